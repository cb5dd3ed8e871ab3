"""``moe``: a mixture-of-experts layer, and its routing, against the same of ``lax.ragged_dot``.

``parts`` is the layer of this package's ``ragged_dot`` as a user writes it: weights multiply the
experts' results, and these are added to tokens.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks.programs import Arrays, Program, ProgramCommand


class Sizes(NamedTuple):
    """The layer's sizes."""

    tokens: int
    features: int
    hidden: int
    experts: int
    chosen: int


_SIZES = {
    "gpu": {
        "64 experts": Sizes(16384, 2560, 1280, 64, 4),
        "128 experts": Sizes(16384, 2048, 768, 128, 8),
        "decode, 128 experts": Sizes(64, 2048, 768, 128, 8),
    },
    "cpu": {"8 experts": Sizes(256, 128, 128, 8, 2)},
}


def _operands(sizes: Sizes) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 5)
    t, d, h, e, _ = sizes

    def normal(key: Any, *shape: int) -> Any:
        return jax.random.normal(key, shape, jnp.bfloat16) / np.sqrt(shape[-2]).astype(jnp.bfloat16)

    arrays = (normal(keys[0], t, d), *(normal(key, e, d, h) for key in keys[1:3]))
    logits = jax.random.normal(keys[4], (t, e), jnp.bfloat16)
    return *arrays, normal(keys[3], e, h, d), *jtk.route(logits, sizes.chosen)


def _ours(x: Any, up: Any, gate: Any, down: Any, weights: Any, indices: Any) -> Any:
    return jtk.moe(x, up, down, indices, weights, w_gate=gate)


def _by_parts(
    ragged_dot: Callable[..., Any],
    x: Any,
    up: Any,
    gate: Any,
    down: Any,
    weights: Any,
    indices: Any,
) -> Any:
    """Return the layer as users of a grouped GEMM write it."""
    tokens, chosen = indices.shape
    order = jnp.argsort(indices.ravel())
    sizes = jnp.bincount(indices.ravel(), length=up.shape[0])
    rows = x[order // chosen]
    hidden = jax.nn.silu(ragged_dot(rows, gate, sizes)) * ragged_dot(rows, up, sizes)
    results = ragged_dot(hidden, down, sizes) * weights.ravel()[order][:, None]
    return jnp.zeros_like(results).at[order].set(results).reshape(tokens, chosen, -1).sum(1)


_LAYERS: dict[str, Callable[..., Any]] = {
    "ours": _ours,
    "XLA": functools.partial(_by_parts, jax.lax.ragged_dot),
    "parts": functools.partial(_by_parts, jtk.ragged_dot),
}


def _gradient(layer: Callable[..., Any]) -> Callable[..., Any]:
    def loss(*args: Any) -> Any:
        return jnp.sum(layer(*args).astype(np.float32) ** 2)

    return lambda *args: jax.grad(loss, (0, 1, 2, 3, 4))(*args)


def _errors(_: Arrays, results: Mapping[str, Any]) -> dict[str, float]:
    """Return the difference from a peer's result, in parts of its largest element."""
    first = {side: np.asarray(jax.tree.leaves(x)[0], np.float32) for side, x in results.items()}
    *_, peer = (x for side, x in first.items() if side != "ours")
    largest = float(np.abs(peer).max())
    return {side: float(np.abs(x - peer).max()) / largest for side, x in first.items()}


def _route_by_jax(logits: Any, *, chosen: int) -> Any:
    scores, indices = jax.lax.top_k(jax.nn.softmax(logits.astype(np.float32)), chosen)
    order = jnp.argsort(indices.ravel())
    sizes = jnp.bincount(indices.ravel(), length=logits.shape[1])
    return scores / scores.sum(1, keepdims=True), indices, order, sizes


def _route(logits: Any, *, chosen: int) -> Any:
    weights, indices = jtk.route(logits, chosen)
    plan = jtk.segment_plan(indices.ravel(), logits.shape[1])
    return weights, indices, plan.order, jnp.diff(plan.bounds)[1:-1]


def _programs(arguments: argparse.Namespace) -> Iterator[Program]:
    for name, sizes in _SIZES["cpu" if jax.default_backend() == "cpu" else "gpu"].items():
        operands = functools.partial(_operands, sizes)
        yield Program(f"{name}, forward", operands, _LAYERS, _errors)
        if not name.startswith("decode"):
            # XLA's takes more memory than the GPU has.
            backward = {side: _gradient(_LAYERS[side]) for side in ("ours", "parts")}
            yield Program(
                f"{name}, forward and backward", operands, backward, _errors, peer="parts"
            )

        def logits(sizes: Sizes = sizes) -> tuple[Any, ...]:
            shape = (sizes.tokens, sizes.experts)
            return (jax.random.normal(jax.random.key(1), shape, jnp.float32),)

        routes = {
            side: functools.partial(function, chosen=sizes.chosen)
            for side, function in (("ours", _route), ("XLA", _route_by_jax))
        }
        yield Program(f"{name}, routing", logits, routes, _errors)


COMMAND = ProgramCommand("mixture-of-experts layers", _programs, 1.0)
