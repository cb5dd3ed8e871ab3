"""Attention and its derivatives by XLA's operations, a block of rows of scores at a time.

Only a block of the scores is in memory (``block_loop.py``), so that memory is linear in the
lengths. Sums are in float32, or in float64 where operands are. Derivatives of these functions
compute a block's scores again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.attention import residual
from jax_tilekern.ops.attention.block_loop import (
    OF_KEYS,
    OF_QUERIES,
    Block,
    Parts,
    axes_of_arrays,
    over_blocks,
)
from jax_tilekern.ops.attention.scores import Scores, score_of, visible_of
from jax_tilekern.primitives.operation import lowering_platform


def score_type(x: Any) -> np.dtype[Any]:
    """Return the type of scores and of sums."""
    return np.dtype(jnp.promote_types(x.dtype, jnp.float32))


def forward(
    query: Array, key: Array, value: Array, *arrays: Array, scores: Scores,
    of_features: Collection[int] = (),
) -> list[Array]:  # fmt: skip
    """Return the result, and the log of the sum of exponentials as in ``residual.py``.

    ``of_features`` are the positions of the operands that have the keys of a feature side by side
    in memory. XLA moves none of them for products whose dimensions are in this order.
    """
    count = residual.count(scores)

    def block(place: Block, rows: Parts, keys: Parts, own: Sequence[Array]) -> list[Array]:
        q = rows["q"]
        products = _products(scores, q, keys["k"], of_features=1 in of_features)
        score = _score_of(scores, place, own)(products)
        exponentials, total, shift = _exponentials(score, _visible(scores, place, own))
        some = jnp.where(total == 0, 1, total)
        log_sum = jnp.where(total == 0, -jnp.inf, jnp.log(some))
        logarithm = [log_sum, shift] if count == 2 else [shift + log_sum]
        out = _times_keys(scores, exponentials, keys["v"], q, of_features=2 in of_features)
        out /= some.reshape(*q.shape[:4], 1)
        return [out.astype(query.dtype), *(x.reshape(q.shape[:4]) for x in logarithm)]

    rows, keys = {"q": _by_group(query, key)}, {"k": _by_head(key), "v": _by_head(value)}
    out, *logarithm = over_blocks(scores, block, rows, keys, arrays, [OF_QUERIES] * (1 + count))
    return [_by_query(out), *map(_of_heads, logarithm)]


def tangent(
    query: Array, key: Array, value: Array, *others: Array, scores: Scores, wanted: Sequence[int]
) -> list[Array]:
    """Return the tangents of the output and of the logarithm.

    ``wanted`` are the operands that have tangents, of query, key, value and the arrays. The
    tangents come before the arrays, and the results, which are not read, before both.
    """
    others = others[1 + residual.count(scores) :]
    dots = dict(zip(wanted, others, strict=False))
    arrays = others[len(wanted) :]
    moving = [i - 3 for i in wanted if i >= 3]

    def block(place: Block, rows: Parts, keys: Parts, own: Sequence[Array]) -> list[Array]:
        q, k, v = rows["q"], keys["k"], keys["v"]
        own, array_dots = own[: len(arrays)], own[len(arrays) :]
        s = _products(scores, q, k)
        s_dot = jnp.zeros_like(s)
        if "q_dot" in rows:
            s_dot += _products(scores, rows["q_dot"], k)
        if "k_dot" in keys:
            s_dot += _products(scores, q, keys["k_dot"])
        score, score_dot = jax.jvp(
            _score_of(scores, place, own, moving),
            [s, *(own[i] for i in moving)],
            [s_dot, *array_dots],
        )
        visible = _visible(scores, place, own)
        score_dot = score_dot if visible is None else jnp.where(visible, score_dot, 0)
        p = _probabilities(score, visible)
        lse_dot = jnp.sum(p * score_dot, -1, keepdims=True)
        out_dot = _times_keys(scores, p * (score_dot - lse_dot), v, q)
        if "v_dot" in keys:
            out_dot += _times_keys(scores, p, keys["v_dot"], q)
        return [out_dot.astype(query.dtype), lse_dot.reshape(q.shape[:4])]

    rows, keys = {"q": _by_group(query, key)}, {"k": _by_head(key), "v": _by_head(value)}
    if 0 in dots:
        rows["q_dot"] = _by_group(dots[0], key)
    keys |= {name: _by_head(dots[i]) for i, name in ((1, "k_dot"), (2, "v_dot")) if i in dots}
    own = [*arrays, *(dots[i] for i in wanted if i >= 3)]
    out_dot, lse_dot = over_blocks(scores, block, rows, keys, own, [OF_QUERIES] * 2, moving)
    return [_by_query(out_dot), _of_heads(lse_dot)]


def backward(
    query: Array, key: Array, value: Array, out: Array, log_sum: Array, *others: Array,
    scores: Scores, wanted: Sequence[int],
) -> list[Array]:  # fmt: skip
    """Return the cotangents of the operands ``wanted`` from those of the output and logarithm."""
    del out
    d_out, d_lse, *arrays = others[residual.count(scores) - 1 :]
    wide = score_type(query)
    moving = [i - 3 for i in wanted if i >= 3]

    def block(place: Block, rows: Parts, keys: Parts, own: Sequence[Array]) -> list[Array]:
        q, k, v, d_out = rows["q"], keys["k"], keys["v"], rows["d_out"]
        s = _products(scores, q, k)
        values = [own[i] for i in moving]
        score, pull = jax.vjp(_score_of(scores, place, own, moving), s, *values)
        visible = _visible(scores, place, own)
        p = _probabilities(score, visible)
        d_p = _product(scores, "md,kd->mk", d_out, v).reshape(s.shape)
        # A row without keys has no derivative, whatever the cotangent of its infinite logarithm is.
        is_empty = rows["log_sum"] == -jnp.inf
        d_lse = jnp.where(is_empty, 0, rows["d_lse"]).reshape(*s.shape[:3], 1)
        # The sum is that of ``out * d_out``, without the rounding of ``out``.
        d_s, *d_arrays = pull(p * (d_p - jnp.sum(p * d_p, -1, keepdims=True) + d_lse))
        d_s = (d_s if visible is None else jnp.where(visible, d_s, 0)) * scores.scale
        products: dict[int, Callable[[], Array]] = {
            0: lambda: _times_keys(scores, d_s, k, q).astype(q.dtype),
            1: lambda: _product(scores, "md,mk->dk", q, d_s),
            2: lambda: _product(scores, "md,mk->dk", d_out, p),
        }
        found = [products[i]() for i in wanted if i < 3]
        return [*found, *(x.astype(wide) for x in d_arrays)]

    rows = {
        "q": _by_group(query, key),
        "log_sum": _lse_by_group(log_sum, key),
        "d_out": _by_group(d_out, key),
        "d_lse": _lse_by_group(d_lse, key),
    }
    keys = {"k": _by_head(key), "v": _by_head(value)}
    of_arrays = axes_of_arrays(scores, arrays, query)
    axes = [OF_QUERIES, OF_KEYS, OF_KEYS, *of_arrays]
    found = over_blocks(scores, block, rows, keys, arrays, [axes[i] for i in wanted])
    operands = [query, key, value, *arrays]
    restored = {0: _by_query, 1: _of_keys, 2: _of_keys}
    return [
        (restored[i](x) if i in restored else x).astype(operands[i].dtype)
        for i, x in zip(wanted, found, strict=True)
    ]


# A block's scores.


def _score_of(
    scores: Scores, place: Block, arrays: Sequence[Array], moving: Sequence[int] = ()
) -> Callable[..., Array]:
    """Return the function from scaled products, and from the arrays ``moving``, to scores."""

    def score(s: Array, *values: Array) -> Array:
        given = dict(zip(moving, values, strict=True))
        own = scores.by_use([given.get(i, x) for i, x in enumerate(arrays)])
        found: Array = score_of(scores, own, s, place)
        return found

    return score


def _visible(scores: Scores, place: Block, arrays: Sequence[Array]) -> Array | None:
    """Return which keys queries see, of dimensions that broadcast; ``None`` for all."""
    found: Array | None = visible_of(scores, scores.by_use(arrays), place)
    return found


def _exponentials(score: Array, visible: Array | None) -> tuple[Array, Array, Array]:
    """Return exponentials of scores less a number of the row, their sum, and the number."""
    score = score if visible is None else jnp.where(visible, score, -jnp.inf)
    largest = jnp.max(score, -1, keepdims=True, initial=-jnp.inf)
    shift = jnp.where(jnp.isfinite(largest), largest, 0)
    exponentials = jnp.exp(score - shift)
    return exponentials, jnp.sum(exponentials, -1, keepdims=True), shift


def _probabilities(score: Array, visible: Array | None) -> Array:
    """Return the weights of a block's keys, which are all keys.

    The rounded logarithm of a sum would not do where scores are large: that of a row of -1e9 is
    -1e9, whatever the number of keys is.
    """
    exponentials, total, _ = _exponentials(score, visible)
    return exponentials / jnp.where(total == 0, 1, total)


# Products of a block. The dimensions of the batch and of heads of keys come first: XLA computes
# others of 16 bits inexactly on a CPU. "m" are the queries of all heads of a group.


def _products(scores: Scores, q: Array, k: Array, of_features: bool = False) -> Array:
    """Return the scaled products of queries and keys."""
    batch, heads, group, queries, _ = q.shape
    s = _product(scores, f"md,{'dk' if of_features else 'kd'}->mk", q, k) * scores.scale
    return s.reshape(batch, heads * group, queries, k.shape[2])


def _times_keys(
    scores: Scores, x: Array, keys: Array, q: Array, of_features: bool = False
) -> Array:
    """Return the product of scores and an array of keys, of the dimensions of ``q``."""
    out = _product(scores, f"mk,{'dk' if of_features else 'kd'}->md", x, keys)
    return out.reshape(*q.shape[:4], keys.shape[3])


def _product(scores: Scores, dims: str, x: Array, y: Array) -> Array:
    heads = x.shape[1] if x.ndim == 5 else y.shape[1]
    lhs, rhs, out = dims.replace("->", ",").split(",")
    wide = np.dtype(jnp.promote_types(jnp.promote_types(x.dtype, y.dtype), jnp.float32))
    types = [z.dtype for z in (x, y) if z.dtype.itemsize == 2]
    is_native = lowering_platform.value == "cuda" or (
        lowering_platform.value == "cpu" and jnp.bfloat16 in types
    )
    narrow = types[0] if types and is_native else wide

    def merged(z: Array, own: str) -> Array:
        if own == "dk":
            z = jnp.swapaxes(z, 2, 3)
        if own[0] == "m":
            size = math.prod(z.shape[1:-1]) // heads
            z = z.reshape(z.shape[0], heads, size, z.shape[-1])
        return z.astype(narrow)

    return jnp.einsum(
        f"bn{lhs},bn{rhs}->bn{out}",
        merged(x, lhs),
        merged(y, rhs),
        precision=scores.precision,
        preferred_element_type=wide,
    )


# Blocks.


def _by_group(x: Array, key: Array) -> Array:
    """``(batch, queries, heads, d)`` to a block's dimensions."""
    batch, queries, heads, d = x.shape
    own = key.shape[2]
    return x.reshape(batch, queries, own, heads // own, d).transpose(0, 2, 3, 1, 4)


def _lse_by_group(x: Array, key: Array) -> Array:
    batch, heads, queries = x.shape
    own = key.shape[2]
    return x.reshape(batch, own, heads // own, queries)


def _by_query(x: Array) -> Array:
    batch, heads, group, queries, d = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, queries, heads * group, d)


def _of_heads(x: Array) -> Array:
    batch, heads, group, queries = x.shape
    return x.reshape(batch, heads * group, queries)


def _by_head(x: Array) -> Array:
    return x.transpose(0, 2, 1, 3)


def _of_keys(x: Array) -> Array:
    return x.transpose(0, 3, 1, 2)
