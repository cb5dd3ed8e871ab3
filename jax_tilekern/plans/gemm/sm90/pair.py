"""Plans for two products of one ``lhs`` in one kernel: ``wgmma_matmul_of_pair``.

Half of a tile's columns are those of each product, so a thread has the accumulators of both for the
same elements, and the epilogue combines them in registers.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from jax_tilekern.plans.gemm.epilogue import QUANTIZED_COLUMNS
from jax_tilekern.plans.gemm.problem import PairProduct
from jax_tilekern.plans.gemm.sm90.config import (
    WGMMA_ARITHMETICS,
    WgmmaTile,
    dense_tiles,
    instance_for,
)
from jax_tilekern.plans.gemm.sm90.tiling import (
    TiledWgmmaCandidate,
    busy_cycles,
    is_launchable,
    oriented_tiles,
    refusal_of_one_launch,
    rhs_map,
    with_scheduler,
)
from jax_tilekern.plans.gemm.tiles import OrientedProduct
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel

_SIXTEEN_BITS = ("bf16", "f16")
# Measured over predicted time of ping-pong consumers, relative to that of cooperative ones: 0.94 to
# 1.16 of four products on an H100 (docs/tuning-log.md).
_PING_PONG = 1.1
_TILES = (
    WgmmaTile(128, 256, pair=True),
    WgmmaTile(256, 128, pair=True),
    WgmmaTile(128, 128, cooperative=False, pair=True),
    WgmmaTile(128, 128, pair=True),
    WgmmaTile(64, 256, consumers=1, pair=True),
    WgmmaTile(64, 128, consumers=1, pair=True),
)


@dataclass(frozen=True)
class PairCandidate(TiledWgmmaCandidate):
    """A kernel for two products, not compiled yet.

    Attributes
    ----------
    product
        What is computed.
    """

    product: PairProduct

    @property
    def key(self) -> str:
        """The tile."""
        return f"wgmma of a pair {self.tile_key}"

    def plan(self, gpu: Gpu) -> LaunchPlan:
        """Compile it."""
        view = OrientedProduct.of(self.product)
        second = dataclasses.replace(view, rhs_buffer=view.rhs_buffer + 1)
        return self.plan_of_one_launch(
            self.product,
            gpu,
            name="wgmma_matmul_of_pair",
            reason="both products in one kernel",
            further_map=rhs_map(second, self.instance, self.instance.rhs_tma_rows),
        )


def pair_candidates(product: PairProduct, gpu: Gpu) -> list[PairCandidate] | NoKernel:
    """Return the ways to compute two products in one kernel, or why there is none."""
    if product.arithmetic not in _SIXTEEN_BITS:
        return NoKernel(f"no kernel of both computes in {product.arithmetic}")
    how = WGMMA_ARITHMETICS[product.arithmetic]
    refused = refusal_of_one_launch(product, how.types, gpu)
    if refused:
        return refused
    view = OrientedProduct.of(product)
    found = []
    for tile, _ in oriented_tiles(view, _TILES, gpu, swaps=(False,)):
        instance = instance_for(tile, view, how.promote, 1, gpu)
        epilogue = product.epilogue
        if epilogue and epilogue.quantized:
            if tile.out_n % QUANTIZED_COLUMNS:
                continue
            if not epilogue.stores:
                # No address of an element takes registers.
                instance = dataclasses.replace(instance, tma_store=True)
        work_tiles = dense_tiles(tile, view)
        if not is_launchable(instance, work_tiles):
            continue
        instance = with_scheduler(instance, work_tiles, gpu)
        k_tiles = math.ceil(view.k / instance.block_k)
        busy = busy_cycles(
            tile, instance, view, product.arithmetic, work_tiles, k_tiles, gpu, product.epilogue
        )
        if not tile.cooperative:
            busy *= _PING_PONG
        found.append(PairCandidate(tile, instance, product.cycles(busy, gpu), product))
    return found or NoKernel("no wgmma tile fits the operands")
