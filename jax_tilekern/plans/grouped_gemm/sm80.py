"""Plans for grouped GEMMs on the kernels of ``grouped_gemm/sm80``.

They have the dense kernels' tiles (``gemm/sm80/config.py``), each of one group's product. The grid
is for the most tiles that the groups can have, and CTAs find out on the device which tile is
theirs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Candidate, Product
from jax_tilekern.plans.gemm.rasterization import band_height
from jax_tilekern.plans.gemm.sm80.candidates import refusal
from jax_tilekern.plans.gemm.sm80.config import (
    ARITHMETICS,
    TINY,
    MatmulInstance,
    MatmulTile,
    instances_for,
    pack_shape,
)
from jax_tilekern.plans.gemm.sm80.cost import busy_cycles
from jax_tilekern.plans.gemm.sm80.operands import Operand, has_vector_rows, lhs_operand, rhs_operand
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.grouped_gemm.problem import RaggedGeometry, RaggedProduct, pack_groups
from jax_tilekern.plans.launch import MAX_GRID, Buffer, Launch, LaunchPlan, NoKernel

_BOUNDS_BYTES = 4
# Of the rows before the first group and after the last; see grouped_gemm/groups.cuh.
_SPANS_OF_NO_GROUP = 2


@dataclass(frozen=True)
class RaggedMmaCandidate(Candidate):
    """A kernel for a ragged product, not compiled yet.

    Attributes
    ----------
    product
        What it computes.
    instance
        The dense kernel whose tiles it has.
    grid
        The most tiles along ``m`` and ``n``, and the product of the batch dimensions: with ragged
        ``m`` without the groups, of which all tiles along ``m`` are.
    band
        Rows of tiles that are computed together.
    out_vectors
        Whether the output's rows are stored 16 bytes at a time.
    cycles
        The estimated cost.
    """

    product: RaggedProduct
    instance: MatmulInstance
    grid: tuple[int, int, int]
    band: int
    out_vectors: bool
    cycles: float

    @property
    def key(self) -> str:
        """The kernel's family and its tile."""
        tile = self.instance.tile
        return f"ragged {self.instance.family} {tile.block_m}x{tile.block_n}"

    def plan(self, gpu: Gpu) -> LaunchPlan:
        """Compile it."""
        product, instance = self.product, self.instance
        geometry, tile = product.geometry, instance.tile
        kernel = ragged_kernel(instance, geometry.ragged)
        shape = pack_shape(geometry.product, instance, self.grid[:2], self.band, self.out_vectors)
        launch = Launch(
            entry=compile_kernels(kernel, arch=gpu.arch).entry(kernel.name),
            grid=(math.prod(self.grid), 1, 1),
            block=(tile.threads, 1, 1),
            parameters=(*map(Buffer, range(4)), shape, pack_groups(geometry)),
            shared_memory_bytes=instance.shared_memory_bytes,
        )
        return LaunchPlan(
            name=f"ragged_{instance.family}_matmul {product.arithmetic}",
            gpu=gpu,
            launches=(launch,),
            alignments=(
                max(product.lhs_dtype.itemsize, instance.lhs.load_bytes),
                max(product.rhs_dtype.itemsize, instance.rhs.load_bytes),
                _BOUNDS_BYTES,
                16 if self.out_vectors else product.out_dtype.itemsize,
            ),
            reason=f"{tile.block_m}x{tile.block_n}x{instance.block_k}, {instance.stages} stages, "
            f"at most {math.prod(self.grid)} tiles on {gpu.multiprocessors} multiprocessors",
        )


def ragged_kernel(instance: MatmulInstance, ragged: Literal["m", "k"]) -> Kernel:
    """Return the kernel of ragged products that has the tiles of a dense one."""
    arguments = f"{instance.template_arguments}, {'true' if ragged == 'k' else 'false'}"
    name = f"{instance.family}_matmul"
    return Kernel(f"grouped_gemm/sm80/{name}.cuh", f"tilekern::ragged_{name}<{arguments}>")


def candidates(product: RaggedProduct, gpu: Gpu) -> list[RaggedMmaCandidate] | NoKernel:
    """Return a candidate for each tile that the product can have, or why there is none."""
    geometry = product.geometry
    types = (product.lhs_dtype, product.rhs_dtype, product.out_dtype, product.arithmetic)
    refused = refusal(Product(geometry.product, *types), gpu)
    if refused:
        return refused
    average = Product(_average(geometry), *types)
    lhs, rhs = _operands(product)
    found: list[RaggedMmaCandidate] = []
    for instance, resident in instances_for(average, lhs, rhs, gpu):
        tile = instance.tile
        grid = _grid(geometry, tile)
        # Two loads that shift leave a single warp no registers.
        shifting = lhs.load_bytes == rhs.load_bytes == 1 and tile == TINY
        if shifting or math.prod(grid) > MAX_GRID[0]:
            continue
        running = gpu.multiprocessors * instance.min_blocks
        tiles_of_group, _ = tile.grid(average.geometry)
        blocks = _expected_tiles(geometry, tile)
        cycles = busy_cycles(instance, resident, blocks, average, gpu)
        found.append(
            RaggedMmaCandidate(
                product,
                instance,
                grid,
                band_height(running, tiles_of_group, tile.block_m, tile.block_n),
                has_vector_rows(geometry.product, product.out_dtype.itemsize),
                # Of equals the larger, which reads less memory.
                product.cycles(cycles) * 1.01 ** len(found),
            )
        )
    return found or NoKernel(f"{geometry} can have more tiles than a grid has blocks")


# The same code as another arithmetic's, but for the instruction that multiplies.
_ALIKE = ("f16", "fp8_fast")
_SAMPLE_SIZE = 1 << 12


def instances(gpu: Gpu) -> Iterator[tuple[MatmulInstance, Literal["m", "k"]]]:
    """Yield kernels that plans for ``gpu`` can ask for, so that a test can compile them.

    There is a larger sample of the dense kernels, of whose registers these take a few more or less.
    So it is the largest tile of each arithmetic in the major orders that products of row-major
    arrays have, and for operands of 2 bytes and of 1 those in which groups start at any byte.
    """
    for arithmetic, how in ARITHMETICS.items():
        if gpu.compute_capability < how.min_capability or arithmetic in _ALIKE:
            continue
        types = (how.operands[0], how.operands[-1], how.results[0])
        for geometry in _samples(unaligned=arithmetic in ("bf16", "int8")):
            found = candidates(RaggedProduct(geometry, *types, arithmetic), gpu)
            assert isinstance(found, list)
            yield found[0].instance, geometry.ragged


def _samples(unaligned: bool) -> Iterator[RaggedGeometry]:
    size, groups = _SAMPLE_SIZE, 8
    matrix, rows, columns = size * size, (size, 1), (1, size)
    for aligned in (True, False) if unaligned else (True,):
        lhs, rhs = (rows, columns) if aligned else (columns, rows)
        product = MatmulGeometry(
            (groups,), size, size, size, (0, *lhs), (matrix, *rows), (0, *rows)
        )
        yield RaggedGeometry(product, "m", ())
        product = MatmulGeometry((groups,), size, size, size, (0, *rhs), (0, *lhs), (matrix, *rows))
        yield RaggedGeometry(product, "k", ())


def _average(geometry: RaggedGeometry) -> MatmulGeometry:
    """Return the groups' products if all had the same number of rows."""
    rows = math.ceil(geometry.average_rows)
    if geometry.ragged == "m":
        return dataclasses.replace(geometry.product, m=rows)
    return dataclasses.replace(geometry.product, k=rows)


def _operands(product: RaggedProduct) -> tuple[Operand, Operand]:
    geometry = product.geometry
    lhs = lhs_operand(geometry.product, product.lhs_dtype.itemsize)
    rhs = rhs_operand(geometry.product, product.rhs_dtype.itemsize)
    # Where rows are neighbours in memory, a group starts at any element.
    if lhs.k_major == (geometry.ragged == "k"):
        lhs = _starting_anywhere(lhs, product.lhs_dtype)
    if rhs.k_major and geometry.ragged == "k":
        rhs = _starting_anywhere(rhs, product.rhs_dtype)
    return lhs, rhs


def _starting_anywhere(operand: Operand, dtype: np.dtype[Any]) -> Operand:
    return Operand(operand.k_major, dtype.itemsize if dtype.itemsize >= 4 else 1)


def _grid(geometry: RaggedGeometry, tile: MatmulTile) -> tuple[int, int, int]:
    tiles_m, tiles_n = tile.grid(geometry.product)
    if geometry.ragged == "k":
        return tiles_m, tiles_n, math.prod(geometry.product.batch)
    # first_tile_row() of the span after the last.
    tile_rows = geometry.rows // tile.block_m + geometry.groups + _SPANS_OF_NO_GROUP
    return tile_rows, tiles_n, math.prod(geometry.batch)


def _expected_tiles(geometry: RaggedGeometry, tile: MatmulTile) -> int:
    """Estimate the number of tiles of all groups, whose last ones are half full on average."""
    tiles_m, tiles_n = tile.grid(geometry.product)
    batches = math.prod(geometry.batch)
    if geometry.ragged == "k":
        return batches * geometry.groups * tiles_m * tiles_n
    groups = min(geometry.groups, geometry.rows)
    tiles_of_group = max(geometry.rows / groups / tile.block_m + 0.5, 1)
    return math.ceil(batches * groups * tiles_of_group) * tiles_n
