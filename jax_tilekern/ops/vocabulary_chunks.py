"""Softmax statistics of ``h @ w + bias``, and their gradient, with a part of the logits at a time.

The vocabulary is visited in chunks of columns of ``w``. Statistics are carried online: each row
has a running maximum and a running sum of exponentials (Milakov and Gimelshein, arXiv:1805.02867).
The gradient multiplies each chunk once more and turns it into the logits' cotangent, which two
products take to the operands. Only a chunk is ever in memory, and everything but the operands of
products is in float32 at least.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.ops.contraction import contract
from jax_tilekern.plans.gemm.contraction import Contraction

Carry = TypeVar("Carry")
_Statistics = tuple[Array, Array, Array, Array]
_Cotangents = tuple[Array, Array, Array]

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
    chunk_bytes
        Size of a chunk of logits. It is exceeded where a chunk would have too few columns.
    """

    softcap: float | None
    precision: Any
    chunk_bytes: int


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
    sum_bar: Array,
    *,
    softcap: float | None,
) -> Array:
    """Return the cotangent of an accumulator from those of its row's statistics."""
    value = logit(accumulator, bias, softcap=softcap)
    result = lse_bar * jnp.exp(value - lse) + sum_bar
    result += jnp.where(column == label, label_bar, 0)
    return result if softcap is None else result * (1 - (value / softcap) ** 2)


class _Weights(NamedTuple):
    """The orientation in which ``w`` lies in memory, and the products with its chunks.

    Attributes
    ----------
    by_rows
        Whether a row of the array belongs to each label, as in a table of embeddings.
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
        self, h: Array, chunk: Array, epilogue: Callable[..., Array], operands: Sequence[Array]
    ) -> Array:
        """Return ``epilogue(accumulator, *operands)`` for each element of ``h @ chunk``."""
        labels = Contraction(_H, self._labels, _LOGITS)
        return epilogue(self._contracted(h, chunk, labels, self.wide), *operands)

    def h_cotangent(self, logits_bar: Array, chunk: Array) -> Array:
        labels = Contraction(_LOGITS, self._labels, _H)
        return self._contracted(logits_bar, chunk, labels, self.wide)

    def w_cotangent(self, h: Array, logits_bar: Array, out_dtype: np.dtype[Any]) -> Array:
        labels = Contraction(_H, _LOGITS, self._labels)
        return self._contracted(h, logits_bar, labels, out_dtype)

    def _contracted(
        self, lhs: Array, rhs: Array, labels: Contraction, out_dtype: np.dtype[Any]
    ) -> Array:
        return contract(lhs, rhs, labels, precision=self.precision, out_dtype=out_dtype)


# The loops.


def statistics(
    h: Array, w: Array, bias: Array, labels: Array, *, options: Options, by_rows: bool
) -> tuple[Array, Array, Array]:
    """Return each row's log-sum-exp, the logit of its label, and the sum of its logits.

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
    options
        Of the call.
    by_rows
        Whether ``w`` lies in memory transposed.
    """
    rows, wide = _flat(h), statistics_type(h, w)
    label = labels.reshape(-1)
    weights = _Weights(by_rows, options.precision, wide)
    epilogue = functools.partial(logit, softcap=options.softcap)
    w = weights.oriented(w)

    def add_chunk(start: Any, size: int, carry: _Statistics) -> _Statistics:
        top, scaled, at_label, total = carry
        chunk = weights.chunk(w, start, size)
        logits = weights.logits(rows, chunk, epilogue, (_part(bias, start, size)[None],))
        new_top = jnp.maximum(top, logits.max(1))
        shift = _finite(new_top)
        scaled = scaled * jnp.exp(top - shift) + jnp.exp(logits - shift[:, None]).sum(1)
        at_label = at_label + _element(logits, label - start)
        return new_top, scaled, at_label, total + logits.sum(1)

    zeros = jnp.zeros_like(rows[:, 0], wide)
    top, scaled, at_label, total = _over_chunks(
        bias.size,
        _chunk_columns(rows, wide, options),
        add_chunk,
        (jnp.full_like(zeros, -jnp.inf), zeros, zeros, zeros),
    )
    lse = _finite(top) + jnp.log(scaled)
    return tuple(x.reshape(labels.shape) for x in (lse, at_label, total))  # type: ignore[return-value]


def cotangents(
    h: Array,
    w: Array,
    bias: Array,
    labels: Array,
    lse: Array,
    lse_bar: Array,
    label_bar: Array,
    sum_bar: Array,
    *,
    options: Options,
    by_rows: bool,
) -> tuple[Array, Array, Array]:
    """Return the cotangents of ``h``, ``w`` and ``bias`` from those of the statistics.

    Parameters
    ----------
    h, w, bias, labels, options, by_rows
        As in :func:`statistics`.
    lse
        The log-sum-exp that :func:`statistics` returned.
    lse_bar, label_bar, sum_bar
        Cotangents of the statistics, each of the shape of ``labels``.
    """
    rows, wide = _flat(h), statistics_type(h, w)
    narrow = np.dtype(jnp.promote_types(h.dtype, w.dtype))
    bars, scale = _in_range((lse_bar, label_bar, sum_bar), narrow)
    of_rows = [x.reshape(-1, 1) for x in (labels, lse, *bars)]
    weights = _Weights(by_rows, options.precision, wide)
    w = weights.oriented(w)

    def epilogue(*elements: Array) -> Array:
        return logit_cotangent(*elements, softcap=options.softcap).astype(narrow)

    def add_chunk(start: Any, size: int, carry: _Cotangents) -> _Cotangents:
        h_bar, w_bar, bias_bar = carry
        chunk = weights.chunk(w, start, size)
        of_columns = (_part(bias, start, size), start + lax.iota(labels.dtype, size))
        operands = (*(x[None] for x in of_columns), *of_rows)
        logits_bar = weights.logits(rows, chunk, epilogue, operands)
        h_bar = h_bar + weights.h_cotangent(logits_bar, chunk)
        of_chunk = weights.w_cotangent(rows, logits_bar, w.dtype if scale is None else wide)
        w_bar = weights.with_chunk(w_bar, _unscaled(of_chunk, scale).astype(w.dtype), start)
        sums = logits_bar.sum(0, dtype=wide)
        return h_bar, w_bar, lax.dynamic_update_slice_in_dim(bias_bar, sums, start, 0)

    h_bar, w_bar, bias_bar = _over_chunks(
        bias.size,
        _chunk_columns(rows, wide, options),
        add_chunk,
        (jnp.zeros_like(rows, wide), jnp.zeros_like(w), jnp.zeros_like(bias, wide)),
    )
    h_bar, bias_bar = _unscaled(h_bar, scale), _unscaled(bias_bar, scale)
    h_bar = h_bar.reshape(h.shape).astype(h.dtype)
    return h_bar, weights.oriented(w_bar), bias_bar.astype(bias.dtype)


def _over_chunks(
    size: int, chunk: int, body: Callable[[Any, int, Carry], Carry], carry: Carry
) -> Carry:
    """Run ``body(start, size, carry)`` for equal chunks, and for what remains."""
    count = size // chunk
    if count == 1:
        carry = body(0, chunk, carry)
    elif count:
        carry = lax.fori_loop(0, count, lambda i, x: body(i * chunk, chunk, x), carry)
    remainder = size - count * chunk
    if not remainder:
        return carry
    # The last logits wait for the loop: made before it they would be in memory beside its own.
    start, carry = lax.optimization_barrier((count * chunk, carry))
    return body(start, remainder, carry)


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


def _finite(top: Array) -> Array:
    """Return the shift of exponents: a row without a finite maximum needs none."""
    return jnp.where(jnp.isfinite(top), top, 0)


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
