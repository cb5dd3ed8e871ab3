"""Calls of Python that depend on no lane, which are made before the kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax

from jax_tilekern.interop import compat


def without_callbacks(
    closed: Any, operands: Sequence[Any], are_mapped: Sequence[bool]
) -> tuple[Any, list[Any]]:
    """Evaluate what calls Python for operands that all lanes read, such as checks of constants.

    Returns the jaxpr of the rest, and the values that it has as further operands.
    """
    if not any(map(_calls_python, closed.jaxpr.eqns)):
        return closed, []
    closed = _inlined(closed)
    jaxpr = closed.jaxpr
    own = {x for x, is_mapped in zip(jaxpr.invars, are_mapped, strict=True) if is_mapped}
    shared = []
    for eqn in jaxpr.eqns:
        if any(x in own for x in _variables(eqn.invars)):
            own.update(eqn.outvars)
        else:
            shared.append(eqn)
    needed: set[Any] = set()
    before = []
    for eqn in reversed(shared):
        if _calls_python(eqn) or any(x in needed for x in eqn.outvars):
            needed.update(_variables(eqn.invars))
            before.append(eqn)
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *operands), strict=True))
    for eqn in reversed(before):
        read = [x.val if compat.is_literal(x) else values[x] for x in eqn.invars]
        # A check of constants fails early, and is no part of the program.
        is_traced = any(isinstance(x, jax.core.Tracer) for x in read)
        with contextlib.nullcontext() if is_traced else jax.ensure_compile_time_eval():
            values.update(zip(eqn.outvars, compat.bind_equation(eqn, read), strict=True))
    made = {id(eqn) for eqn in before}
    read_later = {x for eqn in jaxpr.eqns if id(eqn) not in made for x in _variables(eqn.invars)}
    read_later.update(_variables(jaxpr.outvars))
    found = [x for eqn in reversed(before) for x in eqn.outvars if x in read_later]

    def rest(*given: Any) -> list[Any]:
        known = dict(zip(found, given[len(jaxpr.invars) :], strict=True))

        def equation(eqn: Any, read: list[Any]) -> list[Any]:
            if id(eqn) in made:
                return [known.get(x) for x in eqn.outvars]
            return compat.bind_equation(eqn, read)

        return compat.eval_jaxpr_by(equation, jaxpr, closed.consts, given[: len(jaxpr.invars)])

    with compat.without_mesh():
        remaining = jax.make_jaxpr(rest)(*closed.in_avals, *(x.aval for x in found))
    return remaining, [values[x] for x in found]


def _calls_python(eqn: Any) -> bool:
    if eqn.primitive.name == "pure_callback":
        return True
    return any(_calls_python(each) for inner in compat.jaxprs_of(eqn) for each in inner.eqns)


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [x for x in atoms if not compat.is_literal(x)]


def _inlined(closed: Any) -> Any:
    """Return a jaxpr without calls of jitted functions that call Python."""

    def equation(eqn: Any, operands: list[Any]) -> list[Any]:
        if eqn.primitive.name != "jit" or not _calls_python(eqn):
            return compat.bind_equation(eqn, operands)
        inner = compat.closed_jaxpr(eqn.params["jaxpr"])
        return compat.eval_jaxpr_by(equation, inner.jaxpr, inner.consts, operands)

    with compat.without_mesh():
        return jax.make_jaxpr(
            lambda *operands: compat.eval_jaxpr_by(equation, closed.jaxpr, closed.consts, operands)
        )(*closed.in_avals)
