"""Rows added to few of a table's by XLA, of floats of 16 bits, which are rounded once."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.ops.element_types import wide_dtype


def add_few_rows(table: Array, updates: Array, rows: Array, *, is_zero: bool = False) -> Array:
    """Add updates to the rows of their numbers; numbers that are too large are of none.

    If the table is zero, it is not read, so that its memory has the result.

    The last update of each row has the sum of the row, and of all its updates. Only these rows are
    gathered, and set. XLA adds up the updates, in no fixed order on a GPU.
    """
    number, count = table.shape[0], updates.shape[0]
    wide, edges = wide_dtype(table.dtype), lax.iota(np.int32, count)
    last = jnp.zeros(number, np.int32).at[rows].max(edges, mode="drop")
    last = last.at[rows].get(mode="fill", fill_value=count)
    totals = jnp.zeros(updates.shape, wide).at[last].add(updates.astype(wide), mode="drop")
    if not is_zero:
        totals += table.at[rows].get(mode="fill", fill_value=0).astype(wide)
    # Numbers of rows are unique; those out of bounds are dropped.
    target = jnp.where(last == edges, rows, number + edges)
    result: Array = table.at[target].set(
        totals.astype(table.dtype), mode="drop", unique_indices=True
    )
    return result
