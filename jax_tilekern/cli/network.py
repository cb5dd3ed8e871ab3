"""A small network and its training step, over any function that multiplies matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Product = Callable[[Array, Array], Array]
Layer = tuple[Array, Array]
Parameters = tuple[Layer, ...]

SIZES = (64, 128, 128, 10)
_LEARNING_RATE = 0.5
_MOMENTUM = 0.9
# An example whose gradient is longer than this is scaled down to it, so that no image that is hard
# to read, or labelled wrongly, moves the network more than any other.
_LONGEST_GRADIENT = 5.0


class State(NamedTuple):
    """What training carries from step to step."""

    parameters: Parameters
    velocity: Parameters


class Report(NamedTuple):
    """What a step tells: the mean loss, and the length of every example's own gradient."""

    loss: Array
    gradient_norms: Array


Step = Callable[[State, Array, Array], tuple[State, Report]]


def initial_state() -> State:
    """Return the state before the first step; always the same."""
    rng = np.random.default_rng(0)

    def layer(inputs: int, outputs: int) -> Layer:
        weights = rng.standard_normal((inputs, outputs)) * np.sqrt(2 / inputs)
        return jnp.asarray(weights, jnp.float32), jnp.zeros(outputs, jnp.float32)

    parameters = tuple(map(layer, SIZES[:-1], SIZES[1:]))
    return State(parameters, jax.tree.map(jnp.zeros_like, parameters))


def logits(product: Product, parameters: Parameters, images: Array) -> Array:
    """Return the scores of the ten digits for one image or a batch of them."""
    *hidden, (weights, bias) = parameters
    x = images
    for layer_weights, layer_bias in hidden:
        # Smooth, so that no rounding error flips a unit from off to on and moves a whole gradient.
        x = jax.nn.silu(product(x, layer_weights) + layer_bias)
    return product(x, weights) + bias


def losses(product: Product, parameters: Parameters, images: Array, labels: Array) -> Array:
    """Return the cross entropy of one image or of each in a batch."""
    log_probabilities = jax.nn.log_softmax(logits(product, parameters, images))
    return -jnp.take_along_axis(log_probabilities, labels[..., None], axis=-1)[..., 0]


def gradient_norms(product: Product, parameters: Parameters, images: Array, labels: Array) -> Array:
    """Return the length of each example's own gradient: ``vmap`` of ``grad``."""

    def norm(image: Array, label: Array) -> Array:
        gradient = jax.grad(lambda p: losses(product, p, image, label))(parameters)
        return jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient)))

    return jax.vmap(norm)(images, labels)


def make_step(product: Product) -> Step:
    """Return the jitted training step: gradient descent with momentum, each example clipped."""

    def step(state: State, images: Array, labels: Array) -> tuple[State, Report]:
        norms = gradient_norms(product, state.parameters, images, labels)
        # The gradient of this weighted mean is the mean of the clipped gradients.
        weights = jnp.minimum(1.0, _LONGEST_GRADIENT / jnp.maximum(norms, 1e-12))

        def objective(parameters: Parameters) -> tuple[Array, Array]:
            each = losses(product, parameters, images, labels)
            return jnp.mean(weights * each), jnp.mean(each)

        (_, loss), gradient = jax.value_and_grad(objective, has_aux=True)(state.parameters)
        velocity = jax.tree.map(lambda v, g: _MOMENTUM * v + g, state.velocity, gradient)
        parameters = jax.tree.map(
            lambda p, v: p - _LEARNING_RATE * (1 - _MOMENTUM) * v, state.parameters, velocity
        )
        return State(parameters, velocity), Report(loss, norms)

    return jax.jit(step)
