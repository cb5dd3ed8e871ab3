"""Operations of segments, indices and orders."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks.catalog.bounds import (
    BF16,
    F16,
    F32,
    F64,
    FLOATS,
    UNIT_ROUNDOFF,
    compared,
    einsum,
    unit,
    wide,
)
from benchmarks.catalog.call import Call, describe
from benchmarks.catalog.draw import Draw


def segments(draw: Draw, name: str) -> Call:
    """Draw reductions of rows to segments, of which some are empty and one has many edges."""
    edges, count, columns = draw.size(), draw.size(), max(1, draw.size(20))
    dtype = draw.type(F32, BF16, F16, F64)
    has_plan = name == "segment_plan"
    name = "segment_sum" if has_plan else name
    ids = draw.rng.integers(-2, count + 2, edges).astype(draw.one("int8", "int16", "int32"))
    middle = min(count // 2, np.iinfo(ids.dtype).max)
    ids = np.where(draw.rng.random(edges) < draw.one(0.0, 0.5, 1.0), middle, ids)
    is_sorted, mode = draw.chance(0.3), draw.one(None, "clip")
    has_plan = has_plan or draw.chance(0.4)
    ids = np.sort(ids) if is_sorted else ids
    (rows,) = draw.operands("ec->", {"e": edges, "c": columns}, [dtype])
    own = np.clip(ids, 0, count - 1) if mode == "clip" and count else ids

    def belong():
        return own[:, None] == np.arange(count)

    # What ascends is the same for all elements of a batch.
    operands = (rows,) if is_sorted else (rows, draw.given(ids))

    def call(m, x, ids=ids):
        if has_plan and m is jtk:
            plan = m.segment_plan(ids, count, indices_are_sorted=is_sorted, mode=mode)
            return getattr(m, name)(x, plan)
        return getattr(m, name)(x, ids, count, indices_are_sorted=is_sorted, mode=mode)

    def errors(result, x, _=None):
        belongs = belong()
        if name in ("segment_max", "segment_min"):
            neutral = -np.inf if name == "segment_max" else np.inf
            reduce = np.max if name == "segment_max" else np.min
            each = np.where(belongs[..., None], wide(x)[:, None], neutral)
            return [compared(result, reduce(each, 0, initial=neutral), 0)]
        if name == "segment_prod":
            factors = np.where(belongs[..., None], wide(x)[:, None], 1)
            value = factors.prod(0)
            # A part of the product may underflow, and the other factors are larger than 1.
            lost = 2.0**-126 * np.maximum(np.abs(factors), 1).prod(0)
            slack = 2 * (edges + 1) * (unit(dtype) * np.abs(value) + lost)
            return [compared(result, value, slack)]
        value, magnitude, _ = einsum("es,ec->sc", belongs.astype(float), wide(x))
        count_of_each = np.maximum(belongs.sum(0), 1)[:, None] if name == "segment_mean" else 1
        slack = (edges + 2) * unit(dtype) * magnitude / count_of_each
        return [compared(result, value / count_of_each, slack)]

    def cotangent_errors(cotangents, cotangent, *_):
        value, _, _ = einsum("es,sc->ec", belong().astype(float), wide(cotangent))
        return [compared(cotangents[0], value, 0)]

    return Call(
        name,
        f"ids={ids.dtype}{ids[:20].tolist()}, {count}, {is_sorted=}, {has_plan=}, {mode=}",
        operands,
        call,
        errors,
        cotangent_errors if name == "segment_sum" else None,
        is_plain=False,
    )


def rows_of_table(draw: Draw, name: str) -> Call:
    """Draw ``take`` or ``scatter_add``, of which each is the derivative of the other."""
    edges, rows, columns = draw.size(), max(1, draw.size()), max(1, draw.size(20))
    dtype = draw.type(F32, BF16, F16, F64)
    index = draw.rng.integers(-rows, rows, edges).astype(np.int32)
    (table,) = draw.operands("rc->", {"r": rows, "c": columns}, [dtype])
    (updates,) = draw.operands("ec->", {"e": edges, "c": columns}, [dtype])

    def taken(result, x, _=None):
        return [compared(result, wide(x)[index % rows], 0)]

    def sums(result, x, start):
        picks = (index % rows)[:, None] == np.arange(rows)
        value, magnitude, _ = einsum("er,ec->rc", picks.astype(float), wide(x))
        slack = (edges + 1) * unit(dtype) * (magnitude + np.abs(start))
        return [compared(result, value + start, slack)]

    if name == "take":
        return Call(
            name,
            f"{index[:20].tolist()}",
            (table, draw.given(index)),
            lambda m, x, index: m.take(x, index, axis=0),
            taken,
            lambda cts, ct, x, _: sums(cts[0], ct, np.zeros(x.shape)),
            is_plain=False,
        )
    return Call(
        name,
        f"{index[:20].tolist()}",
        (table, updates, draw.given(index)),
        lambda m, x, y, index: m.scatter_add(x, index, y),
        lambda result, x, y, _: sums(result, y, wide(x)),
        lambda cts, ct, *_: [compared(cts[0], wide(ct), 0), *taken(cts[1], ct)],
        is_plain=False,
    )


def messages(draw: Draw, name: str) -> Call:
    """Draw a reduction of a function of rows that edges gather and of a number of each edge."""
    edges, nodes, count, columns = draw.size(), max(1, draw.size()), draw.size(), draw.size(20)
    dtype, reduction = draw.type(F32, BF16, F16, F64), draw.one("sum", "sum", "max")
    ids = draw.rng.integers(-1, count + 1, edges).astype(np.int32)
    source = draw.rng.integers(0, nodes, edges).astype(np.int32)
    operands = (
        draw.operand((nodes, columns), dtype),
        draw.operand((edges, 1), dtype),
        draw.given(ids),
        draw.given(source),
    )

    def errors(result, x, w, *_):
        belongs = ids[:, None] == np.arange(count)
        each = np.tanh(wide(x)[source]) * wide(w)
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


def orders(draw: Draw, name: str) -> Call:
    """Draw the largest in order, and of equal ones the first."""
    rows, columns = draw.size(), max(1, draw.size())
    k = int(draw.rng.integers(0, min(columns, draw.one(2, 70)) + 1))
    dtype = draw.type(*FLOATS, *map(np.dtype, ("int8", "uint8", "int32")))
    operand = draw.operand((rows, columns), dtype)
    axis = draw.one(-1, 0)
    axis = axis if k <= operand.shape[axis] else -1

    def errors(result, x):
        order = np.argsort(-wide(x), axis, kind="stable").take(range(k), axis)
        values = np.take_along_axis(wide(x), order, axis)
        return [compared(result[0], values, 0), compared(result[1], order, 0)]

    return Call(
        name, f"{k}, {axis=}", (operand,), lambda m, x: m.top_k(x, k, axis=axis), errors,
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
    *describe(orders, "top_k"),
    *describe(integers, "bincount", derivatives=0),
    *describe(integers, "sort_by_key"),
]
