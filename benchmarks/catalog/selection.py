"""Operations of selection and sorting."""

from __future__ import annotations

import numpy as np

from benchmarks.catalog.bounds import (
    BF16,
    F16,
    F32,
    F64,
    FLOATS,
    UNIT_ROUNDOFF,
    compared,
    is_float,
    wide,
)
from benchmarks.catalog.call import Call, describe
from benchmarks.catalog.draw import Draw

_INTEGERS = tuple(np.dtype(x) for x in ("int8", "uint8", "int16", "int32", "uint32"))


def _shape(draw: Draw) -> tuple[int, ...]:
    """Draw rows and columns, at a scale a vector in one of four, and for tests any rank up to 3."""
    if draw.only is not None:
        return draw.size(), max(1, draw.size())
    if draw.scale > 1:
        return tuple(draw.moved_sizes(draw.one("a", "ab", "ab", "ab")).values())
    return *(draw.size(40) for _ in range(draw.one(0, 1, 1, 2))), max(1, draw.size())


def _axis(draw: Draw, rank: int) -> int:
    """Draw the last axis or the first, and for tests any axis."""
    if draw.only is not None or draw.scale > 1:
        return draw.one(-1, -1, -1, 0) if rank > 1 else -1
    return int(draw.rng.integers(-rank, rank))


def largest(draw: Draw, name: str) -> Call:
    """Draw the largest in order, and of equal ones the first."""
    shape = _shape(draw)
    least, most = (0, draw.one(2, 70)) if draw.scale == 1 else (1, draw.one(8, 64, 1024))
    k = int(draw.rng.integers(least, min(shape[-1], most) + 1))
    dtype = draw.type(*FLOATS, *_INTEGERS)
    operand = draw.operand(shape, dtype)
    axis = _axis(draw, len(shape))
    axis = axis if k <= operand.shape[axis] else -1

    def errors(result, x):
        is_nan = np.isnan(wide(x)) if is_float(dtype) else np.zeros(x.shape, bool)
        # NaN comes first.
        order = np.lexsort((-wide(x), ~is_nan), axis).take(range(k), axis)
        values = np.take_along_axis(wide(x), order, axis)
        return [compared(result[0], values, 0), compared(result[1], order, 0)]

    return Call(
        name, f"{k}, {axis=}", (operand,), lambda m, x: m.top_k(x, k, axis=axis), errors,
        has_jaxs_bits=True,
    )  # fmt: skip


def orders(draw: Draw, name: str) -> Call:
    """Draw a sort, or the indices that sort; equal elements keep their order."""
    shape = _shape(draw)
    dtype = draw.type(*FLOATS, *_INTEGERS)
    axis = draw.one(-1, -1, 0, *([None] if draw.only is None else []))
    axis = _axis(draw, len(shape)) if len(shape) == 3 else axis
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
        has_jaxs_bits=True,
    )  # fmt: skip


def sorts_by_keys(draw: Draw, name: str) -> Call:
    """Draw keys with few values, and for ``sort_operands`` what moves with them."""
    shape = _shape(draw)
    count = draw.one(1, 2, 2, 3)
    operands = [draw.operand(shape, draw.type(*FLOATS, *_INTEGERS)) for _ in range(count)]
    axis = _axis(draw, len(shape))
    num_keys = 1 if count == 1 else int(draw.rng.integers(1, count + 1))

    def call(m, *xs):
        if name == "lexsort":
            return m.lexsort(xs, axis)
        return m.sort_operands(xs, axis, num_keys=num_keys)

    def errors(result, *xs):
        keys = xs if name == "lexsort" else xs[:num_keys][::-1]
        order = np.lexsort([wide(x) for x in keys], axis)
        if name == "lexsort":
            return [compared(result, order, 0)]
        moved = (np.take_along_axis(wide(x), order, axis) for x in xs)
        return [compared(found, x, 0) for found, x in zip(result, moved, strict=True)]

    words = f"{axis=}" if name == "lexsort" else f"{axis=}, {num_keys=}"
    return Call(name, words, tuple(operands), call, errors, has_jaxs_bits=True)


def without_repetitions(draw: Draw, name: str) -> Call:
    """Draw integers, of which there are few, and what else is returned."""
    shape = (max(1, *draw.moved_sizes("a").values()),) if draw.only is None else (4, draw.size())
    dtype = draw.type(*_INTEGERS, *FLOATS)
    size = draw.size(40)
    options = {x: draw.chance(0.5) for x in ("return_index", "return_inverse", "return_counts")}
    fill_value = draw.one(None, 7)

    def errors(result, x):
        found = list(result) if any(options.values()) else [result]
        expected = np.unique(wide(x), **options)
        expected = list(expected) if any(options.values()) else [expected]
        values = expected[0]
        filled = np.full(max(0, size - len(values)), values[0] if fill_value is None else 7)
        checked = [compared(found[0], np.concatenate([values, filled])[:size], 0)]
        if options["return_inverse"]:
            # Elements beyond the size have places, too.
            place = 1 + options["return_index"]
            checked.append(compared(found[place], expected[place].reshape(x.shape), 0))
        return checked

    return Call(
        name, f"{size=}, {fill_value=}, {options}", (draw.operand(shape, dtype),),
        lambda m, x: m.unique(x, size=size, fill_value=fill_value, **options), errors,
        is_plain=False, has_jaxs_bits=True,
    )  # fmt: skip


def quantiles(draw: Draw, name: str) -> Call:
    """Draw a median, or quantiles of numbers between 0 and 1."""
    shape = tuple(max(1, size) for size in draw.moved_sizes("ab").values())
    dtype = draw.type(F32, BF16, F16, F64)
    axis = draw.one(-1, 0)
    q = np.round(draw.rng.random(draw.one(1, 2, 5)), 2).astype(np.float32)
    method = draw.one("linear", "lower", "higher", "midpoint", "nearest")
    q, method = (np.array([0.5], np.float32), "midpoint") if name == "median" else (q, method)
    scale = np.float32(100 if name == "percentile" else 1)

    def call(m, x):
        if name == "median":
            return m.median(x, axis)[None]
        return getattr(m, name)(x, scale * q, axis, method=method)

    def errors(result, x):
        # Places are numbers of float32.
        place = np.asarray(scale * q / scale * np.float32(x.shape[axis] - 1))[:, None]
        ordered = np.moveaxis(np.sort(wide(x), axis), axis, 0)
        # XLA may multiply by 1/100: that, the two products and the position are rounded.
        of_place_rounding = 4 * UNIT_ROUNDOFF[F32]

        def of_place(place):
            low, high = np.floor(place), np.ceil(place)
            lower, higher = (ordered[i[:, 0].astype(int)] for i in (low, high))
            part = place - low
            value = {
                "linear": lower * (1 - part) + higher * part,
                "lower": lower,
                "higher": higher,
                "midpoint": (lower + higher) / 2,
                "nearest": np.where(part <= 0.5, lower, higher),
            }[method]
            value = np.where(np.isnan(ordered[-1]), np.nan, value)
            size = np.abs(lower) + np.abs(higher)
            slack = 4 * (UNIT_ROUNDOFF[dtype] + UNIT_ROUNDOFF[F32]) * size
            if name == "percentile":
                slack += of_place_rounding * place * size
            return compared(result, value, slack if method in ("linear", "midpoint") else 0)

        error, bound = of_place(place)
        if name == "percentile" and method != "linear":
            for factor in (1 - of_place_rounding, 1 + of_place_rounding):
                other = of_place(np.minimum(place * factor, x.shape[axis] - 1))
                error = np.where(other[0] <= other[1], np.minimum(error, bound), error)
        return [(error, bound)]

    return Call(
        name, f"{axis=}, q={(scale * q).tolist()}, {method=}", (draw.operand(shape, dtype),),
        call, errors, is_plain=False, has_jaxs_bits=method not in ("linear", "midpoint"),
    )  # fmt: skip


def searches(draw: Draw, name: str) -> Call:
    """Draw searches in an array that ascends."""
    (count,) = draw.moved_sizes("a").values()
    shape = (draw.size(), draw.size(20)) if draw.scale == 1 else _shape(draw)
    dtype, side = draw.type(*FLOATS, *_INTEGERS), draw.one("left", "right")
    values = draw.value(draw.operand((count,), dtype), special=False)
    values = values[np.argsort(wide(values), kind="stable")]

    def errors(result, v, a):
        return [compared(result, np.searchsorted(wide(a), wide(v), side), 0)]

    return Call(
        name, f"{side=}", (draw.operand(shape, dtype), draw.given(values)),
        lambda m, v, a: m.searchsorted(a, v, side), errors, is_plain=False,
        has_jaxs_bits=True,
    )  # fmt: skip


def bins_of(draw: Draw, name: str) -> Call:
    """Draw edges that ascend or descend."""
    count = draw.size(40)
    shape = (draw.size(), draw.size(20)) if draw.scale == 1 else _shape(draw)
    dtype, right = draw.type(*FLOATS, *_INTEGERS), draw.chance(0.5)
    edges = draw.value(draw.operand((count,), dtype), special=False)
    order = np.argsort(wide(edges), kind="stable")
    edges = edges[order[::-1] if draw.chance(0.3) else order]

    def errors(result, x, edges):
        x, edges = (np.asarray(z, np.float64) for z in (x, edges))
        found = np.digitize(x, edges, right) if count else np.zeros(shape, int)
        return [compared(result, found, 0)]

    return Call(
        name, f"{right=}", (draw.operand(shape, dtype), draw.given(edges)),
        lambda m, x, edges: m.digitize(x, edges, right), errors, is_plain=False,
        has_jaxs_bits=True,
    )  # fmt: skip


DESCRIPTIONS = [
    *describe(largest, "top_k"),
    *describe(orders, "sort", "argsort"),
    *describe(sorts_by_keys, "sort_operands"),
    *describe(sorts_by_keys, "lexsort", derivatives=0),
    *describe(without_repetitions, "unique", derivatives=0),
    *describe(searches, "searchsorted", derivatives=0),
    *describe(bins_of, "digitize", derivatives=0),
    *describe(quantiles, "quantile", "percentile", "median"),
]
