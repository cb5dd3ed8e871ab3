"""The plan of the largest elements of rows (``selection/top_k_of_*.cuh``)."""

from __future__ import annotations

import math

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import WARP, Gpu, power_of_two
from jax_tilekern.plans.launch import MAX_INT32, Buffer, Launch, LaunchPlan, NoKernel, Scalars
from jax_tilekern.plans.selection.tile import ORDERED_DTYPES, Tile
from jax_tilekern.plans.selection.top_k_problem import MAX_K, TopK
from jax_tilekern.plans.selection.top_k_segments import plan_segments, takes_segments
from jax_tilekern.plans.selection.top_k_tiles import levels_of, plan_tiles
from jax_tilekern.plans.selection.warp_sort import WARP_CYCLES, WarpSort

_COLUMN_BYTES = 4
_WARP_THREADS = 128
# Elements of a lane, by their bytes, that registers hold with their order.
_WARP_ITEMS = {1: 16, 2: 16, 4: 8}
_INSTRUCTIONS_A_CYCLE = 4


def plan_top_k(problem: TopK, gpu: Gpu) -> LaunchPlan | NoKernel:
    rows, columns, k, dtype = problem.rows, problem.columns, problem.k, problem.dtype
    if dtype not in ORDERED_DTYPES:
        return NoKernel(f"no kernel orders {dtype}")
    if k > MAX_K:
        return NoKernel(f"{k} elements of rows of {columns} (at most {MAX_K})")
    levels = levels_of(problem, gpu)
    if columns > MAX_INT32 or rows * levels[0].tiles > MAX_INT32:
        return NoKernel(f"{rows} rows of {columns} (at most {MAX_INT32} columns and CTAs)")
    if _is_sorted(problem):
        return _plan_sort(problem, gpu)
    if _takes_warps(problem, levels[-1].tile):
        return _plan_warps(problem, gpu)
    return (plan_segments if takes_segments(problem, levels) else plan_tiles)(problem, gpu)


def _is_sorted(problem: TopK) -> bool:
    """Return whether rows of a warp are sorted, which takes less time than ``k`` maxima."""
    sort = WarpSort(problem.rows, problem.columns, problem.dtype)
    if problem.columns > WARP:
        return False
    of_maxima = WARP_CYCLES + _warp_instructions(problem) / _INSTRUCTIONS_A_CYCLE
    of_row = sort.cycles * sort.lanes / WARP
    return problem.dtype.itemsize not in _WARP_ITEMS or of_row <= of_maxima


def _takes_warps(problem: TopK, tile: Tile) -> bool:
    """Return whether a warp to a row has fewer instructions than a tile to a row."""
    if problem.columns > WARP * _WARP_ITEMS.get(problem.dtype.itemsize, 0):
        return False
    return _warp_instructions(problem) <= tile.threads // WARP * (30 * tile.items + 300)


def _warp_instructions(problem: TopK) -> int:
    """Return the instructions of a warp that finds a row's ``k`` maxima."""
    k, items = problem.k, _warp_items(problem.columns)
    log = items.bit_length() - 1
    # Comparators of the odd-even mergesort, and instructions of each and of a step.
    comparators = (log * log - log + 4) * items // 4 - 1
    wide = problem.dtype.itemsize == 4
    moved = min(items, power_of_two(k)) * (1 + wide)
    return 6 * items + comparators * (6 if wide else 2) + k * (moved + 16)


def _warp_items(columns: int) -> int:
    return power_of_two(math.ceil(columns / WARP))


def _plan_sort(problem: TopK, gpu: Gpu) -> LaunchPlan:
    sort = WarpSort(problem.rows, problem.columns, problem.dtype)
    launch = sort.launch(gpu, (Buffer(0), Buffer(1), Buffer(2)), largest=problem.k)
    return _plan(problem, gpu, launch, f"sorted, {sort.way}")


def _plan_warps(problem: TopK, gpu: Gpu) -> LaunchPlan:
    rows, columns, k, dtype = problem.rows, problem.columns, problem.k, problem.dtype
    items = _warp_items(columns)
    types = f"{CXX_TYPES[dtype]}, {items}, {min(items, power_of_two(k))}"
    kernel = Kernel("selection/top_k_of_warps.cuh", f"tilekern::top_k_of_warps<{types}>")
    sizes = (Scalars.pack("I", size) for size in (rows, columns, k))
    launch = Launch(
        entry=compile_kernels(kernel, arch=gpu.arch).entry(kernel.name),
        grid=(math.ceil(rows * WARP / _WARP_THREADS), 1, 1),
        block=(_WARP_THREADS, 1, 1),
        parameters=(Buffer(0), Buffer(1), Buffer(2), *sizes),
    )
    return _plan(problem, gpu, launch, "a warp to a row")


def _plan(problem: TopK, gpu: Gpu, launch: Launch, way: str) -> LaunchPlan:
    size = problem.dtype.itemsize
    return LaunchPlan(
        name=f"top_k {problem.dtype}",
        gpu=gpu,
        launches=(launch,),
        alignments=(size, size, _COLUMN_BYTES),
        reason=f"{problem.k} of {problem.columns}, {way}",
    )
