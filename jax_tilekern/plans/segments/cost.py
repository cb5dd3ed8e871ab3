"""The time of a reduction by kernels and by XLA's scatter, in microseconds on a Hopper GPU.

The numbers are measured (docs/tuning-log.md).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jax_tilekern.plans.gpu import WARP, Gpu
from jax_tilekern.plans.segments.few_segments import FewSegments
from jax_tilekern.plans.segments.index_sort import IndexSort
from jax_tilekern.plans.segments.problem import EXTREMA, SegmentReduction
from jax_tilekern.plans.segments.scanned_segments import ScannedSegments
from jax_tilekern.plans.segments.sorted_segments import SortedSegments

# Launches of each kind, with the keys of the ids.
_SCANNED, _FEW, _SORTED = 6.0, 12.0, 15.0
# A sort: its launches, the launches of each digit after the first, and a million keys of a digit.
_SORT, _DIGIT, _MILLION_KEYS = 9.0, 9.0, 30.0
# A million bins of a warp, whose rows it stores, and a million CTAs that scan edges.
_MILLION_BINS, _MILLION_CTAS = 117.0, 1140.0
# XLA's scatter: its launch, the time of a million memory sectors that rows of atomic additions
# touch, of a million numbers of wide rows that are unaligned to 16 bytes, of a million atomic
# operations that are no additions of float32, and of each atomic operation on the same address.
# Operations of 8 and 16 bits, and products of floats, are loops of compare-and-swap; floats of 16
# bits are added in float32, and a pass rounds them.
_SCATTER, _ROUNDING, _SECTOR_BYTES = 2.0, 2.0, 32
_MILLION_SECTORS, _MILLION_ATOMICS, _MILLION_LOOPS = 11.0, 5.5, 17.0
_MILLION_UNALIGNED, _WIDE_COLUMNS, _VECTOR_BYTES = 25.0, 32, 16
_MILLION_PRODUCTS = {4: 15.0, 8: 100.0}
_SAME_FLOAT, _SAME_INTEGER, _SAME_LOOP = 0.02, 0.1, 4.0
# XLA stores a million equal elements of up to 4 bytes.
_MILLION_FILLED = 1.2
# Few rows of floats of 16 bits: the launches, and the bytes that move for each number of an update.
_FEW_ROWS, _UPDATED_BYTES = 6.5, 20
_SMS = 132


def kernel_microseconds(kernel: ScannedSegments | FewSegments | SortedSegments, gpu: Gpu) -> float:
    """Estimate the time of a kernel, with the sort that it needs."""
    r = kernel.reduction
    memory = _memory_microseconds(r, gpu)
    of_sms = _SMS / gpu.sm_count
    if isinstance(kernel, ScannedSegments):
        return _SCANNED + max(memory, kernel.ctas / 1e6 * _MILLION_CTAS * of_sms)
    if isinstance(kernel, FewSegments):
        return _FEW + memory
    warps = r.tiles * r.lanes / WARP / 1e6
    bins = warps * r.bins * _MILLION_BINS * of_sms
    memory = max(memory, bins)
    if not r.ordered:
        return _SORTED + memory
    digits = len(IndexSort(r.edges, r.bins).digits)
    sort = _SORT + (digits - 1) * _DIGIT + digits * r.edges / 1e6 * _MILLION_KEYS
    return _SORTED + sort + memory


def _memory_microseconds(reduction: SegmentReduction, gpu: Gpu) -> float:
    r = reduction
    return _read_microseconds(r, gpu) + _microseconds_of(r.results * r.out_dtype.itemsize, gpu)


def _read_microseconds(reduction: SegmentReduction, gpu: Gpu) -> float:
    r = reduction
    moved = sum(x.dtype.itemsize * (1 if x.broadcast else r.columns) for x in r.operands) * r.edges
    return _microseconds_of(moved, gpu)


def _microseconds_of(size: int, gpu: Gpu) -> float:
    """Return the time of memory to move so many bytes."""
    return size / gpu.rates.memory_bandwidth / gpu.rates.cycles_per_microsecond


def xla_microseconds(reduction: SegmentReduction, gpu: Gpu) -> float:
    """Estimate the time of XLA's scatter for segments of equal length."""
    return min(_scatter_microseconds(x, gpu) for x in _exact_scatters(reduction))


def scatter_type(reduction: SegmentReduction, gpu: Gpu) -> np.dtype[Any]:
    """Return the type in which XLA's scatter is predicted to be the fastest."""
    exact = _exact_scatters(reduction)
    return min(exact, key=lambda x: _scatter_microseconds(x, gpu)).value


def _exact_scatters(r: SegmentReduction) -> list[SegmentReduction]:
    """Return a reduction in the type of its values, and extrema in that of the result, too."""
    narrow = r.reduction in EXTREMA and r.out_dtype != r.value
    return [r, *([dataclasses.replace(r, value=r.out_dtype)] if narrow else [])]


def _scatter_microseconds(r: SegmentReduction, gpu: Gpu) -> float:
    operations = r.edges * r.columns / 1e6
    on_an_address = r.edges / (r.batch * r.segments)
    fill = min(fill_microseconds(r.results, r.value.itemsize, gpu))
    if r.value.itemsize < 4:
        return _SCATTER + fill + max(operations * _MILLION_LOOPS, on_an_address * _SAME_LOOP)
    time = _additions_microseconds(r) + _read_microseconds(r, gpu) + fill
    same = _SAME_FLOAT if r.value.kind == "f" else _SAME_INTEGER
    if (r.reduction, r.value.kind) == ("prod", "f"):
        time = max(time, operations * _MILLION_PRODUCTS[r.value.itemsize])
        same = _SAME_LOOP
    elif (r.reduction, r.value.kind) != ("sum", "f"):
        time = max(time, operations * _MILLION_ATOMICS)
    rounding = 0.0
    if r.out_dtype != r.value:
        moved = r.results * (r.value.itemsize + r.out_dtype.itemsize)
        rounding = _ROUNDING + _microseconds_of(moved, gpu)
    return _SCATTER + rounding + max(time, on_an_address * same)


def fill_microseconds(elements: int, itemsize: int, gpu: Gpu) -> tuple[float, float]:
    """Estimate the time of a kernel to store equal elements, and that of XLA."""
    memory = _microseconds_of(elements * itemsize, gpu)
    return gpu.rates.custom_call_us + memory, max(memory, elements / 1e6 * _MILLION_FILLED)


def _additions_microseconds(r: SegmentReduction) -> float:
    """Return the time of atomic additions of float32 to distinct addresses."""
    row_bytes, rows = r.columns * r.value.itemsize, r.edges / 1e6
    if r.columns >= _WIDE_COLUMNS and row_bytes % _VECTOR_BYTES:
        return rows * r.columns * _MILLION_UNALIGNED
    return rows * math.ceil(row_bytes / _SECTOR_BYTES) * _MILLION_SECTORS


def scatter_microseconds(updates: SegmentReduction, gpu: Gpu) -> float:
    """Estimate the time of XLA's scatter into a copy of the table."""
    r = updates
    return xla_microseconds(r, gpu) + _microseconds_of(r.results * r.out_dtype.itemsize, gpu)


def totals_microseconds(updates: SegmentReduction, reduced: float, gpu: Gpu) -> float:
    """Estimate the time to reduce updates, which takes ``reduced``, and to add the totals."""
    r = updates
    return reduced + _microseconds_of(
        r.results * (r.value.itemsize + 2 * r.out_dtype.itemsize), gpu
    )


def few_rows_microseconds(updates: SegmentReduction, gpu: Gpu, *, has_table: bool) -> float:
    """Estimate the time to copy or to fill a table, and to set the rows that have updates."""
    r = updates
    rows = _microseconds_of(r.batch * r.segments * 4, gpu)
    table = _microseconds_of(2 * r.results * r.out_dtype.itemsize, gpu)
    if not has_table:
        table = min(fill_microseconds(r.results, r.out_dtype.itemsize, gpu))
    moved = _microseconds_of(r.edges * r.columns * _UPDATED_BYTES, gpu)
    return _FEW_ROWS + rows + table + max(moved, _additions_microseconds(r))
