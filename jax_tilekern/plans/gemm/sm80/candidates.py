"""Plans for dense matrix products on the kernels of ``gemm/sm80``.

A candidate is a tile, which compiles to a launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Compiled, Kernel, compile_kernels
from jax_tilekern.plans.gemm.problem import Candidate, Product
from jax_tilekern.plans.gemm.rasterization import band_height
from jax_tilekern.plans.gemm.sm80.config import (
    ARITHMETICS,
    MatmulInstance,
    instances_for,
    pack_shape,
)
from jax_tilekern.plans.gemm.sm80.cost import busy_cycles
from jax_tilekern.plans.gemm.sm80.operands import has_vector_rows, lhs_operand, rhs_operand
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import MAX_GRID, Buffer, Launch, LaunchPlan, NoKernel


@dataclass(frozen=True)
class MmaCandidate(Candidate):
    """A kernel for a product, not compiled yet.

    Attributes
    ----------
    product
        What it computes.
    instance
        The kernel.
    grid
        Tiles along ``m`` and ``n``, and the product of the batch dimensions.
    band
        Rows of tiles that are computed together.
    out_vectors
        Whether the output's rows are stored 16 bytes at a time.
    cycles
        The estimated cost.
    """

    product: Product
    instance: MatmulInstance
    grid: tuple[int, int, int]
    band: int
    out_vectors: bool
    cycles: float

    @property
    def key(self) -> str:
        """The kernel's family and its tile."""
        tile = self.instance.tile
        return f"{self.instance.family} {tile.block_m}x{tile.block_n}"

    def plan(self, gpu: Gpu) -> LaunchPlan:
        """Compile it."""
        product, instance = self.product, self.instance
        compiled = compile_kernels(instance.kernel, arch=gpu.arch)
        dtypes = (product.lhs_dtype, product.rhs_dtype, product.out_dtype)
        widths = (
            instance.lhs.load_bytes,
            instance.rhs.load_bytes,
            16 if self.out_vectors else 1,
        )
        tile = instance.tile
        return LaunchPlan(
            name=f"{instance.family}_matmul {product.arithmetic}",
            gpu=gpu,
            launches=(self.launch(compiled, Buffer(0), Buffer(1), Buffer(2)),),
            alignments=tuple(max(t.itemsize, w) for t, w in zip(dtypes, widths, strict=True)),
            reason=f"{tile.block_m}x{tile.block_n}x{instance.block_k}, {instance.stages} stages, "
            f"{math.prod(self.grid)} tiles on {gpu.multiprocessors} multiprocessors",
        )

    def launch(self, compiled: Compiled, *buffers: Buffer, kernel: Kernel | None = None) -> Launch:
        """Return the launch, given what ``instance.kernel`` was compiled to and the buffers.

        ``kernel`` is another one that takes the same shape, or more buffers.
        """
        instance = self.instance
        shape = pack_shape(
            self.product.geometry, instance, self.grid[:2], self.band, self.out_vectors
        )
        return Launch(
            entry=compiled.entry((kernel or instance.kernel).name),
            grid=(math.prod(self.grid), 1, 1),
            block=(instance.tile.threads, 1, 1),
            parameters=(*buffers, shape),
            shared_memory_bytes=instance.shared_memory_bytes,
        )


def candidates(product: Product, gpu: Gpu) -> list[MmaCandidate] | NoKernel:
    """Return a candidate for each tile that the product can have, or why there is none."""
    refused = refusal(product, gpu)
    if refused:
        return refused
    geometry = product.geometry
    lhs = lhs_operand(geometry, product.lhs_dtype.itemsize)
    rhs = rhs_operand(geometry, product.rhs_dtype.itemsize)
    found: list[MmaCandidate] = []
    for instance, resident in instances_for(product, lhs, rhs, gpu):
        tile = instance.tile
        grid = (*tile.grid(geometry), math.prod(geometry.batch))
        if math.prod(grid) > MAX_GRID[0]:
            continue
        cycles = busy_cycles(instance, resident, math.prod(grid), product, gpu)
        found.append(
            MmaCandidate(
                product,
                instance,
                grid,
                band_height(
                    gpu.multiprocessors * instance.min_blocks, grid[0], tile.block_m, tile.block_n
                ),
                has_vector_rows(geometry, product.out_dtype.itemsize),
                # Of equals the larger, which reads less memory.
                product.cycles(cycles) * 1.01 ** len(found),
            )
        )
    return found or NoKernel(f"{geometry} has more tiles than a grid has blocks")


def refusal(product: Product, gpu: Gpu) -> NoKernel | None:
    """Return why there is no kernel for the product's types, or for its sizes, if there is none."""
    geometry = product.geometry
    lhs_dtype, rhs_dtype, out_dtype = product.lhs_dtype, product.rhs_dtype, product.out_dtype
    arithmetic = product.arithmetic
    how = ARITHMETICS.get(arithmetic)
    if how is None:
        return NoKernel(f"no kernel computes in {arithmetic}")
    if not {lhs_dtype, rhs_dtype} <= set(how.operands) or out_dtype not in how.results:
        return NoKernel(f"no {arithmetic} kernel for {lhs_dtype} x {rhs_dtype} -> {out_dtype}")
    if gpu.compute_capability < how.min_capability:
        major, minor = how.min_capability
        return NoKernel(f"{arithmetic} takes sm_{major}{minor} or later, and this is {gpu.arch}")
    if max(geometry.m, geometry.n, geometry.k) > 2**31 - 1024:
        return NoKernel("a dimension has more than 2**31 - 1024 elements")
    return None
