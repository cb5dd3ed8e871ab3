"""One attention block in four frameworks, trained with JAX's products and with this library's.

Each is made of its framework's own layers, so what differs between the two columns of losses is
the arithmetic of the products alone:

    python examples/frameworks.py
    python examples/frameworks.py --optimizer muon
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

import jax_tilekern as jtk

BATCH, LENGTH, WIDTH, HEADS, HIDDEN = 8, 12, 16, 2, 32


class Model(NamedTuple):
    """Parameters, and ``apply(params, x)``."""

    params: Any
    apply: Callable[[Any, Array], Array]


def flax_linen(hook: bool) -> Model:
    """Layers that take a ``dot_general``, and attention that takes an ``einsum``."""
    from flax import linen as nn

    dense = {"dot_general": jtk.dot_general} if hook else {}
    attention = (
        {
            "qkv_dot_general": jtk.dot_general,
            "out_dot_general": jtk.dot_general,
            "qk_attn_weights_einsum_cls": lambda: jtk.einsum,
            "attn_weights_value_einsum_cls": lambda: jtk.einsum,
        }
        if hook
        else {}
    )

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(HEADS, **attention)(y, y)
            y = nn.gelu(nn.Dense(HIDDEN, **dense)(nn.LayerNorm()(x)))
            return x + nn.Dense(WIDTH, **dense)(y)

    block = Block()
    return Model(block.init(jax.random.key(0), jnp.ones((1, LENGTH, WIDTH))), block.apply)


def flax_nnx(hook: bool) -> Model:
    """Layers that take a ``dot_general``, and attention that is a function of its own."""
    from flax import nnx

    dense = {"dot_general": jtk.dot_general} if hook else {}
    attention = (
        {
            "qkv_dot_general": jtk.dot_general,
            "out_dot_general": jtk.dot_general,
            "attention_fn": jtk.patch()(nnx.dot_product_attention),
        }
        if hook
        else {}
    )

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.before = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                HEADS, WIDTH, decode=False, rngs=rngs, **attention
            )
            self.between = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs, **dense)
            self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs, **dense)

        def __call__(self, x: Array) -> Array:
            x = x + self.attention(self.before(x))
            return x + self.down(nnx.gelu(self.up(self.between(x))))

    graph, params = nnx.split(Block(nnx.Rngs(0)))
    return Model(params, lambda params, x: nnx.merge(graph, params)(x))


def equinox(hook: bool) -> Model:
    """No hooks: ``weight @ x`` and ``jnp.einsum``, of one sequence, mapped over the batch."""
    import equinox as eqx

    class Block(eqx.Module):
        before: eqx.nn.LayerNorm
        attention: eqx.nn.MultiheadAttention
        between: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP

        def __init__(self, key: Array) -> None:
            attention, mlp = jax.random.split(key)
            self.before = eqx.nn.LayerNorm(WIDTH)
            self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=attention)
            self.between = eqx.nn.LayerNorm(WIDTH)
            self.mlp = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, jax.nn.gelu, key=mlp)

        def __call__(self, x: Array) -> Array:
            y = jax.vmap(self.before)(x)
            x = x + self.attention(y, y, y)
            return x + jax.vmap(lambda row: self.mlp(self.between(row)))(x)

    params, static = eqx.partition(Block(jax.random.key(0)), eqx.is_inexact_array)
    return Model(params, lambda params, x: jax.vmap(eqx.combine(params, static))(x))


def haiku(hook: bool) -> Model:
    """No hooks: ``jnp.dot`` and ``jnp.einsum``."""
    import haiku as hk

    def block(x: Array) -> Array:
        start = hk.initializers.VarianceScaling()
        y = hk.LayerNorm(-1, True, True)(x)
        x = x + hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=start)(y, y, y)
        y = hk.LayerNorm(-1, True, True)(x)
        return x + hk.nets.MLP([HIDDEN, WIDTH], activation=jax.nn.gelu)(y)

    transformed = hk.without_apply_rng(hk.transform(block))
    params = transformed.init(jax.random.key(0), jnp.ones((1, LENGTH, WIDTH)))
    return Model(params, transformed.apply)


MODELS = {"flax.linen": flax_linen, "flax.nnx": flax_nnx, "Equinox": equinox, "Haiku": haiku}
HOOKED = ("flax.linen", "flax.nnx")
OPTIMIZERS = {
    "adam": lambda: optax.adam(3e-3),
    "muon": lambda: optax.contrib.muon(1e-2),
}


@functools.cache
def made(name: str, hook: bool) -> Model:
    """Return a framework's block, which is the same for all that is trained from it."""
    return MODELS[name](hook)


def task() -> tuple[Array, Array]:
    """Sequences, and the running mean of each: what attention is good at."""
    x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, WIDTH))
    return x, jnp.cumsum(x, 1) / jnp.arange(1, LENGTH + 1)[:, None]


def training_step(model: Model, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """``step(params, state, x, y)`` gives the loss, and the next parameters and state."""

    def loss(params: Any, x: Array, y: Array) -> Array:
        return jnp.mean((model.apply(params, x) - y) ** 2)

    def step(params: Any, state: Any, x: Array, y: Array) -> tuple[Array, Any, Any]:
        value, gradient = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(gradient, state, params)
        return value, optax.apply_updates(params, updates), state

    return step


def train(name: str, way: str, optimizer: str = "adam", steps: int = 50) -> list[float]:
    """Train a framework's block.

    Parameters
    ----------
    name
        One of ``MODELS``.
    way
        ``"jax"``, ``"hook"`` or ``"patch"``.
    optimizer
        One of ``OPTIMIZERS``.
    steps
        How many.

    Returns
    -------
    list[float]
        The loss before each step.
    """
    model = made(name, way == "hook")
    step = jax.jit(training_step(model, OPTIMIZERS[optimizer]()))
    params, state = model.params, OPTIMIZERS[optimizer]().init(model.params)
    x, y = task()
    losses = []
    with jtk.patch() if way == "patch" else contextlib.nullcontext():
        for _ in range(steps):
            loss, params, state = step(params, state, x, y)
            losses.append(float(loss))
    return losses


def main() -> None:
    """Print a row for each framework."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    optimizer = parser.parse_args().optimizer
    print(f"{'framework':12} {'way':6} {'first loss':>12} {'after 50 steps':>15}")
    for name in MODELS:
        for way in ("jax", *(("hook",) if name in HOOKED else ()), "patch"):
            losses = train(name, way, optimizer)
            print(f"{name:12} {way:6} {losses[0]:12.6f} {losses[-1]:15.6f}")


if __name__ == "__main__":
    main()
