"""The plan of elements of rows by their ranks (``selection/order_statistics.cuh``)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.candidate import CostedCandidate
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import WARP, Gpu
from jax_tilekern.plans.launch import (
    MAX_INT32,
    NOT_PREDICTED,
    Buffer,
    Launch,
    LaunchPlan,
    NoKernel,
    Scalars,
)  # fmt: skip
from jax_tilekern.plans.policy import plan_choice
from jax_tilekern.plans.policy.workload import sort_workload
from jax_tilekern.plans.selection.sort_rows import sort_rows_candidate
from jax_tilekern.plans.selection.sorted_rows import SortedRows
from jax_tilekern.plans.selection.tile import (
    COUNTED_TILES,
    ORDERED_DTYPES,
    Tile,
    smallest_tile,
)

_INDEX_BYTES = 4
_DIGIT_BITS = 11
# Instructions of a warp for an element of each lane and a digit, and for the counts of a digit; the
# cycles that a digit takes alone; the instructions that an SM issues in a cycle.
_ITEM_INSTRUCTIONS, _DIGIT_INSTRUCTIONS, _DIGIT_LATENCY = 6, 120, 900
_INSTRUCTIONS_A_CYCLE = 2


@dataclass(frozen=True)
class OrderStatistics:
    """Elements of each row of a matrix by their ranks."""

    rows: int
    columns: int
    ranks: int
    dtype: np.dtype[Any]
    indices: bool  # whether the columns of the elements are results


@dataclass(frozen=True)
class OrderStatisticsCandidate(CostedCandidate):
    """A CTA to a row."""

    problem: OrderStatistics
    tile: Tile
    cycles: float

    @property
    def key(self) -> str:
        return f"ranks in {self.tile.columns}"

    def plan(self, gpu: Gpu) -> LaunchPlan:
        problem, tile = self.problem, self.tile
        flag = str(problem.indices).lower()
        types = f"{CXX_TYPES[problem.dtype]}, {tile.threads}, {tile.items}, {flag}"
        name = f"tilekern::order_statistics<{types}>"
        kernel = Kernel("selection/order_statistics.cuh", name)
        sizes = (Scalars.pack("I", size) for size in (problem.columns, problem.ranks))
        # Indices that are not wanted have no buffer.
        buffers = map(Buffer, (0, 1, 2, 2 + problem.indices))
        launch = Launch(
            entry=compile_kernels(kernel, arch=gpu.arch).entry(kernel.name),
            grid=(problem.rows, 1, 1),
            block=(tile.threads, 1, 1),
            parameters=(*buffers, *sizes),
        )
        size = problem.dtype.itemsize
        return LaunchPlan(
            name=f"order statistics {problem.dtype}",
            gpu=gpu,
            launches=(launch,),
            alignments=(size, _INDEX_BYTES, size, *[_INDEX_BYTES] * problem.indices),
            reason=f"{problem.ranks} of {problem.columns}, a CTA to a row",
        )


def plan_order_statistics(problem: OrderStatistics, gpu: Gpu) -> LaunchPlan | NoKernel:
    if problem.dtype not in ORDERED_DTYPES:
        return NoKernel(f"no kernel orders {problem.dtype}")
    if problem.rows > MAX_INT32:
        return NoKernel(f"{problem.rows} rows (at most {MAX_INT32})")
    tile = smallest_tile(COUNTED_TILES, problem.columns)
    if tile is None:
        return NoKernel(f"rows of {problem.columns} (at most {COUNTED_TILES[-1].columns})")
    candidate = OrderStatisticsCandidate(problem, tile, _cycles(problem, tile, gpu))
    workload = sort_workload(problem.rows, problem.columns, problem.dtype, problem.indices)
    sorted_us = _sorted_us(problem, gpu)
    if workload.estimate is None or sorted_us >= workload.estimate:
        return plan_choice(workload, [candidate], gpu)
    # The rows are sorted by a kernel, too, where that is faster than the search.
    found = plan_choice(dataclasses.replace(workload, estimate=sorted_us), [candidate], gpu)
    if isinstance(found, NoKernel) and found.predicted_us != NOT_PREDICTED:
        return dataclasses.replace(found, reason="a sort of the rows is predicted as fast")
    return found


def _sorted_us(problem: OrderStatistics, gpu: Gpu) -> float:
    """Estimate the microseconds of a sort of rows, and of taking elements of them."""
    sort = SortedRows(
        problem.rows, problem.columns, problem.dtype, "ascending", True, problem.indices
    )
    candidate = sort_rows_candidate(sort, gpu)
    if candidate is None:
        return math.inf
    cycles = candidate.cycles + gpu.rates.next_launch_cycles
    return cycles / gpu.rates.cycles_per_microsecond


def _cycles(problem: OrderStatistics, tile: Tile, gpu: Gpu) -> float:
    digits = problem.ranks * math.ceil(8 * problem.dtype.itemsize / _DIGIT_BITS)
    issued = digits * (tile.items * _ITEM_INSTRUCTIONS + _DIGIT_INSTRUCTIONS)
    warps = math.ceil(problem.rows / gpu.sm_count) * tile.threads // WARP
    busy = max(digits * _DIGIT_LATENCY, warps * issued / _INSTRUCTIONS_A_CYCLE)
    read = problem.rows * problem.columns * problem.dtype.itemsize / gpu.rates.memory_bandwidth
    return gpu.rates.launch_cycles + max(busy, read)
