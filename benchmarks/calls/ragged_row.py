"""Rows of grouped GEMMs: one product for each expert of a mixture, of the rows routed to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.calls.row import Row, random_arrays
from jax_tilekern.tuning.random_operands import Operands

Sizes = np.ndarray[Any, Any]

# A single product by its dimensions: forward, the gradient of the rows and that of the weights.
PRODUCTS = (("mk", "gkn", "mn"), ("mn", "gkn", "mk"), ("mk", "mn", "gkn"))
# A gated layer, which has three products, and the layer with its gradients, which has nine.
LAYER = ("mk", "gkn", "mk")
LAYER_GRADIENTS = ("mk", "gkn", "mk,gkn,gkn,gnk")
_LAYER_OPERANDS = ("mk", "gkn", "gkn", "gnk", "g")


def _balanced(rows: int, groups: int, _: np.random.Generator) -> Sizes:
    return np.diff(np.arange(groups + 1) * rows // groups)


def _multinomial(rows: int, groups: int, generator: np.random.Generator) -> Sizes:
    return generator.multinomial(rows, np.full(groups, 1 / groups))


def _zipf(rows: int, groups: int, generator: np.random.Generator) -> Sizes:
    weights = 1 / np.arange(1, groups + 1)
    return generator.multinomial(rows, generator.permutation(weights / weights.sum()))


def _one_hot(rows: int, groups: int, _: np.random.Generator) -> Sizes:
    return np.where(np.arange(groups) == groups // 2, rows, 0)


# How many rows each group gets: as many as the others, at random with the same probability for each
# or with probabilities by Zipf's law (exponent 1, in random order), or one has all.
SPLITS: Mapping[str, Callable[[int, int, np.random.Generator], Sizes]] = {
    "balanced": _balanced,
    "multinomial": _multinomial,
    "zipf": _zipf,
    "one-hot": _one_hot,
}


@dataclass(frozen=True)
class RaggedRow(Row):
    """One grouped GEMM, or a layer of them: ``g`` groups have the ``m`` rows between them.

    The last operand is the sizes of the groups. The dimensions say what is called: one of
    :data:`PRODUCTS`, :data:`LAYER` or :data:`LAYER_GRADIENTS`.

    Attributes
    ----------
    split
        How many rows each group gets, a key of :data:`SPLITS`.
    """

    split: str = "balanced"

    @property
    def dimensions(self) -> tuple[str, str, str]:
        """The dimensions of both operands and of the results."""
        return self.lhs, self.rhs or "", self.out

    @property
    def is_layer(self) -> bool:
        """Whether it is a layer, with or without its gradients."""
        return self.dimensions in (LAYER, LAYER_GRADIENTS)

    @property
    def operands(self) -> tuple[str, ...]:
        """The dimensions of each operand; the last is the sizes of the groups."""
        return _LAYER_OPERANDS if self.is_layer else (*super().operands, "g")

    @property
    def types(self) -> tuple[np.dtype[Any], ...]:
        """Types of the operands."""
        lhs, rhs = super().types[:2]
        return (lhs, *[rhs] * (len(self.operands) - 2), np.dtype(np.int32))

    @property
    def group_sizes(self) -> Sizes:
        """How many rows each group has, the same in every run."""
        generator = np.random.default_rng(0)
        return SPLITS[self.split](self.sizes["m"], self.sizes["g"], generator)

    @property
    def combinations(self) -> int:
        """How many multiplications there are: a row meets the weights of its group alone."""
        products = {LAYER: 3, LAYER_GRADIENTS: 9}.get(self.dimensions, 1)
        return products * math.prod(self.shape("mkn"))

    @property
    def bytes(self) -> int:
        """Bytes that must move at least: the weights of groups without rows need not be read."""
        empty = sum(self.group_sizes == 0)
        unread = (
            self.bytes_of(dimensions[1:], dtype)
            for dimensions, dtype in zip(self.operands[:-1], self.types[:-1], strict=True)
            if dimensions[0] == "g"
        )
        return super().bytes - int(empty) * sum(unread)

    @property
    def details(self) -> Mapping[str, Any]:
        """How the rows are split."""
        sizes = self.group_sizes
        return {
            "split": self.split,
            "groups": {
                "empty": int(sum(sizes == 0)),
                "smallest": int(sizes.min()),
                "largest": int(sizes.max()),
            },
        }

    @property
    def malformed(self) -> str | None:
        """What is wrong with the dimensions or the split."""
        known = (*PRODUCTS, LAYER, LAYER_GRADIENTS)
        if self.dimensions not in known:
            return f"dimensions {' '.join(self.dimensions)!r} are none of {known}"
        if self.split not in SPLITS:
            return f"split {self.split!r} is none of {', '.join(SPLITS)}"
        return None

    @property
    def call(self) -> Self:
        """The row without what the function that computes it does not depend on."""
        return replace(super().call, split="balanced")

    def random_operands(self, seed: int) -> Operands:
        """Return normal numbers, a layer's weights such that its result is of their size."""
        lhs, *others = random_arrays(seed, self.structs[:-1])
        if self.is_layer:
            others = list(map(_scaled, others))
        return (lhs, *others, jnp.asarray(self.group_sizes, jnp.int32))


@jax.jit
def _scaled(weights: jax.Array) -> jax.Array:
    """Return weights over the root of the size that a product with them contracts."""
    return (weights / math.sqrt(weights.shape[1])).astype(weights.dtype)
