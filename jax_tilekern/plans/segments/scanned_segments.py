"""Reductions of so few edges that nothing is sorted (``segments/scanned_segments.cuh``)."""

from __future__ import annotations

from dataclasses import dataclass

from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, Scalars
from jax_tilekern.plans.segments.map_text import SegmentMap
from jax_tilekern.plans.segments.problem import CXX_REDUCTIONS, SegmentReduction

_FILE = "segments/scanned_segments.cuh"
_THREADS = 256
# A CTA may have all edges, so these take about as long as a sort.
_MOST_EDGES = 4096
# Keys that are compared: 2 us of a GPU that compares 32 of them on each SM in a cycle.
_MOST_COMPARISONS = 2**24


@dataclass(frozen=True)
class ScannedSegments:
    """A launch of a CTA for each segment."""

    reduction: SegmentReduction

    @property
    def is_possible(self) -> bool:
        """Whether a CTA for each tile of a row has few enough edges to compare."""
        edges = self.reduction.edges
        return edges <= _MOST_EDGES and edges * self.ctas <= _MOST_COMPARISONS

    @property
    def ctas(self) -> int:
        """CTAs: one for each tile of a segment's row."""
        r = self.reduction
        return r.batch * r.segments * r.tiles

    def plan(self, gpu: Gpu) -> LaunchPlan:
        r = self.reduction
        edge_map = SegmentMap(r, r.vector)
        operation, out = CXX_REDUCTIONS[r.reduction], CXX_TYPES[r.out_dtype]
        kernel = edge_map.kernel(_FILE, "reduce_scanned", operation, "{map}", out, str(r.lanes))
        compiled = compile_kernels(kernel, arch=gpu.arch)
        first = len(r.operands) + r.indices
        shape = Scalars.pack("q3I4x", r.columns, r.edges, r.segments, r.tiles)
        launch = Launch(
            entry=compiled.entry(kernel.name),
            grid=(self.ctas, 1, 1),
            block=(_THREADS, 1, 1),
            parameters=(Buffer(first), Buffer(first + 1), shape, *edge_map.parameters()),
        )
        return LaunchPlan(
            name=f"segment_{r.reduction} {r.out_dtype}, few edges",
            gpu=gpu,
            launches=(launch,),
            alignments=(*edge_map.alignments, 4, r.out_dtype.itemsize * r.vector),
            reason=f"{r.batch * r.segments} segments, {r.tiles} tiles of columns",
        )
