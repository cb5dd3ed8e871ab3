"""Layers of experts as modules of flax.nnx and of Equinox, to copy into a model.

    python examples/moe_layers.py

trains each on a function that differs from one region of its inputs to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

import jax_tilekern as jtk

TOKENS, FEATURES, HIDDEN, EXPERTS, CHOSEN = 512, 8, 16, 8, 2
# Matrices of experts keep the variance of what goes through them.
initial = jax.nn.initializers.variance_scaling(
    1.0, "fan_in", "normal", in_axis=-2, out_axis=-1, batch_axis=0
)


class NnxExperts(nnx.Module):
    """Experts of flax.nnx: each token of ``[..., features]`` is computed by ``chosen`` of them."""

    def __init__(
        self, features: int, hidden: int, experts: int, chosen: int, *, rngs: nnx.Rngs
    ) -> None:
        self.chosen = chosen
        self.router = nnx.Linear(features, experts, use_bias=False, rngs=rngs)
        self.gate = nnx.Param(initial(rngs.params(), (experts, features, hidden)))
        self.up = nnx.Param(initial(rngs.params(), (experts, features, hidden)))
        self.down = nnx.Param(initial(rngs.params(), (experts, hidden, features)))

    def __call__(self, x: Array) -> Array:
        """Return the mixture of each token's experts."""
        tokens = x.reshape(-1, x.shape[-1])
        routing = jtk.route(self.router(tokens), self.chosen)
        gate, up, down = self.gate[...], self.up[...], self.down[...]
        return jtk.moe(tokens, up, down, routing, w_gate=gate).reshape(x.shape)


class EquinoxExperts(eqx.Module):
    """Experts of Equinox: each token of ``[..., features]`` is computed by ``chosen`` of them."""

    router: eqx.nn.Linear
    gate: Array
    up: Array
    down: Array
    chosen: int = eqx.field(static=True)

    def __init__(
        self, features: int, hidden: int, experts: int, chosen: int, *, key: Array
    ) -> None:
        router, gate, up, down = jax.random.split(key, 4)
        self.router = eqx.nn.Linear(features, experts, use_bias=False, key=router)
        self.gate = initial(gate, (experts, features, hidden))
        self.up = initial(up, (experts, features, hidden))
        self.down = initial(down, (experts, hidden, features))
        self.chosen = chosen

    def __call__(self, x: Array) -> Array:
        """Return the mixture of each token's experts."""
        tokens = x.reshape(-1, x.shape[-1])
        routing = jtk.route(jax.vmap(self.router)(tokens), self.chosen)
        layer = jtk.moe(tokens, self.up, self.down, routing, w_gate=self.gate)
        return layer.reshape(x.shape)


def flax_nnx() -> tuple[Any, Callable[[Any, Array], Array]]:
    """Return parameters, and ``apply(params, x)``."""
    graph, params = nnx.split(
        NnxExperts(FEATURES, HIDDEN, EXPERTS, CHOSEN, rngs=nnx.Rngs(0)), nnx.Param
    )
    return params, lambda params, x: nnx.merge(graph, params)(x)


def equinox() -> tuple[Any, Callable[[Any, Array], Array]]:
    """Return parameters, and ``apply(params, x)``."""
    layer = EquinoxExperts(FEATURES, HIDDEN, EXPERTS, CHOSEN, key=jax.random.key(0))
    params, static = eqx.partition(layer, eqx.is_inexact_array)
    return params, lambda params, x: eqx.combine(params, static)(x)


def train(made: tuple[Any, Callable[[Any, Array], Array]], steps: int) -> list[float]:
    """Train a layer and return the loss before each step."""
    params, apply = made
    x = jax.random.normal(jax.random.key(1), (TOKENS, FEATURES))
    # Each sign of the first three features has a matrix of its own.
    region = (x[:, :3] > 0) @ jnp.array([1, 2, 4])
    matrices = jax.random.normal(jax.random.key(2), (8, FEATURES, FEATURES)) / FEATURES**0.5
    wanted = jnp.einsum("td,tde->te", x, matrices[region])
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params: Any, state: Any) -> tuple[Array, Any, Any]:
        def loss(params: Any) -> Array:
            return jnp.mean((apply(params, x) - wanted) ** 2)

        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state, params)
        return value, optax.apply_updates(params, updates), state

    state, losses = optimizer.init(params), []
    for _ in range(steps):
        value, params, state = step(params, state)
        losses.append(float(value))
    return losses


LAYERS = {"flax.nnx": flax_nnx, "Equinox": equinox}

if __name__ == "__main__":
    for name, make in LAYERS.items():
        losses = train(make(), 300)
        print(f"{name:10} loss {losses[0]:.3f}, after 300 steps {losses[-1]:.3f}")
