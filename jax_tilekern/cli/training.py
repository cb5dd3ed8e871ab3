"""One training run, and how far rounding alone can move it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_tilekern.cli.digits import Digits
from jax_tilekern.cli.network import Product, State, Step, initial_state

BATCH = 128
# How many times as far as a run with perturbed products two runs may be apart: the perturbation is
# a typical rounding error of each product, and two kernels differ by two of them, at worst larger.
_MARGIN = 10.0

Batch = tuple[Array, Array]


class Run(NamedTuple):
    """A finished training run: the loss of each step, and the last state."""

    losses: tuple[float, ...]
    state: State


def batches(data: Digits, steps: int) -> list[Batch]:
    """Return the batch of each step: shuffled epochs, always the same."""
    rng = np.random.default_rng(1)
    per_epoch = len(data.images) // BATCH
    chosen: list[Batch] = []
    while len(chosen) < steps:
        order = rng.permutation(len(data.images))[: per_epoch * BATCH]
        for indices in order.reshape(per_epoch, BATCH):
            chosen.append((jnp.asarray(data.images[indices]), jnp.asarray(data.labels[indices])))
    return chosen[:steps]


def train(
    step: Step, chosen: Sequence[Batch], progress: Callable[[int, float], None] | None = None
) -> Run:
    """Train from the initial state, one step a batch.

    Parameters
    ----------
    step
        What :func:`jax_tilekern.cli.network.make_step` returns.
    chosen
        The batches.
    progress
        Called after each step with its number, from 1, and its loss.
    """
    state, losses = initial_state(), []
    for number, (images, labels) in enumerate(chosen, start=1):
        state, report = step(state, images, labels)
        losses.append(float(report.loss))
        if progress is not None:
            progress(number, losses[-1])
    return Run(tuple(losses), state)


def largest_difference(left: Run, right: Run) -> float:
    """Return how far two runs' losses are apart where they are farthest."""
    return max(abs(a - b) for a, b in zip(left.losses, right.losses, strict=True))


def rounding_error(terms: int) -> float:
    """Return the relative error that a float32 product of so many terms has here.

    Sums err by about the square root of their length; a GPU rounds the operands to TF32 too.
    """
    operands = 2.0**-11 if jax.default_backend() == "gpu" else 0.0
    return 2.0**-24 * math.sqrt(terms) + operands


def perturbed(product: Product) -> Product:
    """Return ``product`` with every element of the result off by its rounding error, up or down.

    A training run with it shows how much this very training amplifies rounding. No bound on
    paper does: worst cases grow exponentially with the steps.
    """

    def disturbed(lhs: Array, rhs: Array) -> Array:
        result = product(lhs, rhs)
        signs = 1.0 - 2.0 * (jnp.arange(result.shape[-1]) % 2)
        return result * (1 + rounding_error(lhs.shape[-1]) * signs)

    return disturbed


def allowed_difference(reference: Run, disturbed: Run) -> float:
    """Return how far a run with other kernels may be from ``reference``.

    Parameters
    ----------
    reference
        A run with some product.
    disturbed
        The same with :func:`perturbed` of it.
    """
    return _MARGIN * largest_difference(reference, disturbed)
