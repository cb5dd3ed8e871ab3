"""``moe``: a mixture-of-experts layer, and its routing, against the same of ``lax.ragged_dot``.

``parts`` is the layer of this package's ``ragged_dot`` as a user writes it: weights multiply the
experts' results, and these are added to tokens. ``kernels`` is ours under ``policy("kernels")``,
and sides named by a tile have that tile for both first products. A side that is not installed, or
that does not fit into the GPU's memory, is a line that says so.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks.calls.ragged_calls import FORWARD, tokamax
from benchmarks.programs import KERNELS, Arrays, Program, ProgramCommand
from jax_tilekern.ops import planned_kernel
from jax_tilekern.plans.grouped_gemm.sm90 import candidates


class Sizes(NamedTuple):
    """The layer's sizes, and whether the first experts have most of the tokens."""

    tokens: int
    features: int
    hidden: int
    experts: int
    chosen: int
    zipf: bool = False


_LARGE = Sizes(16384, 2048, 768, 128, 8)
SIZES = {
    "gpu": {
        "64 experts": Sizes(16384, 2560, 1280, 64, 4),
        "128 experts": _LARGE,
        "128 experts, Zipf": _LARGE._replace(zipf=True),
        **{
            f"128 experts, decode of {tokens}": _LARGE._replace(tokens=tokens)
            for tokens in (1, 4, 16, 64, 256)
        },
    },
    "cpu": {
        "8 experts": Sizes(256, 128, 128, 8, 2),
        "8 experts, Zipf": Sizes(256, 128, 128, 8, 2, zipf=True),
        "8 experts, decode of 1": Sizes(1, 128, 128, 8, 2),
    },
}


def operands(sizes: Sizes) -> tuple[Any, ...]:
    """Return the arguments of :func:`layer`."""
    keys = jax.random.split(jax.random.key(0), 5)
    t, d, h, e, k, _ = sizes

    def normal(key: Any, *shape: int) -> Any:
        return jax.random.normal(key, shape, jnp.bfloat16) / np.sqrt(shape[-2]).astype(jnp.bfloat16)

    arrays = (normal(keys[0], t, d), *(normal(key, e, d, h) for key in keys[1:3]))
    return *arrays, normal(keys[3], e, h, d), *jtk.route(_logits(sizes, keys[4]), k)


def _logits(sizes: Sizes, key: Any) -> Any:
    """Return logits whose largest are draws without replacement, by equal or Zipf's weights."""
    logits = jax.random.gumbel(key, (sizes.tokens, sizes.experts))
    return logits - jnp.log(jnp.arange(1, sizes.experts + 1)) if sizes.zipf else logits


def _router_output(sizes: Sizes) -> tuple[Any]:
    return (_logits(sizes, jax.random.key(1)),)


def layer(x: Any, up: Any, gate: Any, down: Any, weights: Any, indices: Any) -> Any:
    """Compute the layer by one call."""
    return jtk.moe(x, up, down, weights, indices, w_gate=gate)


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


def _by_tokamax(x: Any, w: Any, group_sizes: Any) -> Any:
    return tokamax().ragged_dot_general(x, w, group_sizes, FORWARD)


LAYERS: dict[str, Callable[..., Any]] = {
    "ours": layer,
    "XLA": functools.partial(_by_parts, jax.lax.ragged_dot),
    "parts": functools.partial(_by_parts, jtk.ragged_dot),
    "tokamax": functools.partial(_by_parts, _by_tokamax),
}


def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the gradient of the squares of a layer's results by all but the indices."""

    def loss(*args: Any) -> Any:
        return jnp.sum(function(*args).astype(np.float32) ** 2)

    return lambda *args: jax.grad(loss, (0, 1, 2, 3, 4))(*args)


def _errors(_: Arrays, results: Mapping[str, Any]) -> dict[str, float]:
    """Return the difference from a peer's result, in parts of its largest element."""
    first = {side: np.asarray(jax.tree.leaves(x)[0], np.float32) for side, x in results.items()}
    peer = next(x for side, x in first.items() if side != "ours")
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


@contextlib.contextmanager
def _pair_tile(tile: Any) -> Iterator[None]:
    """Plan kernels of two products with one tile."""
    tiles = candidates.PAIR_TILES
    candidates.PAIR_TILES = [tile]
    planned_kernel._plan_once.cache_clear()
    try:
        with KERNELS():
            yield
    finally:
        candidates.PAIR_TILES = tiles
        planned_kernel._plan_once.cache_clear()


def _programs(arguments: argparse.Namespace) -> Iterator[Program]:
    on_gpu = jax.default_backend() != "cpu"
    contexts: dict[str, Any] = {"kernels": KERNELS} if on_gpu else {}
    tiles = candidates.PAIR_TILES if on_gpu else ()
    of_tiles = {str(x): functools.partial(_pair_tile, x) for x in tiles}
    layers = {**LAYERS, **dict.fromkeys(contexts, layer)}
    for name, sizes in SIZES["gpu" if on_gpu else "cpu"].items():
        given = functools.partial(operands, sizes)
        yield Program(
            f"{name}, forward", given, {**layers, **dict.fromkeys(of_tiles, layer)}, _errors,
            contexts=contexts | of_tiles,
        )  # fmt: skip
        if "decode" not in name:
            gradients = {side: gradient(f) for side, f in layers.items()}
            yield Program(
                f"{name}, forward and backward", given, gradients, _errors, contexts=contexts
            )
        routes = {
            side: functools.partial(function, chosen=sizes.chosen)
            for side, function in (
                ("ours", _route), ("XLA", _route_by_jax), *((x, _route) for x in contexts)
            )
        }  # fmt: skip
        logits = functools.partial(_router_output, sizes)
        yield Program(f"{name}, routing", logits, routes, _errors, contexts=contexts)


COMMAND = ProgramCommand("mixture-of-experts layers", _programs, 1.0)
