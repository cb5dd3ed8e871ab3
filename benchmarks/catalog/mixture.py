"""Mixtures of experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
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
    """Draw a layer of experts; some indices are out of bounds."""
    tokens, features, hidden = (max(1, draw.size(50)) for _ in range(3))
    experts, chosen = draw.one(1, 3, 8), draw.one(1, 2, 3)
    dtype = draw.type(F32, BF16, F16)
    indices = draw.rng.integers(-1, experts + 1, (tokens, chosen)).astype(np.int32)
    shapes = {
        "x": (tokens, features), "weights": (tokens, chosen),
        "w_up": (experts, features, hidden), "w_down": (experts, hidden, features),
    }  # fmt: skip
    gated, biased = name != "moe, ungated", name == "moe, biases"
    if gated:
        shapes["w_gate"] = (experts, features, hidden)
    if biased:
        shapes |= {"b_up": (experts, hidden), "b_gate": (experts, hidden)}
        shapes["b_down"] = experts, features
    operands = tuple(draw.operand(shape, dtype) for shape in shapes.values())
    operands += (draw.given(indices),)
    activation, slope = (jax.nn.silu, 1.1) if gated else (jnp.tanh, 1.0)
    u, rounding = 2.0**-24, UNIT_ROUNDOFF[dtype]
    backward = operand_rounding([dtype], None)

    def errors(result, *arrays):
        own = {key: wide(x) for key, x in zip(shapes, arrays, strict=False)}
        share = (features + 5) * u + backward

        def product(of):
            terms = [(own["x"], own[f"w_{of}"], own.get(f"b_{of}", np.zeros((1, 1))))]
            terms.append(tuple(map(np.abs, terms[0])))
            return [np.einsum("td,edh->eth", x, w) + b[:, None] for x, w, b in terms]

        with jax.enable_x64(True):
            v, v_size = product("up")
            of_up = share * v_size + rounding * np.abs(v)
            if gated:
                g, g_size = product("gate")
                active = np.asarray(activation(g))
                h = active * v
                slack = slope * share * g_size * (np.abs(v) + of_up) + np.abs(active) * of_up
            else:
                h, slack = np.asarray(activation(v)), slope * of_up
        slack = slack + (2 * rounding + 2.0**-20) * np.abs(h) + 2.0**-20
        bias = own.get("b_down", np.zeros((1, 1)))[:, None]
        out = np.einsum("eth,ehd->etd", h, own["w_down"]) + bias
        of_down = (hidden + 5) * u + backward + 2 * rounding
        size = np.einsum("eth,ehd->etd", slack + of_down * np.abs(h), np.abs(own["w_down"]))
        size = size + of_down * np.abs(bias)
        valid = (indices >= 0) & (indices < experts)
        w = np.where(valid, own["weights"], 0)
        at = np.where(valid, indices, 0), np.arange(tokens)[:, None]
        value = (w[..., None] * out[at]).sum(1)
        bound = (np.abs(w)[..., None] * (size + 2 * rounding * np.abs(out))[at]).sum(1)
        return [compared(result, value, bound)]

    def call(m, x, weights, up, down, *others_and_indices):
        *others, indices = others_and_indices
        options = dict(zip(list(shapes)[4:], others, strict=True))
        options |= {"save": "inputs"} if biased else {}
        return m.moe(x, up, down, weights, indices, activation=activation, **options)

    return Call(
        name,
        f"{experts} experts, indices={indices.tolist()[:5]}",
        operands,
        call,
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


DESCRIPTIONS = [*describe(moe, "moe", "moe, biases", "moe, ungated"), *describe(route, "route")]
