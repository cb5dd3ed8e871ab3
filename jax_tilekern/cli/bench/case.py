"""A row of a suite made runnable: operands, both sides of the comparison, and their errors."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_tilekern
from jax_tilekern.cli.bench.operations import OPERATIONS, OURS, PEER, Function
from jax_tilekern.cli.bench.suite import Row
from jax_tilekern.random_operands import Operands, random_array

# The error is measured on this many indices of each of the result's dimensions, at most.
_SAMPLED = 64


class Errors(NamedTuple):
    """How wrong the results of a row are, in terms of what random terms add up to.

    That is, for each element of the result, the root of the sum of the squares of its terms: of
    many elements it is their norm, and a single sum may be small only because its terms cancel.

    Attributes
    ----------
    ours, peer
        Frobenius norms of the errors against float64, on a sample of each dimension's indices.
    deviation
        The most by which an element of ours differs from the peer's, of all elements: no sample
        misses the one tile that is wrong.
    """

    ours: float
    peer: float
    deviation: float


@dataclass(frozen=True)
class Case:
    """A row with functions that compute it.

    Attributes
    ----------
    row
        The call.
    ours, peer
        This package's function and JAX's with the row's arguments, jitted.
    """

    row: Row
    ours: Function
    peer: Function

    @classmethod
    def of(cls, row: Row) -> Case:
        """Return the case of a row."""
        call = OPERATIONS[row.operation].call
        return cls(row, jax.jit(call(row, OURS)), jax.jit(call(row, PEER)))

    def operands(self, seed: int = 0) -> Operands:
        """Return random operands: normal, or integers of the whole range."""
        row = self.row
        keys = jax.random.split(jax.random.key(seed), len(row.operands))
        return tuple(
            random_array(key, row.shape(dimensions), dtype)
            for key, dimensions, dtype in zip(keys, row.operands, row.types, strict=True)
        )

    def kernel(self, operands: Operands) -> str:
        """Return our kernel, or why XLA computes the row."""
        choices = jax_tilekern.explain(self.ours, *operands)
        names = [choice.kernel for choice in choices if choice.kernel]
        reasons = [choice.reason for choice in choices] or ["no call of a kernel is left"]
        return ", ".join(names) or f"XLA: {reasons[0]}"

    def errors(self, operands: Operands) -> Errors:
        """Compare both results with float64 and with each other.

        Large results are compared with float64 on a sample of the indices of each dimension, the
        last included.
        """
        row, results = self.row, (self.ours(*operands), self.peer(*operands))
        with jax.enable_x64(True):
            return Errors(*map(float, _errors(row, operands, *results)))


@functools.partial(jax.jit, static_argnums=0)
def _errors(row: Row, operands: Operands, ours: Array, peer: Array) -> tuple[Array, ...]:
    indices = {x: sampled_indices(row.sizes[x]) for x in row.out}
    samples = [
        _wide(_sample(x, dimensions, indices))
        for x, dimensions in zip(operands, row.operands, strict=True)
    ]
    # In float64, whatever the row asks for.
    call = OPERATIONS[row.operation].call(replace(row, precision=None, result=None), PEER)
    exact = call(*samples)
    if jnp.issubdtype(peer.dtype, jnp.integer):
        exact = _wide(exact.astype(jnp.int64).astype(peer.dtype))  # Integers wrap around.
    norm = jnp.sqrt(jnp.sum(call(*(jnp.square(jnp.abs(x)) for x in samples))))
    ours_error, peer_error = (
        jnp.sqrt(jnp.sum(jnp.square(jnp.abs(_wide(_sample(x, row.out, indices)) - exact)))) / norm
        for x in (ours, peer)
    )
    deviation = jnp.max(jnp.abs(_wide(ours) - _wide(peer))) / (norm / math.sqrt(exact.size))
    return ours_error, peer_error, deviation


def _wide(x: Array) -> Array:
    return x.astype(jnp.complex128 if jnp.iscomplexobj(x) else jnp.float64)


def _sample(x: Array, dimensions: str, indices: Mapping[str, np.ndarray[Any, Any]]) -> Array:
    for axis, dimension in enumerate(dimensions):
        if dimension in indices:
            x = jnp.take(x, indices[dimension], axis)
    return x


def sampled_indices(size: int) -> np.ndarray[Any, Any]:
    """Return the indices of a dimension of the result on which errors are measured."""
    return np.unique(np.linspace(0, size - 1, min(size, _SAMPLED)).round().astype(int))


@contextlib.contextmanager
def types_enabled(row: Row) -> Iterator[None]:
    """Let JAX have 64-bit types inside the context if the row has them."""
    with jax.enable_x64(np.zeros((), row.types[0]).real.itemsize == 8):
        yield
