"""Random operands to measure kernels with, and enough copies of them to exceed L2."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Operands = tuple[Array, ...]

# All copies together are this many times the size of L2, so that no copy stays in it.
_CACHES = 4
_MOST_COPIES = 256


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_array(key: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return normal numbers, or integers of the whole range."""
    if jnp.issubdtype(dtype, jnp.integer):
        info = np.iinfo(dtype)
        return jax.random.randint(key, shape, info.min, info.max, dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.random.normal(key, shape, dtype)
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    return jax.random.normal(key, shape, wide).astype(dtype)


def beyond_cache(
    operands: Operands, operands_of: Callable[[int], Operands], l2_bytes: int
) -> list[Operands]:
    """Return operands to rotate among, so that L2 has evicted each before its next use.

    Parameters
    ----------
    operands
        The first set.
    operands_of
        A function that makes another set from a seed.
    l2_bytes
        Size of the GPU's L2.
    """
    copies = copies_beyond_cache(sum(operand.nbytes for operand in operands), l2_bytes)
    return [operands, *(operands_of(seed) for seed in range(1, copies))]


def copies_beyond_cache(size: int, l2_bytes: int) -> int:
    """Return how many operands, of so many bytes each, L2 evicts before each is used again."""
    return min(_MOST_COPIES, max(2, math.ceil(_CACHES * l2_bytes / max(1, size))))
