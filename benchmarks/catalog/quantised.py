"""8-bit floats with scales of blocks, and their products."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.catalog.bounds import (
    BF16,
    F8E4,
    F16,
    F32,
    INT4,
    INT8,
    TF32_ROUNDOFF,
    UNIT_ROUNDOFF,
    compared,
    einsum,
    on_gpu,
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


def quantize_integers(draw: Draw, name: str) -> Call:
    """Draw rows, quantised to integers in groups, with or without zero points."""
    rows, columns = max(1, draw.size()), max(1, draw.size(256))
    operand = draw.operand((rows, columns), draw.type(F32, BF16, F16))
    dtype, group, symmetric = draw.one(INT4, INT8), draw.one(32, 64, 128), draw.one(True, False)
    values_of_type = 2.0 ** (4 if dtype == INT4 else 8) - 1

    def call(m, x):
        values, scales, *zeros = m.quantize(x, (1, group), dtype, symmetric=symmetric)
        values = values.astype(np.float32)
        of_elements = [jnp.repeat(y, group, -1)[..., :columns] for y in (scales, *zeros)]
        for zero in of_elements[1:]:
            values = values - zero
        return values * of_elements[0]

    def errors(result, x):
        # Half a step; at the ends a whole one with zero points, which are rounded.
        steps = (values_of_type - 1) / 2 if symmetric else values_of_type / 2
        half = 0.5 if symmetric else 1.0
        x = wide(x)
        most = np.stack([np.abs(x[:, i : i + group]).max(1) for i in range(0, columns, group)], 1)
        most = np.repeat(most, group, 1)[:, :columns]
        return [(np.abs(wide(result) - x), (half / steps + 2.0**-20) * most + 2.0**-90)]

    text = f"{dtype}, groups of {group}, {'' if symmetric else 'not '}symmetric"
    return Call(name, text, (operand,), call, errors, is_plain=False)


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


def weights_product(draw: Draw, name: str) -> Call:
    """Draw a product by quantised weights, or one for each group of rows."""
    sizes = {label: max(1, min(256, size)) for label, size in draw.sizes("mkn").items()}
    m, k, n = (sizes[label] for label in "mkn")
    k += draw.one(0, 60, 128, 200)
    # Kernels have rows of weights in units of 16 bytes.
    k = draw.one(k, -(-k // 32) * 32)
    has_groups, has_epilogue = "ragged" in name, "epilogue" in name
    has_zeros, group = draw.one(True, False), draw.one(32, 64, 128, k)
    experts = draw.one(1, 3)
    batch = (experts,) if has_groups else draw.one((), (), (2,))
    counts = np.diff(np.sort(draw.rng.integers(0, m + 1, experts)), prepend=0).astype(np.int32)
    dtype = draw.type(F32, BF16, F16)
    stored = draw.one(INT4, INT8, F8E4)
    if stored == F8E4:
        weights = draw.operand((*batch, n, k), stored)
    else:
        most = 7 if stored == INT4 else 127
        integers = draw.rng.integers(-1 - most, most, (*batch, n, k), endpoint=True)
        weights = draw.given(integers.astype(stored))
    shape = (*batch, draw.one(n, n, 1), -(-k // group))
    narrow = draw.type(F32, F32, BF16)
    operands: tuple[Operand, ...] = (
        draw.operand((m, k), dtype),
        weights,
        draw.operand(shape, narrow),
        *((draw.operand(shape, narrow),) if has_zeros else ()),
        *((draw.given(counts),) if has_groups else ()),
        *((draw.operand(draw.one((n,), (m, 1), (m, n)), F32),) if has_epilogue else ()),
    )

    def plus_tanh(y, b):
        return y + jnp.tanh(b * y)

    def call(m, x, w, scales, *others):
        zeros = others[0] if has_zeros else None
        others = others[has_zeros:]
        if has_groups:
            return m.scaled_ragged_dot(x, w, *others, None, scales, rhs_zeros=zeros)
        options = {"epilogue": plus_tanh, "operands": others} if has_epilogue else {}
        return m.scaled_matmul(x, w, None, scales, rhs_zeros=zeros, **options)

    def errors(result, x, w, scales, *others):
        x, w = wide(x), wide(np.asarray(w).astype(np.float32))
        scales, *zeros = (
            np.broadcast_to(np.repeat(wide(y), group, -1)[..., :k], w.shape)
            for y in (scales, *others[:has_zeros])
        )
        w = (w - zeros[0] if zeros else w) * scales
        if has_groups:
            of_row = np.searchsorted(np.cumsum(counts), np.arange(m), side="right")
            masks = of_row == np.arange(experts)[:, None]
            value, magnitude, _ = einsum("gmk,gnk->mn", masks[..., None] * x, w)
        else:
            value, magnitude = x @ w.mT, np.abs(x) @ np.abs(w).mT
        # Weights are rounded to bfloat16, and for float16 to TF32 on a GPU.
        of_weights = UNIT_ROUNDOFF[BF16] if dtype == BF16 else 0.0
        if dtype == F16 and on_gpu():
            of_weights = TF32_ROUNDOFF
        slack = ((k + 4) * 2.0**-24 + of_weights) * magnitude
        if has_epilogue:
            b = wide(others[-1])
            slack = (slack + 2.0**-22 * np.abs(value)) * (1 + np.abs(b)) + 2.0**-20
            value = value + np.tanh(b * value)
        return [compared(result, value, slack)]

    text = f"groups of {group}" + (f", {counts.tolist()}" if has_groups else "")
    return Call(name, text, operands, call, errors, is_plain=False)


def product_of_model(draw: Draw, name: str) -> Call:
    """Draw a layer, the matrix of which is quantised in groups of 32."""
    sizes = {label: max(1, min(256, size)) for label, size in draw.sizes("mkn").items()}
    dtype, stored = draw.type(F32, BF16), draw.one(INT4, INT8)
    operands = draw.operands("mk,kn->mn", sizes, [dtype] * 2)

    def call(m, x, w):
        model = m.quantize_weights({"kernel": lax.stop_gradient(w)}, dtype=stored, block=(1, 32))
        return m.matmul(x, model["kernel"])

    def errors(result, x, w):
        x, w = wide(x), wide(w)
        value, magnitude, terms = einsum("mk,kn->mn", x, w)
        largest = [np.abs(w[i : i + 32]).max(0) for i in range(0, len(w), 32)]
        half = np.repeat(largest, 32, 0)[: len(w)] / (14 if stored == INT4 else 254)
        slack = np.abs(x) @ (half * (1 + 2.0**-16) + UNIT_ROUNDOFF[dtype] * (np.abs(w) + half))
        slack += (terms + 4) * (2.0**-24 + operand_rounding([dtype] * 2, None)) * magnitude * 2
        return [compared(result, value, slack)]

    return Call(name, str(stored), operands, call, errors, is_plain=False)


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
    *describe(quantize_integers, "quantize, integers", derivatives=0, tolerance=0.3),
    *describe(row_quantize, "row_quantize", derivatives=0, tolerance=0.07),
    *describe(scaled_product, "scaled_matmul", "scaled_matmul, epilogue", "scaled_ragged_dot"),
    *describe(
        weights_product,
        "scaled_matmul, weights",
        "scaled_matmul, weights and epilogue",
        "scaled_ragged_dot, weights",
    ),
    *describe(product_of_model, "quantize_weights", tolerance=0.3),
    *describe(fp8_dot_general, "fp8_dot_general", derivatives=1, tolerance=0.3),
]
