"""Estimates of XLA's sorts, in microseconds, fitted to times on an H200."""

from __future__ import annotations

import math

# Rows of two: XLA's fusion takes them for minima and maxima. Microseconds of a call, of an element
# and of each of its bytes.
_FUSED, _FUSED_ELEMENT, _FUSED_BYTE = 2.0, 2.7e-6, 5.4e-7
# Rows of fewer than 512: a CTA of a thread to two elements for each row. Microseconds of a launch,
# of a step of the network of one CTA alone and of CTAs that fill an SM, and the least of a CTA;
# what a step takes, by the bytes of an element.
_LAUNCH, _STEP, _BUSY_STEP, _LEAST_CTA = 2.4, 0.18, 0.45, 2.6
_STEP_SHARE, _STEP_SHARE_OF_BYTE = 0.7, 0.085
_SMS, _SM_CTAS, _SM_THREADS, _WARP = 132, 32, 2048, 32
# Longer rows: microseconds of rows of 512, and how many more each doubling takes; microseconds of
# an element, and of each pass over the memory that rows of more than 4096 take.
_LONG_COLUMNS, _LONG, _LONG_DOUBLING = 512, 8.0, 9.5
_LONG_ELEMENT, _SHARED_COLUMNS, _PASS = 4.88e-5, 4096, 4e-6
# One row, which XLA may give to CUB's radix sort: microseconds of any row, of an element by its
# bytes, and of its index. Sorts of 64-bit elements with indices are none of CUB's. No time of 2
# bytes is recorded: they are taken for twice 1.
_CUB, _CUB_INDEX = 57.0, 1.2e-5
_CUB_ELEMENT = {1: 4.2e-6, 2: 8.4e-6, 4: 3.4e-5, 8: 7.8e-5}


def xla_sort_us(rows: int, columns: int, itemsize: int, indices: bool = False) -> float:
    """Return the time of XLA's sort of rows of elements, which may have their columns with them."""
    found = network_sort_us(rows, columns, itemsize)
    if rows == 1 and columns >= _LONG_COLUMNS and itemsize + 4 * indices <= 8:
        found = min(found, _CUB + columns * (_CUB_ELEMENT[itemsize] + _CUB_INDEX * indices))
    return found


def network_sort_us(rows: int, columns: int, itemsize: int) -> float:
    """Return the time of XLA's sorting network, by the bytes of an element of all operands."""
    elements = rows * columns
    if columns <= 2:
        return _FUSED + elements * (_FUSED_ELEMENT + itemsize * _FUSED_BYTE)
    if columns < _LONG_COLUMNS:
        log = math.ceil(math.log2(columns))
        steps = log * (log + 1) // 2
        ctas = _SMS * min(_SM_CTAS, _SM_THREADS // max(_WARP, (1 << log) // 2))
        busy = _BUSY_STEP * steps * (_STEP_SHARE + _STEP_SHARE_OF_BYTE * itemsize)
        return _LAUNCH + max(_STEP * steps, rows / ctas * max(_LEAST_CTA, busy))
    doublings = max(0, math.log2(columns / _LONG_COLUMNS))
    # Each doubling of rows beyond those in shared memory has a pass more than the one before.
    long = max(0, math.ceil(math.log2(columns / _SHARED_COLUMNS)))
    passes = long * (long + 1) / 2 + long
    return max(_LONG + doublings * _LONG_DOUBLING, elements * (_LONG_ELEMENT + passes * _PASS))
