"""A model whose products are somebody's choice, and what it costs to make a program of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

Matmul = Callable[..., Array]

_BATCH, _LENGTH, _WIDTH, _HEADS = 4, 512, 1024, 8
# Steps of making a program, in order.
STEPS = ("trace", "lower", "compile")


def programs(layers: int) -> dict[str, Callable[[Matmul], Callable[..., Any]]]:
    """Return by name what makes a program of a model of so many layers from a matrix product."""

    def inference(matmul: Matmul) -> Callable[..., Array]:
        def loss(weights: Sequence[Sequence[Array]], x: Array) -> Array:
            for layer in weights:
                x = _layer(matmul, layer, x)
            return x.astype(jnp.float32).sum()

        return loss

    return {
        f"inference, {layers} layers": inference,
        f"gradients, {layers} layers": lambda matmul: jax.grad(inference(matmul)),
    }


def arguments(layers: int) -> tuple[Any, ...]:
    """Return the types of a model's weights and of its input."""

    def weights(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    square, wide = weights(_WIDTH, _WIDTH), weights(_WIDTH, 4 * _WIDTH)
    layer = [*[square] * 4, wide, weights(4 * _WIDTH, _WIDTH)]
    return [layer] * layers, weights(_BATCH, _LENGTH, _WIDTH)


def make_program(
    function: Callable[..., Any], types: tuple[Any, ...], platform: str, *, compiles: bool
) -> tuple[dict[str, float], int]:
    """Make a program of a function, and return the seconds of each step and the bytes of its HLO.

    Parameters
    ----------
    function
        What JAX has not seen yet, of which it would have kept everything.
    types
        Of its arguments.
    platform
        What it is lowered for.
    compiles
        Whether it is compiled too, for which the platform has to be here.
    """
    times = [time.perf_counter()]
    traced = jax.jit(function).trace(*types)
    times.append(time.perf_counter())
    lowered = traced.lower(lowering_platforms=(platform,))
    times.append(time.perf_counter())
    if compiles:
        lowered.compile()
        times.append(time.perf_counter())
    # Without a compilation there is one step less.
    spans = zip(STEPS, times[:-1], times[1:], strict=False)
    hlo: Any = lowered.compiler_ir("hlo")
    size = len(hlo.as_serialized_hlo_module_proto())
    return {step: end - start for step, start, end in spans}, size


def _layer(matmul: Matmul, weights: Sequence[Array], x: Array) -> Array:
    """Attention and a perceptron, as a transformer's layer has them."""
    query, key, value, out, wide, narrow = weights
    normed = _normed(x)

    def heads(weight: Array) -> Array:
        return matmul(normed, weight).reshape(_BATCH, _LENGTH, _HEADS, -1).transpose(0, 2, 1, 3)

    scores = matmul(heads(query), heads(key).mT).astype(jnp.float32) * (_WIDTH / _HEADS) ** -0.5
    mixed = matmul(jax.nn.softmax(scores).astype(x.dtype), heads(value))
    x = x + matmul(mixed.transpose(0, 2, 1, 3).reshape(x.shape), out)
    return x + matmul(jax.nn.gelu(matmul(_normed(x), wide)), narrow)


def _normed(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)
