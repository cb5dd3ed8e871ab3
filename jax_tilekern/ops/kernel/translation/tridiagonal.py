"""Systems of tridiagonal matrices in a lane."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_tilekern.epilogue.understood import one_of
from jax_tilekern.ops.kernel.translation.arrays import Places
from jax_tilekern.ops.kernel.translation.values import Value
from jax_tilekern.ops.kernel.translation.writer import LaneWriter, rule


# Pivots that are perturbed belong to singular systems.
@rule("tridiagonal_solve", perturb_singular=one_of(False))
def _tridiagonal_solve(
    writer: LaneWriter, eqn: Any, operands: list[Value], _: Places
) -> list[Value]:
    means = _solution
    for _dim in range(len(operands[0].shape) - 1):
        means = jax.vmap(means)
    return writer.meaning(means, eqn, operands)


def _solution(lower: Any, diagonal: Any, upper: Any, right: Any) -> Any:
    """Solve by elimination with pivoting between neighbouring rows, as LAPACK's ``gtsv``.

    A row that is exchanged with the next one gets a second upper element. No pivot is zero in an
    invertible matrix; a singular one gives NaN, as on XLA's CPU.
    """
    if not diagonal.size:
        return right
    zero = jnp.zeros((), diagonal.dtype)
    # JAX does not read the last element of the upper diagonal.
    upper = upper.at[-1].set(zero)

    def eliminate(row: Any, following: Any) -> tuple[Any, Any]:
        pivot, beside, b, is_regular = row
        under, next_pivot, next_beside, next_b = following
        exchanged = jnp.abs(under) > jnp.abs(pivot)
        top, bottom = jnp.where(exchanged, under, pivot), jnp.where(exchanged, pivot, under)
        is_regular &= top != 0
        factor = bottom / top

        def pair(x: Any, y: Any) -> tuple[Any, Any]:
            first, second = jnp.where(exchanged, y, x), jnp.where(exchanged, x, y)
            return first, second - factor * first

        first, pivot = pair(beside, next_pivot)
        second, beside = pair(zero, next_beside)
        own, b = pair(b, next_b)
        return (pivot, beside, b, is_regular), (top, first, second, own)

    start = diagonal[0], upper[0], right[0], jnp.array(True)
    rows = lower[1:], diagonal[1:], upper[1:], right[1:]
    (pivot, _, b, is_regular), eliminated = lax.scan(eliminate, start, rows)
    last = jnp.where(is_regular & (pivot != 0), b / pivot, jnp.nan)

    def substitute(later: Any, row: Any) -> tuple[Any, Any]:
        (x1, x2), (pivot, first, second, b) = later, row
        x = (b - first * x1 - second * x2) / pivot
        return (x, x1), x

    ends = last, jnp.zeros_like(last)
    _, others = lax.scan(substitute, ends, eliminated, reverse=True)
    return jnp.concatenate([others, last[None]])
