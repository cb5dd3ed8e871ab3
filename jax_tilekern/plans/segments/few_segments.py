"""Reductions to segments whose values fit in shared memory (``segments/few_segments.cuh``)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import RESERVED_SHARED_BYTES, Gpu, power_of_two
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, Scalars, overlapping
from jax_tilekern.plans.segments.map_text import SegmentMap
from jax_tilekern.plans.segments.problem import CXX_REDUCTIONS, SegmentReduction

_FILE = "segments/few_segments.cuh"
_COMBINE_THREADS, _COMBINE_LANES = 256, 32
_THREADS = (256, 128)
# CTAs of which an SM must hold this many, to keep the memory busy.
_LEAST_CTAS = 2
# Wider rows take longer than their sort, by one digit, and a reduction in that order.
_MOST_LANES = 16
_UNROLL = 16
_LOAD_BYTES = 4
_RESIDENT_THREADS = 2048


@dataclass(frozen=True)
class FewSegments:
    """A launch of CTAs that reduce blocks of edges as they lie, and one that combines them."""

    reduction: SegmentReduction
    threads: int  # of a CTA
    gpu: Gpu

    @property
    def vector(self) -> int:
        """Adjacent columns of a thread."""
        sizes = [x.dtype.itemsize for x in self.reduction.operands if not x.broadcast]
        return math.gcd(max(1, _LOAD_BYTES // max(sizes, default=4)), self.reduction.columns)

    @property
    def lanes(self) -> int:
        """Threads side by side on a row."""
        vectors = self.reduction.columns // self.vector
        return min(self.threads, power_of_two(vectors))

    @property
    def tiles(self) -> int:
        return math.ceil(self.reduction.columns / (self.lanes * self.vector))

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA: the values of each thread."""
        r = self.reduction
        return r.bins * self.vector * self.threads * r.value.itemsize

    @property
    def resident_ctas(self) -> int:
        by_memory = self.gpu.shared_memory_bytes // (self.shared_bytes + RESERVED_SHARED_BYTES)
        return min(by_memory, _RESIDENT_THREADS // self.threads)

    @property
    def block(self) -> int:
        """Edges of a CTA."""
        ctas = max(1, self.gpu.sm_count * self.resident_ctas // self.tiles)
        least = _UNROLL * (self.threads // self.lanes)
        return max(least, math.ceil(self.reduction.edges / ctas))

    def plan(self, gpu: Gpu) -> LaunchPlan:
        r = self.reduction
        operation = CXX_REDUCTIONS[r.reduction]
        edge_map = SegmentMap(r, self.vector)
        reduce = edge_map.kernel(
            _FILE, "reduce_few", operation, "{map}", str(self.threads), str(_UNROLL)
        )
        combine = Kernel(
            _FILE,
            f"tilekern::combine_blocks<{operation}, {r.cxx_value}, {CXX_TYPES[r.out_dtype]}>",
        )
        compiled = compile_kernels(reduce, combine, arch=gpu.arch)
        blocks, results = math.ceil(r.edges / self.block), r.segments * r.columns
        first = len(r.operands) + r.indices
        keys, result, parts = (Buffer(first + i) for i in range(3))
        shape = Scalars.pack(
            "q4I", r.columns, r.edges, r.bins, self.block, self.lanes.bit_length() - 1
        )
        launches = (
            Launch(
                entry=compiled.entry(reduce.name),
                grid=(blocks, self.tiles, 1),
                block=(self.threads, 1, 1),
                parameters=(keys, parts, shape, *edge_map.parameters()),
                shared_memory_bytes=self.shared_bytes,
            ),
            Launch(
                entry=compiled.entry(combine.name),
                grid=(math.ceil(results / _COMBINE_LANES), 1, 1),
                block=(_COMBINE_THREADS, 1, 1),
                parameters=(parts, result, Scalars.pack("q", results), Scalars.pack("I", blocks)),
            ),
        )
        return LaunchPlan(
            name=f"segment_{r.reduction} {r.out_dtype}, few segments",
            gpu=gpu,
            launches=overlapping(gpu, *launches),
            alignments=(*edge_map.alignments, 4, r.out_dtype.itemsize),
            workspace_bytes=(blocks * results * r.value.itemsize,),
            reason=f"{blocks} CTAs of {self.threads} threads, {self.tiles} tiles of columns, "
            f"{self.shared_bytes} bytes of shared memory",
        )


def few_segments(reduction: SegmentReduction, gpu: Gpu) -> FewSegments | None:
    """Return the launches where every thread has room for the values of all segments."""
    if reduction.batch > 1:
        return None
    found = (FewSegments(reduction, threads, gpu) for threads in _THREADS)
    return next(
        (each for each in found if each.resident_ctas >= _LEAST_CTAS and each.lanes <= _MOST_LANES),
        None,
    )
