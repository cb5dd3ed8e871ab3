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
from benchmarks.catalog.oracles import element_scales

# A rounding to an 8-bit float with a scale errs by a share of the number, or of the largest one.
_ROUNDING, _LEAST = UNIT_ROUNDOFF[F8E4] * (1 + 2.0**-16), 2.0**-10 / 448


def _rounding_error(x):
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
        return [(np.abs(wide(result) - wide(x)), _rounding_error(wide(x)))]

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
        return [(np.abs(wide(result) - y), _rounding_error(y) + 2 * slack.max(-1, keepdims=True))]

    return Call(
        name,
        "",
        operands,
        lambda m, x, w: _restored(*m.matmul(x, w, epilogue=m.row_quantize)),
        errors,
        is_plain=False,
    )


def _scales(draw, rows, k):
    """Return the shape of scales: of each row or of 128, and of each 128 of k or of all."""
    return draw.one(rows, rows, -(-rows // 128)), draw.one(-(-k // 128), -(-k // 128), 1)


def scaled_product(draw: Draw, name: str) -> Call:
    """Draw a product, or one for each group of rows, with scales of blocks."""
    sizes = {label: max(1, min(128, size)) for label, size in draw.sizes("mkn").items()}
    m, k, n = (sizes[label] for label in "mkn")
    groups = draw.one(1, 3)
    has_groups, has_epilogue = name == "scaled_ragged_dot", name.endswith("epilogue")
    batch = (groups,) if has_groups else ()
    of_lhs, of_rhs, of_batch = (m, 1), (n, 1), ()
    if draw.for_tests:
        k += draw.one(0, 128, 200)
        of_lhs, of_rhs = _scales(draw, m, k), _scales(draw, n, k)
        if not has_groups:
            of_batch, batch = draw.one(((), ()), ((2,), ()), ((), (2,)), ((2,), (2,)))
    bounds = np.sort(draw.rng.integers(0, m + 1, groups))
    counts = np.diff(bounds, prepend=0).astype(np.int32)
    operands: tuple[Operand, ...] = (
        draw.operand((*of_batch, m, k), F8E4),
        draw.operand((*batch, n, k), F8E4),
        draw.operand((*of_batch, *of_lhs), F32),
        draw.operand((*batch, *of_rhs), F32),
    )

    if has_groups:
        operands += (draw.given(counts),)
    if has_epilogue:
        operands += (draw.operand(draw.one((n,), (m, 1), (m, n)), F32),)

    def plus_tanh(y, b):
        return y + jnp.tanh(b * y)

    def call(m, x, w, x_scales, w_scales, *others):
        if has_groups:
            return m.scaled_ragged_dot(x, w, *others, x_scales, w_scales)
        options = {"epilogue": plus_tanh, "operands": others} if has_epilogue else {}
        return m.scaled_matmul(x, w, x_scales, w_scales, **options)

    def errors(result, x, w, x_scales, w_scales, *others):
        x, w = (
            wide(x) * np.asarray(element_scales(wide(scales), x.shape))
            for x, scales in ((x, x_scales), (w, w_scales))
        )
        if has_groups:
            of_row = np.searchsorted(bounds, np.arange(m), side="right")
            masks = of_row == np.arange(groups)[:, None]
            value, magnitude, _ = einsum("gmk,gnk->mn", masks[..., None] * x, w)
        else:
            value, magnitude = x @ w.mT, np.abs(x) @ np.abs(w).mT
        slack = ((k + 4) * 2.0**-24 + operand_rounding([F8E4] * 2, None)) * magnitude
        if has_epilogue:
            b = wide(others[0])
            slack = (slack + 2.0**-22 * np.abs(value)) * (1 + np.abs(b)) + 2.0**-20
            value = value + np.tanh(b * value)
        return [compared(result, value, slack)]

    text = f"{counts.tolist()}" if has_groups else ""
    return Call(name, text, operands, call, errors, is_plain=False)


# Batches, several contracted dimensions, other orders, and vectors.
_DIMENSIONS = (
    "mk,kn->mn", "amk,kn->amn", "mk,nk->mn", "km,nk->mn", "bmk,bkn->bmn", "amkl,kln->amn",
    "bmak,akbn->bmn", "k,kn->n", "mk,k->m",
)  # fmt: skip


def fp8_dot_general(draw: Draw, name: str) -> Call:
    """Draw a product of which both operands are quantised."""
    dtype = draw.type(F32, BF16, F16)
    subscripts = draw.one(*_DIMENSIONS) if draw.for_tests else "mk,kn->mn"
    lhs, rhs = subscripts.partition("->")[0].split(",")
    operands = draw.operands(subscripts, draw.sizes(set(lhs + rhs)), [dtype] * 2)
    out = subscripts.partition("->")[2]
    shared = [label for label in lhs if label in rhs]
    dimensions = tuple(
        tuple([labels.index(x) for x in shared if (x in out) == is_batch] for labels in (lhs, rhs))
        for is_batch in (False, True)
    )

    def errors(result, x, w):
        x, w = wide(x), wide(w)
        # The scale of a block of weights is that of its largest number.
        of_x = _ROUNDING * np.abs(x) + 2 * _LEAST * np.abs(x).max(initial=0)
        of_w = _ROUNDING * np.abs(w) + 2 * _LEAST * np.abs(w).max(initial=0)
        value, magnitude, terms = einsum(subscripts, x, w)
        slack = np.einsum(subscripts, of_x, np.abs(w))
        slack += np.einsum(subscripts, np.abs(x) + of_x, of_w)
        slack += (terms + 4) * (2.0**-24 + operand_rounding([F8E4] * 2, None)) * magnitude
        return [compared(result, value, slack)]

    return Call(
        name,
        subscripts if draw.for_tests else "",
        operands,
        lambda m, x, w: m.fp8_dot_general(x, w, dimensions),
        errors,
        is_plain=False,
    )


DESCRIPTIONS = [
    *describe(quantize, "quantize", derivatives=0, tolerance=0.07),
    *describe(row_quantize, "row_quantize", derivatives=0, tolerance=0.07),
    *describe(scaled_product, "scaled_matmul", "scaled_matmul, epilogue", "scaled_ragged_dot"),
    *describe(fp8_dot_general, "fp8_dot_general", derivatives=1, tolerance=0.3),
]
