"""Softmax statistics of ``h @ w + bias``, and their gradient, with a part of the logits at a time.

The vocabulary is visited in chunks of columns of ``w``. On a GPU the statistics of a chunk are
reductions in the epilogue of its product, so that its logits are in memory only where no kernel
reduces them. The gradient multiplies each chunk once more and turns it into the logits' cotangent,
which two products take to the operands. Only a chunk is ever in memory, and everything but the
operands of products is in float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.epilogue.row_reductions import RowReduction, row_logsumexp, row_sum
from jax_tilekern.interop import compat
from jax_tilekern.ops.contraction import contract
from jax_tilekern.ops.fused_contraction import contract_with_epilogue
from jax_tilekern.plans.gemm.contraction import Contraction

Carry = TypeVar("Carry")
_Statistics = tuple[Array, ...]
_Cotangents = tuple[Array | None, ...]

# A product needs this many columns to be efficient, however many rows it has.
_MIN_COLUMNS = 2048
# Chunks begin at multiples of a tile's width.
_COLUMN_MULTIPLE = 256

# Labels of the contractions.
_ROW, _FEATURE, _COLUMN = range(3)
_H, _LOGITS = (_ROW, _FEATURE), (_ROW, _COLUMN)


class Options(NamedTuple):
    """What a call depends on beside arrays.

    Attributes
    ----------
    softcap
        Bounds logits by ``softcap * tanh(logit / softcap)``.
    precision
        Of the products, canonical.
    smoothed
        Whether the sums of the logits are among the statistics.
    chunk_bytes
        Size of a chunk of logits. It is exceeded where a chunk would have too few columns.
    """

    softcap: float | None
    precision: Any
    smoothed: bool
    chunk_bytes: int


class Lowering(NamedTuple):
    """What is known of a call when it is lowered.

    Attributes
    ----------
    by_rows
        Whether ``w`` is the transpose of an array in memory, which has a row for each label.
    on_gpu
        Whether it is lowered for a GPU.
    """

    by_rows: bool
    on_gpu: bool


def statistics_type(h: Any, w: Any) -> np.dtype[Any]:
    """Return the type of logits and statistics."""
    return np.dtype(jnp.promote_types(jnp.promote_types(h.dtype, w.dtype), jnp.float32))


# The elementwise parts, each a function of the accumulator of a product and of one element of each
# operand.


def logit(accumulator: Array, bias: Array, *, softcap: float | None) -> Array:
    """Return the logit of an accumulator."""
    raw = accumulator + bias.astype(accumulator.dtype)
    return raw if softcap is None else softcap * jnp.tanh(raw / softcap)


def logit_cotangent(
    accumulator: Array,
    bias: Array,
    column: Array,
    label: Array,
    lse: Array,
    lse_bar: Array,
    label_bar: Array,
    sum_bar: Array | None = None,
    *,
    softcap: float | None,
) -> Array:
    """Return the cotangent of an accumulator from those of its row's statistics."""
    value = logit(accumulator, bias, softcap=softcap)
    result = lse_bar * jnp.exp(value - lse) + jnp.where(column == label, label_bar, 0)
    if sum_bar is not None:
        result += sum_bar
    return result if softcap is None else result * (1 - (value / softcap) ** 2)


class _Weights(NamedTuple):
    """The orientation in which ``w`` lies in memory, and the products with its chunks.

    Attributes
    ----------
    by_rows
        As in :class:`Lowering`.
    precision
        Of the products.
    wide
        Type of the accumulators.
    """

    by_rows: bool
    precision: Any
    wide: np.dtype[Any]

    @property
    def _labels(self) -> tuple[int, int]:
        return (_COLUMN, _FEATURE) if self.by_rows else (_FEATURE, _COLUMN)

    @property
    def _axis(self) -> int:
        return 0 if self.by_rows else 1

    def oriented(self, w: Array) -> Array:
        """Return ``w`` of shape ``(d, v)`` as it lies in memory, or the reverse."""
        return w.T if self.by_rows else w

    def chunk(self, w: Array, start: Any, size: int) -> Array:
        return lax.dynamic_slice_in_dim(w, start, size, self._axis)

    def with_chunk(self, w: Array, chunk: Array, start: Any) -> Array:
        return lax.dynamic_update_slice_in_dim(w, chunk, start, self._axis)

    def logits(
        self, h: Array, chunk: Array, epilogue: Callable[..., Any], operands: Sequence[Array]
    ) -> Any:
        """Return ``epilogue(accumulator, *operands)`` for each element of ``h @ chunk``."""
        size = chunk.shape[self._axis]
        labels = Contraction(_H, self._labels, _LOGITS)
        return self._fused(h, chunk, labels, (h.shape[0], size), epilogue, operands)

    def add_h_cotangent(self, h_bar: Array, logits_bar: Array, chunk: Array) -> Array:
        """Add the cotangent of ``h`` that belongs to a chunk."""
        labels = Contraction(_LOGITS, self._labels, _H)
        result: Array = self._fused(logits_bar, chunk, labels, h_bar.shape, jnp.add, (h_bar,))
        return result

    def w_cotangent(self, h: Array, logits_bar: Array, out_dtype: np.dtype[Any]) -> Array:
        labels = Contraction(_H, _LOGITS, self._labels)
        return self._contracted(h, logits_bar, labels, out_dtype)

    def _contracted(
        self, lhs: Array, rhs: Array, labels: Contraction, out_dtype: np.dtype[Any]
    ) -> Array:
        return contract(lhs, rhs, labels, precision=self.precision, out_dtype=out_dtype)

    def _fused(
        self,
        lhs: Array,
        rhs: Array,
        labels: Contraction,
        shape: tuple[int, ...],
        epilogue: Callable[..., Any],
        operands: Sequence[Array],
    ) -> Any:
        return contract_with_epilogue(
            lhs,
            rhs,
            labels,
            precision=self.precision,
            product=self.wide,
            shape=shape,
            epilogue=epilogue,
            operands=operands,
        )


# The loops.


def statistics(
    h: Array, w: Array, bias: Array, labels: Array, *, options: Options, lowering: Lowering
) -> list[Array]:
    """Return each row's log-sum-exp, the logit of its label, and perhaps the sum of its logits.

    Parameters
    ----------
    h
        Shape ``(..., d)``.
    w
        Shape ``(d, v)``.
    bias
        Shape ``(v,)``.
    labels
        Integers of shape ``(...)``. The logit of a label that is no column is 0.
    options, lowering
        Of the call.
    """
    rows, wide = _flat(h), statistics_type(h, w)
    label = labels.reshape(-1)
    weights = _Weights(lowering.by_rows, options.precision, wide)

    def value_of(accumulator: Array, bias: Array) -> Array:
        return logit(accumulator, bias, softcap=options.softcap)

    def of_row(accumulator: Array, bias: Array, column: Array, label: Array) -> list[RowReduction]:
        value = value_of(accumulator, bias)
        results = [row_logsumexp(value), row_sum(jnp.where(column == label, value, 0))]
        return [*results, row_sum(value)] if options.smoothed else results

    w = weights.oriented(w)

    def of_chunk(start: Any, size: int) -> Sequence[Array]:
        chunk, bias_row = weights.chunk(w, start, size), _part(bias, start, size)[None]
        if lowering.on_gpu:
            columns = (start + lax.iota(label.dtype, size))[None]
            results: Sequence[Array] = weights.logits(
                rows, chunk, of_row, (bias_row, columns, label[:, None])
            )
            return results
        # XLA reads an element of each row where a reduction would take a pass.
        logits = weights.logits(rows, chunk, value_of, (bias_row,))
        results = [jax.nn.logsumexp(logits, 1), _element(logits, label - start)]
        return [*results, logits.sum(1)] if options.smoothed else results

    def add_chunk(start: Any, size: int, carry: _Statistics) -> _Statistics:
        lse_of_chunk, *sums_of_chunk = of_chunk(start, size)
        lse, *sums = carry
        sums = [x + y for x, y in zip(sums, sums_of_chunk, strict=True)]
        return jnp.logaddexp(lse, lse_of_chunk), *sums

    zeros = jnp.zeros_like(rows[:, 0], wide)
    results = _over_chunks(
        bias.size,
        _chunk_columns(rows, wide, options),
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
    weights = _Weights(lowering.by_rows, options.precision, wide)
    w = weights.oriented(w)

    def to_cotangent(*elements: Array) -> Array:
        return logit_cotangent(*elements, softcap=options.softcap).astype(narrow)

    def add_chunk(start: Any, size: int, carry: _Cotangents) -> _Cotangents:
        h_bar, w_bar, bias_bar = carry
        chunk = weights.chunk(w, start, size)
        of_columns = (_part(bias, start, size), start + lax.iota(labels.dtype, size))
        operands = (*(x[None] for x in of_columns), *of_rows)
        logits_bar = weights.logits(rows, chunk, to_cotangent, operands)
        if h_bar is not None:
            h_bar = weights.add_h_cotangent(h_bar, logits_bar, chunk)
        if w_bar is not None:
            of_chunk = weights.w_cotangent(rows, logits_bar, w.dtype if scale is None else wide)
            w_bar = weights.with_chunk(w_bar, _unscaled(of_chunk, scale).astype(w.dtype), start)
        if bias_bar is not None:
            sums = logits_bar.sum(0, dtype=wide)
            bias_bar = lax.dynamic_update_slice_in_dim(bias_bar, sums, start, 0)
        return h_bar, w_bar, bias_bar

    zeros = (jnp.zeros_like(rows, wide), jnp.zeros_like(w), jnp.zeros_like(bias, wide))
    h_bar, w_bar, bias_bar = _over_chunks(
        bias.size,
        _chunk_columns(rows, wide, options),
        add_chunk,
        tuple(x if i in wanted else None for i, x in enumerate(zeros)),
        # A kernel on a GPU writes the sum of h_bar beside the h_bar that it reads. Of two chunks
        # the second writes it back, so that nothing is copied.
        unroll=2 if lowering.on_gpu else 1,
    )
    results = []
    if h_bar is not None:
        results.append(_unscaled(h_bar, scale).reshape(h.shape).astype(h.dtype))
    if w_bar is not None:
        results.append(weights.oriented(w_bar))
    if bias_bar is not None:
        results.append(_unscaled(bias_bar, scale).astype(bias.dtype))
    return results


def _over_chunks(
    size: int,
    chunk: int,
    body: Callable[[Any, int, Carry], Carry],
    carry: Carry,
    *,
    unroll: int = 1,
) -> Carry:
    """Run ``body(start, size, carry)`` for equal chunks, and for what remains."""

    def step(state: tuple[Any, Carry], size: int) -> tuple[Any, Carry]:
        # Chunks wait for each other: logits made early would be in memory beside earlier ones.
        start, carry = lax.optimization_barrier(state)
        return start + size, body(start, size, carry)

    count, remainder = divmod(size, chunk)
    if count == 0 or (count == 1 and not remainder):
        return body(0, size, carry)
    # In a shard_map the barrier makes all that passes it vary over the same axes (jax 0.10).
    first, *_ = compat.unify_varying(jnp.int32(0), *jax.tree.leaves(carry))
    state = lax.fori_loop(
        0, count, lambda _, state: step(state, chunk), (first, carry), unroll=unroll
    )
    return (step(state, remainder) if remainder else state)[1]


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
