"""Plans for two products of one ``lhs`` in one kernel: ``wgmma_matmul_of_pair``.

Half of a tile's columns are those of each product, so a thread has the accumulators of both for the
same elements, and the epilogue combines them in registers.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import compile_kernels
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
    launch_tiles,
    oriented_tiles,
    refusal,
    rhs_map,
)
from jax_tilekern.plans.gemm.tiles import OrientedProduct, fits_tma
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import TMA_STRIDE_BYTES, LaunchPlan, NoKernel

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
        product, view = self.product, OrientedProduct.of(self.product)
        kernel, more = self.fused(product.epilogue, product.geometry, product.out_buffer)
        compiled = compile_kernels(kernel, arch=gpu.arch)
        second = dataclasses.replace(view, rhs_buffer=view.rhs_buffer + 1)
        second_rhs = rhs_map(second, self.instance, self.instance.rhs_tma_rows)
        launch = launch_tiles(
            compiled, self.tile, self.instance, view, 1, gpu,
            kernel=kernel, more=((second_rhs,), more),
        )  # fmt: skip
        return LaunchPlan(
            name=f"wgmma_matmul_of_pair {product.arithmetic}",
            gpu=gpu,
            launches=(launch,),
            alignments=product.alignments(
                TMA_STRIDE_BYTES,
                TMA_STRIDE_BYTES,
                self.out_alignment(product.out_dtype.itemsize),
            ),
            reason=f"both products in one kernel, {self.tile_reason}",
        )


def pair_candidates(product: PairProduct, gpu: Gpu) -> list[PairCandidate] | NoKernel:
    """Return the ways to compute two products in one kernel, or why there is none."""
    if product.arithmetic not in _SIXTEEN_BITS:
        return NoKernel(f"no kernel of both computes in {product.arithmetic}")
    how = WGMMA_ARITHMETICS[product.arithmetic]
    refused = refusal(product, how.types, gpu)
    if refused:
        return refused
    if gpu.beside_collectives:
        return NoKernel("the kernel of both has no dynamic tile scheduler")
    view = OrientedProduct.of(product)
    if not (fits_tma(view.lhs, view.lhs_dtype) and fits_tma(view.rhs, view.rhs_dtype)):
        return NoKernel("TMA does not load rows that are no multiples of 16 bytes")
    found = []
    for tile, _ in oriented_tiles(view, _TILES, gpu, swaps=(False,)):
        instance = instance_for(tile, view, how.promote, 1, gpu)
        work_tiles = dense_tiles(tile, view)
        if not is_launchable(instance, work_tiles):
            continue
        k_tiles = math.ceil(view.k / instance.block_k)
        busy = busy_cycles(
            tile, instance, view, product.arithmetic, work_tiles, k_tiles, gpu, product.epilogue
        )
        if not tile.cooperative:
            busy *= _PING_PONG
        found.append(PairCandidate(tile, instance, product.cycles(busy, gpu), product))
    return found or NoKernel("no wgmma tile fits the operands")
