"""A small network and its training step, over any function that multiplies matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_tilekern.cli.digits import Digits

Multiply = Callable[[Array, Array], Array]
Layer = tuple[Array, Array]
Parameters = tuple[Layer, ...]

SIZES = (64, 128, 128, 10)
BATCH = 128
_LEARNING_RATE = 0.05
_MOMENTUM = 0.9


class State(NamedTuple):
    """The state that training carries from step to step."""

    parameters: Parameters
    velocity: Parameters


Batch = tuple[Array, Array]
TrainingStep = Callable[[State, Array, Array], tuple[State, Array]]


def initial_state() -> State:
    """Return the state before the first step; always the same."""
    rng = np.random.default_rng(0)

    def layer(inputs: int, outputs: int) -> Layer:
        weights = rng.standard_normal((inputs, outputs)) * np.sqrt(2 / inputs)
        return jnp.asarray(weights, jnp.float32), jnp.zeros(outputs, jnp.float32)

    parameters = tuple(map(layer, SIZES[:-1], SIZES[1:]))
    return State(parameters, jax.tree.map(jnp.zeros_like, parameters))


def batches(data: Digits) -> Iterator[Batch]:
    """Yield batches without end: shuffled epochs, always the same."""
    rng = np.random.default_rng(1)
    while True:
        order = rng.permutation(len(data.images))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            yield jnp.asarray(data.images[chosen]), jnp.asarray(data.labels[chosen])


def logits(product: Multiply, parameters: Parameters, images: Array) -> Array:
    """Return the scores of the ten digits for each image of a batch."""
    *hidden, (weights, bias) = parameters
    x = images
    for layer_weights, layer_bias in hidden:
        x = jax.nn.silu(product(x, layer_weights) + layer_bias)
    return product(x, weights) + bias


def make_step(product: Multiply) -> TrainingStep:
    """Return the jitted training step, gradient descent with momentum; it also returns the loss."""

    def loss(parameters: Parameters, images: Array, labels: Array) -> Array:
        log_probabilities = jax.nn.log_softmax(logits(product, parameters, images))
        return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[:, None], axis=-1))

    def step(state: State, images: Array, labels: Array) -> tuple[State, Array]:
        value, gradient = jax.value_and_grad(loss)(state.parameters, images, labels)
        velocity = jax.tree.map(lambda v, g: _MOMENTUM * v + g, state.velocity, gradient)
        parameters = jax.tree.map(lambda p, v: p - _LEARNING_RATE * v, state.parameters, velocity)
        return State(parameters, velocity), value

    return jax.jit(step)
