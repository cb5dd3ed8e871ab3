"""Find the elementwise equations of a jaxpr, and how they read their operands."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_tilekern.epilogue.cuda_text import computed_type
from jax_tilekern.epilogue.primitives import is_elementwise
from jax_tilekern.epilogue.understood import Untranslatable, broadcasts, is_understood
from jax_tilekern.interop import compat

Shape = tuple[int, ...]


class Reading(NamedTuple):
    """An array that is read element by element, broadcast to a shape."""

    array: Any  # a variable, or a number
    dims: tuple[int, ...]  # the dimension of the shape for each dimension of the array


def read(atom: Any, shape: Shape) -> Reading | None:
    """Return how an elementwise equation reads an operand, if it broadcasts to a shape."""
    own = atom.aval.shape
    return Reading(atom, tuple(range(len(own)))) if broadcasts(own, shape) else None


def readings(eqn: Any, shape: Shape, *, with_rule: bool = True) -> list[Reading] | None:
    """Return how an equation reads its operands if it computes each element of a shape by itself.

    A broadcast is such an equation, and a function with a derivative rule if its rule consists of
    such equations. ``with_rule=False`` ignores the rule, which may contain its own function.
    """
    name = eqn.primitive.name
    if not (name in ("broadcast_in_dim", "custom_jvp_call") or is_elementwise(name)):
        return None
    if not is_understood(eqn) or any(x.aval.shape != shape for x in eqn.outvars):
        return None
    if name == "broadcast_in_dim":
        # Sizes that are values of the program are further operands.
        array, *sizes = eqn.invars
        dims = tuple(eqn.params["broadcast_dimensions"])
        return None if sizes else [Reading(array, dims)]
    found = [read(x, shape) for x in eqn.invars]
    if None in found or not all(map(_has_arithmetic, (*eqn.invars, *eqn.outvars))):
        return None
    if name == "custom_jvp_call" and not _is_elementwise_call(eqn, shape, with_rule):
        return None
    return [x for x in found if x is not None]


def elementwise_first(jaxpr: compat.Jaxpr) -> compat.Jaxpr:
    """Return a jaxpr with each elementwise equation as soon as its operands are known.

    A product takes equations as its epilogue up to the first other use of their values. In a
    backward pass, products that read the cotangent of one value precede the elementwise equations
    that compute that of another.
    """
    if jaxpr.effects:
        return jaxpr
    eqns: Sequence[Any] = jaxpr.eqns
    readers, missing = defaultdict[Any, list[int]](list), list[int]()
    made = {x for eqn in eqns for x in eqn.outvars}
    for position, eqn in enumerate(eqns):
        operands = {x for x in eqn.invars if not compat.is_literal(x) and x in made}
        missing.append(len(operands))
        for x in operands:
            readers[x].append(position)
    order, waiting = list[Any](), list[int]()
    placed = set[int]()
    for position in range(len(eqns)):
        if position not in placed:
            heapq.heappush(waiting, position)
        while waiting:
            position = heapq.heappop(waiting)
            placed.add(position)
            eqn = eqns[position]
            order.append(eqn)
            for reader in (reader for x in eqn.outvars for reader in readers[x]):
                missing[reader] -= 1
                if not missing[reader] and _is_elementwise(eqns[reader]):
                    heapq.heappush(waiting, reader)
    reordered: compat.Jaxpr = jaxpr.replace(eqns=order)
    return reordered


def _is_elementwise(eqn: Any) -> bool:
    return bool(eqn.outvars) and readings(eqn, eqn.outvars[0].aval.shape) is not None


def _is_elementwise_call(eqn: Any, shape: Shape, with_rule: bool) -> bool:
    called = eqn.params["call_jaxpr"]
    if not all(jnp.issubdtype(x.aval.dtype, jnp.inexact) for x in eqn.invars):
        return False
    if not _all_elementwise(called.jaxpr, called.consts, shape, with_rule):
        return False
    rule = compat.custom_jvp_rule(eqn) if with_rule else None
    return not with_rule or (rule is not None and _all_elementwise(*rule, shape, False))


def _all_elementwise(
    jaxpr: compat.Jaxpr, consts: Sequence[Any], shape: Shape, with_rules: bool = True
) -> bool:
    """Whether every equation computes scalars, or each element of a shape."""
    return not any(getattr(x, "shape", ()) for x in consts) and all(
        _all_elementwise(inner.jaxpr, inner.consts, shape, with_rules)
        if (inner := inlined_call(eqn)) is not None
        else any(readings(eqn, each, with_rule=with_rules) is not None for each in (shape, ()))
        for eqn in jaxpr.eqns
    )


def inlined_call(eqn: Any) -> Any | None:
    """Return the closed jaxpr of a call of a jitted function that may be inlined."""
    return eqn.params["jaxpr"] if compat.is_plain_jit(eqn) else None


def is_elementwise_jit(eqn: Any) -> bool:
    """Whether an equation is a call of a function of which each equation is elementwise."""
    inner = inlined_call(eqn)
    if inner is None:
        return False
    shapes = {x.aval.shape for x in eqn.outvars}
    return len(shapes) == 1 and _all_elementwise(inner.jaxpr, inner.consts, shapes.pop())


def _has_arithmetic(atom: Any) -> bool:
    try:
        computed_type(atom.aval.dtype)
    except (Untranslatable, AttributeError):
        return False
    return True
