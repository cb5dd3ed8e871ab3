"""Functions of blocks of scores, over the elements of a batch and the queries.

A block has a part of the batch and of the queries, and all heads and keys. Its arrays of queries
have dimensions ``(batch, key heads, heads of a group, queries, ...)``, those of keys ``(batch, key
heads, keys, ...)``, and scores ``(batch, heads, queries, keys)``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax

from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.attention.index_functions import IndexFunction
from jax_tilekern.ops.attention.scores import Scores, of_whole
from jax_tilekern.primitives.operation import lowering_platform

# The scores of a block: some caches of a CPU hold them, and a GPU needs many to be busy.
_SCORES_OF_GPU = 1 << 25
_SCORES = 1 << 20
# A block has one element of a batch before it has fewer queries.
_FEW_QUERIES = 64

Parts = Mapping[str, Array]
# The axes of an array that blocks divide: those of the batch and of the queries.
Axes = tuple[int | None, int | None]
OF_QUERIES: Axes = (0, 3)
OF_KEYS: Axes = (0, None)


class Block(NamedTuple):
    """A block: its first element of the batch, its first query, and the sizes of its scores."""

    batch: Any
    query: Any
    sizes: tuple[int, int, int, int]

    def indices(self, origins: Any) -> list[Array]:
        """Return vectors of indices, in the whole call if there are origins."""
        starts = of_whole(origins, self.batch, 0, self.query, 0)
        return [x + lax.iota(np.int32, n) for x, n in zip(starts, self.sizes, strict=True)]

    def query_and_key(self, origins: Any) -> tuple[Array, Array]:
        _, _, query, key = self.indices(origins)
        return query[:, None], key

    def part(self, x: Array, divisor: int | None, origins: Any) -> Array:
        if divisor is not None or self.sizes[0] == 0:
            x = x[self.indices(origins)[0] // (divisor or 1) % x.shape[0]]
        return x if x.ndim == 4 else x[:, None, None, None]

    def values(
        self, function: IndexFunction, origins: Any, score: Sequence[Any], arrays: Sequence[Any]
    ) -> Array:
        return function.over_indices(*score, *self.indices(origins), *arrays)


def over_blocks(
    scores: Scores, block: Callable[..., list[Array]], rows: Parts, keys: Parts,
    arrays: Sequence[Array], results: Sequence[Axes], tangents: Sequence[int] = (),
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
    own = axes_of_arrays(scores, arrays[:count], jax.ShapeDtypeStruct((batch, queries), q.dtype))
    own += [own[i] for i in tangents]
    axes = [*[OF_QUERIES] * len(rows), *[OF_KEYS] * len(keys), *own]

    def of_batch(first: Any, *parts: Array) -> list[Array]:
        def of_queries(start: Any, *parts: Array) -> list[Array]:
            q = parts[0]
            sizes = (q.shape[0], heads * group, q.shape[3], k.shape[2])
            by_name = dict(zip((*rows, *keys), parts, strict=False))
            return block(
                Block(first, start, sizes),
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


def axes_of_arrays(scores: Scores, arrays: Sequence[Any], query: Any) -> list[Axes]:
    batch, queries = query.shape[:2]
    named, found = dict(scores.named), []
    for kind, x in itertools.zip_longest(scores.kinds, arrays):
        divides = kind in named and named[kind] is None and x.shape[0] == batch > 1
        has_queries = kind in ("bias", "mask") and x.shape[2] == queries > 1
        found.append((0 if divides else None, 2 if has_queries else None))
    return found
