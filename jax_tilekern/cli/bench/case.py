"""A row of a suite made runnable: operands, both sides of the comparison, and their errors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jax_tilekern
from jax_tilekern.cli.bench.suite import Row

Operands = tuple[Array, Array]
# The error is measured on this many rows and columns, and this many batch entries, at most.
_SAMPLED = {"b": 4, "m": 64, "n": 64}


class Errors(NamedTuple):
    """How wrong the results of a row are.

    Attributes
    ----------
    ours, peer
        Relative Frobenius errors against float64, on a sample of rows and columns.
    deviation
        The most by which an element of ours differs from the peer's, of all elements and in terms
        of their root mean square: no sample misses the one tile that is wrong.
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
        The product.
    ours, peer
        ``jax_tilekern.dot_general`` and ``jax.lax.dot_general`` with the row's arguments, jitted.
    """

    row: Row
    ours: Callable[[Array, Array], Array]
    peer: Callable[[Array, Array], Array]

    @classmethod
    def of(cls, row: Row) -> Case:
        """Return the case of a row."""

        def call(dot_general: Callable[..., Array]) -> Callable[[Array, Array], Array]:
            return jax.jit(
                lambda lhs, rhs: dot_general(
                    lhs,
                    rhs,
                    row.dimension_numbers,
                    precision=row.precision,
                    preferred_element_type=row.result and jnp.dtype(row.result),
                )
            )

        return cls(row, call(jax_tilekern.dot_general), call(lax.dot_general))

    def operands(self, seed: int = 0) -> Operands:
        """Return random operands: normal, or integers of the whole range."""
        row, keys = self.row, jax.random.split(jax.random.key(seed))
        lhs, rhs = (
            _random(key, row.shape(dimensions), dtype)
            for key, dimensions, dtype in zip(keys, (row.lhs, row.rhs), row.types, strict=True)
        )
        return lhs, rhs

    def kernel(self, operands: Operands) -> str:
        """Return our kernel, or why XLA computes the row."""
        choices = jax_tilekern.explain(self.ours, *operands)
        names = [choice.kernel for choice in choices if choice.kernel]
        return ", ".join(names) or f"XLA: {choices[0].reason}"

    def errors(self, operands: Operands) -> Errors:
        """Compare both results with float64 and with each other.

        Large products are compared with float64 on a sample of rows and columns, the last of each
        included.
        """
        row = self.row
        indices = {x: _sample(row.sizes[x], _SAMPLED[x]) for x in row.out}

        def sampled(x: Array, dimensions: str) -> np.ndarray[Any, Any]:
            host = np.asarray(x)
            for axis, dimension in enumerate(dimensions):
                if dimension in indices:
                    host = host.take(indices[dimension], axis)
            return host.astype(np.float64)

        exact = np.einsum(
            f"{row.lhs},{row.rhs}->{row.out}",
            sampled(operands[0], row.lhs),
            sampled(operands[1], row.rhs),
        )
        norm = np.linalg.norm(exact)
        results = self.ours(*operands), self.peer(*operands)
        ours, peer = (
            float(np.linalg.norm(sampled(result, row.out) - exact) / norm) for result in results
        )
        return Errors(ours, peer, float(_deviation(*results)))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random(key: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    if jnp.issubdtype(dtype, jnp.integer):
        info = np.iinfo(dtype)
        return jax.random.randint(key, shape, info.min, info.max, dtype)
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    return jax.random.normal(key, shape, wide).astype(dtype)


@jax.jit
def _deviation(ours: Array, peer: Array) -> Array:
    real = jnp.promote_types(peer.dtype, jnp.float32)
    # Integers are subtracted as such, which float32 cannot always tell apart.
    exact = peer.dtype if jnp.issubdtype(peer.dtype, jnp.integer) else real
    difference = (ours.astype(exact) - peer.astype(exact)).astype(real)
    return jnp.max(jnp.abs(difference)) / jnp.sqrt(jnp.mean(jnp.square(peer.astype(real))))


@contextlib.contextmanager
def types_enabled(row: Row) -> Iterator[None]:
    """Let JAX have 64-bit types inside the context if the row has them."""
    with jax.enable_x64(jnp.dtype(row.type).itemsize == 8):
        yield


def _sample(size: int, most: int) -> np.ndarray[Any, Any]:
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(int))
