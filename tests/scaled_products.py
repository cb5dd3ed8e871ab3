"""Products of 8-bit floats with scales of blocks, and what they should be."""

import jax.numpy as jnp
import numpy as np
from numerics import F8E4, UNIT_ROUNDOFF, roundoff

F32 = np.dtype(np.float32)
# Hopper's MMAs add so many products to an accumulator, in fixed point with this unit, relative to
# the largest magnitude of both.
_STEP, _UNIT = 32, 2.0**-13
_BLOCK = 128
TENSOR_CORES = roundoff(F8E4) > 0


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


def _sum_errors(a, b):
    """Return the largest errors of sums of ``a @ b`` by MMAs, which begin anew in each block."""
    errors = np.zeros((a @ b).shape)
    for block in range(0, a.shape[-1], _BLOCK):
        partial = np.zeros_like(errors)
        for first in range(block, min(block + _BLOCK, a.shape[-1]), _STEP):
            x = a[..., first : min(first + _STEP, block + _BLOCK)]
            y = b[..., first : min(first + _STEP, block + _BLOCK), :]
            largest = np.abs(partial)
            for i in range(x.shape[-1]):
                np.maximum(largest, np.abs(x[..., i, None] * y[..., i, None, :]), out=largest)
            errors += (_STEP + 1) * _UNIT * largest
            partial += x @ y
    return errors


def product_bounds(a, b, dtype, *, tensor_cores):
    """Return ``a @ b`` and its largest errors: each term and each sum is rounded to float32.

    ``tensor_cores`` adds the errors of their sums.
    """
    expected = a @ b
    bound = (a.shape[-1] + 4) * UNIT_ROUNDOFF[F32] * (np.abs(a) @ np.abs(b))
    if tensor_cores:
        bound = bound + _sum_errors(a, b)
    if dtype != F32:
        bound = bound + UNIT_ROUNDOFF[np.dtype(dtype)] * (np.abs(expected) + bound)
    return expected, bound
