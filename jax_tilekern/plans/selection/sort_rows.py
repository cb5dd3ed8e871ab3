"""The plan of a sort of rows that fit shared memory (``selection/sort_rows.cuh``)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.candidate import CostedCandidate
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import WARP, Gpu
from jax_tilekern.plans.launch import MAX_INT32, Buffer, Launch, LaunchPlan, NoKernel, Scalars
from jax_tilekern.plans.policy import plan_choice
from jax_tilekern.plans.selection.radix_sort import plan_radix_sort
from jax_tilekern.plans.selection.sorted_rows import (
    DIGIT_BITS,
    ITEM_LATENCY,
    PASS_LATENCY,
    SortedRows,
)
from jax_tilekern.plans.selection.tile import ORDERED_DTYPES, Tile, smallest_tile
from jax_tilekern.plans.selection.warp_sort import WarpSort

_TILES = (
    Tile(64, 4), Tile(128, 4), Tile(128, 8), Tile(128, 16), Tile(256, 16), Tile(512, 16),
    Tile(512, 32),
)  # fmt: skip
# Bytes of a thread's elements, beside which registers hold their columns and ranks.
_MAX_THREAD_BYTES = 128
# Bytes of a warp's counts of a digit, and of a column in shared memory.
_COUNT_BYTES, _SHARED_COLUMN_BYTES = 4, 2
# Bytes of the part of a range, in which elements of 64 bits are.
_PART_BYTES = 2
_STATIC_SHARED_BYTES = 128
# Fitted to times on an H200: cycles of an SM for an element of each lane of a warp in a pass, and
# for the counts of a pass.
_ITEM_CYCLES, _PASS_CYCLES = 16, 340
# Elements of 64 bits: cycles of an SM for an element of a tile, of two digits and comparisons of
# elements of a part, and passes that take as long where a CTA waits for itself.
_WIDE_CYCLES, _WIDE_PASSES = 3.3, 3


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
        """Dynamic shared memory: a row with its columns, and counts of digits or parts."""
        of_column = self.problem.dtype.itemsize + self.problem.indices * _SHARED_COLUMN_BYTES
        counts = self.tile.threads // WARP * _COUNT_BYTES << DIGIT_BITS
        parts = self.tile.columns * _PART_BYTES if self.problem.dtype.itemsize == 8 else 0
        return self.tile.columns * of_column + max(counts, parts)

    def plan(self, gpu: Gpu) -> LaunchPlan:
        problem, tile = self.problem, self.tile
        flags = ", ".join(str(x).lower() for x in (problem.values, problem.indices))
        types = f"{CXX_TYPES[problem.dtype]}, {tile.threads}, {tile.items}, {flags}"
        kernel = Kernel("selection/sort_rows.cuh", f"tilekern::sort_rows<{types}>")
        backwards = problem.order == "descending", problem.order != "ascending"
        launch = Launch(
            entry=compile_kernels(kernel, arch=gpu.arch).entry(kernel.name),
            grid=(problem.rows, 1, 1),
            block=(tile.threads, 1, 1),
            parameters=(*_buffers(problem), Scalars.pack("3I", problem.columns, *backwards)),
            shared_memory_bytes=self.shared_bytes,
        )
        return _plan(problem, gpu, launch, f"tiles of {tile.columns}")


@dataclass(frozen=True)
class SortWarpsCandidate(CostedCandidate):
    """Rows in warps."""

    problem: SortedRows
    sort: WarpSort
    cycles: float

    @property
    def key(self) -> str:
        return f"rows of {self.sort.lanes * self.sort.items} in a warp"

    def plan(self, gpu: Gpu) -> LaunchPlan:
        problem = self.problem
        launch = self.sort.launch(
            gpu,
            _buffers(problem),
            backwards=(problem.order == "descending") + 2 * (problem.order != "ascending"),
            values=problem.values,
            indices=problem.indices,
        )
        return _plan(problem, gpu, launch, self.sort.way)


def _buffers(problem: SortedRows) -> tuple[Buffer, ...]:
    """Return the operand and both results; a result that is not wanted has no buffer."""
    return Buffer(0), Buffer(1), Buffer(1 + (problem.values and problem.indices))


def _plan(problem: SortedRows, gpu: Gpu, launch: Launch, way: str) -> LaunchPlan:
    return LaunchPlan(
        name=f"sort {problem.dtype}",
        gpu=gpu,
        launches=(launch,),
        alignments=problem.alignments,
        reason=f"{problem.rows} rows of {problem.columns}, {way}",
    )


def plan_sort_rows(problem: SortedRows, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan a sort of rows of any length."""
    if problem.dtype not in ORDERED_DTYPES:
        return NoKernel(f"no kernel orders {problem.dtype}")
    if problem.rows > MAX_INT32:
        return NoKernel(f"{problem.rows} rows (at most {MAX_INT32})")
    found = sort_rows_candidate(problem, gpu)
    if found is None:
        return plan_radix_sort(problem, gpu)
    return plan_choice(problem.workload, [found], gpu)


def sort_rows_candidate(
    problem: SortedRows, gpu: Gpu
) -> SortRowsCandidate | SortWarpsCandidate | None:
    """Return the way to sort rows that fit a CTA, or ``None`` if they do not."""
    sort = WarpSort(problem.rows, problem.columns, problem.dtype)
    if sort.fits:
        return SortWarpsCandidate(problem, sort, _warp_cycles(problem, sort, gpu))
    tiles = [x for x in _TILES if x.items * problem.dtype.itemsize <= _MAX_THREAD_BYTES]
    tile = smallest_tile(tiles, problem.columns)
    if tile is None:
        return None
    found = SortRowsCandidate(problem, tile, _cycles(problem, tile, gpu))
    fits = found.shared_bytes + _STATIC_SHARED_BYTES <= gpu.shared_memory_bytes
    return found if fits else None


def _warp_cycles(problem: SortedRows, sort: WarpSort, gpu: Gpu) -> float:
    """Estimate the time of a sort in warps."""
    warps = math.ceil(sort.warps / gpu.sm_count)
    busy = max(warps * sort.cycles, sort.latency)
    return gpu.rates.launch_cycles + max(busy, problem.bytes / gpu.rates.memory_bandwidth)


def _cycles(problem: SortedRows, tile: Tile, gpu: Gpu) -> float:
    """Estimate the time of a sort."""
    wide = problem.dtype.itemsize == 8
    passes = _WIDE_PASSES if wide else problem.passes
    of_pass = tile.threads // WARP * tile.items * _ITEM_CYCLES + _PASS_CYCLES
    of_row = tile.columns * _WIDE_CYCLES if wide else passes * of_pass
    alone = passes * (tile.items * ITEM_LATENCY + PASS_LATENCY)
    busy = max(alone, math.ceil(problem.rows / gpu.sm_count) * of_row)
    return gpu.rates.launch_cycles + max(busy, problem.bytes / gpu.rates.memory_bandwidth)
