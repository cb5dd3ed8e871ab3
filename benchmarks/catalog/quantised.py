"""8-bit floats with scales of blocks, and their products."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from benchmarks.catalog.bounds import (
    BF16,
    F8E4,
    F16,
    F32,
    UNIT_ROUNDOFF,
    compared,
    einsum,
    operand_rounding,
    wide,
)
from benchmarks.catalog.call import Call, Operand, describe
from benchmarks.catalog.draw import Draw

# A rounding to an 8-bit float with a scale errs by a share of the number, or of the largest one.
_ROUNDING, _LEAST = UNIT_ROUNDOFF[F8E4] * (1 + 2.0**-16), 2.0**-10 / 448


def _of_rounding(x):
    largest = np.abs(x).max(-1, keepdims=True, initial=0)
    return np.maximum(_ROUNDING * np.abs(x), 2 * _LEAST * largest)


def _restored(values, scales):
    """Return numbers of which the scales are of blocks of 1x128."""
    scales = jnp.repeat(scales, 128, -1)[..., : values.shape[-1]]
    return values.astype(np.float32) * scales


def quantize(draw: Draw, name: str) -> Call:
    """Draw rows, quantised in blocks of 1x128."""
    rows, columns = max(1, draw.size()), max(1, draw.size(128))
    operand = draw.operand((rows, columns), draw.type(F32, BF16, F16))

    def errors(result, x):
        return [(np.abs(wide(result) - wide(x)), _of_rounding(wide(x)))]

    return Call(
        name, "", (operand,), lambda m, x: _restored(*m.quantize(x)), errors, is_plain=False
    )


def row_quantize(draw: Draw, name: str) -> Call:
    """Draw a product of which the rows are quantised."""
    dtype = draw.type(F32, BF16)
    sizes = {label: max(1, min(128, size)) for label, size in draw.sizes("mkn").items()}
    operands = draw.operands("mk,kn->mn", sizes, [dtype] * 2)

    def errors(result, x, w):
        y, magnitude, terms = einsum("mk,kn->mn", wide(x), wide(w))
        share = (terms + 4) * 2.0**-24 + operand_rounding([dtype] * 2, None)
        slack = share * magnitude + UNIT_ROUNDOFF[dtype] * np.abs(y)
        return [(np.abs(wide(result) - y), _of_rounding(y) + 2 * slack.max(-1, keepdims=True))]

    return Call(
        name,
        "",
        operands,
        lambda m, x, w: _restored(*m.matmul(x, w, epilogue=m.row_quantize)),
        errors,
        is_plain=False,
    )


def scaled_product(draw: Draw, name: str) -> Call:
    """Draw a product, or one for each group of rows, with a scale of each row."""
    sizes = {label: max(1, min(128, size)) for label, size in draw.sizes("mkn").items()}
    m, k, n = (sizes[label] for label in "mkn")
    groups = draw.one(1, 3)
    batch = (groups,) if name == "scaled_ragged_dot" else ()
    bounds = np.sort(draw.rng.integers(0, m + 1, groups))
    counts = np.diff(bounds, prepend=0).astype(np.int32)
    operands: tuple[Operand, ...] = (
        draw.operand((m, k), F8E4),
        draw.operand((*batch, n, k), F8E4),
        draw.operand((m, 1), F32),
        draw.operand((*batch, n, 1), F32),
    )

    if batch:
        operands += (draw.given(counts),)

    def call(m, x, w, x_scales, w_scales, *sizes):
        if batch:
            return m.scaled_ragged_dot(x, w, *sizes, x_scales, w_scales)
        return m.scaled_matmul(x, w, x_scales, w_scales)

    def errors(result, x, w, x_scales, w_scales, *_):
        x, w = wide(x) * wide(x_scales), wide(w) * wide(w_scales)
        if batch:
            of_row = np.searchsorted(bounds, np.arange(m), side="right")
            masks = of_row == np.arange(groups)[:, None]
            value, magnitude, _ = einsum("gmk,gnk->mn", masks[..., None] * x, w)
        else:
            value, magnitude, _ = einsum("mk,nk->mn", x, w)
        share = (k + 4) * 2.0**-24 + operand_rounding([F8E4] * 2, None)
        return [compared(result, value, share * magnitude)]

    return Call(name, f"{counts.tolist()}" if batch else "", operands, call, errors, is_plain=False)


def fp8_dot_general(draw: Draw, name: str) -> Call:
    """Draw a product of which both operands are quantised."""
    dtype = draw.type(F32, BF16, F16)
    operands = draw.operands("mk,kn->mn", draw.sizes("mkn"), [dtype] * 2)
    dimensions = (((1,), (0,)), ((), ()))

    def errors(result, x, w):
        x, w = wide(x), wide(w)
        # The scale of a block of weights is that of its largest number.
        of_x = _ROUNDING * np.abs(x) + 2 * _LEAST * np.abs(x).max(initial=0)
        of_w = _ROUNDING * np.abs(w) + 2 * _LEAST * np.abs(w).max(initial=0)
        slack = of_x @ np.abs(w) + (np.abs(x) + of_x) @ of_w
        slack += (x.shape[1] + 4) * (2.0**-24 + operand_rounding([F8E4] * 2, None)) * (
            np.abs(x) @ np.abs(w)
        )  # fmt: skip
        return [compared(result, x @ w, slack)]

    return Call(
        name,
        "",
        operands,
        lambda m, x, w: m.fp8_dot_general(x, w, dimensions),
        errors,
        is_plain=False,
    )


DESCRIPTIONS = [
    *describe(quantize, "quantize", derivatives=0, tolerance=0.07),
    *describe(row_quantize, "row_quantize", derivatives=0, tolerance=0.07),
    *describe(scaled_product, "scaled_matmul", "scaled_ragged_dot"),
    *describe(fp8_dot_general, "fp8_dot_general", derivatives=1, tolerance=0.3),
]
