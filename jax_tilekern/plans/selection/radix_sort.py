"""The plan of a sort of rows of any length (``selection/radix_sort.cuh``)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.candidate import CostedCandidate
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import WARP, Gpu
from jax_tilekern.plans.launch import (
    MAX_INT32,
    Buffer,
    Launch,
    LaunchPlan,
    NoKernel,
    Scalars,
    overlapping,
)
from jax_tilekern.plans.policy import plan_choice
from jax_tilekern.plans.scans.look_back import CLEAR, clear_launch
from jax_tilekern.plans.selection.sorted_rows import (
    COLUMN_BYTES,
    DIGIT_BITS,
    ITEM_LATENCY,
    PASS_LATENCY,
    SortedRows,
)
from jax_tilekern.plans.selection.tile import Tile

_FILE = "selection/radix_sort.cuh"
_TILES = (
    Tile(256, 4), Tile(256, 8), Tile(256, 12), Tile(384, 12), Tile(256, 16), Tile(512, 16),
    Tile(512, 20),
)  # fmt: skip
# Bytes of a thread's elements, beside which registers hold their indices and ranks.
_MAX_THREAD_BYTES = 96
# The most elements of a thread, by their bytes, where stores of short ones take further registers.
_MOST_ITEMS = {1: 16}
_WORD_BYTES, _SECTOR_BYTES = 4, 32
_VALUES = 1 << DIGIT_BITS  # of a digit
# The first digit that a prefix may begin with, and the most elements of a run that shares it.
_PREFIX_DIGIT, _PREFIX_RUN = 2, 32
# `count_row_digits`: threads, elements that a thread loads at once, copies of a count, and CTAs of
# an SM.
_COUNT_THREADS, _COUNT_ITEMS, _COUNT_COPIES, _COUNT_CTAS = 512, 8, 16, 2
# Cycles of an SM to count a digit of an element of each lane, and of a step of the look-back, which
# is a read of some tiles from L2. These and those below are fitted to times on an H200.
_COUNT_CYCLES, _STEP_LATENCY, _STEP_TILES = 12, 470, 4
# CTAs of an SM that sort tiles.
_TILE_CTAS = 3
# Cycles of an SM for an element of each lane of a warp, for each word of 32 bits that moves beside
# the first one, and for the counts of a tile.
_ITEM_CYCLES, _WORD_CYCLES, _TILE_CYCLES = 24, 21, 900


@dataclass(frozen=True)
class Control:
    """Parts of the workspace that is zeroed, as offsets in bytes."""

    problem: SortedRows
    tiles: int  # of a row

    @property
    def passes(self) -> int:
        """By all digits, and before them by those that a prefix may have."""
        return self.problem.passes * (1 + has_prefix(self.problem))

    @property
    def differing(self) -> int:
        """Behind a counter of tickets for each pass."""
        return 16 * _WORD_BYTES

    @property
    def failed(self) -> int:
        """Whether a row has to be sorted by all digits."""
        return self.differing + 8 * self.problem.rows

    @property
    def counts(self) -> int:
        return self.failed + 2 * _WORD_BYTES * math.ceil(self.problem.rows / 2)

    def slots(self, number: int) -> int:
        rows, digits = self.problem.rows, self.problem.passes
        return self.counts + _WORD_BYTES * _VALUES * rows * (digits + number * self.tiles)

    @property
    def bytes(self) -> int:
        return self.slots(self.passes)


def has_prefix(problem: SortedRows) -> bool:
    """Whether rows are first sorted by their upper digits alone."""
    return problem.dtype.itemsize == 8


def _prefix_bits(problem: SortedRows) -> int:
    """Return in how many bits elements have to differ for a prefix of them to be enough."""
    slack = -1 if problem.dtype.kind in "iu" else 7
    return problem.columns.bit_length() + slack


@dataclass(frozen=True)
class RadixSort(CostedCandidate):
    """A pass over memory for each digit of 8 bits, and one that counts all digits."""

    problem: SortedRows
    tile: Tile
    cycles: float

    @property
    def key(self) -> str:
        return f"digits of tiles of {self.tile.columns}"

    @property
    def tiles(self) -> int:
        return math.ceil(self.problem.columns / self.tile.columns)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a tile: elements, indices, and words of each warp and value."""
        of_column = self.problem.dtype.itemsize + self.problem.indices * COLUMN_BYTES
        warps = self.tile.threads // WARP
        words = (warps + 1) * _VALUES + warps + 1
        return self.tile.columns * of_column + words * _WORD_BYTES

    def plan(self, gpu: Gpu) -> LaunchPlan:
        problem, digits = self.problem, self.problem.passes
        dtype, elements = CXX_TYPES[problem.dtype], problem.rows * problem.columns
        flags = ", ".join(str(x).lower() for x in (problem.values, problem.indices))
        types = f"{dtype}, {self.tile.threads}, {self.tile.items}, {flags}"
        count = Kernel(_FILE, f"tilekern::count_row_digits<{dtype}>")
        sort = Kernel(_FILE, f"tilekern::sort_by_digit<{types}>")
        runs = Kernel(_FILE, f"tilekern::order_prefix_runs<{types}>")
        kernels = [CLEAR, count, sort, *[runs] * has_prefix(problem)]
        compiled = compile_kernels(*kernels, arch=gpu.arch)

        control = Control(problem, self.tiles)
        workspaces = [control.bytes]
        of_control = 1 + problem.values + problem.indices

        def workspace(itemsize: int, is_used: bool) -> Buffer:
            """Return a buffer of all elements; one that is not used stands for none."""
            if not is_used:
                return Buffer(0)
            workspaces.append(elements * itemsize)
            return Buffer(of_control + len(workspaces) - 1)

        # Passes alternate between both buffers, and the last one writes the results.
        size = problem.dtype.itemsize
        keys = Buffer(1) if problem.values else workspace(size, digits > 2)
        other_keys = workspace(size, digits > 1)
        indices = Buffer(of_control - 1) if problem.indices else Buffer(0)
        other_indices = workspace(COLUMN_BYTES, problem.indices and digits > 1)
        differing = Buffer(of_control, control.differing)
        counts = Buffer(of_control, control.counts)
        parts, length = self.parts(gpu)
        launches = [
            clear_launch(compiled, Buffer(of_control), control.bytes // 8, gpu),
            Launch(
                entry=compiled.entry(count.name),
                grid=(problem.rows * parts, 1, 1),
                block=(_COUNT_THREADS, 1, 1),
                parameters=(
                    Buffer(0),
                    differing,
                    counts,
                    Scalars.pack("3I", problem.columns, parts, length),
                ),
                shared_memory_bytes=digits * _VALUES * _COUNT_COPIES * _WORD_BYTES,
            ),
        ]
        sizes = problem.rows, problem.columns, self.tiles
        backwards = problem.order == "descending", problem.order != "ascending"
        failed = Buffer(of_control, control.failed)

        def sort_by_digit(digit: int, of_prefix: bool) -> Launch:
            number = digit + digits * of_prefix
            return Launch(
                entry=compiled.entry(sort.name),
                grid=(problem.rows * self.tiles, 1, 1),
                block=(self.tile.threads, 1, 1),
                parameters=(
                    *(Buffer(0), keys, other_keys, indices, other_indices),
                    Buffer(of_control, number * _WORD_BYTES),
                    *(differing, counts, Buffer(of_control, control.slots(number)), failed),
                    Scalars.pack("7I", *sizes, digit, of_prefix, *backwards),
                ),
                shared_memory_bytes=self.shared_bytes,
            )

        if has_prefix(problem):
            launches += [sort_by_digit(digit, True) for digit in range(_PREFIX_DIGIT, digits)]
            launches.append(
                Launch(
                    entry=compiled.entry(runs.name),
                    grid=(problem.rows * self.tiles, 1, 1),
                    block=(self.tile.threads, 1, 1),
                    parameters=(
                        *(other_keys, keys, other_indices, indices, differing, failed),
                        Scalars.pack("3I", problem.columns, self.tiles, backwards[1]),
                    ),
                    shared_memory_bytes=(self.tile.columns + 2 * _PREFIX_RUN) * size,
                )
            )
        launches += [sort_by_digit(digit, False) for digit in range(digits)]
        return LaunchPlan(
            name=f"sort {problem.dtype}",
            gpu=gpu,
            launches=overlapping(gpu, *launches),
            alignments=problem.alignments,
            workspace_bytes=tuple(workspaces),
            reason=f"{problem.rows} rows of {problem.columns}, "
            f"{digits} digits, tiles of {self.tile.columns}",
        )

    def parts(self, gpu: Gpu) -> tuple[int, int]:
        """Return in how many parts a row is counted, and columns of each."""
        columns = self.problem.columns
        enough = math.ceil(_COUNT_CTAS * gpu.sm_count / self.problem.rows)
        parts = min(enough, math.ceil(columns / (_COUNT_THREADS * _COUNT_ITEMS)))
        length = math.ceil(columns / parts)
        return math.ceil(columns / length), length


def plan_radix_sort(problem: SortedRows, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan a sort of rows of an ordered type."""
    found = radix_sort_candidate(problem, gpu)
    if isinstance(found, NoKernel):
        return found
    return plan_choice(problem.workload, [found], gpu)


def radix_sort_candidate(problem: SortedRows, gpu: Gpu) -> RadixSort | NoKernel:
    """Return the tiles that are fastest by the estimate, or why there are none."""
    size = problem.dtype.itemsize
    most = min(_MAX_THREAD_BYTES // size, _MOST_ITEMS.get(size, _MAX_THREAD_BYTES))
    tiles = [x for x in _TILES if x.items <= most]
    candidates = [RadixSort(problem, tile, _cycles(problem, tile, gpu)) for tile in tiles]
    found = min(candidates, key=lambda candidate: candidate.cycles)
    if problem.columns > MAX_INT32 or problem.rows * found.tiles > MAX_INT32:
        return NoKernel(
            f"{problem.rows} rows of {problem.columns} (at most {MAX_INT32} columns and CTAs)"
        )
    return found


def _cycles(problem: SortedRows, tile: Tile, gpu: Gpu) -> float:
    """Estimate the time of a sort whose elements differ in all digits, and have short runs."""
    rates, digits, size = gpu.rates, problem.passes, problem.dtype.itemsize
    elements = problem.rows * problem.columns
    tiles = math.ceil(problem.columns / tile.columns)
    warp_items = math.ceil(elements / WARP / gpu.sm_count)
    cleared = Control(problem, tiles).bytes / rates.memory_bandwidth
    counted = max(
        elements * size / rates.memory_bandwidth,
        warp_items * digits * _COUNT_CYCLES,
    )
    launched = digits
    if has_prefix(problem):
        # The order of runs takes about as long as a pass, and each skipped pass as a launch.
        launched = 2 * digits - _PREFIX_DIGIT + 1
        digits = min(digits, math.ceil(_prefix_bits(problem) / DIGIT_BITS) + 1)
    # Indices of the first pass are columns, which are not read. Elements that are no result are not
    # written by the last one. A run of elements of one value begins and ends within a sector.
    of_element = size + COLUMN_BYTES * problem.indices
    read = digits * of_element - COLUMN_BYTES * problem.indices
    written = digits * of_element - size * (not problem.values)
    sectors = 1 + _SECTOR_BYTES * _VALUES / (tile.columns * of_element)
    moved = elements * (read + written * sectors)
    memory = moved / digits / rates.memory_bandwidth
    ctas = problem.rows * tiles
    tiles_of_sm = math.ceil(ctas / gpu.sm_count)
    words = math.ceil(size / _WORD_BYTES) + problem.indices
    of_item = _ITEM_CYCLES + (words - 1) * _WORD_CYCLES
    busy = tiles_of_sm * (tile.threads // WARP * tile.items * of_item + _TILE_CYCLES)
    alone = tile.items * ITEM_LATENCY + PASS_LATENCY
    # Tiles of a row that begin together look back over others that begin with them. With each step
    # of a tile, the tiles end whose look-back that many steps cover.
    together = min(tiles, max(1, _TILE_CTAS * gpu.sm_count // problem.rows))
    look_back = math.ceil(math.sqrt(2 * together / _STEP_TILES)) * _STEP_LATENCY
    launches = rates.launch_cycles + (1 + launched) * rates.next_launch_cycles
    return launches + cleared + counted + digits * (max(memory, busy, alone) + look_back)
