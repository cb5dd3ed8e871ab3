"""Products whose result is symmetric: ``wgmma_symmetric_matmul``.

Only tiles with an element on or below the diagonal are computed. Elements below the diagonal are
stored twice, the second time transposed.
"""

from __future__ import annotations

import dataclasses
import math

from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.sm90.config import WgmmaInstance, WgmmaTile
from jax_tilekern.plans.gemm.sm90.tiling import subtile_columns
from jax_tilekern.plans.gemm.sm90.variant import Parameters, Variant
from jax_tilekern.plans.gemm.tiles import TILE_ROW_BYTES, OrientedProduct, out_map
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import NoKernel


def symmetric_tiles(tile: WgmmaTile, rows: int) -> int:
    """Return the number of tiles that are computed of a symmetric matrix."""
    tiles_m, tiles_n = tile.grid(rows, rows)
    return sum(
        min(tiles_n, math.ceil((row + 1) * tile.block_m / tile.block_n)) for row in range(tiles_m)
    )


def _refusal(product: Product) -> NoKernel | None:
    epilogue = product.epilogue
    if epilogue is not None and (epilogue.has_row_results or epilogue.outputs):
        return NoKernel("the kernel of half a product has one result")
    return None


def _instance(
    _: Product, view: OrientedProduct, instance: WgmmaInstance, __: Gpu
) -> WgmmaInstance | None:
    # Accumulators that pass through registers have pairs of rows, which the store of a transpose
    # does not take.
    paired_rows = not instance.lhs_k_major and view.lhs_dtype.itemsize != 2
    if not instance.tma_store or paired_rows:
        return None
    return dataclasses.replace(instance, symmetric=True)


def _map_of_transpose(product: Product, instance: WgmmaInstance) -> Parameters:
    view = OrientedProduct.of(product)
    rows = TILE_ROW_BYTES // view.out_dtype.itemsize
    return (out_map(view, rows, subtile_columns(instance, view)),), ()


SYMMETRIC = Variant(
    name="wgmma_symmetric_matmul",
    key="symmetric wgmma",
    tiles=(
        WgmmaTile(128, 256),
        WgmmaTile(256, 128),
        WgmmaTile(128, 192),
        WgmmaTile(128, 192, cooperative=False),
        WgmmaTile(128, 160),
        WgmmaTile(128, 128, cooperative=False),
        WgmmaTile(128, 128),
        WgmmaTile(64, 256, consumers=1),
        WgmmaTile(64, 192, consumers=1),
        WgmmaTile(64, 128, consumers=1),
        WgmmaTile(64, 64, consumers=1),
        WgmmaTile(64, 64, cooperative=False),
    ),
    computes="half of a symmetric result",
    kernel="kernel of half a product",
    swaps=(False,),
    # Tiles whose rows are no multiple of 128 bytes fill a wave of 132 SMs where others do not.
    store_row_bytes=64,
    has_passes=False,
    rereads=False,
    refusal=_refusal,
    instance=_instance,
    work_tiles=lambda tile, view: math.prod(view.batch) * symmetric_tiles(tile, view.lhs.mn),
    parameters=_map_of_transpose,
)
