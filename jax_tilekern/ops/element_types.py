"""Types in which elements of narrow types are computed."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import Array

from jax_tilekern.interop.originals import jnp


def is_narrow(dtype: Any) -> bool:
    """Whether floats of a type are combined in a wider one."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and np.dtype(dtype).itemsize < 4


def wide_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the type in which elements are combined that are rounded to a type."""
    return np.dtype(np.float32 if is_narrow(dtype) else dtype)


def clipped(numbers: Array, low: int, high: int) -> Array:
    """Return integers of any type between two bounds of 31 bits, as int32."""
    if numbers.dtype.itemsize < 4:
        numbers = numbers.astype(np.int32)
    info = np.iinfo(numbers.dtype)
    low, high = max(low, info.min), min(high, info.max)
    # Conditions and not jnp.clip, since jax.experimental.jet takes minima of floats only.
    found = jnp.where(numbers < low, low, jnp.where(numbers > high, high, numbers))
    return found.astype(np.int32)
