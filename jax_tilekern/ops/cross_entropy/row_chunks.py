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
from jax_tilekern.ops.cross_entropy.logits import (
    Lowering,
    Options,
    logit,
    over_chunks,
    product,
    row_losses,
    slope,
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
    """What chunks fill in and add to: of each row its loss and largest logit, and the gradient."""

    losses: Array
    largest: Array
    # What the largest logits of the next chunk are about.
    estimate: Array
    # Whether a row's shift was too far from its largest logit.
    far: Array
    # The cotangents of h, w and bias, and the remainder of that of w.
    bars: list[Any]


def supports(h: Any, w: Any, options: Options) -> bool:
    """Whether the types and sizes of a call allow this program."""
    # float16 lacks the range of the exponentials. TMA cannot read rows of other sizes. Smoothed
    # labels add to all elements.
    has_range = jnp.promote_types(h.dtype, w.dtype) in (np.float32, jnp.bfloat16)
    return has_range and all(x % 8 == 0 for x in w.shape) and not options.label_smoothing


def losses_and_cotangents(
    h: Array,
    w: Array,
    bias: Array,
    labels: Array,
    weights: Array,
    *,
    wanted: Sequence[int],
    options: Options,
    lowering: Lowering,
) -> list[Array]:
    """Return the losses of the rows, and cotangents of their sum by weights."""
    rows, wide = h.reshape(-1, h.shape[-1]), statistics_type(h, w)
    narrow = np.dtype(jnp.promote_types(h.dtype, w.dtype))
    of_row = labels.reshape(-1), weights.reshape(-1)
    w, softcap = lowering.oriented(w), options.softcap
    columns = lax.iota(labels.dtype, bias.size)[None]
    multiply = functools.partial(product, precision=options.precision)

    def to_exponential(
        accumulator: Array, bias: Array, column: Array, label: Array, shift: Array
    ) -> list[Any]:
        value = logit(accumulator, bias, softcap)
        exponential = jnp.exp(value - shift)
        element = (exponential * slope(value, softcap)).astype(narrow)
        at_label = jnp.where(column == label, value, 0)
        return [element, row_sum(exponential), row_max(value), row_sum(at_label)]

    def to_h_cotangent(accumulator: Array, scale: Array) -> Array:
        return (accumulator * scale).astype(h.dtype)

    def to_sum(accumulator: Array, total: Array) -> Array:
        return (accumulator + total).astype(total.dtype)

    def to_sum_and_remainder(accumulator: Array, total: Array, remainder: Array) -> list[Array]:
        exact = accumulator + (total.astype(wide) + remainder.astype(wide))
        rounded = exact.astype(total.dtype)
        return [rounded, (exact - rounded.astype(wide)).astype(total.dtype)]

    def add_chunk(shifts: Array | None, start: Any, size: int, carry: _Carry) -> _Carry:
        h, label, weight = (lax.dynamic_slice_in_dim(x, start, size) for x in (rows, *of_row))
        shift = jnp.full_like(h[:, 0], carry.estimate, wide)
        if shifts is not None:
            shift = lax.dynamic_slice_in_dim(shifts, start, size)
        operands = (bias[None], columns, label[:, None], shift[:, None])
        elements, sums, largest, at_label = multiply(
            f"rd,{lowering.w}->rv", h, w, to_exponential, operands
        )
        lse = shift + jnp.log(sums)
        lse_bar = 1 + 2 * options.z_loss * lse
        of_label = (lse_bar * jnp.exp(at_label - lse) - 1) * slope(at_label, softcap)
        element = of_label * sums / jnp.where(lse_bar == 0, 1, lse_bar)
        rounded = _rounded(element, narrow)
        elements = elements.at[lax.iota(label.dtype, size), label].set(
            rounded.astype(narrow), mode="drop", unique_indices=True, indices_are_sorted=True,
            wrap_negative_indices=False,
        )  # fmt: skip
        # The cotangents of a row's logits are `scale * elements`. That of the label is usually the
        # largest: the scale makes up for the rounding of its element.
        scale = weight * lse_bar / sums * jnp.where(rounded == 0, 1, element / rounded)
        h_bar, w_bar, bias_bar, remainder = carry.bars
        if h_bar is not None:
            of_chunk = multiply(
                f"rv,{lowering.w}->rd", elements, w, to_h_cotangent, (scale[:, None],)
            )
            h_bar = lax.dynamic_update_slice_in_dim(h_bar, of_chunk, start, 0)
        if w_bar is not None:
            scaled, dims = (scale[:, None] * h).astype(narrow), f"rd,rv->{lowering.w}"
            add = functools.partial(multiply, dims, scaled, elements)
            if remainder is None:
                w_bar = add(to_sum, (w_bar,), in_place=((0, 0),))
            else:
                w_bar, remainder = add(
                    to_sum_and_remainder, (w_bar, remainder), in_place=((0, 0), (1, 1))
                )
        if bias_bar is not None:
            bias_bar += (scale[:, None] * elements.astype(wide)).sum(0)
        far = (jnp.abs(largest - shift) >= _MAX_DIFFERENCE) & jnp.isfinite(largest)
        losses = row_losses(options, lse, at_label)
        return _Carry(
            lax.dynamic_update_slice_in_dim(carry.losses, losses, start, 0),
            lax.dynamic_update_slice_in_dim(carry.largest, largest, start, 0),
            _finite(largest).mean(),
            carry.far | jnp.any(far),
            [h_bar, w_bar, bias_bar, remainder],
        )

    def all_chunks(shifts: Array | None, estimate: Array) -> _Carry:
        of_rows = jnp.zeros_like(rows[:, 0], wide)
        zeros = (jnp.zeros_like(rows), jnp.zeros_like(w), jnp.zeros_like(bias, wide))
        bars = [x if i in wanted else None for i, x in enumerate(zeros)]
        with_remainder = 1 in wanted and w.dtype.itemsize < wide.itemsize
        bars.append(jnp.zeros_like(w) if with_remainder else None)
        # The condition varies over the same axes of a mesh as the estimate.
        never = (estimate > 0) & False
        return over_chunks(
            rows.shape[0],
            _chunk_rows(rows.shape[0], bias.size * narrow.itemsize, options),
            functools.partial(add_chunk, shifts),
            _Carry(of_rows, of_rows, estimate, never, bars),
        )

    sampled = multiply(f"rd,{lowering.w}->rv", rows[:_SAMPLED_ROWS], w, lambda x: x)
    estimate = _finite(logit(sampled, bias, softcap).max(1)).mean()
    # If an estimate was far off, everything is computed again, with the largest logits as shifts.
    found = lax.while_loop(
        lambda found: found.far,
        lambda found: all_chunks(_finite(found.largest), found.estimate)._replace(
            far=found.far & False
        ),
        all_chunks(None, estimate),
    )
    finish = (
        lambda x: x.reshape(h.shape),
        lowering.oriented,
        lambda x: x.astype(bias.dtype),
    )
    return [found.losses.reshape(labels.shape), *(finish[i](found.bars[i]) for i in wanted)]


def _chunk_rows(rows: int, row_bytes: int, options: Options) -> int:
    """Return the rows of equal chunks, a multiple of a tile's."""
    most = max(_MIN_ROWS, options.chunk_bytes // row_bytes)
    most = max(_ROW_MULTIPLE, most // _ROW_MULTIPLE * _ROW_MULTIPLE)
    chunks = max(1, math.ceil(rows / most))
    return math.ceil(rows / chunks / _ROW_MULTIPLE) * _ROW_MULTIPLE


def _rounded(x: Array, dtype: np.dtype[Any]) -> Array:
    """Round to another type. XLA omits a conversion to it and back."""
    finfo: Any = jnp.finfo
    info = finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


def _finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, 0)
