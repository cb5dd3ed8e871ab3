"""Mixtures of experts."""

from __future__ import annotations

import numpy as np

from benchmarks.catalog.bounds import (
    BF16,
    F16,
    F32,
    UNIT_ROUNDOFF,
    compared,
    operand_rounding,
    wide,
)
from benchmarks.catalog.call import Call, describe
from benchmarks.catalog.draw import Draw


def moe(draw: Draw, name: str) -> Call:
    """Draw a layer of gated experts; some indices are out of bounds."""
    tokens, features, hidden = (max(1, draw.size(50)) for _ in range(3))
    experts, chosen = draw.one(1, 3, 8), draw.one(1, 2, 3)
    dtype = draw.type(F32, BF16, F16)
    indices = draw.rng.integers(-1, experts + 1, (tokens, chosen)).astype(np.int32)
    shapes = [(tokens, features), *[(experts, features, hidden)] * 2, (experts, hidden, features)]
    operands = tuple(draw.operand(shape, dtype) for shape in (*shapes, (tokens, chosen)))
    u, rounding = 2.0**-24, UNIT_ROUNDOFF[dtype]
    backward = operand_rounding([dtype], None)

    def errors(result, x, gate, up, down, weights):
        x, gate, up, down, weights = map(wide, (x, gate, up, down, weights))
        share = (features + 4) * u + backward
        (g, g_size), (v, v_size) = (
            (np.einsum("td,edh->eth", a, w), np.einsum("td,edh->eth", np.abs(a), np.abs(w)))
            for a, w in ((x, gate), (x, up))
        )
        silu = g / (1 + np.exp(-g))
        h = silu * v
        of_up = share * v_size + rounding * np.abs(v)
        slack = 1.1 * share * g_size * (np.abs(v) + of_up) + np.abs(silu) * of_up
        slack += (2 * rounding + 2.0**-20) * np.abs(h) + 2.0**-20
        out = np.einsum("eth,ehd->etd", h, down)
        of_down = (hidden + 4) * u + backward + 2 * rounding
        size = np.einsum("eth,ehd->etd", slack + of_down * np.abs(h), np.abs(down))
        valid = (indices >= 0) & (indices < experts)
        w = np.where(valid, weights, 0)
        at = np.where(valid, indices, 0), np.arange(tokens)[:, None]
        value = (w[..., None] * out[at]).sum(1)
        bound = (np.abs(w)[..., None] * (size + 2 * rounding * np.abs(out))[at]).sum(1)
        return [compared(result, value, bound)]

    return Call(
        name,
        f"{experts} experts, indices={indices.tolist()[:5]}",
        operands,
        lambda m, x, gate, up, down, weights: m.moe(x, up, down, weights, indices, w_gate=gate),
        errors,
        is_plain=False,
    )


def route(draw: Draw, name: str) -> Call:
    """Draw logits of tokens, of which each takes the experts of the highest scores."""
    tokens, experts = max(1, draw.size()), max(2, draw.size(70))
    k = draw.one(1, 2)
    dtype = draw.type(F32, BF16)

    def errors(result, logits):
        weights, indices = (np.asarray(x) for x in result)
        y = wide(logits)
        scores = np.exp(y - y.max(-1, keepdims=True))
        chosen = np.take_along_axis(scores, indices, -1)
        expected = chosen / chosen.sum(-1, keepdims=True)
        # Scores that differ by roundings have either order.
        share = (experts + 16) * UNIT_ROUNDOFF[F32]
        highest = -np.sort(-scores, -1)[:, :k]
        return [
            compared(weights, expected, share * expected),
            (np.abs(chosen - highest), share * highest),
        ]

    return Call(
        name,
        f"{k=}",
        (draw.operand((tokens, experts), dtype),),
        lambda m, x: tuple(m.route(x, k)),
        errors,
        is_plain=False,
    )


DESCRIPTIONS = [*describe(moe, "moe"), *describe(route, "route")]
