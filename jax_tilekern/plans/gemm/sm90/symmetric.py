"""Plans for products whose result is symmetric: ``wgmma_symmetric_matmul``.

Only tiles with an element on or below the diagonal are computed. What is below it is stored twice,
the second time transposed.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from jax_tilekern.plans.gemm.problem import SymmetricProduct
from jax_tilekern.plans.gemm.sm90.config import (
    WGMMA_ARITHMETICS,
    WgmmaTile,
    instance_for,
)
from jax_tilekern.plans.gemm.sm90.tiling import (
    TiledWgmmaCandidate,
    busy_cycles,
    is_launchable,
    oriented_tiles,
    refusal_of_one_launch,
    subtile_columns,
    with_scheduler,
)
from jax_tilekern.plans.gemm.tiles import TILE_ROW_BYTES, OrientedProduct, out_map
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel

_TILES = (
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
)
# Tiles whose rows are no multiple of 128 bytes fill a wave of 132 SMs where others do not.
_STORE_ROW_BYTES = 64


def symmetric_tiles(tile: WgmmaTile, rows: int) -> int:
    """Return the number of tiles that are computed of a symmetric matrix."""
    tiles_m, tiles_n = tile.grid(rows, rows)
    return sum(
        min(tiles_n, math.ceil((row + 1) * tile.block_m / tile.block_n)) for row in range(tiles_m)
    )


@dataclass(frozen=True)
class SymmetricCandidate(TiledWgmmaCandidate):
    """A kernel for a product with a symmetric result, not compiled yet.

    Attributes
    ----------
    product
        What is computed.
    """

    product: SymmetricProduct

    @property
    def key(self) -> str:
        """The tile."""
        return f"symmetric wgmma {self.tile_key}"

    def plan(self, gpu: Gpu) -> LaunchPlan:
        """Compile it."""
        view = OrientedProduct.of(self.product)
        return self.plan_of_one_launch(
            self.product,
            gpu,
            name="wgmma_symmetric_matmul",
            reason="half of a symmetric result",
            further_map=out_map(
                view,
                TILE_ROW_BYTES // view.out_dtype.itemsize,
                subtile_columns(self.instance, view),
            ),
            work_tiles=_work_tiles(self.tile, view),
        )


def symmetric_candidates(
    product: SymmetricProduct, gpu: Gpu
) -> list[SymmetricCandidate] | NoKernel:
    """Return the ways to compute half of a product, or why there is none."""
    how = WGMMA_ARITHMETICS.get(product.arithmetic)
    if how is None:
        return NoKernel(f"no kernel of half a product computes in {product.arithmetic}")
    refused = refusal_of_one_launch(product, how.types, gpu)
    if refused:
        return refused
    if product.epilogue is not None and (
        product.epilogue.has_row_results or product.epilogue.outputs
    ):
        return NoKernel("the kernel of half a product has one result")
    view = OrientedProduct.of(product)
    found = []
    for tile, _ in oriented_tiles(
        view, _TILES, gpu, swaps=(False,), store_row_bytes=_STORE_ROW_BYTES
    ):
        instance = instance_for(tile, view, how.promote, 1, gpu)
        # Accumulators that pass through registers have pairs of rows, which the store of a
        # transpose does not take.
        paired_rows = not instance.lhs_k_major and view.lhs_dtype.itemsize != 2
        if not instance.tma_store or paired_rows:
            continue
        instance = dataclasses.replace(instance, symmetric=True)
        work_tiles = _work_tiles(tile, view)
        if not is_launchable(instance, work_tiles):
            continue
        instance = with_scheduler(instance, work_tiles, gpu)
        k_tiles = math.ceil(view.k / instance.block_k)
        busy = busy_cycles(
            tile, instance, view, product.arithmetic, work_tiles, k_tiles, gpu, product.epilogue
        )
        found.append(SymmetricCandidate(tile, instance, product.cycles(busy, gpu), product))
    return found or NoKernel("no wgmma tile fits the operands")


def _work_tiles(tile: WgmmaTile, view: OrientedProduct) -> int:
    return math.prod(view.batch) * symmetric_tiles(tile, view.lhs.mn)
