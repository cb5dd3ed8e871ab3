"""Segment ids as keys of bins.

Bin 0 has the ids before the first segment, bin ``segments + 1`` the ids after the last one. The
bins of a batch follow the bins of the batch before it. A key is the number of its bin, less one;
lower keys are of the first bin, higher keys of the last. So int32 ids are keys.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_tilekern.ops.element_types import clipped


def keys_of(ids: Array, segments: int, *, clip: bool = False) -> Array:
    """Return the int32 key of each id, of any integer type.

    With ``clip``, ids out of bounds belong to the first or the last segment; otherwise to none.
    """
    if clip and segments:
        return clipped(ids, 0, segments - 1)
    return ids if ids.dtype == np.int32 else clipped(ids, -1, segments)


def from_the_first(numbers: Array, rows: int) -> Array:
    """Return numbers of rows where negative ones are counted from the last row."""
    if not jnp.issubdtype(numbers.dtype, jnp.signedinteger):
        return numbers
    if numbers.dtype.itemsize < 4:
        numbers = numbers.astype(np.int32)
    return jnp.where(numbers < 0, numbers + rows, numbers)


def bins_of(keys: Array, bins: int) -> Array:
    return jnp.clip(keys, -1, bins - 2) + 1


def rows_of(keys: Array, segments: int, batch: int = 1) -> Array:
    """Return the row of a result that a key stands for, -1 for a key of no segment."""
    if batch == 1:
        return jnp.where((keys >= 0) & (keys < segments), keys, -1)
    number, within = jnp.divmod(bins_of(keys, batch * (segments + 2)), segments + 2)
    inside = (within >= 1) & (within <= segments)
    return jnp.where(inside, number * segments + within - 1, -1)


def lowest(dtype: np.dtype[Any]) -> int:
    info: Any = jnp.iinfo
    return int(info(dtype).min)


def highest(dtype: np.dtype[Any]) -> int:
    info: Any = jnp.iinfo
    return int(info(dtype).max)
