"""The plan of the largest elements of long rows (``selection/top_k_of_segments.cuh``)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import WARP, Gpu, power_of_two
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, Scalars, overlapping
from jax_tilekern.plans.selection.top_k_problem import MAX_K, TopK
from jax_tilekern.plans.selection.top_k_tiles import (
    Level,
    levels_of,
    tile_kernels,
    tile_launches,
    tiles_text,
)

# `top_k_of_segments.cuh`: elements of a warp, and threads.
_BLOCK, _SEGMENT_THREADS, _ROW_THREADS = 1024, 256, 512
# Segments of a row for each element that is found, the most segments of a row, and how many lanes
# of a warp may have one.
_SEGMENTS_OF_ELEMENT, _MOST_SEGMENTS = 4, 16_384
_LANES = (32, 8)
# The most elements that are found, since hardly more candidates are sorted.
_MOST_FOUND = 1536
# Launches over tiles that take less time, by 13 calls on an H200, and elements that tiles find in
# less time by any number of launches: 50 of 2^22, but not 100 of 2^20.
_FEW_LAUNCHES, _FEW_FOUND = 2, 50
_WORD_BYTES, _COLUMN_BYTES = 4, 4


def lanes_of(problem: TopK) -> int | None:
    """Return the lanes of a segment with which there are enough segments, or None."""
    blocks = math.ceil(problem.columns / _BLOCK)
    for lanes in _LANES if problem.k <= _MOST_FOUND else ():
        if _SEGMENTS_OF_ELEMENT * problem.k <= blocks * WARP // lanes <= _MOST_SEGMENTS:
            return lanes
    return None


def takes_segments(problem: TopK, levels: Sequence[Level]) -> bool:
    """Return whether segments took less time than tiles in calls like this."""
    is_long = len(levels) > _FEW_LAUNCHES and problem.k > _FEW_FOUND
    return is_long and lanes_of(problem) is not None


def plan_segments(problem: TopK, gpu: Gpu) -> LaunchPlan:
    rows, columns, k, dtype = problem.rows, problem.columns, problem.k, problem.dtype
    lanes = lanes_of(problem)
    assert lanes is not None
    blocks = math.ceil(columns / _BLOCK)
    segments = blocks * WARP // lanes
    items = max(4, power_of_two(math.ceil(segments / _ROW_THREADS)))
    kind = CXX_TYPES[dtype]
    names = (
        f"find_segment_maxima<{kind}, {lanes}>", f"find_segment_bounds<{kind}, {lanes}, {items}>",
        f"gather_candidates<{kind}, {lanes}>", f"sort_candidates<{kind}>",
    )  # fmt: skip
    own = [Kernel("selection/top_k_of_segments.cuh", f"tilekern::{name}") for name in names]
    levels = levels_of(problem, gpu)
    kernels = tile_kernels(levels, dtype, if_many=True)
    compiled = compile_kernels(*own, *dict.fromkeys(kernels), arch=gpu.arch)
    bits = max(dtype.itemsize, _WORD_BYTES)
    workspaces = (
        rows * segments * bits, rows * bits, rows * _WORD_BYTES, rows * MAX_K * bits,
        rows * MAX_K * _COLUMN_BYTES,
    )  # fmt: skip
    x, values, found = Buffer(0), Buffer(1), Buffer(2)
    maxima, bounds, counts, candidates, of_candidates = (Buffer(3 + i) for i in range(5))
    shape = Scalars.pack("4I", rows, columns, blocks, k)
    of_segments = math.ceil(rows * blocks * WARP / _SEGMENT_THREADS), _SEGMENT_THREADS
    of_rows = rows, _ROW_THREADS
    parameters = (
        (of_segments, (x, maxima)),
        (of_rows, (maxima, bounds, counts)),
        (of_segments, (x, maxima, bounds, counts, candidates, of_candidates)),
        (of_rows, (candidates, of_candidates, counts, values, found)),
    )
    launches = [
        Launch(
            entry=compiled.entry(kernel.name),
            grid=(ctas, 1, 1),
            block=(threads, 1, 1),
            parameters=(*buffers, shape),
        )
        for kernel, ((ctas, threads), buffers) in zip(own, parameters, strict=True)
    ]
    others, further = tile_launches(problem, levels, kernels, compiled, 8, counts)
    return LaunchPlan(
        name=f"top_k {dtype}",
        gpu=gpu,
        launches=overlapping(gpu, *launches, *others),
        alignments=(dtype.itemsize, dtype.itemsize, _COLUMN_BYTES),
        workspace_bytes=(*workspaces, *further),
        reason=f"{k} of {columns}, {segments} segments of a row; if these tell too little, "
        f"{tiles_text(levels)}",
    )
