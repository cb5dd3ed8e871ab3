"""Derivatives that follow from linearity: an operation is linear in groups of its operands.

A *group* is a tuple of operands in which the operation is jointly linear, as addition is in both of
its operands, while a product is linear in each of its own. Any number of groups gives a
multilinear operation, whose tangent is a sum with one term for each group, and whose transpose
with respect to a group is the rule that the operation states for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import Array

from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad, zero_tangent

OperandGroup = tuple[int, ...]
# rule(cotangent, *operands, **params) returns the cotangents of the group's operands; it gets the
# abstract values of these operands.
Rules = Mapping[OperandGroup, Callable[..., Sequence[Any]]]


def tangents_out(
    bind: Callable[..., Sequence[Any]],
    groups: Sequence[OperandGroup],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    results: Sequence[Any],
) -> list[Any]:
    """Return the tangents of ``results = bind(*primals)``.

    The caller refuses tangents of operands outside every group.
    """
    terms = []
    for group in groups:
        if all(type(tangents[i]) is ad.Zero for i in group):
            continue
        operands = list(primals)
        for i in group:
            operands[i] = ad.instantiate_zeros(tangents[i])
        terms.append(bind(*operands))
    if not terms:
        return [zero_tangent(result) for result in results]
    return [functools.reduce(ad.add_tangents, parts) for parts in zip(*terms, strict=True)]


def cotangents_in(
    rules: Rules, cotangent: Any, operands: Sequence[Any], params: Mapping[str, Any]
) -> list[Any]:
    """Return the cotangents of the unknown operands, ``None`` for the others."""
    unknown = {i for i, operand in enumerate(operands) if ad.is_undefined_primal(operand)}
    for group in rules:
        if unknown <= set(group):
            break
    else:
        raise TypeError(f"not linear in operands {sorted(unknown)} together")
    known = list(operands)
    for i in group:
        known[i] = operands[i].aval if i in unknown else jax.typeof(operands[i])
    results: list[Any] = [None] * len(operands)
    for i, value in zip(group, rules[group](cotangent, *known, **params), strict=True):
        if i in unknown:
            results[i] = _split_like(known[i], value)
    return results


def _split_like(operand: Any, cotangent: Any) -> Any:
    """Return a cotangent that explicit axes split as its operand, as JAX requires."""
    wanted = compat.explicit_sharding(operand)
    if wanted is None or type(cotangent) is ad.Zero:
        return cotangent
    found = compat.explicit_sharding(jax.typeof(cotangent))
    if found is not None and found.spec.partitions == wanted.spec.partitions:
        return cotangent
    return jax.sharding.reshard(cotangent, wanted)


def jvp_of(
    reference: Callable[..., Any],
    primals: Sequence[Array],
    tangents: Sequence[Any],
    **params: Any,
) -> tuple[Any, Any]:
    """Differentiate a function with respect to the operands that have a tangent."""
    differentiated = [i for i, x in enumerate(tangents) if type(x) is not ad.Zero]

    def function(*values: Array) -> Any:
        operands = list(primals)
        for i, value in zip(differentiated, values, strict=True):
            operands[i] = value
        return reference(*operands, **params)

    return jax.jvp(
        function,
        [primals[i] for i in differentiated],
        [tangents[i] for i in differentiated],
    )
