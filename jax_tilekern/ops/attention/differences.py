"""Sums over scores of the same difference of query and key, and the parts that kernels return.

Sums are ``(batch, heads, differences)``, from the lowest difference, of query 0 and the last key.
A part has those of 64 queries, and of keys up to a multiple of 64.
"""

from __future__ import annotations

from jax import Array

from jax_tilekern.interop.originals import jnp
from jax_tilekern.plans.attention.problem import ROWS


def sum_of_parts(parts: Array, queries: int, keys: int) -> Array:
    """Return the sums of parts ``(batch, heads, parts, differences)``."""
    *leading, count, differences = parts.shape
    # Each part begins 64 differences behind the one before, in rows that are as much shorter.
    width = ROWS * (count - 1) + differences
    padding = [(0, 0), (0, 0), (0, 0), (0, width + ROWS - differences)]
    flat = jnp.pad(parts, padding).reshape(*leading, -1)
    rows = flat[..., : count * width].reshape(*leading, count, width)
    first = differences - ROWS - keys
    return rows.sum(2)[..., first : first + queries + keys - 1]


def as_parts(sums: Array, shape: tuple[int, ...], queries: int, keys: int) -> Array:
    """Return parts of these sums."""
    *leading, count, differences = shape
    before = differences - ROWS - 1
    padding = [(0, 0), (0, 0), (before + 1 - keys, count * ROWS - queries)]
    whole = jnp.pad(sums, padding)
    parts = whole[..., before:].reshape(*leading, count, ROWS)
    parts = jnp.pad(parts, [(0, 0), (0, 0), (0, 0), (before, 1)])
    return parts.at[..., 0, :before].set(whole[..., :before])
