"""Softmax statistics of ``h @ w + bias``, and their gradient, with some columns at a time.

The statistics of a chunk of logits are reductions in the epilogue of its product, so that its
logits are in memory only where no kernel reduces them. The gradient multiplies each chunk once more
and turns it into the logits' cotangent, which two products take to the operands. Everything but the
operands of products is in float32 at least.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from jax_tilekern.epilogue.row_reductions import row_logsumexp, row_sum
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.cross_entropy.logits import (
    Lowering,
    Options,
    logit,
    over_chunks,
    product,
    slope,
    statistics_type,
)

# A product needs this many columns to be efficient, however many rows it has.
_MIN_COLUMNS = 2048
# Chunks begin at multiples of a tile's width.
_COLUMN_MULTIPLE = 256
# Size of a chunk of logits that kernels reduce. They are not in memory, so that a chunk only bounds
# the partial results of the reductions.
_REDUCED_BYTES = 2 << 30


def statistics(
    h: Array, w: Array, bias: Array, labels: Array, *, options: Options, lowering: Lowering
) -> list[Array]:
    """Return each row's log-sum-exp, the logit of its label, and perhaps the sum of its logits."""
    rows, label = h.reshape(-1, h.shape[-1]), labels.reshape(-1, 1)
    w, axis = lowering.oriented(w), lowering.w.index("v")

    def to_logit(accumulator: Array, bias: Array) -> Array:
        return logit(accumulator, bias, options.softcap)

    def of_row(accumulator: Array, bias: Array, column: Array, label: Array) -> list[Any]:
        value = to_logit(accumulator, bias)
        results = [row_logsumexp(value), row_sum(jnp.where(column == label, value, 0))]
        return [*results, row_sum(value)] if options.label_smoothing else results

    def of_chunk(chunk: Array, start: Any, size: int) -> Sequence[Array]:
        multiply = functools.partial(
            product, f"rd,{lowering.w}->rv", rows, chunk, precision=options.precision
        )
        bias_row, column = _of_columns(bias, label, start, size)
        if lowering.reduces_rows:
            results: Sequence[Array] = multiply(of_row, (bias_row, column, label))
            return results
        # XLA reads an element of each row where a reduction would take a pass.
        logits = multiply(to_logit, (bias_row,))
        at_label = logits.at[lax.iota(label.dtype, label.size), label[:, 0] - start].get(
            mode="fill", fill_value=0, wrap_negative_indices=False
        )
        results = [jax.nn.logsumexp(logits, 1), at_label]
        return [*results, logits.sum(1)] if options.label_smoothing else results

    def add_chunk(start: Any, size: int, carry: Sequence[Array]) -> Sequence[Array]:
        chunk = lax.dynamic_slice_in_dim(w, start, size, axis)
        lse, *sums = of_chunk(chunk, start, size)
        return jnp.logaddexp(carry[0], lse), *map(jnp.add, carry[1:], sums)

    zeros = jnp.zeros_like(rows[:, 0], statistics_type(h, w))
    carry: Sequence[Array] = (zeros - jnp.inf, zeros, *([zeros] if options.label_smoothing else []))
    chunk_bytes = _REDUCED_BYTES if lowering.reduces_rows else options.chunk_bytes
    results = over_chunks(bias.size, _chunk_columns(zeros, chunk_bytes), add_chunk, carry)
    return [x.reshape(labels.shape) for x in results]


def cotangents(
    h: Array,
    w: Array,
    bias: Array,
    labels: Array,
    *by_row: Array,
    wanted: Sequence[int],
    options: Options,
    lowering: Lowering,
) -> list[Array]:
    """Return cotangents of some operands from the log-sum-exp and those of the statistics."""
    rows, wide = h.reshape(-1, h.shape[-1]), statistics_type(h, w)
    narrow = np.dtype(jnp.promote_types(h.dtype, w.dtype))
    label, lse, *bars = (x.reshape(-1, 1) for x in (labels, *by_row))
    scale = _scale(bars) if narrow == np.float16 else None
    bars = bars if scale is None else [x * scale for x in bars]
    w, axis = lowering.oriented(w), lowering.w.index("v")
    multiply = functools.partial(product, precision=options.precision)

    def to_cotangent(accumulator: Array, *operands: Array) -> Array:
        bias, column, label, lse, lse_bar, label_bar, *sum_bar = operands
        value = logit(accumulator, bias, options.softcap)
        result = lse_bar * jnp.exp(value - lse) + jnp.where(column == label, label_bar, 0)
        return (sum(sum_bar, result) * slope(value, options.softcap)).astype(narrow)

    def unscaled(x: Array) -> Array:
        return x if scale is None else x / scale

    def to_w_cotangent(accumulator: Array) -> Array:
        return unscaled(accumulator).astype(w.dtype)

    def add_chunk(start: Any, size: int, carry: Sequence[Any]) -> Sequence[Any]:
        h_bar, w_bar, bias_bar = carry
        chunk = lax.dynamic_slice_in_dim(w, start, size, axis)
        operands = (*_of_columns(bias, label, start, size), label, lse, *bars)
        logits_bar = multiply(f"rd,{lowering.w}->rv", rows, chunk, to_cotangent, operands)
        if h_bar is not None:
            h_bar = multiply(
                f"rv,{lowering.w}->rd", logits_bar, chunk, jnp.add, (h_bar,), in_place=((0, 0),)
            )
        if w_bar is not None:
            of_chunk = multiply(f"rd,rv->{lowering.w}", rows, logits_bar, to_w_cotangent)
            w_bar = lax.dynamic_update_slice_in_dim(w_bar, of_chunk, start, axis)
        if bias_bar is not None:
            sums = logits_bar.sum(0, dtype=wide)
            bias_bar = lax.dynamic_update_slice_in_dim(bias_bar, sums, start, 0)
        return h_bar, w_bar, bias_bar

    zeros = (jnp.zeros_like(rows, wide), jnp.zeros_like(w), jnp.zeros_like(bias, wide))
    start: Sequence[Any] = tuple(x if i in wanted else None for i, x in enumerate(zeros))
    found = over_chunks(bias.size, _chunk_columns(lse, options.chunk_bytes), add_chunk, start)
    finish = (
        lambda x: unscaled(x).reshape(h.shape).astype(h.dtype),
        lowering.oriented,
        lambda x: unscaled(x).astype(bias.dtype),
    )
    return [finish[i](found[i]) for i in wanted]


def _chunk_columns(of_rows: Array, chunk_bytes: int) -> int:
    columns = chunk_bytes // max(1, of_rows.size * of_rows.dtype.itemsize)
    return max(_MIN_COLUMNS, columns // _COLUMN_MULTIPLE * _COLUMN_MULTIPLE)


def _of_columns(bias: Array, label: Array, start: Any, size: int) -> tuple[Array, Array]:
    """Return the bias and the number of each column of a chunk."""
    column = start + lax.iota(label.dtype, size)
    return lax.dynamic_slice_in_dim(bias, start, size)[None], column[None]


def _scale(bars: Sequence[Array]) -> Array:
    """Return a power of two by which cotangents do not underflow in float16."""
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in bars]))
    # A logit's cotangent is at most three times as large as the largest of its row's.
    exponent = jnp.where(largest > 0, 13 - jnp.frexp(largest)[1], 0)
    return jnp.ldexp(jnp.ones_like(largest), exponent)
