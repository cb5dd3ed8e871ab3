"""The library's operations under the policies of ``jax.checkpoint``.

A checkpoint policy of JAX's, such as ``dots_saveable``, is asked about one equation at a time and
compares its primitive with ``dot_general``. The rule that is registered here for a primitive of
the library asks instead about the equation of JAX's that it stands for. So every policy treats
both alike, JAX's own and the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.interpreters import partial_eval

from jax_tilekern.interop import compat
from jax_tilekern.interop.global_modes import mode_independent
from jax_tilekern.scope import entered, settings_of, under_traced_settings

# stands_for(**params) returns a primitive of JAX, and the parameters of its equation; ``None`` for
# a call that policies see as itself.
StandsFor = Callable[..., tuple[compat.Primitive, dict[str, Any]] | None]
# Equations of the forward and of the backward pass; for each result, whether it is unknown in the
# forward pass, and whether the backward pass computes or fetches it; and the values it is given.
Split = tuple[Any, Any, Sequence[bool], Sequence[bool], list[compat.Var]]


class Saved(NamedTuple):
    """The saved result of a call with several results, if a policy saves the product in it."""

    position: int | None  # which result is saved, ``None`` for all of them
    # Others(saved, *operands) gives the other results from it and the operands after the first two.
    others: Callable[..., Sequence[Any]] = lambda *_: ()
    # Names that ``checkpoint_name`` has given to values inside the call. A policy that saves one of
    # them saves the result.
    names: Sequence[str] = ()


def register(
    primitive: compat.Primitive,
    stands_for: StandsFor,
    saved: Callable[..., Saved | None] | None = None,
) -> None:
    """Make checkpoint policies see a primitive of the library as one of JAX's.

    Its first two operands are those of JAX's primitive. ``saved(**params)`` says what is saved of
    several results, all of them if it is ``None``.
    """
    stands_for = under_traced_settings(stands_for)
    saved = None if saved is None else under_traced_settings(saved)

    def split(
        policy: Callable[..., Any], unknown: Sequence[bool], given: Sequence[bool], eqn: Any
    ) -> Split:
        count = len(eqn.outvars)
        if any(unknown):
            missing = _missing(eqn.invars, given)
            return None, eqn, [True] * count, [True] * count, missing
        kept = None if saved is None else saved(**eqn.params)
        case = _case(policy, stands_for, eqn, () if kept is None else kept.names)
        if case == "recompute":
            return eqn, eqn, [False] * count, [True] * count, _missing(eqn.invars, given)
        if kept is None and count == 1 and case != "save":
            kept = Saved(0)
        if kept is None or kept.position is None:
            return eqn, None, [False] * count, [False] * count, []
        kept = kept._replace(others=mode_independent(kept.others))
        with entered(settings_of(eqn.params)):
            if case == "save":
                return _saved(eqn, kept, given)
            return _offloaded(eqn, kept, given, *case)

    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = split


def _missing(operands: Sequence[Any], given: Sequence[bool]) -> list[compat.Var]:
    return [
        operand
        for operand, is_given in zip(operands, given, strict=True)
        if isinstance(operand, compat.Var) and not is_given
    ]


def _case(policy: Callable[..., Any], stands_for: StandsFor, eqn: Any, names: Sequence[str]) -> Any:
    """Ask a policy about the product, and about the names inside the call."""
    operands, stood_for = [x.aval for x in eqn.invars], stands_for(**eqn.params)
    if stood_for is None:
        cases = [compat.remat_case(policy(eqn.primitive, *operands, **eqn.params))]
    else:
        like, params = stood_for
        cases = [compat.remat_case(policy(like, *operands[:2], **params))]
    cases += [
        compat.remat_case(policy(compat.name_p, eqn.outvars[0].aval, name=name)) for name in names
    ]
    return next((case for case in cases if case != "recompute"), "recompute")


def _saved(eqn: Any, kept: Saved, given: Sequence[bool]) -> Split:
    """Save one result, and compute the others from it in the backward pass."""
    assert kept.position is not None
    others = [x for i, x in enumerate(eqn.outvars) if i != kept.position]
    result, operands = eqn.outvars[kept.position], eqn.invars[2:]
    recomputed = [x is not result for x in eqn.outvars]
    (backward,) = jax.make_jaxpr(jax.jit(kept.others))(
        result.aval, *(x.aval for x in operands)
    ).eqns
    return (
        eqn,
        backward.replace(invars=[result, *operands], outvars=others),
        [False] * len(eqn.outvars),
        recomputed,
        [result, *_missing(operands, given[2:])],
    )


def _offloaded(eqn: Any, kept: Saved, given: Sequence[bool], home: Any, away: Any) -> Split:
    """Copy a result to another memory, and back in the backward pass."""
    position = kept.position
    assert position is not None

    @jax.jit
    def computed(*operands: Any) -> tuple[Any, Any]:
        results = eqn.primitive.bind(*operands, **eqn.params)
        results = results if eqn.primitive.multiple_results else [results]
        return results, jax.device_put(results[position], away)

    @jax.jit
    def fetched(copy: Any, *operands: Any) -> list[Any]:
        result = jax.device_put(copy, home)
        results = list(kept.others(result, *operands))
        results.insert(position, result)
        return results

    operands = eqn.invars[2:]
    (forward,) = jax.make_jaxpr(computed)(*(x.aval for x in eqn.invars)).eqns
    *_, copy = forward.outvars
    (backward,) = jax.make_jaxpr(fetched)(copy.aval, *(x.aval for x in operands)).eqns
    return (
        forward.replace(invars=eqn.invars, outvars=[*eqn.outvars, copy]),
        backward.replace(invars=[copy, *operands], outvars=eqn.outvars),
        [False] * len(eqn.outvars),
        [True] * len(eqn.outvars),
        [copy, *_missing(operands, given[2:])],
    )
