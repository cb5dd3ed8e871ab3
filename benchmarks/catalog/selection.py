"""Operations of selection and sorting."""

from __future__ import annotations

import numpy as np

from benchmarks.catalog.bounds import FLOATS, compared, is_float, wide
from benchmarks.catalog.call import Call, describe
from benchmarks.catalog.draw import Draw

_INTEGERS = tuple(np.dtype(x) for x in ("int8", "uint8", "int16", "int32", "uint32"))


def largest(draw: Draw, name: str) -> Call:
    """Draw the largest in order, and of equal ones the first."""
    rows, columns = draw.size(), max(1, draw.size())
    k = int(draw.rng.integers(0, min(columns, draw.one(2, 70)) + 1))
    dtype = draw.type(*FLOATS, *_INTEGERS)
    operand = draw.operand((rows, columns), dtype)
    axis = draw.one(-1, 0)
    axis = axis if k <= operand.shape[axis] else -1

    def errors(result, x):
        is_nan = np.isnan(wide(x)) if is_float(dtype) else np.zeros(x.shape, bool)
        # NaN comes first.
        order = np.lexsort((-wide(x), ~is_nan), axis).take(range(k), axis)
        values = np.take_along_axis(wide(x), order, axis)
        return [compared(result[0], values, 0), compared(result[1], order, 0)]

    return Call(
        name, f"{k}, {axis=}", (operand,), lambda m, x: m.top_k(x, k, axis=axis), errors,
    )  # fmt: skip


def orders(draw: Draw, name: str) -> Call:
    """Draw a sort, or the indices that sort; equal elements keep their order."""
    shape = draw.size(), max(1, draw.size())
    dtype = draw.type(*FLOATS, *_INTEGERS)
    axis = draw.one(-1, -1, 0, *([None] if draw.only is None else []))
    descending = draw.chance(0.3)

    def errors(result, x):
        x, along = (x.ravel(), 0) if axis is None else (x, axis)
        # Twice reversed, equal elements are in their order.
        x = np.flip(wide(x), along) if descending else wide(x)
        order = np.argsort(x, along, kind="stable")
        if name == "sort":
            order = np.take_along_axis(x, order, along)
        elif descending:
            order = x.shape[along] - 1 - order
        return [compared(result, np.flip(order, along) if descending else order, 0)]

    return Call(
        name, f"{axis=}, {descending=}", (draw.operand(shape, dtype),),
        lambda m, x: getattr(m, name)(x, axis, descending=descending), errors,
    )  # fmt: skip


DESCRIPTIONS = [
    *describe(largest, "top_k"),
    *describe(orders, "sort"),
    *describe(orders, "argsort"),
]
