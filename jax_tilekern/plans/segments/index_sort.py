"""The plan of a stable sort of row numbers by small keys (``segments/index_sort.cuh``)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Compiled, Kernel, compile_kernels
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, NoKernel, Scalars, overlapping

_FILE = "segments/index_sort.cuh"
_THREADS = 256
# Keys of a thread: many, so that a tile has runs of each digit; few, where there are few tiles.
_ITEMS = (12, 4)
# Tiles that occupy a GPU.
_ENOUGH_TILES = 64
_DIGIT_BITS = 9
# Every CTA adds up at most so many counts of tiles. If there are more, a scan adds them up before.
_SUMMED_COUNTS = 1 << 14
# Items of the list of edges and ends of bins have numbers of 31 bits.
MAX_ITEMS = 2**31 - 1


@dataclass(frozen=True)
class IndexSort:
    """A sort of the rows of an array by their keys."""

    rows: int  # number of keys, at least one
    bins: int  # bins of keys 0 to bins - 3, and one each for keys below and above
    places: bool = False  # whether the place of each row in the order is a result, too

    @property
    def items(self) -> int:
        """Keys of a thread."""
        many = (n for n in _ITEMS if self.rows >= _ENOUGH_TILES * _THREADS * n)
        return next(many, _ITEMS[-1])

    @property
    def tiles(self) -> int:
        return math.ceil(self.rows / (_THREADS * self.items))

    @property
    def in_one_pass(self) -> bool:
        """Whether there is one digit, and few tiles."""
        return len(self.digits) == 1 and self.tiles << self.digits[0] <= _SUMMED_COUNTS

    @property
    def digits(self) -> list[int]:
        """Bits of each digit, least significant first: as few digits as there may be."""
        bits = max(1, (self.bins - 1).bit_length())
        passes = math.ceil(bits / _DIGIT_BITS)
        return [bits // passes + (i < bits % passes) for i in range(passes)]


def too_many_items(rows: int, bins: int) -> NoKernel | None:
    """Refuse rows and ends of bins whose numbers exceed int32."""
    if rows + bins <= MAX_ITEMS:
        return None
    return NoKernel(f"{rows} rows and {bins} bins (at most {MAX_ITEMS} together)")


def plan_index_sort(sort: IndexSort, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan a sort of keys into the order of the rows and the bounds of the bins."""
    if (refused := too_many_items(sort.rows, sort.bins)) is not None:
        return refused
    if sort.in_one_pass:
        return _plan_one_pass(sort, gpu)
    assert not sort.places, "places of rows come from one pass"
    items, digits, tiles = sort.items, sort.digits, sort.tiles
    keys, order, bounds = map(Buffer, range(3))
    largest = 1 << max(digits)
    workspaces = [4 * largest * tiles, 4 * largest]
    counts, totals = Buffer(3), Buffer(4)
    # Two buffers of keys and rows, ping-pong; bounds are searched for in the last keys.
    between = [(Buffer(5 + 2 * i), Buffer(6 + 2 * i)) for i in range(min(2, len(digits)))]
    workspaces += [4 * sort.rows] * (2 * len(between))
    scan, search = (Kernel(_FILE, f"tilekern::{x}") for x in ("scan_digits", "find_bounds<true>"))
    passes = [
        tuple(
            Kernel(_FILE, f"tilekern::{name}<{items}, {str(i == 0).lower()}>")
            for name in ("count_digits", "scatter_digits")
        )
        for i in range(len(digits))
    ]
    compiled = compile_kernels(scan, search, *itertools.chain(*passes), arch=gpu.arch)
    launches, shift, source = [], 0, (keys, keys)
    for i, (bits, (count, scatter)) in enumerate(zip(digits, passes, strict=True)):
        keys_out, rows_out = between[i % 2]
        target = keys_out, order if i == len(digits) - 1 else rows_out
        shape = Scalars.pack("5I", sort.rows, tiles, shift, 1 << bits, sort.bins)
        launches += [
            _launch(compiled, count, tiles, source[0], counts, shape),
            _launch(compiled, scan, 1 << bits, counts, totals, shape),
            _launch(compiled, scatter, tiles, *source, counts, totals, *target, shape),
        ]
        shift, source = shift + bits, target
    launches.append(_bounds_launch(compiled, search, sort, source[0], bounds))
    return LaunchPlan(
        name=f"sort {sort.rows} rows by {sort.bins} keys",
        gpu=gpu,
        launches=overlapping(gpu, *launches),
        alignments=(4, 4, 4),
        workspace_bytes=tuple(workspaces),
        reason=f"digits of {' and '.join(map(str, digits))} bits, {tiles} CTAs",
    )


def _plan_one_pass(sort: IndexSort, gpu: Gpu) -> LaunchPlan:
    # Counts are read four at a time.
    items, tiles, bits = sort.items, sort.tiles, max(2, *sort.digits)
    count = Kernel(_FILE, f"tilekern::count_digits<{items}, true, true>")
    tile = Kernel(_FILE, f"tilekern::sort_tiles<{items}, {str(sort.places).lower()}>")
    counted = tiles > 1
    compiled = compile_kernels(*([count] if counted else []), tile, arch=gpu.arch)
    # Places, if there are any, are between the order and the bounds.
    keys, order, places = map(Buffer, range(3))
    bounds, counts = (Buffer(i + sort.places) for i in (2, 3))
    shape = Scalars.pack("5I", sort.rows, tiles, 0, 1 << bits, sort.bins)
    launches = [_launch(compiled, count, tiles, keys, counts, shape)] if counted else []
    buffers = (keys, counts if counted else keys, order, places, bounds)
    launches.append(_launch(compiled, tile, tiles, *buffers, shape))
    return LaunchPlan(
        name=f"sort {sort.rows} rows by {sort.bins} keys",
        gpu=gpu,
        launches=overlapping(gpu, *launches),
        alignments=(4,) * (3 + sort.places),
        workspace_bytes=(4 * tiles << bits,) if counted else (),
        reason=f"one pass of {bits} bits, {tiles} CTAs",
    )


def plan_bounds(sort: IndexSort, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan a search for the bounds of the bins of keys that are sorted as they lie."""
    if (refused := too_many_items(sort.rows, sort.bins)) is not None:
        return refused
    search = Kernel(_FILE, "tilekern::find_bounds<false>")
    compiled = compile_kernels(search, arch=gpu.arch)
    keys, bounds = Buffer(0), Buffer(1)
    return LaunchPlan(
        name=f"bounds of {sort.bins} keys in {sort.rows} sorted rows",
        gpu=gpu,
        launches=(_bounds_launch(compiled, search, sort, keys, bounds),),
        alignments=(4, 4),
        reason="a binary search for each key",
    )


def _bounds_launch(
    compiled: Compiled, search: Kernel, sort: IndexSort, keys: Buffer, bounds: Buffer
) -> Launch:
    sizes = (Scalars.pack("I", sort.rows), Scalars.pack("I", sort.bins))
    ctas = math.ceil((sort.bins + 1) / _THREADS)
    return _launch(compiled, search, ctas, keys, bounds, *sizes)


def _launch(compiled: Compiled, kernel: Kernel, ctas: int, *parameters: Buffer | Scalars) -> Launch:
    return Launch(
        entry=compiled.entry(kernel.name),
        grid=(ctas, 1, 1),
        block=(_THREADS, 1, 1),
        parameters=parameters,
    )
