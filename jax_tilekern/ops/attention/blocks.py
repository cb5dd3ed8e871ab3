"""Attention and its derivatives by XLA's operations, a block of rows of scores at a time.

Only a block of the scores is in memory, so that memory is linear in the lengths. Sums are in
float32, or in float64 where operands are. Derivatives of these functions compute a block's scores
again.

In a block, arrays of queries have dimensions ``(batch, key heads, heads of a group, queries,
...)``, arrays of keys ``(batch, key heads, keys, ...)``, and scores ``(batch, heads, queries,
keys)``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax

from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.attention.scores import Scores, window_conditions
from jax_tilekern.primitives.operation import lowering_platform

# The scores of a block: some caches of a CPU hold them, and a GPU needs many to be busy.
_SCORES_OF_GPU = 1 << 25
_SCORES = 1 << 20
# A block has one element of a batch before it has fewer queries.
_FEW_QUERIES = 64

_Parts = Mapping[str, Array]
# The axes of an array that blocks divide: those of the batch and of the queries.
_Axes = tuple[int | None, int | None]
_OF_QUERIES: _Axes = (0, 3)
_OF_KEYS: _Axes = (0, None)


def score_type(x: Any) -> np.dtype[Any]:
    """Return the type of scores and of sums."""
    return np.dtype(jnp.promote_types(x.dtype, jnp.float32))


class _Block(NamedTuple):
    """A block: its first element of the batch, its first query, and the sizes of its scores."""

    batch: Any
    query: Any
    sizes: tuple[int, int, int, int]

    def indices(self, origins: Any) -> list[Array]:
        """Return vectors of indices, in the whole call if there are origins."""
        starts = [self.batch, 0, self.query, 0]
        if origins is not None:
            starts[:3] = (x + origins[i] for i, x in enumerate(starts[:3]))
        return [x + lax.iota(np.int32, n) for x, n in zip(starts, self.sizes, strict=True)]


def forward(query: Array, key: Array, value: Array, *arrays: Array, scores: Scores) -> list[Array]:
    """Return the result, and the log of the sum of exponentials ``(batch, heads, queries)``."""

    def block(place: _Block, rows: _Parts, keys: _Parts, own: Sequence[Array]) -> list[Array]:
        q = rows["q"]
        score = _score_of(scores, place, own)(_products(scores, q, keys["k"]))
        visible = _visible(scores, place, own)
        score = score if visible is None else jnp.where(visible, score, -jnp.inf)
        largest = jnp.max(score, -1, keepdims=True, initial=-jnp.inf)
        shift = jnp.where(jnp.isfinite(largest), largest, 0)
        exponentials = jnp.exp(score - shift)
        total = jnp.sum(exponentials, -1, keepdims=True)
        some = jnp.where(total == 0, 1, total)
        lse = jnp.where(total == 0, -jnp.inf, shift + jnp.log(some))
        out = _times_keys(scores, exponentials, keys["v"], q) / some.reshape(*q.shape[:4], 1)
        return [out.astype(query.dtype), lse.reshape(q.shape[:4])]

    rows, keys = {"q": _by_group(query, key)}, {"k": _by_head(key), "v": _by_head(value)}
    out, lse = _over_blocks(scores, block, rows, keys, arrays, [_OF_QUERIES] * 2)
    return [_by_query(out), _of_heads(lse)]


def tangent(
    query: Array, key: Array, value: Array, out: Array, lse: Array, *others: Array,
    scores: Scores, wanted: Sequence[int],
) -> list[Array]:  # fmt: skip
    """Return the tangents of the results.

    ``wanted`` are the operands that have tangents, of query, key, value and the arrays. The
    tangents come before the arrays.
    """
    del out
    dots = dict(zip(wanted, others, strict=False))
    arrays = others[len(wanted) :]
    moving = [i - 3 for i in wanted if i >= 3]

    def block(place: _Block, rows: _Parts, keys: _Parts, own: Sequence[Array]) -> list[Array]:
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
        p = _probabilities(score, visible, rows["lse"])
        lse_dot = jnp.sum(p * score_dot, -1, keepdims=True)
        out_dot = _times_keys(scores, p * (score_dot - lse_dot), v, q)
        if "v_dot" in keys:
            out_dot += _times_keys(scores, p, keys["v_dot"], q)
        return [out_dot.astype(query.dtype), lse_dot.reshape(q.shape[:4])]

    rows = {"q": _by_group(query, key), "lse": _lse_by_group(lse, key)}
    keys = {"k": _by_head(key), "v": _by_head(value)}
    if 0 in dots:
        rows["q_dot"] = _by_group(dots[0], key)
    keys |= {name: _by_head(dots[i]) for i, name in ((1, "k_dot"), (2, "v_dot")) if i in dots}
    own = [*arrays, *(dots[i] for i in wanted if i >= 3)]
    out_dot, lse_dot = _over_blocks(scores, block, rows, keys, own, [_OF_QUERIES] * 2, moving)
    return [_by_query(out_dot), _of_heads(lse_dot)]


def backward(
    query: Array, key: Array, value: Array, out: Array, lse: Array, d_out: Array, d_lse: Array,
    *arrays: Array, scores: Scores, wanted: Sequence[int],
) -> list[Array]:  # fmt: skip
    """Return the cotangents of the operands that are ``wanted`` from those of the results."""
    del out
    wide = score_type(query)
    moving = [i - 3 for i in wanted if i >= 3]

    def block(place: _Block, rows: _Parts, keys: _Parts, own: Sequence[Array]) -> list[Array]:
        q, k, v, d_out = rows["q"], keys["k"], keys["v"], rows["d_out"]
        s = _products(scores, q, k)
        values = [own[i] for i in moving]
        score, pull = jax.vjp(_score_of(scores, place, own, moving), s, *values)
        visible = _visible(scores, place, own)
        p = _probabilities(score, visible, rows["lse"])
        d_p = _product(scores, "md,kd->mk", d_out, v).reshape(s.shape)
        # A row without keys has no derivative, whatever the cotangent of its infinite logarithm is.
        d_lse = jnp.where(rows["lse"] == -jnp.inf, 0, rows["d_lse"]).reshape(*s.shape[:3], 1)
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
        "lse": _lse_by_group(lse, key),
        "d_out": _by_group(d_out, key),
        "d_lse": _lse_by_group(d_lse, key),
    }
    keys = {"k": _by_head(key), "v": _by_head(value)}
    of_arrays = _axes_of_arrays(scores, arrays, query)
    axes = [_OF_QUERIES, _OF_KEYS, _OF_KEYS, *of_arrays]
    found = _over_blocks(scores, block, rows, keys, arrays, [axes[i] for i in wanted])
    operands = [query, key, value, *arrays]
    restored = {0: _by_query, 1: _of_keys, 2: _of_keys}
    return [
        (restored[i](x) if i in restored else x).astype(operands[i].dtype)
        for i, x in zip(wanted, found, strict=True)
    ]


# A block's scores.


def _score_of(
    scores: Scores, place: _Block, arrays: Sequence[Array], moving: Sequence[int] = ()
) -> Callable[..., Array]:
    """Return the function from scaled products, and from the arrays ``moving``, to scores."""

    def score(s: Array, *values: Array) -> Array:
        given = dict(zip(moving, values, strict=True))
        own = scores.by_use([given.get(i, x) for i, x in enumerate(arrays)])
        if own.bias is not None:
            s = s + _of_batch(scores, "bias", own.bias, place, own.origins).astype(s.dtype)
        if scores.score_mod is not None:
            indices = place.indices(own.origins)
            s = scores.score_mod.over_indices(s, *indices, *own.of_score)
        return s

    return score


def _visible(scores: Scores, place: _Block, arrays: Sequence[Array]) -> Array | None:
    """Return which keys queries see, of dimensions that broadcast; ``None`` for all."""
    own = scores.by_use(arrays)
    b, h, q, k = place.indices(own.origins)
    found = window_conditions(scores, q[:, None], k)
    if own.mask is not None:
        found.append(_of_batch(scores, "mask", own.mask, place, own.origins))
    for name, index in (("query_lengths", q[:, None]), ("key_lengths", k)):
        if (lengths := getattr(own, name)) is not None:
            lengths = _of_batch(scores, name, lengths, place, own.origins)
            found.append(index < lengths[:, None, None, None])
    if scores.mask_mod is not None:
        found.append(scores.mask_mod.over_indices(b, h, q, k, *own.of_mask))
    return functools.reduce(jnp.logical_and, found) if found else None


def _of_batch(scores: Scores, name: str, x: Array, place: _Block, origins: Any) -> Array:
    """Return the part of an array for the elements of the batch in a block."""
    divisor = scores.divisor(name)
    if divisor is None:
        return x
    return x[place.indices(origins)[0] // divisor % x.shape[0]]


def _probabilities(score: Array, visible: Array | None, lse: Array) -> Array:
    lse = lse.reshape(*score.shape[:3], 1)
    score = score if visible is None else jnp.where(visible, score, -jnp.inf)
    return jnp.exp(score - jnp.where(lse == -jnp.inf, 0, lse))


# Products of a block. The dimensions of the batch and of heads of keys come first: XLA computes
# others of 16 bits inexactly on a CPU. "m" are the queries of all heads of a group.


def _products(scores: Scores, q: Array, k: Array) -> Array:
    """Return the scaled products of queries and keys."""
    batch, heads, group, queries, _ = q.shape
    s = _product(scores, "md,kd->mk", q, k) * scores.scale
    return s.reshape(batch, heads * group, queries, k.shape[2])


def _times_keys(scores: Scores, x: Array, keys: Array, q: Array) -> Array:
    """Return the product of scores and an array of keys, of the dimensions of ``q``."""
    return _product(scores, "mk,kd->md", x, keys).reshape(*q.shape[:4], keys.shape[3])


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


def _axes_of_arrays(scores: Scores, arrays: Sequence[Any], query: Any) -> list[_Axes]:
    batch, queries = query.shape[:2]
    named, found = dict(scores.named), []
    for kind, x in itertools.zip_longest(scores.kinds, arrays):
        divides = kind in named and named[kind] is None and x.shape[0] == batch > 1
        has_queries = kind in ("bias", "mask") and x.shape[2] == queries > 1
        found.append((0 if divides else None, 2 if has_queries else None))
    return found


def _of_keys(x: Array) -> Array:
    return x.transpose(0, 3, 1, 2)


def _over_blocks(
    scores: Scores, block: Callable[..., list[Array]], rows: _Parts, keys: _Parts,
    arrays: Sequence[Array], results: Sequence[_Axes], tangents: Sequence[int] = (),
) -> list[Array]:  # fmt: skip
    """Call ``block(place, rows, keys, arrays)`` for parts of the batch and of the queries.

    ``results`` are the axes of its results that the parts divide; results without one are added.
    The last of the arrays are tangents of those of these positions.
    """
    q, k = rows["q"], keys["k"]
    batch, heads, group, queries, _ = q.shape
    elements, size = _block_sizes(batch, queries, heads * group * k.shape[2])
    is_one_block = elements >= batch and size >= queries
    count = len(arrays) - len(tangents)
    own = _axes_of_arrays(scores, arrays[:count], jax.ShapeDtypeStruct((batch, queries), q.dtype))
    own += [own[i] for i in tangents]
    axes = [*[_OF_QUERIES] * len(rows), *[_OF_KEYS] * len(keys), *own]

    def of_batch(first: Any, *parts: Array) -> list[Array]:
        def of_queries(start: Any, *parts: Array) -> list[Array]:
            q = parts[0]
            sizes = (q.shape[0], heads * group, q.shape[3], k.shape[2])
            by_name = dict(zip((*rows, *keys), parts, strict=False))
            return block(
                _Block(first, start, sizes),
                {name: by_name[name] for name in rows},
                {name: by_name[name] for name in keys},
                list(parts[len(by_name) :]),
            )

        rows_of = [row for _, row in axes], [row for _, row in results]
        of_block = of_queries if is_one_block else jax.checkpoint(of_queries)
        return _over_parts(of_block, queries, size, parts, *rows_of)

    operands = compat.unify_varying(*rows.values(), *keys.values(), *arrays)
    elements_of = [first for first, _ in axes], [first for first, _ in results]
    return _over_parts(of_batch, batch, elements, operands, *elements_of)


def _block_sizes(batch: int, queries: int, scores_of_query: int) -> tuple[int, int]:
    """Return the elements of a batch and the queries of a block."""
    # Symbolic sizes are one block.
    if not all(isinstance(n, int) for n in (batch, queries, scores_of_query)):
        return batch, queries
    most = _SCORES_OF_GPU if lowering_platform.value == "cuda" else _SCORES
    rows = max(1, most // max(1, scores_of_query))
    if rows >= batch * queries:
        return batch, queries
    few = min(queries, _FEW_QUERIES)
    elements = max(x for x in range(1, batch + 1) if batch % x == 0 and x <= max(1, rows // few))
    size = min(queries, max(few, rows // elements))
    return elements, math.ceil(queries / math.ceil(queries / size))


def _over_parts(
    function: Callable[..., list[Array]], total: int, size: int, operands: Sequence[Array],
    axes: Sequence[int | None], result_axes: Sequence[int | None],
) -> list[Array]:  # fmt: skip
    """Call ``function(start, *parts)`` for parts of the operands along their axes.

    Results are put together along their axes; those without one are added.
    """
    if total <= size:
        return function(np.int32(0), *operands)
    count, rest = divmod(total, size)

    def part(x: Array, axis: int | None, start: int, size: int) -> Array:
        return x if axis is None else lax.slice_in_dim(x, start, start + size, axis=axis)

    def stacked(x: Array, axis: int) -> Array:
        x = part(x, axis, 0, count * size)
        shape = (*x.shape[:axis], count, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    divided = [i for i, axis in enumerate(axes) if axis is not None]

    def of_part(start: Any, *parts: Array) -> list[Array]:
        given = dict(zip(divided, parts, strict=True))
        return function(start, *(given.get(i, x) for i, x in enumerate(operands)))

    def step(sums: list[Array], x: Any) -> tuple[list[Array], list[Array]]:
        found = of_part(*x)
        own = [x for x, axis in zip(found, result_axes, strict=True) if axis is None]
        others = [x for x, axis in zip(found, result_axes, strict=True) if axis is not None]
        return [jnp.add(x, y) for x, y in zip(sums, own, strict=True)], others

    xs = [stacked(operands[i], axis) for i, axis in enumerate(axes) if axis is not None]
    starts = np.arange(count, dtype=np.int32) * np.int32(size)
    types = jax.eval_shape(of_part, starts[0], *(x[0] for x in xs))
    added = [x for x, axis in zip(types, result_axes, strict=True) if axis is None]
    zeros = compat.unify_varying(operands[0], *(jnp.zeros(x.shape, x.dtype) for x in added))[1:]
    sums, others = lax.scan(step, [*zeros], (starts, *xs))
    last = []
    if rest:
        parts = (part(operands[i], axes[i], count * size, rest) for i in divided)
        last = of_part(np.int32(count * size), *parts)
    total_of, others_of, results = iter(sums), iter(others), []
    for i, axis in enumerate(result_axes):
        if axis is None:
            x = next(total_of)
            results.append(x + last[i] if rest else x)
            continue
        x = jnp.moveaxis(next(others_of), 0, axis)
        x = x.reshape(*x.shape[:axis], count * size, *x.shape[axis + 2 :])
        results.append(jnp.concatenate([x, last[i]], axis) if rest else x)
    return results
