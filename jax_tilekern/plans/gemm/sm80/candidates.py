"""Candidates on the kernels of ``gemm/sm80``: what dense products and grouped GEMMs share.

A candidate is a tile, which determines the kernel, its grid and the cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from jax_tilekern.compilation.compiler import Compiled, Kernel, compile_kernels
from jax_tilekern.plans.candidate import CostedCandidate, Family
from jax_tilekern.plans.gemm.epilogue_text import kernel_with_epilogue
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.sm80.config import (
    MMA_ARITHMETICS,
    MatmulInstance,
    MatmulTile,
    OperandLayout,
    has_vector_rows,
    instances_for,
    lhs_operand,
    pack_shape,
    rhs_operand,
)
from jax_tilekern.plans.gemm.tiles import TILE_ROW_BYTES, raster_height
from jax_tilekern.plans.gpu import VECTOR_BYTES, Gpu
from jax_tilekern.plans.launch import MAX_GRID, Buffer, Launch, LaunchPlan, NoKernel, Parameter

# Cycles of the barrier after each k-tile, unless another CTA of the SM runs meanwhile.
_BARRIER_CYCLES = 80
# Warps of an SM that hide the latency of shared memory and MMAs.
_ENOUGH_WARPS = 8
# By the bytes of a copy: the time of a k-tile over that with 16 (H100). Narrow copies are bound by
# their number.
_NARROW_LOADS = {16: 1.0, 8: 1.3, 4: 1.6, 1: 2.5}


def busy_cycles(
    instance: MatmulInstance, resident: int, ctas: int, product: Product, gpu: Gpu
) -> float:
    """Estimate the cycles of the busiest SM if memory were no limit.

    Parameters
    ----------
    instance
        The kernel.
    resident
        How many of its CTAs an SM holds at a time.
    ctas
        Tiles of the output, all batches together.
    product
        What is computed.
    gpu
        What it is for.
    """
    geometry, rates = product.geometry, gpu.rates
    tile, block_k = instance.tile, instance.block_k
    warps = tile.warps_m * tile.warps_n
    warp_mn = tile.block_m // tile.warps_m + tile.block_n // tile.warps_n
    mn = min(tile.block_m, geometry.m) + min(tile.block_n, geometry.n)
    busy = math.ceil(ctas / gpu.available_sms)
    l2_share = rates.l2_load_share * gpu.available_sms / ctas * busy
    k_tile = max(
        tile.block_m * tile.block_n * block_k / rates.mma_macs[product.arithmetic],
        (warp_mn * warps * TILE_ROW_BYTES + tile.stage_bytes) / rates.shared_memory_bandwidth,
        mn * TILE_ROW_BYTES / min(rates.l2_load_bandwidth, l2_share),
    )
    k_tile *= _NARROW_LOADS[min(instance.lhs.load_bytes, instance.rhs.load_bytes)]
    resident = min(busy, resident)
    if resident == 1:
        k_tile += _BARRIER_CYCLES
    hidden = min(1, resident * warps / _ENOUGH_WARPS) ** 0.5
    k_tiles = math.ceil(geometry.k / block_k)
    cycles: float = busy * (k_tiles * k_tile + rates.cta_cycles) / hidden
    return cycles


# Among tiles of equal cost the larger is taken, because it reads less memory.
_SMALLER_TILE = 1.01

_Candidate = TypeVar("_Candidate", bound="TiledMmaCandidate")


@dataclass(frozen=True)
class TiledMmaCandidate(CostedCandidate):
    """A tile for a product, not compiled yet.

    Attributes
    ----------
    product
        What is computed.
    instance
        The dense kernel of the tile.
    grid
        Tiles along ``m``, along ``n``, and of the batch; of a grouped GEMM the maximum.
    raster_height
        Height in tiles of a rasterization group.
    out_vectors
        Whether the output's rows are stored 16 bytes at a time.
    cycles
        The estimated cost.
    """

    product: Product
    instance: MatmulInstance
    grid: tuple[int, int, int]
    raster_height: int
    out_vectors: bool
    cycles: float

    @property
    def kind(self) -> str:
        """The tile: with as many accumulators, fewer threads load more elements each."""
        return self.tile_name

    @property
    def accumulators(self) -> int:
        """Accumulators of a thread."""
        tile = self.instance.tile
        return tile.block_m * tile.block_n // tile.threads

    @property
    def alignments(self) -> tuple[int, int, int]:
        """Bytes that the addresses of ``lhs``, ``rhs`` and the output are multiples of."""
        widths = (
            self.instance.lhs.load_bytes,
            self.instance.rhs.load_bytes,
            VECTOR_BYTES if self.out_vectors else 1,
        )
        lhs, rhs, out = (
            max(dtype.itemsize, width)
            for dtype, width in zip(self.product.dtypes, widths, strict=True)
        )
        return lhs, rhs, out

    def fused(self, plain: Kernel) -> tuple[Kernel, tuple[Parameter, ...]]:
        """Return a kernel with the product's epilogue, and the parameters that follow its own."""
        product, tile = self.product, self.instance.tile
        if product.epilogue is None:
            return plain, ()
        kernel = kernel_with_epilogue(
            plain,
            product.epilogue,
            columns=product.geometry.n,
            within_rows=product.geometry.m % tile.block_m == 0,
            within_columns=product.geometry.n % tile.block_n == 0,
            tile_columns=tile.block_n,
        )
        return kernel, product.epilogue.parameters(product.out_buffer)

    @property
    def tile_name(self) -> str:
        """The kernel's family and its tile."""
        tile = self.instance.tile
        return f"{self.instance.family} {tile.block_m}x{tile.block_n}"

    @property
    def tile_reason(self) -> str:
        """The tile and its pipeline, for ``explain``."""
        tile, stages = self.instance.tile, self.instance.stages
        return f"{tile.block_m}x{tile.block_n}x{self.instance.block_k}, {stages} stages"

    def launch(
        self,
        compiled: Compiled,
        *buffers: Buffer,
        kernel: Kernel | None = None,
        more: tuple[Parameter, ...] = (),
    ) -> Launch:
        """Return the launch.

        Parameters
        ----------
        compiled
            What the kernel was compiled to.
        buffers
            The kernel's buffers.
        kernel
            The kernel, if it is not ``instance.kernel``.
        more
            Parameters that follow the shape.
        """
        instance = self.instance
        shape = pack_shape(
            self.product.geometry, instance, self.grid[:2], self.raster_height, self.out_vectors
        )
        return Launch(
            entry=compiled.entry((kernel or instance.kernel).name),
            grid=(math.prod(self.grid), 1, 1),
            block=(instance.tile.threads, 1, 1),
            parameters=(*buffers, shape, *more),
            shared_memory_bytes=instance.shared_memory_bytes,
        )


class Grid(NamedTuple):
    """The grid of a launch, and the number of its CTAs that are expected to have a tile."""

    tiles: tuple[int, int, int]
    expected: int


def tiled_candidates(
    kind: type[_Candidate],
    product: Product,
    typical: Product,
    operands: tuple[OperandLayout, OperandLayout],
    grid: Callable[[MatmulTile], Grid | None],
    gpu: Gpu,
) -> list[_Candidate] | NoKernel:
    """Return a candidate for each tile that a product can have, or why there is none.

    Parameters
    ----------
    kind
        What to make.
    product
        What is computed.
    typical
        The dense product that the cost is estimated for.
    operands
        How ``lhs`` and ``rhs`` lie in memory.
    grid
        The grid for a tile, or ``None`` for a tile that the kernels do not have.
    gpu
        What it is for.
    """
    out_vectors = has_vector_rows(product.geometry, product.out_dtype.itemsize)
    found: list[_Candidate] = []
    for instance, resident in instances_for(typical, *operands, gpu):
        tile = instance.tile
        chosen = grid(tile)
        if chosen is None or math.prod(chosen.tiles) > MAX_GRID[0]:
            continue
        tiles_m, _ = tile.grid(typical.geometry)
        running = gpu.available_sms * instance.min_blocks
        busy = busy_cycles(instance, resident, chosen.expected, typical, gpu)
        if product.epilogue is not None:
            rounds = math.ceil(chosen.expected / gpu.available_sms)
            each = product.epilogue.cycles + product.epilogue.cycles_of_arrays(staged=False)
            busy += rounds * tile.block_m * tile.block_n * each
        found.append(
            kind(
                product=product,
                instance=instance,
                grid=chosen.tiles,
                raster_height=raster_height(running, tiles_m, tile.block_m, tile.block_n),
                out_vectors=out_vectors,
                cycles=product.cycles(busy, gpu) * _SMALLER_TILE ** len(found),
            )
        )
    return found or NoKernel(f"{product.geometry} has more tiles than a grid has CTAs")


def refusal(product: Product, gpu: Gpu) -> NoKernel | None:
    """Return why the kernels do not take a product on a GPU, or ``None``."""
    how = MMA_ARITHMETICS[product.arithmetic]
    refused = product.refusal(how.types)
    if refused is None and gpu.compute_capability < how.min_capability:
        needed = "sm_{}{}".format(*how.min_capability)
        refused = NoKernel(f"{product.arithmetic} takes {needed} or later, and this is {gpu.arch}")
    return refused


@dataclass(frozen=True)
class MmaCandidate(TiledMmaCandidate):
    """A kernel for a matrix product, not compiled yet."""

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
            reason=f"{self.tile_reason}, {math.prod(self.grid)} tiles on {gpu.available_sms} SMs",
        )


def mma_candidates(product: Product, gpu: Gpu) -> list[MmaCandidate] | NoKernel:
    """Return a candidate for each tile that the product can have, or why there is none."""
    refused = refusal(product, gpu)
    if refused:
        return refused
    if product.epilogue and product.epilogue.has_row_results:
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
