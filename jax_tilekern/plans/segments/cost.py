"""The time of a reduction by kernels and by XLA's scatter, in microseconds on an H100.

The numbers are measured (docs/tuning-log.md). They decide where the result does not depend on the
order of reduction. Sums of floats always have a kernel, because its order is fixed.
"""

from __future__ import annotations

from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.segments.few_segments import FewSegments
from jax_tilekern.plans.segments.index_sort import IndexSort
from jax_tilekern.plans.segments.problem import SegmentReduction
from jax_tilekern.plans.segments.scanned_segments import ScannedSegments
from jax_tilekern.plans.segments.sorted_segments import SortedSegments

# Launches of each kind, with the keys of the ids.
_SCANNED, _FEW, _SORTED = 6.0, 12.0, 15.0
# A sort: its launches, the launches of each digit after the first, and a million keys of a digit.
_SORT, _DIGIT, _MILLION_KEYS = 9.0, 9.0, 30.0
# XLA's scatter: its launch, the time of a million atomic operations, and the time of each atomic
# operation on the same address. Operations of 8 and 16 bits are loops of compare-and-swap.
_SCATTER = 2.0
_MILLION_ATOMICS, _MILLION_LOOPS = 4.5, 12.0
_SAME_FLOAT, _SAME_INTEGER, _SAME_LOOP = 0.02, 0.1, 0.5


def kernel_microseconds(kernel: ScannedSegments | FewSegments | SortedSegments, gpu: Gpu) -> float:
    """Estimate the time of a kernel, with the sort that it needs."""
    r = kernel.reduction
    moved = sum(x.dtype.itemsize for x in r.operands) * r.edges * r.columns
    moved += r.batch * r.segments * r.columns * r.out_dtype.itemsize
    rates = gpu.rates
    memory = moved / rates.memory_bandwidth / rates.cycles_per_microsecond
    if isinstance(kernel, ScannedSegments):
        return _SCANNED + memory
    if isinstance(kernel, FewSegments):
        return _FEW + memory
    if not r.ordered:
        return _SORTED + memory
    digits = len(IndexSort(r.edges, r.bins).digits)
    sort = _SORT + (digits - 1) * _DIGIT + digits * r.edges / 1e6 * _MILLION_KEYS
    return _SORTED + sort + memory


def xla_microseconds(reduction: SegmentReduction) -> float:
    """Estimate the time of XLA's scatter for segments of equal length."""
    r = reduction
    each, same = _MILLION_ATOMICS, _SAME_FLOAT if r.value.kind == "f" else _SAME_INTEGER
    if r.out_dtype.itemsize < 4:
        each, same = _MILLION_LOOPS, _SAME_LOOP
    atomics = r.edges * r.columns / 1e6 * each
    return _SCATTER + max(atomics, r.edges / (r.batch * r.segments) * same)
