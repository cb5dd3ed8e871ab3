"""Products with a function of their elements."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks.catalog.bounds import (
    BF16,
    F16,
    F32,
    F64,
    UNIT_ROUNDOFF,
    compared,
    einsum,
    operand_rounding,
    wide,
)
from benchmarks.catalog.call import Call, describe
from benchmarks.catalog.draw import Draw
from benchmarks.catalog.oracles import ORACLES

_ACTIVATIONS = ((jax.nn.relu, 1), (jnp.tanh, 1), (jax.nn.silu, 1.1))
_LAYERS = ("linear", "matmul, epilogue", "matmul, residual", "fuse", "patch")


def layer(draw: Draw, name: str) -> Call:
    """Draw a product with a bias, an activation and perhaps a residual."""
    # Second derivatives of relu are zeros.
    activation, derivative = draw.one(*_ACTIVATIONS[draw.only is not None :])
    types = [draw.type(F32, BF16, F16)] * 3
    sizes = draw.sizes("mkn")
    m, n = sizes["m"], sizes["n"]
    shape = draw.one((n,), (1, n), (m, 1), (m, n), ()) if name == "matmul, epilogue" else (n,)
    operands: tuple[Any, ...] = (
        *draw.operands("mk,kn->mn", sizes, types[:2]),
        draw.operand(shape, types[2]),
    )
    if name == "matmul, residual":
        operands = *operands, draw.operand((m, n), types[2])

    # The same functions in each call.
    def activated_sum(y, b, *residual):
        return sum(residual, activation(y + b))

    def activated_product(x, w, b):
        return activation(x @ w + b[None])

    wrap = jtk.fuse if name == "fuse" else jtk.patch()
    wrapped = activated_product, wrap(activated_product)

    def call(m, x, w, b, *residual):
        if name == "linear":
            return m.linear(x, w, b, activation)
        if name.startswith("matmul"):
            return m.matmul(x, w, epilogue=activated_sum, operands=(b, *residual))
        return wrapped[m is jtk](x, w, b)

    def errors(result, x, w, b, *residual):
        value, magnitude, terms = einsum("mk,kn->mn", wide(x), wide(w))
        value, magnitude = value + wide(b), magnitude + np.abs(wide(b))
        share = (terms + 4) * 2.0**-24 + operand_rounding(types, None)
        # `fuse` rounds the product and the sum to their types.
        share += 3 * UNIT_ROUNDOFF[types[0]] if name in ("fuse", "patch") else 0
        slack = derivative * share * magnitude + 2.0**-20
        with jax.enable_x64(True):
            exact = np.asarray(activation(jnp.asarray(value, F64)))
        return [compared(result, sum(map(wide, residual), exact), slack)]

    return Call(
        name,
        activation.__name__,
        operands,
        call,
        errors,
        is_plain=False,
    )


def gated_linear(draw: Draw, name: str) -> Call:
    """Draw two products of the same rows."""
    types = [draw.type(F32, BF16, F16)] * 3
    operands = draw.operands("mk,kn,kn->mn", draw.sizes("mkn"), types)

    def errors(result, x, gate, up):
        (g, g_size, terms), (u, u_size, _) = (
            einsum("mk,kn->mn", wide(x), wide(w)) for w in (gate, up)
        )
        share = (terms + 4) * 2.0**-24 + operand_rounding(types, None)
        of_gate, of_up = share * g_size, share * u_size + UNIT_ROUNDOFF[types[0]] * np.abs(u)
        silu = g / (1 + np.exp(-g))
        slack = 1.1 * of_gate * (np.abs(u) + of_up) + np.abs(silu) * of_up
        return [compared(result, silu * u, slack + 2.0**-20 * (1 + np.abs(silu * u)))]

    return Call(name, "", operands, lambda m, *xs: m.gated_linear(*xs), errors, is_plain=False)


def linear_cross_entropy(draw: Draw, name: str) -> Call:
    """Draw labels of rows, and perhaps every option."""
    sizes = draw.sizes("mdv")
    rows, depth, columns = (max(1, sizes[x]) for x in "mdv")
    types = [draw.type(F32, BF16, F16)] * 3
    labels = draw.rng.integers(0, columns, rows).astype(np.int32)
    operands: tuple[Any, ...] = (
        draw.operand((rows, depth), types[0]),
        draw.operand((depth, columns), types[1]),
        draw.given(labels),
    )
    options: dict[str, Any] = {"reduction": "mean" if name.endswith("mean") else "none"}
    if name.endswith("options"):
        operands = *operands, draw.operand((columns,), types[2])
        options = {
            "reduction": "sum", "z_loss": 0.01, "label_smoothing": 0.1, "softcap": 5.0,
            "ignore_index": int(labels[0]),
        }  # fmt: skip

    def call(m, h, w, labels, bias=None):
        return m.linear_cross_entropy(h, w, labels, bias=bias, **options)

    def errors(result, h, w, _, bias=None):
        y, magnitude, terms = einsum("md,dv->mv", wide(h), wide(w))
        share = (terms + 1) * 2.0**-24 + operand_rounding(types, None)
        if bias is not None:
            with jax.enable_x64(True):
                expected = np.asarray(call(ORACLES, wide(h), wide(w), labels, wide(bias)))
            magnitude = magnitude + np.abs(wide(bias))
            # Twice for the smoothing and the z-loss, whose derivative is 0.02 lse.
            slack = 4 * share * magnitude.max(1) + (columns + 16) * 2.0**-22 * (
                8 + magnitude.max(1)
            )
            return [compared(result, expected, slack.sum())]
        top = y.max(1)
        lse = top + np.log(np.exp(y - top[:, None]).sum(1))
        slack = 2 * share * magnitude.max(1) + (columns + 16) * 2.0**-24 * (
            1 + np.abs(lse) + np.abs(top)
        )
        losses = lse - y[np.arange(rows), labels]
        if options["reduction"] == "mean":
            slack = slack.mean() + (rows + 1) * 2.0**-24 * np.abs(losses).mean()
            losses = losses.mean()
        return [compared(result, losses, slack)]

    return Call(name, "", operands, call, errors, is_plain=False)


_ROWS = {
    "row_sum": (lambda y: y * y, lambda y: (y * y).sum(-1)),
    "row_max": (lambda y: y, lambda y: y.max(-1)),
    "row_logsumexp": (lambda y: y, lambda y: np.log(np.exp(y - y.max()).sum(-1)) + y.max()),
}


def row_reduction(draw: Draw, name: str) -> Call:
    """Draw a product of which an epilogue reduces the rows, perhaps with its elements."""
    dtype = draw.type(F32, BF16, F16)
    sizes = {label: max(1, size) for label, size in draw.sizes("mkn").items()}
    operands = draw.operands("mk,kn->m", sizes, [dtype] * 2)
    each, expected = _ROWS[name]
    # Beside the reduction are a bias and the elements.
    beside = draw.for_tests and draw.chance(0.5)
    if beside:
        operands = *operands, draw.operand((sizes["n"],), dtype)

    def reduced(m, y, *bias):
        rows = getattr(m, name)(each(sum(bias, y)))
        return {"elements": y, "rows": rows} if bias else rows

    epilogues = [functools.partial(reduced, m) for m in (ORACLES, jtk)]

    def errors(result, x, w, *bias):
        y, magnitude, terms = einsum("mk,kn->mn", wide(x), wide(w))
        share = (terms + sizes["n"] + 16) * 2.0**-24 + operand_rounding([dtype] * 2, None)
        # The sum of squares errs by twice the share of each; all values have a rounding, too.
        share += UNIT_ROUNDOFF[dtype]
        rows, found = result, []
        if bias:
            rows, found = result["rows"], [compared(result["elements"], y, 2 * share * magnitude)]
            y, magnitude = y + wide(*bias), magnitude + np.abs(wide(*bias))
        slack = 2 * share * (magnitude**2).sum(-1) if name == "row_sum" else 2 * share * (
            magnitude.max(-1) + 1
        )  # fmt: skip
        return [*found, compared(rows, expected(y), slack)]

    return Call(
        name,
        "beside elements" if beside else "",
        operands,
        lambda m, x, w, *bias: m.matmul(x, w, epilogue=epilogues[m is jtk], operands=bias),
        errors,
        is_plain=False,
    )


DESCRIPTIONS = [
    *describe(layer, *_LAYERS),
    *describe(gated_linear, "gated_linear"),
    *describe(
        linear_cross_entropy,
        "linear_cross_entropy",
        "linear_cross_entropy, mean",
        "linear_cross_entropy, options",
        own_types=True,
    ),
    *describe(row_reduction, *_ROWS, own_types=True),
]
