"""Operations of segments and indices."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks.catalog.bounds import (
    BF16,
    F16,
    F32,
    F64,
    UNIT_ROUNDOFF,
    compared,
    einsum,
    unit,
    wide,
)
from benchmarks.catalog.call import Call, describe
from benchmarks.catalog.draw import Draw

# Types of indices and of whole numbers.
_INTEGERS = tuple(np.dtype(x) for x in ("int8", "uint8", "int16", "uint16", "int32", "uint32"))
_MODES = None, "drop", "clip", "fill", "promise_in_bounds"
_UFUNCS = {"max": np.maximum, "min": np.minimum, "prod": np.multiply}


def segments(draw: Draw, name: str) -> Call:
    """Draw reductions of rows to segments, of which some are empty and one has many edges."""
    edges, count, columns = draw.size(), draw.size(), max(1, draw.size(20))
    if draw.for_tests and draw.only is None:  # Of many edges threads have a part each.
        edges, count = edges * draw.one(1, 1, 30), count * draw.one(1, 1, 30)
    has_plan = name == "segment_plan"
    whole = _INTEGERS if draw.for_tests and name != "segment_mean" else ()
    dtype = draw.type(F32, BF16, F16, F64, *whole)
    name = "segment_sum" if has_plan else name
    reduction = name.removeprefix("segment_")
    ids = draw.rng.integers(-2, count + 2, edges)
    types = _INTEGERS if draw.for_tests else tuple(map(np.dtype, ("int8", "int16", "int32")))
    ids = ids.astype(draw.one(*types))
    middle = min(count // 2, np.iinfo(ids.dtype).max)
    ids = np.where(draw.rng.random(edges) < draw.one(0.0, 0.5, 1.0), middle, ids).astype(ids.dtype)
    is_sorted, mode = draw.chance(0.3), draw.one(*(_MODES if draw.for_tests else (None, "clip")))
    has_plan = has_plan or draw.chance(0.4)
    if mode == "promise_in_bounds":
        ids = np.clip(ids, 0, max(0, count - 1)).astype(ids.dtype)
        mode = mode if count else None
    ids = np.sort(ids) if is_sorted else ids
    (rows,) = draw.operands("ec->", {"e": edges, "c": columns}, [dtype])
    own = ids.astype(np.int64)
    own = np.clip(own, 0, count - 1) if mode == "clip" and count else own
    inside = (own >= 0) & (own < count)

    # What ascends is the same for all elements of a batch.
    operands = (rows,) if is_sorted else (rows, draw.given(ids))

    def call(m, x, ids=ids):
        if has_plan and m is jtk:
            plan = m.segment_plan(ids, count, indices_are_sorted=is_sorted, mode=mode)
            return getattr(m, name)(x, plan)
        return getattr(m, name)(x, ids, count, indices_are_sorted=is_sorted, mode=mode)

    def reduced(x, start=0):
        result = np.full((count, columns), start, x.dtype)
        with np.errstate(over="ignore"):
            _UFUNCS.get(reduction, np.add).at(result, own[inside], x[inside])
        return result

    lowest, highest = (
        (np.iinfo(dtype).min, np.iinfo(dtype).max) if dtype.kind in "iu" else (-np.inf, np.inf)
    )
    starts = {"max": lowest, "min": highest, "prod": 1}

    def errors(result, x, _=None):
        value = reduced(wide(x), starts.get(reduction, 0))
        if dtype.kind in "iu" or reduction in ("max", "min"):
            return [compared(result, value, 0)]
        if reduction == "prod":
            # A part of the product may underflow, and the other factors are larger than 1.
            underflow = 2.0**-126 * reduced(np.maximum(np.abs(wide(x)), 1), 1)
            slack = 2 * (edges + 1) * (unit(dtype) * np.abs(value) + underflow)
            return [compared(result, value, slack)]
        divisors = np.ones(count)
        if reduction == "mean":
            divisors = np.maximum(np.bincount(own[inside], minlength=count), 1.0)
        value, magnitude = (y / divisors[:, None] for y in (value, reduced(np.abs(wide(x)))))
        return [compared(result, value, (edges + 2) * unit(dtype) * magnitude)]

    def cotangent_errors(cotangents, cotangent, *_):
        each = np.concatenate([wide(cotangent), np.zeros((1, columns))])
        return [compared(cotangents[0], each[np.where(inside, own, count)], 0)]

    return Call(
        name,
        f"ids={ids.dtype}{ids[:20].tolist()}, {count}, {is_sorted=}, {has_plan=}, {mode=}",
        operands,
        call,
        errors,
        cotangent_errors if name == "segment_sum" and dtype.kind not in "iu" else None,
        is_plain=False,
    )


def rows_of_table(draw: Draw, name: str) -> Call:
    """Draw ``take`` or ``scatter_add``, of which each is the derivative of the other."""
    edges, rows, columns = draw.size(), max(1, draw.size()), max(1, draw.size(20))
    dtype = draw.type(F32, BF16, F16, F64)
    index, mode = draw.rng.integers(-rows, rows, edges).astype(np.int32), None
    if draw.for_tests:
        index = draw.rng.integers(-rows - 3, rows + 3, edges).astype(np.int32)
        mode = draw.one(None, "clip", *(("wrap", "fill") if name == "take" else ("drop",)))
    (table,) = draw.operands("rc->", {"r": rows, "c": columns}, [dtype])
    (updates,) = draw.operands("ec->", {"e": edges, "c": columns}, [dtype])
    # The row after the last one is none.
    own = np.where((index >= -rows) & (index < rows), index % rows, rows)
    if mode == "clip":  # Indices of ``at`` count from the last row first.
        own = np.clip(index + rows * ((index < 0) & (name != "take")), 0, rows - 1)
    elif mode == "wrap":
        own = index % rows

    def taken(result, x, outside):
        each = np.concatenate([wide(x), np.full((1, columns), outside)])
        return [compared(result, each[own], 0)]

    def sums(result, x, start):
        picks = own[:, None] == np.arange(rows)
        value, magnitude, _ = einsum("er,ec->rc", picks.astype(float), wide(x))
        slack = (edges + 1) * unit(dtype) * (magnitude + np.abs(start))
        return [compared(result, value + start, slack)]

    if name == "take":
        return Call(
            name,
            f"{index[:20].tolist()}" + (f", {mode=}" if mode else ""),
            (table, draw.given(index)),
            lambda m, x, index: m.take(x, index, axis=0, mode=mode),
            lambda result, x, _: taken(result, x, np.nan),
            lambda cts, ct, x, _: sums(cts[0], ct, np.zeros(x.shape)),
            is_plain=False,
        )
    return Call(
        name,
        f"{index[:20].tolist()}" + (f", {mode=}" if mode else ""),
        (table, updates, draw.given(index)),
        lambda m, x, y, index: m.scatter_add(x, index, y, mode=mode),
        lambda result, x, y, _: sums(result, y, wide(x)),
        lambda cts, ct, *_: [compared(cts[0], wide(ct), 0), *taken(cts[1], ct, 0)],
        is_plain=False,
    )


def messages(draw: Draw, name: str) -> Call:
    """Draw a reduction of a function of rows that edges gather and of a number of each edge."""
    edges, nodes, count, columns = draw.size(), max(1, draw.size()), draw.size(), draw.size(20)
    dtype, reduction = draw.type(F32, BF16, F16, F64), draw.one("sum", "sum", "max")
    ids = draw.rng.integers(-1, count + 1, edges).astype(np.int32)
    source = draw.rng.integers(0, nodes, edges).astype(np.int32)
    if draw.for_tests:  # Negative ones count from the last row, and others read zeros.
        source = draw.rng.integers(-nodes - 2, nodes + 2, edges).astype(np.int32)
    operands = (
        draw.operand((nodes, columns), dtype),
        draw.operand((edges, 1), dtype),
        draw.given(ids),
        draw.given(source),
    )

    def errors(result, x, w, *_):
        belongs = ids[:, None] == np.arange(count)
        rows = np.concatenate([wide(x), np.zeros((1, columns))])
        inside = (source >= -nodes) & (source < nodes)
        each = np.tanh(rows[np.where(inside, source % nodes, nodes)]) * wide(w)
        slack = 8 * UNIT_ROUNDOFF[dtype] * np.abs(each)
        if reduction == "max":
            value = np.where(belongs[..., None], each[:, None], -np.inf).max(0, initial=-np.inf)
            of_any = np.where(belongs[..., None], slack[:, None], 0).max(0, initial=0)
            return [compared(result, value, of_any)]
        slack += (edges + 1) * unit(dtype) * np.abs(each)
        picks = belongs.T.astype(float)
        return [compared(result, picks @ each, picks @ slack)]

    def weighted(x, w):
        return jnp.tanh(x) * w

    return Call(
        name,
        f"{reduction}, ids={ids[:20].tolist()}, {count}",
        operands,
        lambda m, x, w, ids, source: m.segment_reduce(
            weighted, x, w, segment_ids=ids, num_segments=count, gather=(source, None),
            reduction=reduction,
        ),
        errors,
        is_plain=False,
    )  # fmt: skip


def integers(draw: Draw, name: str) -> Call:
    """Draw counts or the order of small integers, some out of bounds."""
    count, bins = draw.size(), max(1, draw.size())
    keys = draw.rng.integers(-2, bins + 2, count).astype(np.int32)
    operand = draw.operand((count,), draw.type(F32, np.dtype("int32")))
    if name == "bincount":
        # Negative integers count as zeros, as in jnp.bincount.
        inside = np.maximum(keys, 0)
        expected = np.bincount(inside[inside < bins], minlength=bins)
        return Call(
            name, f"{keys[:20].tolist()}, {bins}", (operand, draw.given(keys)),
            lambda m, x, keys: m.bincount(keys, length=bins) + jnp.zeros_like(x, np.int32).sum(),
            lambda result, *_: [compared(result, expected, 0)], is_plain=False,
        )  # fmt: skip
    keys = np.clip(keys, 0, bins - 1)
    order = np.argsort(keys, kind="stable")
    return Call(
        name, f"{keys[:20].tolist()}, {bins}", (operand, draw.given(keys)),
        lambda m, x, keys: m.sort_by_key(keys, x, num_keys=bins)[1],
        lambda result, x, _: [compared(result, wide(x)[order], 0)], is_plain=False,
    )  # fmt: skip


DESCRIPTIONS = [
    *describe(segments, "segment_sum", "segment_mean", "segment_plan", linear=True),
    *describe(segments, "segment_max", "segment_min"),
    *describe(segments, "segment_prod", derivatives=0),
    *describe(rows_of_table, "take", "scatter_add", linear=True),
    *describe(messages, "segment_reduce"),
    *describe(integers, "bincount", derivatives=0),
    *describe(integers, "sort_by_key"),
]
