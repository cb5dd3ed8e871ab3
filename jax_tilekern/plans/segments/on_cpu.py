"""Reductions to segments by the CPU's handler: how it reads edges, and where XLA is faster.

The numbers are measured on an AMD EPYC with AVX-512.
"""

from __future__ import annotations

from jax_tilekern.plans.segments.problem import EXTREMA, SegmentReduction

# Totals of so many bytes are read and written faster at random than their edges are sorted and
# read at random. Rows of fewer bytes are never worth a sort.
_MOST_TOTALS = 8 << 20
_LEAST_SORTED_BYTES = 512
# Sorted edges are read segment by segment where rows have so many bytes, or segments so many edges.
_LEAST_WIDE_BYTES = 256
_LEAST_LONG = 24
# Fewer numbers take XLA as long as a call of the handler. Up to so many more, XLA's scatter takes
# longer than the handler whatever the rows are, because it consists of several kernels.
_LEAST_NUMBERS = 1 << 10
_LEAST_SCATTERED = 1 << 14
# From so many numbers on, a sort costs less than writing far segments at random.
_LEAST_SORTED_NUMBERS = 1 << 23
# Nanoseconds of an update of a row by itself and of each of its numbers, and of each number of all
# totals, and of a table that they are added to.
_UPDATE, _UPDATED_NUMBER = 12.0, 0.1
_TOTAL, _TOTAL_OF_TABLE = 0.13, 0.3
# XLA's scatter takes as long as the handler for updates of so many numbers, and less for fewer.
_SCATTERED_COLUMNS = 256
# Names of attributes are those of jax_tilekern_cpu_segment_reduce.
_REDUCTIONS = ("sum", "prod", "max", "min")


def reads_keys(reduction: SegmentReduction) -> bool:
    """Return whether the handler reads edges as they lie by their keys, and no order or bounds."""
    r = reduction
    row = r.columns * r.value.itemsize
    if r.batch > 1:
        return False
    if r.ordered:
        return row < _LEAST_SORTED_BYTES or r.segments * row <= _MOST_TOTALS
    return row < _LEAST_WIDE_BYTES and r.edges < _LEAST_LONG * r.segments


def attributes(reduction: SegmentReduction) -> dict[str, int]:
    """Return the attributes of ``jax_tilekern_cpu_segment_reduce``."""
    return {
        "edges": reduction.edges,
        "segments": reduction.segments,
        "batch": reduction.batch,
        "columns": reduction.columns,
        "reduction": _REDUCTIONS.index(reduction.reduction),
        "by_key": int(reads_keys(reduction)),
    }


def why_slower(reduction: SegmentReduction) -> str | None:
    """Return why XLA's scatter is chosen, or ``None`` if the handler is faster."""
    r = reduction
    numbers, row = r.edges * r.columns, r.columns * r.value.itemsize
    if numbers < _LEAST_NUMBERS:
        return f"XLA's scatter of {numbers} numbers takes no longer than a call of a kernel"
    # XLA converts floats of 16 bits in a pass of their own, unless it has the extrema of them.
    is_narrow = r.operands[0].dtype.itemsize < r.value.itemsize
    is_converted = is_narrow and r.reduction not in EXTREMA
    if is_converted or numbers < _LEAST_SCATTERED:
        return None
    is_wide = row >= _LEAST_SORTED_BYTES
    if reads_keys(r) or (is_wide and not r.ordered):
        return f"XLA's scatter of {r.edges} rows of {row} bytes as they lie is faster"
    if r.ordered and numbers < _LEAST_SORTED_NUMBERS:
        return f"XLA's scatter of {r.edges} rows of {row} bytes is faster than a sort"
    return None


def updates_table(updates: SegmentReduction) -> bool:
    """Return whether rows are faster added to a table's one by one than by totals of all rows."""
    return updates.batch == 1 and _are_few(updates, _TOTAL_OF_TABLE)


def updates_neutral_rows(reduction: SegmentReduction) -> bool:
    """Return whether results are faster computed by updates of few rows, which no edge has yet."""
    r = reduction
    # XLA reads and writes results of 16-bit floats as float32, and others that fit the cache fast.
    is_slow = r.out_dtype != r.value or r.results * r.value.itemsize > _MOST_TOTALS
    is_one_type = r.operands[0].dtype == r.out_dtype
    return r.batch == 1 and is_one_type and is_slow and _are_few(r, _TOTAL)


def _are_few(r: SegmentReduction, total: float) -> bool:
    return r.edges * (_UPDATE + _UPDATED_NUMBER * r.columns) < r.results * total


def why_scattered(updates: SegmentReduction) -> str | None:
    """Return why XLA's scatter adds rows to those of a table, or ``None`` if it does not."""
    r = updates
    if r.out_dtype != r.value:
        # It would round each of several updates of a row.
        return None
    if not updates_table(r):
        return why_slower(r)
    if r.columns < _SCATTERED_COLUMNS:
        return f"XLA's scatter adds rows of {r.columns} numbers in place"
    return None


def update_attributes(reduction: SegmentReduction) -> dict[str, int]:
    """Return the attributes of ``jax_tilekern_cpu_update_rows``."""
    r = reduction
    return {
        "edges": r.edges,
        "rows": r.segments,
        "columns": r.columns,
        "reduction": _REDUCTIONS.index(r.reduction),
    }
