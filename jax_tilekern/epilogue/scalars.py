"""Elementwise equations evaluated on scalars, from which an epilogue is traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jax_tilekern.interop import compat


def equation_of_scalars(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Evaluate an elementwise equation on one element of each operand."""
    name = eqn.primitive.name
    if name == "broadcast_in_dim":
        return list(operands)
    if name == "custom_jvp_call":
        return list(_with_custom_derivative(eqn)(*operands))
    if compat.is_plain_jit(eqn):
        inner = eqn.params["jaxpr"]
        return evaluated(inner.jaxpr, inner.consts, operands)
    with compat.traced_from(eqn):
        results = eqn.primitive.bind(*compat.unify_varying(*operands), **eqn.params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _with_custom_derivative(eqn: Any) -> Any:
    """Return the function of scalars that a ``custom_jvp_call`` applies to elements."""
    called, rule = eqn.params["call_jaxpr"], compat.custom_jvp_rule(eqn)
    assert rule is not None

    @jax.custom_jvp
    def function(*scalars: Any) -> tuple[Any, ...]:
        return tuple(evaluated(called.jaxpr, called.consts, scalars))

    @function.defjvp
    def _(primals: Any, tangents: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        both = evaluated(*rule, (*primals, *tangents))
        count = len(both) // 2
        return tuple(both[:count]), tuple(both[count:])

    return function


def evaluated(jaxpr: compat.Jaxpr, consts: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """Evaluate elementwise equations on one element of each operand."""
    return compat.eval_jaxpr_by(equation_of_scalars, jaxpr, consts, operands)
