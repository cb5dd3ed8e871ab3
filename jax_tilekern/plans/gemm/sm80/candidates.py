"""Plans for dense matrix products on the kernels of ``gemm/sm80``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.gemm.families import Family
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.sm80.config import MMA_ARITHMETICS, MatmulTile
from jax_tilekern.plans.gemm.sm80.operands import lhs_operand, rhs_operand
from jax_tilekern.plans.gemm.sm80.tiling import Grid, TiledMmaCandidate, refusal, tiled_candidates
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, LaunchPlan, NoKernel


@dataclass(frozen=True)
class MmaCandidate(TiledMmaCandidate):
    """A kernel for a matrix product, not compiled yet."""

    product: Product

    @property
    def key(self) -> str:
        """The kernel's family and its tile."""
        return self.tile_name

    def plan(self, gpu: Gpu) -> LaunchPlan:
        """Compile it."""
        instance, product = self.instance, self.product
        kernel, more = self.fused(instance.kernel)
        compiled = compile_kernels(kernel, arch=gpu.arch)
        buffers = map(Buffer, (0, 1, product.out_buffer))
        return LaunchPlan(
            name=f"{instance.family}_matmul {product.arithmetic}",
            gpu=gpu,
            launches=(self.launch(compiled, *buffers, kernel=kernel, more=more),),
            alignments=product.alignments(*self.alignments),
            reason=f"{self.tile_reason}, {math.prod(self.grid)} tiles on {gpu.sm_count} SMs",
        )


def mma_candidates(product: Product, gpu: Gpu) -> list[MmaCandidate] | NoKernel:
    """Return a candidate for each tile that the product can have, or why there is none."""
    refused = refusal(product, gpu)
    if refused:
        return refused
    if product.epilogue and product.epilogue.reductions:
        return NoKernel("only kernels of sm_90a reduce rows")
    geometry = product.geometry
    operands = (
        lhs_operand(geometry, product.lhs_dtype.itemsize),
        rhs_operand(geometry, product.rhs_dtype.itemsize),
    )

    def grid(tile: MatmulTile) -> Grid:
        tiles = (*tile.grid(geometry), math.prod(geometry.batch))
        return Grid(tiles, math.prod(tiles))

    return tiled_candidates(MmaCandidate, product, product, operands, grid, gpu)


MMA = Family(MMA_ARITHMETICS, mma_candidates)
