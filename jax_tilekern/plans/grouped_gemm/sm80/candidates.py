"""Plans for grouped GEMMs on the kernels of ``grouped_gemm/sm80``.

They have the dense kernels' tiles (``gemm/sm80/config.py``), each of one group's product. The grid
is for the maximum number of tiles that the groups can have, and CTAs find out on the device which
tile is theirs.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.candidate import Family
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.sm80.candidates import (
    Grid,
    TiledMmaCandidate,
    refusal,
    tiled_candidates,
)
from jax_tilekern.plans.gemm.sm80.config import (
    MMA_ARITHMETICS,
    TINY,
    MatmulInstance,
    MatmulTile,
    OperandLayout,
    lhs_operand,
    rhs_operand,
)
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.grouped_gemm.problem import GroupedGeometry, pack_groups
from jax_tilekern.plans.launch import Buffer, LaunchPlan, NoKernel

# The rows before the first group and those after the last; see grouped_gemm/groups.cuh.
_SPANS_OF_NO_GROUP = 2


@dataclass(frozen=True)
class GroupedMmaCandidate(TiledMmaCandidate):
    """A kernel for a grouped GEMM, not compiled yet.

    With ragged ``m`` the grid's batch is without the groups, whose tiles are all along ``m``.
    """

    @property
    def key(self) -> str:
        """The kernel's family and its tile."""
        return f"ragged {self.tile_name}"

    def plan(self, gpu: Gpu) -> LaunchPlan:
        """Compile it."""
        product, family = self.product, self.instance.family
        kernel, more = self.fused(grouped_kernel(self.instance, product.groups.ragged))
        compiled = compile_kernels(kernel, arch=gpu.arch)
        buffers = map(Buffer, (0, 1, 2, product.out_buffer))
        more = (pack_groups(product.groups), *more)
        lhs, rhs, out = self.alignments
        tiles = f"at most {math.prod(self.grid)} tiles on {gpu.available_sms} SMs"
        return LaunchPlan(
            name=f"ragged_{family}_matmul {product.arithmetic}",
            gpu=gpu,
            launches=(self.launch(compiled, *buffers, kernel=kernel, more=more),),
            alignments=product.alignments(lhs, rhs, out),
            reason=f"{self.tile_reason}, {tiles}",
        )


def grouped_kernel(instance: MatmulInstance, ragged: Literal["m", "k"]) -> Kernel:
    """Return the kernel for grouped GEMMs that has the tiles of a dense kernel."""
    arguments = f"{instance.template_arguments}, {'true' if ragged == 'k' else 'false'}"
    name = f"{instance.family}_matmul"
    return Kernel(f"grouped_gemm/sm80/{name}.cuh", f"tilekern::ragged_{name}<{arguments}>")


def grouped_mma_candidates(product: Product, gpu: Gpu) -> list[GroupedMmaCandidate] | NoKernel:
    """Return a candidate for each tile that the product can have, or why there is none."""
    refused = refusal(product, gpu)
    if refused:
        return refused
    geometry = product.groups
    lhs, rhs = _operands(product)

    def grid(tile: MatmulTile) -> Grid | None:
        # Two operands of byte loads leave a single warp no registers.
        if tile == TINY and lhs.load_bytes == rhs.load_bytes == 1:
            return None
        return Grid(_grid(geometry, tile), _expected_tiles(geometry, tile))

    average = product.plain(_average(geometry))
    return tiled_candidates(GroupedMmaCandidate, product, average, (lhs, rhs), grid, gpu)


GROUPED_MMA = Family(MMA_ARITHMETICS, grouped_mma_candidates)


def _average(geometry: GroupedGeometry) -> MatmulGeometry:
    """Return the groups' products if all had the same number of rows."""
    rows = math.ceil(geometry.average_rows)
    if geometry.ragged == "m":
        return dataclasses.replace(geometry, m=rows)
    return dataclasses.replace(geometry, k=rows)


def _operands(product: Product) -> tuple[OperandLayout, OperandLayout]:
    geometry = product.groups
    lhs = lhs_operand(geometry, product.lhs_dtype.itemsize)
    rhs = rhs_operand(geometry, product.rhs_dtype.itemsize)
    # Where rows are neighbours in memory, a group starts at any element.
    if lhs.k_major == (geometry.ragged == "k"):
        lhs = _starting_anywhere(lhs, product.lhs_dtype)
    if rhs.k_major and geometry.ragged == "k":
        rhs = _starting_anywhere(rhs, product.rhs_dtype)
    return lhs, rhs


def _starting_anywhere(operand: OperandLayout, dtype: np.dtype[Any]) -> OperandLayout:
    return OperandLayout(operand.k_major, dtype.itemsize if dtype.itemsize >= 4 else 1)


def _grid(geometry: GroupedGeometry, tile: MatmulTile) -> tuple[int, int, int]:
    tiles_m, tiles_n = tile.grid(geometry)
    if geometry.ragged == "k":
        return tiles_m, tiles_n, math.prod(geometry.batch)
    # first_tile_row() of the span after the last.
    tile_rows = geometry.rows // tile.block_m + geometry.groups + _SPANS_OF_NO_GROUP
    return tile_rows, tiles_n, math.prod(geometry.outer_batch)


def _expected_tiles(geometry: GroupedGeometry, tile: MatmulTile) -> int:
    """Estimate the number of tiles of all groups, whose last ones are half full on average."""
    tiles_m, tiles_n = tile.grid(geometry)
    batches = math.prod(geometry.outer_batch)
    if geometry.ragged == "k":
        return batches * geometry.groups * tiles_m * tiles_n
    groups = min(geometry.groups, geometry.rows)
    tiles_of_group = max(geometry.rows / groups / tile.block_m + 0.5, 1)
    return math.ceil(batches * groups * tiles_of_group) * tiles_n
