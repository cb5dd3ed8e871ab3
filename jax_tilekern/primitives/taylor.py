"""Rules of ``jax.experimental.jet``: Taylor polynomials of an operation's results.

A value is a polynomial ``x[0] + x[1] t + x[2] t**2 + ...``, whose coefficients are arrays. A rule
takes the coefficients of the operands and returns those of the results.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.jet import jet, jet_rules

from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad, zero_tangent
from jax_tilekern.interop.originals import jnp
from jax_tilekern.primitives.linearity import OperandGroup

Coefficients = Sequence[Sequence[Any]]
_rules: dict[Any, Any] = jet_rules
# The results, and for each its higher coefficients.
Polynomials = tuple[list[Any], list[list[Any]]]


def register(primitive: compat.Primitive, rule: Callable[..., Polynomials]) -> None:
    """Register ``rule(primals, series, **params)``, which returns lists of results."""

    def jet_rule(primals: Sequence[Any], series: Coefficients, **params: Any) -> Any:
        results, higher = rule(primals, series, **params)
        return (results, higher) if primitive.multiple_results else (results[0], higher[0])

    _rules[primitive] = jet_rule


def multilinear_polynomials(
    bind: Callable[..., Sequence[Any]],
    groups: Sequence[OperandGroup],
    primals: Sequence[Any],
    series: Coefficients,
) -> Polynomials:
    """Return the results and their higher coefficients, by Leibniz's rule.

    Operands outside every group are constants.
    """
    order = len(series[0])
    operands = [(x, *terms) for x, terms in zip(primals, series, strict=True)]

    def coefficient(k: int) -> list[Any]:
        terms = []
        for orders in itertools.product(range(k + 1), repeat=len(groups)):
            if sum(orders) == k:
                order_of = {i: n for group, n in zip(groups, orders, strict=True) for i in group}
                terms.append(bind(*(x[order_of.get(i, 0)] for i, x in enumerate(operands))))
        return [functools.reduce(jnp.add, parts) for parts in zip(*terms, strict=True)]

    results, *higher = (coefficient(k) for k in range(order + 1))
    return results, [list(terms) for terms in zip(*higher, strict=True)]


def differentiable_polynomials(
    jvp: Callable[..., tuple[Sequence[Any], Sequence[Any]]],
    primals: Sequence[Any],
    series: Coefficients,
) -> Polynomials:
    """Return the results and their higher coefficients, by the rule of the first derivative.

    The polynomial of ``y`` follows from that of ``dy/dt = jvp(x, dx/dt)``, of one order less.
    """
    order, count = len(series[0]), len(primals)
    moving = [i for i, x in enumerate(primals) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def with_derivative(*operands: Any) -> tuple[list[Any], list[Any]]:
        values, moves = operands[:count], dict(zip(moving, operands[count:], strict=True))
        tangents = [moves[i] if i in moves else zero_tangent(x) for i, x in enumerate(values)]
        results, derivatives = jvp(values, tangents)
        return list(results), [
            jnp.zeros_like(y) if type(dy) is ad.Zero else dy
            for y, dy in zip(results, derivatives, strict=True)
        ]

    velocities = [[k * x for k, x in enumerate(series[i], 1)] for i in moving]
    points = [*primals, *(x[0] for x in velocities)]
    if order == 1:
        results, first = with_derivative(*points)
        higher: Coefficients = [[] for _ in first]
    else:
        (results, first), (_, higher) = jet(
            with_derivative,
            points,
            [*(x[: order - 1] for x in series), *(x[1:] for x in velocities)],
            factorial_scaled=False,
        )
    return results, [
        [(dy / k).astype(y.dtype) for k, dy in enumerate((y, *terms), 1)]
        for y, terms in zip(first, higher, strict=True)
    ]
