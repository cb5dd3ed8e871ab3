"""Reductions of edges that are sorted by segment (``segments/sorted_segments.cuh``)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.cxx import CXX_TYPES, cxx_config
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, NoKernel, Scalars, overlapping
from jax_tilekern.plans.segments.index_sort import too_many_items
from jax_tilekern.plans.segments.map_text import SegmentMap
from jax_tilekern.plans.segments.problem import CXX_REDUCTIONS, SegmentReduction

_FILE = "segments/sorted_segments.cuh"
_THREADS = 256
# Threads for each SM: some rounds of those that it holds, so that the last one is short.
_THREADS_OF_SM = 2048
# CTAs of an SM that combine parts, unless there are more workers.
_COMBINING_CTAS_OF_SM = 4
# A worker's search for its items, and its two parts, are worth so many items.
_LEAST_ITEMS = 16
# 16-byte loads of a thread that are in flight at once.
_LOADS = 4


@dataclass(frozen=True)
class SortedSegments:
    """A launch that reduces sorted edges, and one that combines parts of segments."""

    reduction: SegmentReduction
    sm_count: int

    @property
    def total(self) -> int:
        """Edges and ends of bins."""
        return self.reduction.edges + self.reduction.bins

    @property
    def items(self) -> int:
        """Edges and ends of bins of a worker."""
        threads = self.sm_count * _THREADS_OF_SM
        workers = max(1, threads // (self.reduction.lanes * self.reduction.tiles))
        return max(_LEAST_ITEMS, math.ceil(self.total / workers))

    @property
    def workers(self) -> int:
        """Groups of threads that take equally many items."""
        return math.ceil(self.total / self.items)

    @property
    def unroll(self) -> int:
        """Rows whose loads are in flight at once."""
        wide = sum(not x.broadcast for x in self.reduction.operands)
        return max(2, _LOADS // max(1, wide))

    def plan(self, gpu: Gpu) -> LaunchPlan | NoKernel:
        r = self.reduction
        if (refused := too_many_items(r.edges, r.bins)) is not None:
            return refused
        operation, out = CXX_REDUCTIONS[r.reduction], CXX_TYPES[r.out_dtype]
        edge_map = SegmentMap(r, r.vector)
        config = cxx_config("SegmentConfig", lanes=r.lanes, unroll=self.unroll, ordered=r.ordered)
        reduce = edge_map.kernel(_FILE, "reduce_sorted", operation, "{map}", out, config)
        combine = Kernel(
            _FILE,
            f"tilekern::combine_parts<{operation}, {r.cxx_value}, {out}, {r.vector}, {r.lanes}>",
        )
        compiled = compile_kernels(reduce, combine, arch=gpu.arch)
        first = len(r.operands) + r.indices
        # Without an order, it is not read.
        order, bounds = (Buffer(first + i) for i in ((0, 1) if r.ordered else (0, 0)))
        result = Buffer(bounds.index + 1)
        heads, tails = (Buffer(result.index + i) for i in (1, 2))
        shape = Scalars.pack(
            "q6I",
            r.columns,
            r.edges,
            r.bins,
            r.period,
            self.items,
            self.workers,
            r.tiles,
        )
        groups = _THREADS // r.lanes
        ctas = math.ceil(self.workers / groups)
        # Where few CTAs combine parts of wide rows, more of them share the columns.
        shared = min(r.tiles, math.ceil(self.sm_count * _COMBINING_CTAS_OF_SM / ctas))
        launches = (
            Launch(
                entry=compiled.entry(reduce.name),
                grid=(ctas * r.tiles, 1, 1),
                block=(_THREADS, 1, 1),
                parameters=(order, bounds, heads, tails, result, shape, *edge_map.parameters()),
            ),
            Launch(
                entry=compiled.entry(combine.name),
                grid=(ctas, shared, 1),
                block=(_THREADS, 1, 1),
                parameters=(bounds, heads, tails, result, shape),
            ),
        )
        part = self.workers * r.columns * r.value.itemsize
        return LaunchPlan(
            name=f"segment_{r.reduction} {r.out_dtype}",
            gpu=gpu,
            launches=overlapping(gpu, *launches),
            alignments=(
                *edge_map.alignments,
                *(4,) * (1 + r.ordered),
                r.out_dtype.itemsize * r.vector,
            ),
            workspace_bytes=(part, part),
            reason=f"{self.workers} workers of {r.lanes} lanes and {self.items} items, "
            f"{r.tiles} tiles of columns",
        )
