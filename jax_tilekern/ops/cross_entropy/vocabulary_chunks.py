"""Softmax statistics of ``h @ w + bias``, and their gradient, with some columns at a time.

The statistics of a chunk of logits are reductions in the epilogue of its product, so that its
logits are in memory only where no kernel reduces them. The gradient multiplies each chunk once more
and turns it into the logits' cotangent, which two products take to the operands. Everything but the
operands of products is in float32 at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from jax_tilekern.epilogue.row_reductions import row_logsumexp, row_sum
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.cross_entropy.logits import Layer, over_chunks

# A product needs this many columns to be efficient, however many rows it has.
_MIN_COLUMNS = 2048
# Chunks begin at multiples of a tile's width.
_COLUMN_MULTIPLE = 256
# Size of a chunk of logits that kernels reduce. They are not in memory, so that a chunk only bounds
# the partial results of the reductions.
_REDUCED_BYTES = 2 << 30


def statistics(layer: Layer, labels: Array) -> list[Array]:
    """Return each row's log-sum-exp, the logit of its label, and perhaps the sum of its logits."""
    rows, table, options = layer.rows, layer.table, layer.options
    label = labels.reshape(-1, 1)

    def row_statistics(accumulator: Array, bias: Array, column: Array, label: Array) -> list[Any]:
        logit = options.logit(accumulator, bias)
        results = [row_logsumexp(logit), row_sum(jnp.where(column == label, logit, 0))]
        return [*results, row_sum(logit)] if options.label_smoothing else results

    def chunk_statistics(start: Any, size: int) -> Sequence[Array]:
        chunk, bias, column = _columns(layer, table, label, start, size)
        if layer.reduces_rows:
            results: Sequence[Array] = layer.product(
                "rd,dv->rv", rows, chunk, row_statistics, bias, column, label
            )
            return results
        # XLA reads an element of each row where a reduction would take a pass.
        logits = layer.product("rd,dv->rv", rows, chunk, options.logit, bias)
        label_logit = logits.at[lax.iota(label.dtype, label.size), label[:, 0] - start].get(
            mode="fill", fill_value=0, wrap_negative_indices=False
        )
        results = [jax.nn.logsumexp(logits, 1), label_logit]
        return [*results, logits.sum(1)] if options.label_smoothing else results

    def add_chunk(start: Any, size: int, carry: Sequence[Array]) -> Sequence[Array]:
        lse, *sums = chunk_statistics(start, size)
        return jnp.logaddexp(carry[0], lse), *map(jnp.add, carry[1:], sums)

    zeros = jnp.zeros_like(rows[:, 0], layer.wide)
    carry: Sequence[Array] = (zeros - jnp.inf, zeros, *([zeros] if options.label_smoothing else []))
    chunk_bytes = _REDUCED_BYTES if layer.reduces_rows else options.chunk_bytes
    results = over_chunks(layer.bias.size, _chunk_columns(zeros, chunk_bytes), add_chunk, carry)
    return [x.reshape(labels.shape) for x in results]


def cotangents(
    layer: Layer, labels: Array, *row_values: Array, wanted: Sequence[int]
) -> list[Array]:
    """Return cotangents of some operands from the log-sum-exp and those of the statistics."""
    rows, table, options = layer.rows, layer.table, layer.options
    label = labels.reshape(-1, 1)
    narrow, w_dtype = layer.narrow, layer.w.dtype
    lse, *statistics_bar = (x.reshape(-1, 1) for x in row_values)
    scale = _scale(statistics_bar) if narrow == np.float16 else None
    if scale is not None:
        statistics_bar = [x * scale for x in statistics_bar]

    def to_cotangent(accumulator: Array, *operands: Array) -> Array:
        bias, column, label, lse, lse_bar, label_bar, *sum_bar = operands
        logit = options.logit(accumulator, bias)
        result = lse_bar * jnp.exp(logit - lse) + jnp.where(column == label, label_bar, 0)
        return (sum(sum_bar, result) * options.slope(logit)).astype(narrow)

    def unscaled(x: Array) -> Array:
        return x if scale is None else x / scale

    def to_w_cotangent(accumulator: Array) -> Array:
        return unscaled(accumulator).astype(w_dtype)

    def add_chunk(start: Any, size: int, carry: Sequence[Any]) -> Sequence[Any]:
        h_bar, w_bar, bias_bar = carry
        chunk, bias, column = _columns(layer, table, label, start, size)
        operands = (bias, column, label, lse, *statistics_bar)
        logits_bar = layer.product("rd,dv->rv", rows, chunk, to_cotangent, *operands)
        if h_bar is not None:
            h_bar = layer.product("rv,dv->rd", logits_bar, chunk, jnp.add, h_bar, in_place=True)
        if w_bar is not None:
            columns_bar = layer.product("rd,rv->dv", rows, logits_bar, to_w_cotangent)
            axis = layer.w_dims.index("v")
            w_bar = lax.dynamic_update_slice_in_dim(w_bar, columns_bar, start, axis)
        if bias_bar is not None:
            sums = logits_bar.sum(0, dtype=layer.wide)
            bias_bar = lax.dynamic_update_slice_in_dim(bias_bar, sums, start, 0)
        return h_bar, w_bar, bias_bar

    zeros: Sequence[Any] = tuple(layer.zero_cotangents(wanted, layer.wide))
    columns = _chunk_columns(lse, options.chunk_bytes)
    h_bar, w_bar, bias_bar = over_chunks(layer.bias.size, columns, add_chunk, zeros)
    h_bar, bias_bar = (None if x is None else unscaled(x) for x in (h_bar, bias_bar))
    return layer.cotangents(wanted, (h_bar, w_bar, bias_bar))


def _chunk_columns(row_values: Array, chunk_bytes: int) -> int:
    columns = chunk_bytes // max(1, row_values.size * row_values.dtype.itemsize)
    return max(_MIN_COLUMNS, columns // _COLUMN_MULTIPLE * _COLUMN_MULTIPLE)


def _columns(
    layer: Layer, table: Array, label: Array, start: Any, size: int
) -> tuple[Array, Array, Array]:
    """Return a chunk of ``w``, and the bias and the number of each of its columns."""
    chunk = lax.dynamic_slice_in_dim(table, start, size, layer.w_dims.index("v"))
    column = start + lax.iota(label.dtype, size)
    return chunk, lax.dynamic_slice_in_dim(layer.bias, start, size)[None], column[None]


def _scale(statistics_bar: Sequence[Array]) -> Array:
    """Return a power of two by which cotangents do not underflow in float16."""
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in statistics_bar]))
    # A logit's cotangent is at most three times as large as the largest of its row's.
    exponent = jnp.where(largest > 0, 13 - jnp.frexp(largest)[1], 0)
    return jnp.ldexp(jnp.ones_like(largest), exponent)
