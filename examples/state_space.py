"""A state-space model that learns when to remember: a gated linear recurrence after a convolution.

    python examples/state_space.py

A sequence has letters, some of which follow a mark. The model says at every step which letter
followed the last mark. The recurrence keeps it, with a gate for each number of the state, and the
convolution sees the mark before the letter.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jax_tilekern as jtk

LETTERS, WIDTH, FILTER = 8, 64, 4
BATCH, LENGTH = 32, 128
MARKED = 0.1

Params = dict[str, Array]


def batch(key: Array) -> tuple[Array, Array]:
    """Return letters, with marks as letter 0, and for each step the letter after the last mark."""
    letters, marks = jax.random.split(key)
    x = jax.random.randint(letters, (BATCH, LENGTH), 1, LETTERS)
    is_mark = jax.random.bernoulli(marks, MARKED, x.shape)
    x = jnp.where(is_mark, 0, x)
    follows = jnp.pad(is_mark, ((0, 0), (1, 0)))[:, :-1] & ~is_mark
    # The step of the last letter that followed a mark, which is a cumulative maximum.
    steps = jnp.where(follows, jnp.arange(LENGTH), -1)
    last = jtk.cummax(steps, axis=1)
    kept = jnp.take_along_axis(x, jnp.maximum(last, 0), axis=1)
    return x, jnp.where(last < 0, 0, kept)


def initial_params(key: Array) -> Params:
    """Return random weights; gates begin nearly open, so that states last."""
    shapes = {
        "embed": (LETTERS, WIDTH), "filter": (FILTER, WIDTH), "gate": (WIDTH, WIDTH),
        "value": (WIDTH, WIDTH), "out": (WIDTH, LETTERS),
    }  # fmt: skip
    keys = jax.random.split(key, len(shapes))
    params = {
        name: jax.random.normal(k, shape) / math.sqrt(1 if name == "embed" else shape[0])
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return params | {"gate_bias": jnp.full(WIDTH, 2.0)}


def logits(params: Params, x: Array) -> Array:
    """Return the logits of every step."""
    z = jtk.causal_conv1d(params["embed"][x], params["filter"], activation="silu")
    decay = jax.nn.sigmoid(z @ params["gate"] + params["gate_bias"])
    states = jtk.linear_recurrence(decay, (1 - decay) * (z @ params["value"]), axis=1)
    return states @ params["out"]


def loss(params: Params, x: Array, y: Array) -> Array:
    """Return the mean cross-entropy of the steps."""
    log_shares = jax.nn.log_softmax(logits(params, x))
    return -jnp.take_along_axis(log_shares, y[..., None], axis=-1).mean()


@functools.partial(jax.jit, static_argnames="updates")
def train(key: Array, updates: int) -> Array:
    """Train by Adam; return the loss of each update."""
    start, data = jax.random.split(key)
    params = initial_params(start)
    zeros = jax.tree.map(jnp.zeros_like, params)

    def update(carry: tuple[Params, Params, Params], number: Array) -> tuple[Any, Array]:
        params, mean, square = carry
        x, y = batch(jax.random.fold_in(data, number))
        value, gradient = jax.value_and_grad(loss)(params, x, y)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
        square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, square, gradient)
        n = number + 1.0
        params = jax.tree.map(
            lambda p, m, s: p
            - 0.01 * (m / (1 - 0.9**n)) / (jnp.sqrt(s / (1 - 0.99**n)) + 1e-8),
            params, mean, square,
        )  # fmt: skip
        return (params, mean, square), value

    _, losses = jax.lax.scan(update, (params, zeros, zeros), jnp.arange(updates))
    return losses


def main(updates: int = 120) -> tuple[float, float]:
    """Train the model; return the first loss and the mean of the last ten."""
    x, y = batch(jax.random.key(1))
    print(jtk.explain(jax.grad(loss), initial_params(jax.random.key(0)), x, y))
    losses = train(jax.random.key(0), updates)
    for number in range(0, updates, max(1, updates // 6)):
        print(f"update {number:3}: loss {float(losses[number]):.3f}")
    return float(losses[0]), float(losses[-10:].mean())


if __name__ == "__main__":
    main()
