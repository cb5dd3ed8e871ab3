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
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.epilogue.row_reductions import row_max, row_sum
from jax_tilekern.ops.cross_entropy.logits import Layer, over_chunks, row_losses
from jax_tilekern.plans.policy import current_policy, policy

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
    """What chunks fill in and add to: the loss, the largest logit of each row, the gradient."""

    total: Array
    largest: Array
    # What the largest logits of the next chunk are about.
    estimate: Array
    # Whether a row's shift is too far from its largest logit.
    out_of_range: Array
    # Those of h, w and bias.
    cotangents: list[Any]
    # What the cotangent of w lacks, of the same type.
    w_remainder: Array | None


def supports(layer: Layer) -> bool:
    """Whether the types and sizes of a call allow this program."""
    # float16 lacks the range of the exponentials. TMA cannot read rows of other sizes. Smoothed
    # labels add to all elements.
    has_range = layer.narrow in (np.float32, jnp.bfloat16)
    is_aligned = all(x % 8 == 0 for x in layer.w.shape)
    return has_range and is_aligned and not layer.options.label_smoothing


def _memory_of_chunks() -> AbstractContextManager[None]:
    """Return a context in which a product is a kernel, because XLA's stores the accumulators."""
    return policy("kernels") if current_policy() == "auto" else nullcontext()


def loss_and_cotangents(
    layer: Layer, labels: Array, weights: Array, *, wanted: Sequence[int]
) -> list[Array]:
    """Return the sum of the losses of the rows by weights, and cotangents of some operands."""
    rows, table, options = layer.rows, layer.table, layer.options
    narrow, wide, h_dtype = layer.narrow, layer.wide, layer.h.dtype
    labels, weights = labels.reshape(-1), weights.reshape(-1)
    columns = lax.iota(labels.dtype, layer.bias.size)[None]

    def to_exponential(
        accumulator: Array, bias: Array, column: Array, label: Array, shift: Array
    ) -> list[Any]:
        logit = options.logit(accumulator, bias)
        exponential = jnp.exp(logit - shift)
        element = (exponential * options.slope(logit)).astype(narrow)
        label_logit = jnp.where(column == label, logit, 0)
        return [element, row_sum(exponential), row_max(logit), row_sum(label_logit)]

    def to_h_cotangent(accumulator: Array, scale: Array) -> Array:
        return (accumulator * scale).astype(h_dtype)

    def to_sum(accumulator: Array, total: Array) -> Array:
        return (accumulator + total).astype(total.dtype)

    def to_sum_and_remainder(accumulator: Array, total: Array, remainder: Array) -> list[Array]:
        exact = accumulator + (total.astype(wide) + remainder.astype(wide))
        rounded = exact.astype(total.dtype)
        return [rounded, (exact - rounded.astype(wide)).astype(total.dtype)]

    def add_chunk(shifts: Array | None, start: Any, size: int, carry: _Carry) -> _Carry:
        h, label, weight = (
            lax.dynamic_slice_in_dim(x, start, size) for x in (rows, labels, weights)
        )
        shift = jnp.full_like(h[:, 0], carry.estimate, wide)
        if shifts is not None:
            shift = lax.dynamic_slice_in_dim(shifts, start, size)
        operands = (layer.bias[None], columns, label[:, None], shift[:, None])
        elements, sums, largest, label_logit = layer.product(
            "rd,dv->rv", h, table, to_exponential, *operands
        )
        lse = shift + jnp.log(sums)
        lse_bar = 1 + 2 * options.z_loss * lse
        label_bar = (lse_bar * jnp.exp(label_logit - lse) - 1) * options.slope(label_logit)
        element = label_bar * sums / jnp.where(lse_bar == 0, 1, lse_bar)
        rounded = _rounded(element, narrow)
        elements = elements.at[lax.iota(label.dtype, size), label].set(
            rounded.astype(narrow), mode="drop", unique_indices=True, indices_are_sorted=True,
            wrap_negative_indices=False,
        )  # fmt: skip
        # The cotangents of a row's logits are `scale * elements`. That of the label is usually the
        # largest: the scale makes up for the rounding of its element.
        scale = weight * lse_bar / sums * jnp.where(rounded == 0, 1, element / rounded)
        h_bar, w_bar, bias_bar = carry.cotangents
        remainder = carry.w_remainder
        if h_bar is not None:
            rows_bar = layer.product("rv,dv->rd", elements, table, to_h_cotangent, scale[:, None])
            h_bar = lax.dynamic_update_slice_in_dim(h_bar, rows_bar, start, 0)
        add_to_w = functools.partial(
            layer.product, "rd,rv->dv", (scale[:, None] * h).astype(narrow), elements, in_place=True
        )
        if remainder is not None:
            w_bar, remainder = add_to_w(to_sum_and_remainder, w_bar, remainder)
        elif w_bar is not None:
            w_bar = add_to_w(to_sum, w_bar)
        if bias_bar is not None:
            bias_bar += (scale[:, None] * elements.astype(wide)).sum(0)
        differs = (jnp.abs(largest - shift) >= _MAX_DIFFERENCE) & jnp.isfinite(largest)
        return _Carry(
            carry.total + row_losses(options, weight, lse, label_logit).sum(),
            lax.dynamic_update_slice_in_dim(carry.largest, largest, start, 0),
            _finite(largest).mean(),
            carry.out_of_range | jnp.any(differs),
            [h_bar, w_bar, bias_bar],
            remainder,
        )

    def all_chunks(shifts: Array | None, estimate: Array) -> _Carry:
        has_remainder = 1 in wanted and table.dtype.itemsize < wide.itemsize
        with _memory_of_chunks():
            return over_chunks(
                rows.shape[0],
                _chunk_rows(rows.shape[0], layer.bias.size * narrow.itemsize, options.chunk_bytes),
                functools.partial(add_chunk, shifts),
                _Carry(
                    jnp.zeros_like(estimate),
                    jnp.zeros_like(rows[:, 0], wide),
                    estimate,
                    jnp.zeros_like(estimate, bool),
                    layer.zero_cotangents(wanted, h_dtype),
                    jnp.zeros_like(table) if has_remainder else None,
                ),
            )

    sample = layer.product("rd,dv->rv", rows[:_SAMPLED_ROWS], table, lambda x: x)
    estimate = _finite(options.logit(sample, layer.bias).max(1)).mean()
    # If an estimate is far off, everything is computed again, with the largest logits as shifts.
    found = lax.while_loop(
        lambda found: found.out_of_range,
        lambda found: all_chunks(_finite(found.largest), found.estimate)._replace(
            out_of_range=jnp.zeros_like(found.out_of_range)
        ),
        all_chunks(None, estimate),
    )
    return [found.total, *layer.cotangents(wanted, found.cotangents)]


def _chunk_rows(rows: int, row_bytes: int, chunk_bytes: int) -> int:
    """Return the rows of equal chunks, a multiple of a tile's."""
    most = max(_MIN_ROWS, chunk_bytes // row_bytes)
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
