"""The plan of the largest elements of rows by tiles (``selection/top_k_of_tiles.cuh``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.compilation.compiler import Compiled, Kernel, compile_kernels
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, Scalars, overlapping
from jax_tilekern.plans.selection.tile import COUNTED_TILES, Tile, smallest_tile
from jax_tilekern.plans.selection.top_k_problem import TopK

_COLUMN_BYTES = 4
# Tiles of a row that several CTAs share, and how many elements they have for each that they find.
_SHARED_TILES = COUNTED_TILES[2:]
_REDUCTION = 16
# Tiles of what tiles of a row have found, whose threads have few elements.
_LAST_TILES = Tile(256, 1), Tile(512, 1), Tile(512, 2), Tile(512, 4)


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
    tile = smallest_tile((*_LAST_TILES, *COUNTED_TILES) if levels else COUNTED_TILES, columns)
    assert tile is not None
    return [*levels, Level(columns, k, tile, 1, columns)]


def plan_tiles(problem: TopK, gpu: Gpu) -> LaunchPlan:
    dtype = problem.dtype
    levels = levels_of(problem, gpu)
    kernels = tile_kernels(levels, dtype, if_many=False)
    compiled = compile_kernels(*dict.fromkeys(kernels), arch=gpu.arch)
    launches, workspaces = tile_launches(problem, levels, kernels, compiled, 3, Buffer(0))
    return LaunchPlan(
        name=f"top_k {dtype}",
        gpu=gpu,
        launches=overlapping(gpu, *launches),
        alignments=(dtype.itemsize, dtype.itemsize, _COLUMN_BYTES),
        workspace_bytes=workspaces,
        reason=f"{problem.k} of {problem.columns}, {tiles_text(levels)}",
    )


def tiles_text(levels: Sequence[Level]) -> str:
    tiles = " and ".join(f"{level.tiles} of {level.tile.columns}" for level in levels)
    return f"tiles to a row: {tiles}"


def tile_launches(
    problem: TopK,
    levels: Sequence[Level],
    kernels: Sequence[Kernel],
    compiled: Compiled,
    first: int,
    counts: Buffer,
) -> tuple[list[Launch], tuple[int, ...]]:
    """Return the launches over tiles, and their workspaces, which are buffers from ``first`` on."""
    rows = problem.rows
    # Values and columns that are found, ping-pong.
    between = [
        (Buffer(first + 2 * i), Buffer(first + 1 + 2 * i)) for i in range(min(2, len(levels) - 1))
    ]
    workspaces = tuple(
        rows * level.found * size
        for level in levels[: len(between)]
        for size in (problem.dtype.itemsize, _COLUMN_BYTES)
    )
    launches, source = [], (Buffer(0), Buffer(0))
    for i, (level, kernel) in enumerate(zip(levels, kernels, strict=True)):
        is_last = level.tiles == 1
        target = (Buffer(1), Buffer(2)) if is_last else between[i % 2]
        shape = Scalars.pack("5I", level.columns, level.found, level.tiles, level.length, problem.k)
        launches.append(
            Launch(
                entry=compiled.entry(kernel.name),
                grid=(rows * level.tiles, 1, 1),
                block=(level.tile.threads, 1, 1),
                parameters=(*source, *target, counts, shape),
            )
        )
        source = target
    return launches, workspaces


def tile_kernels(levels: Sequence[Level], dtype: np.dtype[Any], *, if_many: bool) -> list[Kernel]:
    kernels = []
    for i, level in enumerate(levels):
        flags = (i == 0, level.tiles == 1, if_many)
        numbers = level.tile.threads, level.tile.items, *(str(x).lower() for x in flags)
        types = ", ".join(map(str, (CXX_TYPES[dtype], *numbers)))
        kernels.append(Kernel("selection/top_k_of_tiles.cuh", f"tilekern::top_k_of_tiles<{types}>"))
    return kernels
