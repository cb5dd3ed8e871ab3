"""The loss of all rows and its gradient with three products, for a part of the rows at a time.

A chunk of rows is multiplied by all columns of ``w``, so that its log-sum-exp is complete before
its cotangents are computed. The epilogue of that product stores the exponential of each logit
relative to a shift, and reduces the rows. A row's exponentials are its probabilities up to a
factor. The element at its label is replaced once the sum of the row is known. Two products take the
exponentials to ``h`` and ``w``: the factor is in the epilogue of one, and in the rows of ``h`` that
the other multiplies.

The cotangent of ``w`` is added up over the chunks in place. Where it has 16 bits it is a sum of two
such numbers, the result and a remainder.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.epilogue.row_reductions import row_max, row_sum
from jax_tilekern.ops.cross_entropy.chunk_loop import over_chunks
from jax_tilekern.ops.cross_entropy.logits import (
    LogitProducts,
    Lowering,
    Options,
    logit,
    statistics_type,
)

# Every chunk reads and writes the cotangent of w, so it has at least this many rows.
_MIN_ROWS = 1024
# Chunks begin at multiples of a tile's height.
_ROW_MULTIPLE = 128
# The shift of the first chunk is estimated from so many rows.
_SAMPLED_ROWS = 16
# Everything is computed again if the shift of a row is farther from its largest logit. Exponentials
# are then below exp(40), and the factors of rows, for 2^40 logits, above exp(-40) / 2^40. Both are
# normal numbers of bfloat16 and float32, whose range is exp(-87) to exp(88).
_MAX_DIFFERENCE = 40.0


class _Carry(NamedTuple):
    """What chunks fill in and add to.

    Attributes
    ----------
    lse, at_label, largest
        Of each row, the log-sum-exp, the logit of the label and the largest logit.
    estimate
        Of the largest logits of the next chunk.
    far
        Whether a row's shift was too far from its largest logit.
    bars
        The cotangents of ``h`` and ``w``, the remainder of the latter, and that of ``bias``.
    """

    lse: Array
    at_label: Array
    largest: Array
    estimate: Array
    far: Array
    bars: tuple[Array | None, Array | None, Array | None, Array | None]


def supports(h: Any, w: Any) -> bool:
    """Whether the types and sizes of a call allow this program.

    float16 lacks the range of the exponentials. TMA cannot read rows of other sizes.
    """
    narrow = np.dtype(jnp.promote_types(h.dtype, w.dtype))
    return narrow in (np.float32, jnp.bfloat16) and all(size % 8 == 0 for size in w.shape)


def loss_and_cotangents(
    h: Array,
    w: Array,
    bias: Array,
    labels: Array,
    weights: Array,
    *,
    z_loss: float,
    wanted: Sequence[int],
    options: Options,
    lowering: Lowering,
) -> list[Array]:
    """Return statistics of the rows, and the cotangents of a weighted sum of their losses.

    Parameters
    ----------
    h, w, bias, labels
        As for :func:`~jax_tilekern.ops.cross_entropy.statistics.statistics`.
    weights
        Shape ``(...)``. The sum is over ``weights * (lse - at_label + z_loss * lse ** 2)``.
    z_loss, options, lowering
        Of the call.
    wanted
        Which of the operands' cotangents are computed, in order: 0, 1, 2.

    Returns
    -------
    list of Array
        Each row's log-sum-exp and the logit of its label, then the cotangents.
    """
    rows, wide = h.reshape(-1, h.shape[-1]), statistics_type(h, w)
    narrow = np.dtype(jnp.promote_types(h.dtype, w.dtype))
    label, weight = labels.reshape(-1), weights.reshape(-1)
    products = LogitProducts(lowering.by_rows, options.precision, wide)
    w = products.oriented(w)
    columns = lax.iota(label.dtype, bias.size)

    def to_exponential(
        accumulator: Array, bias: Array, column: Array, label: Array, shift: Array
    ) -> list[Any]:
        value = logit(accumulator, bias, softcap=options.softcap)
        exponential = jnp.exp(value - shift)
        element = exponential * _slope(value, options.softcap)
        at_label = jnp.where(column == label, value, 0)
        return [element.astype(narrow), row_sum(exponential), row_max(value), row_sum(at_label)]

    def exponentials(h: Array, label: Array, shift: Array) -> list[Array]:
        operands = (bias[None], columns[None], label[:, None], shift[:, None])
        results: list[Array] = products.logits(h, w, to_exponential, operands)
        return results

    def add_chunk(shifts: Array | None, start: Any, size: int, carry: _Carry) -> _Carry:
        h, own_label, own_weight = (_rows_of(x, start, size) for x in (rows, label, weight))
        if shifts is None:
            shift = jnp.full_like(h[:, 0], carry.estimate, wide)
        else:
            shift = _rows_of(shifts, start, size)
        elements, sums, largest, at_label = exponentials(h, own_label, shift)
        lse = shift + jnp.log(sums)
        slope = 1 + 2 * z_loss * lse
        of_label = (slope * jnp.exp(at_label - lse) - 1) * _slope(at_label, options.softcap)
        element = of_label * sums / jnp.where(slope == 0, 1, slope)
        rounded = _rounded(element, narrow)
        elements = _with_labels(elements, own_label, rounded.astype(narrow))
        # The cotangents of a row's logits are `scale * elements`. That of the label is usually the
        # largest: the scale makes up for the rounding of its element.
        scale = own_weight * slope / sums * jnp.where(rounded == 0, 1, element / rounded)
        h_bar, w_bar, remainder, bias_bar = carry.bars
        if h_bar is not None:
            of_chunk = products.h_cotangent(elements, w, to_h_cotangent, (scale[:, None],))
            h_bar = lax.dynamic_update_slice_in_dim(h_bar, of_chunk, start, 0)
        if w_bar is not None:
            scaled = (scale[:, None] * h).astype(narrow)
            if remainder is None:
                operands: tuple[Array, ...] = (w_bar,)
                w_bar = products.w_cotangent(scaled, elements, to_sum, operands, ((0, 0),))
            else:
                operands = (w_bar, remainder)
                in_place = ((0, 0), (1, 1))
                w_bar, remainder = products.w_cotangent(
                    scaled, elements, to_sum_and_remainder, operands, in_place
                )
        if bias_bar is not None:
            bias_bar += (scale[:, None] * elements.astype(wide)).sum(0)
        far = jnp.abs(largest - shift) >= _MAX_DIFFERENCE
        return _Carry(
            lax.dynamic_update_slice_in_dim(carry.lse, lse, start, 0),
            lax.dynamic_update_slice_in_dim(carry.at_label, at_label, start, 0),
            lax.dynamic_update_slice_in_dim(carry.largest, largest, start, 0),
            _finite(largest).mean(),
            carry.far | jnp.any(far & jnp.isfinite(largest)),
            (h_bar, w_bar, remainder, bias_bar),
        )

    def to_h_cotangent(accumulator: Array, scale: Array) -> Array:
        return (accumulator * scale).astype(h.dtype)

    def to_sum(accumulator: Array, total: Array) -> Array:
        return (accumulator + total).astype(total.dtype)

    def to_sum_and_remainder(accumulator: Array, total: Array, remainder: Array) -> list[Array]:
        exact = accumulator + (total.astype(wide) + remainder.astype(wide))
        rounded = exact.astype(total.dtype)
        return [rounded, (exact - rounded.astype(wide)).astype(total.dtype)]

    def all_chunks(shifts: Array | None, estimate: Array) -> _Carry:
        of_rows = jnp.zeros_like(rows[:, 0], wide)
        zeros = (jnp.zeros_like(rows), jnp.zeros_like(w), jnp.zeros_like(bias, wide))
        h_bar, w_bar, bias_bar = (x if i in wanted else None for i, x in enumerate(zeros))
        with_remainder = w_bar is not None and w.dtype.itemsize < wide.itemsize
        remainder = jnp.zeros_like(w) if with_remainder else None
        return over_chunks(
            rows.shape[0],
            _chunk_rows(rows.shape[0], bias.size, narrow, options),
            functools.partial(add_chunk, shifts),
            _Carry(
                *(of_rows, of_rows, of_rows),
                estimate,
                _never(estimate > 0),
                (h_bar, w_bar, remainder, bias_bar),
            ),
        )

    sampled = logit(products.accumulators(rows[:_SAMPLED_ROWS], w), bias, softcap=options.softcap)
    estimate = _finite(sampled.max(1)).mean()
    # If an estimate was far off, everything is computed again, with the largest logits as shifts.
    found = lax.while_loop(
        lambda found: found.far,
        lambda found: all_chunks(_finite(found.largest), found.estimate)._replace(
            far=_never(found.far)
        ),
        all_chunks(None, estimate),
    )
    h_bar, w_bar, _, bias_bar = found.bars
    results = [x.reshape(labels.shape) for x in (found.lse, found.at_label)]
    if h_bar is not None:
        results.append(h_bar.reshape(h.shape))
    if w_bar is not None:
        results.append(products.oriented(w_bar))
    if bias_bar is not None:
        results.append(bias_bar.astype(bias.dtype))
    return results


def _chunk_rows(rows: int, columns: int, narrow: np.dtype[Any], options: Options) -> int:
    """Return the rows of equal chunks, a multiple of a tile's."""
    most = max(_MIN_ROWS, options.chunk_bytes // (columns * narrow.itemsize))
    most = max(_ROW_MULTIPLE, most // _ROW_MULTIPLE * _ROW_MULTIPLE)
    chunks = max(1, math.ceil(rows / most))
    return math.ceil(rows / chunks / _ROW_MULTIPLE) * _ROW_MULTIPLE


def _slope(value: Array, softcap: float | None) -> Array | float:
    """Return the derivative of a logit with respect to what the softcap bounds."""
    return 1.0 if softcap is None else 1 - (value / softcap) ** 2


def _rows_of(x: Array, start: Any, size: int) -> Array:
    return lax.dynamic_slice_in_dim(x, start, size)


def _rounded(x: Array, dtype: np.dtype[Any]) -> Array:
    """Round to another type. XLA omits a conversion to it and back."""
    finfo: Any = jnp.finfo
    info = finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


def _never(far: Array) -> Array:
    """Return false, which varies over the same axes of a mesh."""
    return far & ~far


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, 0)


def _with_labels(elements: Array, label: Array, value: Array) -> Array:
    """Replace an element of each row, if its label is one of the columns."""
    rows, columns = elements.shape
    position = jnp.where((label >= 0) & (label < columns), label, columns)
    row = lax.iota(position.dtype, rows)
    return elements.at[row, position].set(
        value, mode="drop", unique_indices=True, indices_are_sorted=True
    )
