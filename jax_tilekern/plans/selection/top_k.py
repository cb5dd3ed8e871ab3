"""The plan of the largest elements of rows (``selection/top_k_of_*.cuh``)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import WARP, Gpu, power_of_two
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, NoKernel, Scalars, overlapping
from jax_tilekern.plans.selection.tile import (
    COUNTED_TILES,
    ORDERED_DTYPES,
    Tile,
    smallest_tile,
)

# The most elements whose order fits shared memory beside the counts.
MAX_K = 2048
_MAX_SIZE = 2**31 - 1
_COLUMN_BYTES = 4
_WARP_THREADS = 128
# Elements of a lane, by their bytes, that registers hold with their order.
_WARP_ITEMS = {1: 16, 2: 16, 4: 8}
# Tiles of a row that several CTAs share, and how many elements they have for each that they find.
_SHARED_TILES = COUNTED_TILES[2:]
_REDUCTION = 16


@dataclass(frozen=True)
class TopK:
    """The ``k`` largest elements of each row."""

    rows: int
    columns: int
    k: int
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class Level:
    """A launch that finds the ``k`` largest elements of each tile of the rows."""

    columns: int  # of a row
    k: int
    tile: Tile
    tiles: int  # of a row
    length: int  # columns of a tile, of which the last one may have fewer

    @property
    def found(self) -> int:
        """Elements of a row that the tiles find."""
        rest = self.columns - (self.tiles - 1) * self.length
        return (self.tiles - 1) * self.k + min(self.k, rest)


def plan_top_k(problem: TopK, gpu: Gpu) -> LaunchPlan | NoKernel:
    rows, columns, k, dtype = problem.rows, problem.columns, problem.k, problem.dtype
    if dtype not in ORDERED_DTYPES:
        return NoKernel(f"no kernel orders {dtype}")
    if k > MAX_K:
        return NoKernel(f"{k} elements of rows of {columns} (at most {MAX_K})")
    levels = levels_of(problem, gpu)
    if columns > _MAX_SIZE or rows * levels[0].tiles > _MAX_SIZE:
        return NoKernel(f"{rows} rows of {columns} (at most {_MAX_SIZE} columns and CTAs)")
    takes_warps = _takes_warps(problem, levels[-1].tile)
    return (_plan_warps if takes_warps else _plan_tiles)(problem, gpu)


def levels_of(problem: TopK, gpu: Gpu) -> list[Level]:
    """Return the launches over tiles; the last one has a tile for each row."""
    columns, k = problem.columns, problem.k
    levels: list[Level] = []
    while columns > COUNTED_TILES[-1].columns:
        # The largest tile with which there are enough CTAs.
        enough = 2 * gpu.sm_count
        few = [x for x in _SHARED_TILES if x.columns >= _REDUCTION * k] or _SHARED_TILES[-1:]
        fitting = (x for x in reversed(few) if problem.rows * columns >= enough * x.columns)
        tile = next(fitting, few[0])
        length = math.ceil(columns / math.ceil(columns / tile.columns))
        levels.append(Level(columns, k, tile, math.ceil(columns / length), length))
        columns = levels[-1].found
    tile = smallest_tile(COUNTED_TILES, columns)
    assert tile is not None
    return [*levels, Level(columns, k, tile, 1, columns)]


def _takes_warps(problem: TopK, tile: Tile) -> bool:
    """Return whether a warp to a row has fewer instructions than a tile to a row."""
    columns, k, dtype = problem.columns, problem.k, problem.dtype
    if columns > WARP * _WARP_ITEMS.get(dtype.itemsize, 0):
        return False
    items, log = _warp_items(columns), _warp_items(columns).bit_length() - 1
    # Comparators of the odd-even mergesort, and instructions of each and of a step.
    comparators = (log * log - log + 4) * items // 4 - 1
    wide = dtype.itemsize == 4
    moved = min(items, power_of_two(k)) * (1 + wide)
    of_warp = 6 * items + comparators * (6 if wide else 2) + k * (moved + 16)
    return of_warp <= tile.threads // WARP * (30 * tile.items + 300)


def _warp_items(columns: int) -> int:
    return power_of_two(math.ceil(columns / WARP))


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
    return LaunchPlan(
        name=f"top_k {dtype}",
        gpu=gpu,
        launches=(launch,),
        alignments=(dtype.itemsize, dtype.itemsize, _COLUMN_BYTES),
        reason=f"{k} of {columns}, a warp to a row",
    )


def _plan_tiles(problem: TopK, gpu: Gpu) -> LaunchPlan:
    rows, k, dtype = problem.rows, problem.k, problem.dtype
    levels = levels_of(problem, gpu)
    kernels = [_tile_kernel(level, dtype, i == 0) for i, level in enumerate(levels)]
    compiled = compile_kernels(*dict.fromkeys(kernels), arch=gpu.arch)
    # Values and columns that are found, ping-pong.
    between = [(Buffer(3 + 2 * i), Buffer(4 + 2 * i)) for i in range(min(2, len(levels) - 1))]
    workspaces = [
        rows * level.found * size
        for level in levels[: len(between)]
        for size in (dtype.itemsize, _COLUMN_BYTES)
    ]
    launches, source = [], (Buffer(0), Buffer(0))
    for i, (level, kernel) in enumerate(zip(levels, kernels, strict=True)):
        is_last = level.tiles == 1
        target = (Buffer(1), Buffer(2)) if is_last else between[i % 2]
        shape = Scalars.pack("5I", level.columns, level.found, level.tiles, level.length, k)
        launches.append(
            Launch(
                entry=compiled.entry(kernel.name),
                grid=(rows * level.tiles, 1, 1),
                block=(level.tile.threads, 1, 1),
                parameters=(*source, *target, shape),
            )
        )
        source = target
    tiles = " and ".join(f"{level.tiles} of {level.tile.columns}" for level in levels)
    return LaunchPlan(
        name=f"top_k {dtype}",
        gpu=gpu,
        launches=overlapping(gpu, *launches),
        alignments=(dtype.itemsize, dtype.itemsize, _COLUMN_BYTES),
        workspace_bytes=tuple(workspaces),
        reason=f"{k} of {problem.columns}, tiles to a row: {tiles}",
    )


def _tile_kernel(level: Level, dtype: np.dtype[Any], is_first: bool) -> Kernel:
    flags = ", ".join(str(x).lower() for x in (is_first, level.tiles == 1))
    types = f"{CXX_TYPES[dtype]}, {level.tile.threads}, {level.tile.items}, {flags}"
    return Kernel("selection/top_k_of_tiles.cuh", f"tilekern::top_k_of_tiles<{types}>")
