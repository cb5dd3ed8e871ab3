"""A row of a suite made runnable: operands, both sides of the comparison, and their errors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jax_tilekern
from jax_tilekern.cli.bench.suite import Row

Operands = tuple[Array, Array]
# The error is measured on this many rows and columns, and this many batch entries, at most.
_SAMPLED = {"b": 4, "m": 64, "n": 64}


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
            _random(key, row.shape(dimensions), jnp.dtype(row.type))
            for key, dimensions in zip(keys, (row.lhs, row.rhs), strict=True)
        )
        return lhs, rhs

    def kernel(self, operands: Operands) -> str:
        """Return our kernel, or why XLA computes the row."""
        choices = jax_tilekern.explain(self.ours, *operands)
        names = [choice.kernel for choice in choices if choice.kernel]
        return ", ".join(names) or f"XLA: {choices[0].reason}"

    def errors(self, operands: Operands) -> tuple[float, float]:
        """Return the relative Frobenius errors of ours and the peer against float64.

        Large products are compared on a sample of rows and columns, the last of each included.
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
        ours, peer = (
            float(np.linalg.norm(sampled(side(*operands), row.out) - exact) / norm)
            for side in (self.ours, self.peer)
        )
        return ours, peer


@functools.partial(jax.jit, static_argnums=(1, 2))
def _random(key: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    if jnp.issubdtype(dtype, jnp.integer):
        info = np.iinfo(dtype)
        return jax.random.randint(key, shape, info.min, info.max, dtype)
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    return jax.random.normal(key, shape, wide).astype(dtype)


@contextlib.contextmanager
def types_enabled(row: Row) -> Iterator[None]:
    """Let JAX have 64-bit types inside the context if the row has them."""
    with jax.enable_x64(jnp.dtype(row.type).itemsize == 8):
        yield


def _sample(size: int, most: int) -> np.ndarray[Any, Any]:
    return np.unique(np.linspace(0, size - 1, min(size, most)).round().astype(int))
