"""The plan of a sort of rows that fit shared memory (``selection/sort_rows.cuh``)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.candidate import CostedCandidate
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import WARP, Gpu
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, NoKernel, Scalars
from jax_tilekern.plans.policy import plan_choice
from jax_tilekern.plans.policy.workload import sort_workload
from jax_tilekern.plans.selection.tile import ORDERED_DTYPES, Tile

# ``reversed`` is the reverse of ``ascending``; in both and in ``descending`` the order is stable
# before it is reversed, and in ``descending`` after.
Order = Literal["ascending", "reversed", "descending"]
_TILES = (
    Tile(64, 4), Tile(128, 4), Tile(128, 8), Tile(128, 16), Tile(256, 16), Tile(512, 16),
    Tile(512, 32),
)  # fmt: skip
_MAX_ROWS = 2**31 - 1
# Bytes of a thread's elements, beside which registers hold their columns and ranks.
_MAX_THREAD_BYTES = 128
_COLUMN_BYTES = 4
_DIGIT_BITS = 8
# Bytes of a warp's counts of a digit, and of a column in shared memory.
_COUNT_BYTES, _SHARED_COLUMN_BYTES = 4, 2
_STATIC_SHARED_BYTES = 128
# Measured on an H200: cycles of an SM for an element of each lane of a warp in a pass, and for the
# counts of a pass; and the cycles of both where a CTA waits for itself.
_ITEM_CYCLES, _PASS_CYCLES = 31, 450
_ITEM_LATENCY, _PASS_LATENCY = 190, 700


@dataclass(frozen=True)
class SortedRows:
    """A sort of each row of a matrix."""

    rows: int
    columns: int
    dtype: np.dtype[Any]
    order: Order
    values: bool  # whether the elements are results
    indices: bool  # whether their columns are

    @property
    def passes(self) -> int:
        """The most digits that elements differ in."""
        return self.dtype.itemsize * 8 // _DIGIT_BITS


@dataclass(frozen=True)
class SortRowsCandidate(CostedCandidate):
    """A CTA to a row."""

    problem: SortedRows
    tile: Tile
    cycles: float

    @property
    def key(self) -> str:
        return f"rows of {self.tile.columns}"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: counts of digits, and a row with its columns."""
        of_column = self.problem.dtype.itemsize + self.problem.indices * _SHARED_COLUMN_BYTES
        counts = self.tile.threads // WARP * _COUNT_BYTES << _DIGIT_BITS
        return counts + self.tile.columns * of_column

    def plan(self, gpu: Gpu) -> LaunchPlan:
        problem, tile = self.problem, self.tile
        flags = ", ".join(str(x).lower() for x in (problem.values, problem.indices))
        types = f"{CXX_TYPES[problem.dtype]}, {tile.threads}, {tile.items}, {flags}"
        kernel = Kernel("selection/sort_rows.cuh", f"tilekern::sort_rows<{types}>")
        backwards = problem.order == "descending", problem.order != "ascending"
        # A result that is not wanted has no buffer.
        results = Buffer(1), Buffer(1 + (problem.values and problem.indices))
        launch = Launch(
            entry=compile_kernels(kernel, arch=gpu.arch).entry(kernel.name),
            grid=(problem.rows, 1, 1),
            block=(tile.threads, 1, 1),
            parameters=(Buffer(0), *results, Scalars.pack("3I", problem.columns, *backwards)),
            shared_memory_bytes=self.shared_bytes,
        )
        size = problem.dtype.itemsize
        return LaunchPlan(
            name=f"sort {problem.dtype}",
            gpu=gpu,
            launches=(launch,),
            alignments=(size, *[size] * problem.values, *[_COLUMN_BYTES] * problem.indices),
            reason=f"{problem.rows} rows of {problem.columns}, tiles of {tile.columns}",
        )


def plan_sort_rows(problem: SortedRows, gpu: Gpu) -> LaunchPlan | NoKernel:
    found = sort_rows_candidate(problem, gpu)
    if isinstance(found, NoKernel):
        return found
    return plan_choice(sort_workload(problem.rows, problem.columns, problem.dtype), [found], gpu)


def sort_rows_candidate(problem: SortedRows, gpu: Gpu) -> SortRowsCandidate | NoKernel:
    """Return the way to sort rows, or why there is none."""
    if problem.dtype not in ORDERED_DTYPES:
        return NoKernel(f"no kernel orders {problem.dtype}")
    if problem.rows > _MAX_ROWS:
        return NoKernel(f"{problem.rows} rows (at most {_MAX_ROWS})")
    tiles = [x for x in _TILES if x.items * problem.dtype.itemsize <= _MAX_THREAD_BYTES]
    tile = next((x for x in tiles if x.columns >= problem.columns), None)
    if tile is None:
        return NoKernel(f"rows of {problem.columns} (at most {tiles[-1].columns})")
    found = SortRowsCandidate(problem, tile, _cycles(problem, tile, gpu))
    if found.shared_bytes + _STATIC_SHARED_BYTES > gpu.shared_memory_bytes:
        return NoKernel(f"rows of {problem.columns} exceed the shared memory of {gpu.name}")
    return found


def _cycles(problem: SortedRows, tile: Tile, gpu: Gpu) -> float:
    """Estimate the time of a sort."""
    passes = problem.passes
    written = problem.dtype.itemsize * problem.values + _COLUMN_BYTES * problem.indices
    moved = problem.rows * problem.columns * (problem.dtype.itemsize + written)
    warps = tile.threads // WARP
    busy = math.ceil(problem.rows / gpu.sm_count) * (
        warps * tile.items * _ITEM_CYCLES + _PASS_CYCLES
    )
    alone = tile.items * _ITEM_LATENCY + _PASS_LATENCY
    busy = passes * max(alone, busy)
    return gpu.rates.launch_cycles + max(busy, moved / gpu.rates.memory_bandwidth)
