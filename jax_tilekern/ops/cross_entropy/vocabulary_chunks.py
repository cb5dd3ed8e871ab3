"""Softmax statistics of ``h @ w + bias``, and their gradient, with a part of the logits at a time.

The vocabulary is visited in chunks of columns of ``w``. On a GPU the statistics of a chunk are
reductions in the epilogue of its product, so that its logits are in memory only where no kernel
reduces them. The gradient multiplies each chunk once more and turns it into the logits' cotangent,
which two products take to the operands. Only a chunk is ever in memory, and everything but the
operands of products is in float32 at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from jax_tilekern.epilogue.row_reductions import RowReduction, row_logsumexp, row_sum
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.cross_entropy.chunk_loop import over_chunks
from jax_tilekern.ops.cross_entropy.logits import (
    LogitProducts,
    Lowering,
    Options,
    logit,
    logit_cotangent,
    statistics_type,
)

_Statistics = tuple[Array, ...]
_Cotangents = tuple[Array | None, ...]

# A product needs this many columns to be efficient, however many rows it has.
_MIN_COLUMNS = 2048
# Chunks begin at multiples of a tile's width.
_COLUMN_MULTIPLE = 256
# Columns of a chunk whose logits are reduced in the epilogue. They are not in memory, so that a
# chunk only bounds the partial results of the reductions.
_REDUCED_COLUMNS = 16384


def statistics(
    h: Array, w: Array, bias: Array, labels: Array, *, options: Options, lowering: Lowering
) -> list[Array]:
    """Return each row's log-sum-exp, the logit of its label, and perhaps the sum of its logits.

    Parameters
    ----------
    h, w, bias, labels
        As for :func:`~jax_tilekern.ops.cross_entropy.statistics.statistics`.
    options, lowering
        Of the call.
    """
    rows, wide = _flat(h), statistics_type(h, w)
    label = labels.reshape(-1)
    products = LogitProducts(lowering.by_rows, options.precision, wide)

    def value_of(accumulator: Array, bias: Array) -> Array:
        return logit(accumulator, bias, softcap=options.softcap)

    def of_row(accumulator: Array, bias: Array, column: Array, label: Array) -> list[RowReduction]:
        value = value_of(accumulator, bias)
        results = [row_logsumexp(value), row_sum(jnp.where(column == label, value, 0))]
        return [*results, row_sum(value)] if options.smoothed else results

    w = products.oriented(w)

    def of_chunk(start: Any, size: int) -> Sequence[Array]:
        chunk, bias_row = products.chunk(w, start, size), _part(bias, start, size)[None]
        if lowering.reduces_rows:
            columns = (start + lax.iota(label.dtype, size))[None]
            results: Sequence[Array] = products.logits(
                rows, chunk, of_row, (bias_row, columns, label[:, None])
            )
            return results
        # XLA reads an element of each row where a reduction would take a pass.
        logits = products.logits(rows, chunk, value_of, (bias_row,))
        results = [jax.nn.logsumexp(logits, 1), _element(logits, label - start)]
        return [*results, logits.sum(1)] if options.smoothed else results

    def add_chunk(start: Any, size: int, carry: _Statistics) -> _Statistics:
        lse_of_chunk, *sums_of_chunk = of_chunk(start, size)
        lse, *sums = carry
        sums = [x + y for x, y in zip(sums, sums_of_chunk, strict=True)]
        return jnp.logaddexp(lse, lse_of_chunk), *sums

    zeros = jnp.zeros_like(rows[:, 0], wide)
    results = over_chunks(
        bias.size,
        _REDUCED_COLUMNS if lowering.reduces_rows else _chunk_columns(rows, wide, options),
        add_chunk,
        (jnp.full_like(zeros, -jnp.inf), zeros, *([zeros] if options.smoothed else [])),
    )
    return [x.reshape(labels.shape) for x in results]


def cotangents(
    h: Array,
    w: Array,
    bias: Array,
    labels: Array,
    lse: Array,
    *bars: Array,
    wanted: Sequence[int],
    options: Options,
    lowering: Lowering,
) -> list[Array]:
    """Return cotangents of ``h``, ``w`` and ``bias`` from those of the statistics.

    Parameters
    ----------
    h, w, bias, labels, options, lowering
        As in :func:`statistics`.
    lse
        The log-sum-exp that :func:`statistics` returned.
    bars
        Cotangents of the statistics, each of the shape of ``labels``.
    wanted
        Which of the operands' cotangents are computed, in order: 0, 1, 2.
    """
    rows, wide = _flat(h), statistics_type(h, w)
    narrow = np.dtype(jnp.promote_types(h.dtype, w.dtype))
    scaled_bars, scale = _in_range(bars, narrow)
    of_rows = [x.reshape(-1, 1) for x in (labels, lse, *scaled_bars)]
    products = LogitProducts(lowering.by_rows, options.precision, wide)
    w = products.oriented(w)

    def to_cotangent(*elements: Array) -> Array:
        return logit_cotangent(*elements, softcap=options.softcap).astype(narrow)

    def to_w_cotangent(accumulator: Array) -> Array:
        return accumulator.astype(w.dtype if scale is None else wide)

    def add_chunk(start: Any, size: int, carry: _Cotangents) -> _Cotangents:
        h_bar, w_bar, bias_bar = carry
        chunk = products.chunk(w, start, size)
        of_columns = (_part(bias, start, size), start + lax.iota(labels.dtype, size))
        operands = (*(x[None] for x in of_columns), *of_rows)
        logits_bar = products.logits(rows, chunk, to_cotangent, operands)
        if h_bar is not None:
            h_bar = products.h_cotangent(logits_bar, chunk, jnp.add, (h_bar,), ((0, 0),))
        if w_bar is not None:
            of_chunk = products.w_cotangent(rows, logits_bar, to_w_cotangent)
            w_bar = products.with_chunk(w_bar, _unscaled(of_chunk, scale).astype(w.dtype), start)
        if bias_bar is not None:
            sums = logits_bar.sum(0, dtype=wide)
            bias_bar = lax.dynamic_update_slice_in_dim(bias_bar, sums, start, 0)
        return h_bar, w_bar, bias_bar

    zeros = (jnp.zeros_like(rows, wide), jnp.zeros_like(w), jnp.zeros_like(bias, wide))
    h_bar, w_bar, bias_bar = over_chunks(
        bias.size,
        _chunk_columns(rows, wide, options),
        add_chunk,
        tuple(x if i in wanted else None for i, x in enumerate(zeros)),
    )
    results = []
    if h_bar is not None:
        results.append(_unscaled(h_bar, scale).reshape(h.shape).astype(h.dtype))
    if w_bar is not None:
        results.append(products.oriented(w_bar))
    if bias_bar is not None:
        results.append(_unscaled(bias_bar, scale).astype(bias.dtype))
    return results


def _chunk_columns(rows: Array, wide: np.dtype[Any], options: Options) -> int:
    columns: int = options.chunk_bytes // (max(1, rows.shape[0]) * wide.itemsize)
    return max(_MIN_COLUMNS, columns // _COLUMN_MULTIPLE * _COLUMN_MULTIPLE)


def _flat(h: Array) -> Array:
    return h.reshape(-1, h.shape[-1])


def _part(x: Array, start: Any, size: int) -> Array:
    return lax.dynamic_slice_in_dim(x, start, size)


def _element(logits: Array, position: Array) -> Array:
    """Return an element of each row, 0 where the position lies outside of the row."""
    inside = (position >= 0) & (position < logits.shape[1])
    safe = jnp.where(inside, position, 0)
    return jnp.where(inside, jnp.take_along_axis(logits, safe[:, None], 1)[:, 0], 0)


def _in_range(bars: Sequence[Array], narrow: np.dtype[Any]) -> tuple[Sequence[Array], Array | None]:
    """Scale cotangents that would underflow in float16; return the scale, a power of two."""
    if narrow != np.float16:
        return bars, None
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in bars]))
    # A logit's cotangent is at most three times as large as the largest of its row's.
    exponent = jnp.where(largest > 0, 13 - jnp.frexp(largest)[1], 0)
    scale = jnp.ldexp(jnp.ones_like(largest), exponent)
    return [x * scale for x in bars], scale


def _unscaled(x: Array, scale: Array | None) -> Array:
    return x if scale is None else x / scale
