"""What a call costs the host that is not compiled: outside of ``jit``, and while it is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jax_tilekern as jtk
from jax_tilekern.cli.timing import Pairs, interleaved
from jax_tilekern.tuning.wall_time import repeated

# Calls in a program that is traced, so that the program itself does not count.
_TRACED_CALLS = 50
_EAGER_CALLS = 100


def calls() -> dict[str, tuple[Callable[..., Any], Callable[..., Any], Sequence[Any]]]:
    """Return by name each operation's function, JAX's, and operands that take no time."""
    x, v = jnp.ones((8, 8)), jnp.ones(8)
    dims = (((1,), (0,)), ((), ()))
    return {
        "matmul": (jtk.matmul, jnp.matmul, (x, x)),
        "dot_general": (
            partial(jtk.dot_general, dimension_numbers=dims),
            partial(lax.dot_general, dimension_numbers=dims),
            (x, x),
        ),
        "einsum": (
            partial(jtk.einsum, "ij,jk->ik"),
            partial(jnp.einsum, "ij,jk->ik"),
            (x, x),
        ),
        "matvec": (jtk.matvec, jnp.matvec, (x, v)),
        "vecmat": (jtk.vecmat, jnp.vecmat, (v, x)),
        "dot": (jtk.dot, jnp.dot, (v, v)),
        "vdot": (jtk.vdot, jnp.vdot, (v, v)),
        "ragged_dot": (
            jtk.ragged_dot,
            lax.ragged_dot,
            (x, jnp.ones((2, 8, 8)), jnp.full(2, 4, jnp.int32)),
        ),
        "sum": (partial(jtk.sum, axis=0), partial(jnp.sum, axis=0), (x,)),
        "transpose": (jtk.transpose, jnp.transpose, (x,)),
        "add": (jtk.add, jnp.add, (x, x)),
    }


def eager_times(
    ours: Callable[..., Any], theirs: Callable[..., Any], operands: Sequence[Any], seconds: float
) -> Pairs:
    """Return the times of a call outside of ``jit``, the computation included."""
    sides = (partial(repeated, partial(side, *operands), _EAGER_CALLS) for side in (ours, theirs))
    return interleaved(*sides, seconds=seconds).divided(_EAGER_CALLS)


def trace_times(
    ours: Callable[..., Any], theirs: Callable[..., Any], operands: Sequence[Any], seconds: float
) -> Pairs:
    """Return the times that a call adds to the tracing of a program, which has many of it."""

    def traced(side: Callable[..., Any]) -> Any:
        # A function of its own, of which JAX has kept nothing.
        return jax.jit(lambda *x: [side(*x) for _ in range(_TRACED_CALLS)]).trace(*operands)

    sides = (partial(_without_result, partial(traced, side)) for side in (ours, theirs))
    return interleaved(*sides, seconds=seconds).divided(_TRACED_CALLS)


def _without_result(function: Callable[[], Any]) -> tuple[()]:
    function()
    return ()
