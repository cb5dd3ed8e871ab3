"""A loop over equal chunks and the remainder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_tilekern.interop import compat

Carry = TypeVar("Carry")


def over_chunks(
    size: int,
    chunk: int,
    body: Callable[[Any, int, Carry], Carry],
    carry: Carry,
) -> Carry:
    """Run ``body(start, size, carry)`` for equal chunks, and for what remains."""

    def step(state: tuple[Any, Carry], size: int) -> tuple[Any, Carry]:
        # Chunks wait for each other: logits made early would be in memory beside earlier ones.
        start, carry = lax.optimization_barrier(state)
        return start + size, body(start, size, carry)

    count, remainder = divmod(size, chunk)
    if count == 0 or (count == 1 and not remainder):
        return body(0, size, carry)
    # In a shard_map the barrier makes all that passes it vary over the same axes (jax 0.10).
    first, *_ = compat.unify_varying(jnp.int32(0), *jax.tree.leaves(carry))
    state = lax.fori_loop(0, count, lambda _, state: step(state, chunk), (first, carry))
    return (step(state, remainder) if remainder else state)[1]
