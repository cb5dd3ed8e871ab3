"""The library's operations under the policies of ``jax.checkpoint``.

A checkpoint policy of JAX's, such as ``dots_saveable``, is asked about one equation at a time and
compares its primitive with ``dot_general``. The rule that is registered here for a primitive of
the library asks instead about the equation of JAX's that it stands for. So every policy treats
both alike, JAX's own and the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import partial_eval

from jax_tilekern.interop import compat

# stands_for(**params) returns a primitive of JAX, and the parameters of its equation.
StandsFor = Callable[..., tuple[compat.Primitive, dict[str, Any]]]
# Equations of the forward and of the backward pass; for each result, whether it is unknown in the
# forward pass, and whether the backward pass computes or fetches it; and the values it is given.
Split = tuple[Any, Any, Sequence[bool], Sequence[bool], list[compat.Var]]


def register(primitive: compat.Primitive, stands_for: StandsFor) -> None:
    """Make checkpoint policies see ``primitive``, of one result, as the one it stands for."""

    def split(
        policy: Callable[..., Any], unknown: Sequence[bool], given: Sequence[bool], eqn: Any
    ) -> Split:
        missing = [
            operand
            for operand, is_given in zip(eqn.invars, given, strict=True)
            if isinstance(operand, compat.Var) and not is_given
        ]
        if any(unknown):
            return None, eqn, [True], [True], missing
        like, params = stands_for(**eqn.params)
        case = compat.remat_case(policy(like, *(x.aval for x in eqn.invars), **params))
        if case == "save":
            return eqn, None, [False], [False], []
        if case == "recompute":
            return eqn, eqn, [False], [True], missing
        return _offloaded(eqn, *case)

    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = split


def _offloaded(eqn: Any, home: Any, away: Any) -> Split:
    """Copy the result to another memory, and back in the backward pass."""

    @jax.jit
    def computed(*operands: Any) -> tuple[Any, Any]:
        result = eqn.primitive.bind(*operands, **eqn.params)
        return result, jax.device_put(result, away)

    def fetched(copy: Any) -> Any:
        return jax.device_put(copy, home)

    (forward,) = jax.make_jaxpr(computed)(*(x.aval for x in eqn.invars)).eqns
    _, copy = forward.outvars
    (backward,) = jax.make_jaxpr(fetched)(copy.aval).eqns
    return (
        forward.replace(invars=eqn.invars, outvars=[*eqn.outvars, copy]),
        backward.replace(invars=[copy], outvars=eqn.outvars),
        [False],
        [True],
        [copy],
    )
