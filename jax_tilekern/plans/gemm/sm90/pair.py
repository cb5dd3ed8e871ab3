"""Two products of one ``lhs`` in one kernel: ``wgmma_matmul_of_pair``.

Half of a tile's columns are those of each product, so a thread has the accumulators of both for the
same elements, and the epilogue combines them in registers.
"""

from __future__ import annotations

import dataclasses

from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.sm90.config import WgmmaInstance, WgmmaTile
from jax_tilekern.plans.gemm.sm90.tiling import rhs_map
from jax_tilekern.plans.gemm.sm90.variant import Parameters, Variant
from jax_tilekern.plans.gemm.tiles import OrientedProduct


def _map_of_second(product: Product, instance: WgmmaInstance) -> Parameters:
    view = dataclasses.replace(OrientedProduct.of(product), rhs_buffer=product.second_rhs)
    return (rhs_map(view, instance, instance.rhs_tma_rows),), ()


PAIR = Variant(
    name="wgmma_matmul_of_pair",
    key="wgmma of a pair",
    tiles=(
        WgmmaTile(128, 256, pair=True),
        WgmmaTile(256, 128, pair=True),
        WgmmaTile(128, 128, cooperative=False, pair=True),
        WgmmaTile(128, 128, pair=True),
        WgmmaTile(64, 256, consumers=1, pair=True),
        WgmmaTile(64, 128, consumers=1, pair=True),
    ),
    computes="both products in one kernel",
    kernel="kernel of both",
    arithmetics=("bf16", "f16"),
    swaps=(False,),
    has_passes=False,
    rereads=False,
    # 0.94 to 1.16 of four products on an H100 (docs/tuning-log.md).
    ping_pong=1.1,
    parameters=_map_of_second,
)
