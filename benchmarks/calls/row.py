"""A row of a suite: one call of an operation, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jax_tilekern.tuning.random_operands import Operands, random_array


@dataclass(frozen=True)
class Row:
    """One call of an operation.

    Attributes
    ----------
    name
        What tables call it.
    group
        The group that it belongs to.
    target
        The least peer / ours that is no loss.
    type
        Of the operands.
    lhs, rhs
        The dimensions of each operand in the order in which they lie, a letter each; ``rhs`` is
        ``None`` where there is one operand. Those of a product are ``b`` batch, ``m`` rows, ``n``
        columns, ``k`` contracted, and a batch that one operand lacks is broadcast.
    out
        The dimensions of the result; of several results, separated by commas.
    sizes
        Of each dimension.
    rhs_type
        Type of the right operand where it is another.
    result
        Type of the result; by default the operands'.
    precision
        As ``jax.lax.dot_general`` takes it.
    operation
        A key of :data:`benchmarks.calls.operations.OPERATIONS`.
    share
        The least share of the memory's bandwidth that is no loss.
    others
        Which of the operation's other peers it is measured against, and the least other / ours
        that is no loss.
    temporary
        The most temporary bytes that are no loss, if anything is said of them.
    """

    name: str
    group: str
    target: float
    type: str
    lhs: str
    rhs: str | None
    out: str
    sizes: Mapping[str, int] = field(hash=False)
    rhs_type: str | None = None
    result: str | None = None
    precision: str | None = None
    operation: str = "matmul"
    share: float = 0.0
    others: Mapping[str, float] = field(default_factory=dict, hash=False)
    temporary: int | None = None

    @property
    def operands(self) -> tuple[str, ...]:
        """The dimensions of each operand."""
        return (self.lhs,) if self.rhs is None else (self.lhs, self.rhs)

    @property
    def types(self) -> tuple[np.dtype[Any], ...]:
        """Types of the operands."""
        return tuple(map(jnp.dtype, (self.type, self.rhs_type or self.type)))[: len(self.operands)]

    @property
    def results(self) -> tuple[str, ...]:
        """The dimensions of each result."""
        return tuple(self.out.split(","))

    @property
    def result_type(self) -> np.dtype[Any]:
        """Type of the results."""
        return jnp.dtype(self.result or self.type)

    @property
    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and types of the operands."""
        return tuple(map(jax.ShapeDtypeStruct, map(self.shape, self.operands), self.types))

    @property
    def combinations(self) -> int:
        """How many combinations of indices the operation works on."""
        return math.prod(self.sizes.values())

    @property
    def bytes(self) -> int:
        """Bytes of the operands and of the results: the least that must move."""
        results = [self.result_type] * len(self.results)
        dimensions, types = (*self.operands, *self.results), (*self.types, *results)
        return sum(map(self.bytes_of, dimensions, types))

    @property
    def details(self) -> Mapping[str, Any]:
        """What a record says of the row besides what every row has."""
        return {}

    @property
    def malformed(self) -> str | None:
        """What is wrong with it that its kind of row alone knows."""
        return None

    @property
    def call(self) -> Self:
        """The row without what the function that computes it does not depend on."""
        return replace(
            self, name="", group="", target=0.0, share=0.0, others={}, temporary=None, sizes={}
        )

    def shape(self, dimensions: str) -> tuple[int, ...]:
        """Return the sizes of ``dimensions``."""
        return tuple(self.sizes[x] for x in dimensions)

    def bytes_of(self, dimensions: str, dtype: np.dtype[Any]) -> int:
        """Return the bytes of an array of ``dimensions``."""
        return math.prod(self.shape(dimensions)) * dtype.itemsize

    def random_operands(self, seed: int) -> Operands:
        """Return random operands: normal, or integers of the whole range."""
        return random_arrays(seed, self.structs)


def random_arrays(seed: int, structs: Sequence[jax.ShapeDtypeStruct]) -> Operands:
    """Return random arrays of these shapes and types."""
    keys = jax.random.split(jax.random.key(seed), len(structs))
    return tuple(random_array(key, x.shape, x.dtype) for key, x in zip(keys, structs, strict=True))
