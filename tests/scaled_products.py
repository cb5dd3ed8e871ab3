"""Products of 8-bit floats with scales of blocks, and what they should be."""

import jax.numpy as jnp
import numpy as np
from numerics import F8E4


def values(rng, *shape, dtype=F8E4):
    return jnp.asarray(rng.normal(size=shape), dtype)


def scales(rng, *shape):
    return jnp.asarray(np.exp(rng.normal(size=shape)), np.float32)


def dequantized(x, scales):
    """Return values times the scales of their blocks, in float64."""
    x, scales = np.asarray(x, np.float64), np.asarray(scales, np.float64)
    for axis in (x.ndim - 2, x.ndim - 1):
        if scales.shape[axis] not in (1, x.shape[axis]):
            scales = np.take(np.repeat(scales, 128, axis), range(x.shape[axis]), axis)
    return x * scales
