"""The bounds of groups, from their sizes: the one array that kernels read."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.interop.global_modes import mode_independent

_MOST = np.iinfo(np.int32).max
_BITS = 10
_DIGIT = (1 << _BITS) - 1


# The function is not inlined, because it has many equations.
@functools.partial(jax.jit, static_argnames=("rows", "count"))
@mode_independent
def group_bounds(sizes: Array, rows: Any, offset: Array | None = None, count: Any = None) -> Array:
    """Return where each group's rows begin and end.

    XLA makes one small fusion of it: a masked sum, with no loop over the groups.

    Parameters
    ----------
    sizes
        Integers of shape ``(..., groups)``. A negative size counts as 0.
    rows
        The number of rows. Groups are cut off there.
    offset
        The first group of interest, an integer of shape ``()`` or ``(1,)``; 0 by default. Any
        value is defined: there are no rows before the first group or behind the last.
    count
        How many groups from there on; all by default.

    Returns
    -------
    Array
        ``int32`` of shape ``(..., count + 1)``: group ``offset + j`` has rows ``bounds[..., j]``
        to ``bounds[..., j + 1]``.
    """
    groups = sizes.shape[-1]
    count = groups if count is None else count
    first = 0 if offset is None else _clipped(offset.reshape(()), -count, groups)
    sizes = _clipped(sizes, 0, _MOST).astype(np.uint32)
    # The digits are summed, so that the sums of up to two million groups do not overflow. XLA does
    # not partition a sum that saturates.
    digits = jnp.stack([sizes & _DIGIT, sizes >> _BITS & _DIGIT, sizes >> 2 * _BITS])
    shape = (*digits.shape[:-1], count + 1, groups)
    group = lax.broadcasted_iota(np.int32, shape, len(shape) - 1)
    bound = lax.broadcasted_iota(np.int32, shape, len(shape) - 2)
    low, middle, high = jnp.where(group - bound < first, digits[..., None, :], np.uint32(0)).sum(-1)
    middle += low >> _BITS
    high += middle >> _BITS
    sums = (high << 2 * _BITS) + ((middle & _DIGIT) << _BITS) + (low & _DIGIT)
    sums = jnp.where(high >> (31 - 2 * _BITS) > 0, np.uint32(_MOST), sums)
    sums = sums.astype(np.int32)
    return jnp.where(sums < rows, sums, rows)


def _clipped(x: Array, low: int, high: int) -> Array:
    """Integers of any type as ``int32`` between two others."""
    # Conditions and not jnp.clip, since jax.experimental.jet takes minima of floats only.
    if x.dtype.itemsize < 4:
        x = x.astype(np.int32)
    info = np.iinfo(x.dtype)
    low, high = max(low, info.min), min(high, info.max)
    return jnp.where(x < low, low, jnp.where(x > high, high, x)).astype(np.int32)
