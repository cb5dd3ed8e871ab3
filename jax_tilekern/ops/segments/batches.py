"""Batches of edges and of segments: they follow one another along one dimension."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.ops.segments.keys import bins_of


def first_of_batches(batch: int, step: int) -> Array:
    """Return the first number of each batch, as a column: batch ``i`` begins at ``i * step``."""
    return lax.broadcasted_iota(np.int32, (batch, 1), 0) * step


def by_batch(x: Array, batch: int) -> Array:
    """Return an array whose batches follow one another with the batch as its first dimension."""
    return x.reshape(batch, x.shape[0] // batch, *x.shape[1:])


def in_front(operands: Sequence[Array], dims: Sequence[int | None]) -> tuple[int, list[Array]]:
    """Return the size of a mapped axis, and the operands with the axis in front if they have it."""
    moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]
    return next(x.shape[0] for x, d in zip(moved, dims, strict=True) if d is not None), moved


def whole(x: Array, is_mapped: bool, size: int) -> Array:
    """Return an array with the mapped axis in front."""
    return x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))


def concatenated_batches(
    keys: Array, order: Sequence[Array], bounds: Array, *, bins: int
) -> tuple[Array, ...]:
    """Return the keys, orders and bounds of batches, which are in front, as those of all rows.

    There is one order or none, and a batch has ``bins`` bins.
    """
    batch, rows = keys.shape
    first = first_of_batches(batch, rows)
    return (
        (bins_of(keys, bins) - 1 + first_of_batches(batch, bins)).ravel(),
        *((each + first).ravel() for each in order),
        jnp.append((bounds[:, :-1] + first).ravel(), np.int32(batch * rows)),
    )
