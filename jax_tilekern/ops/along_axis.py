"""Operations along one axis of arrays of one shape, and the rules that follow from that.

Devices share the other axes, and ``vmap`` adds one of these. XLA does not partition its own
operation on a CPU, so each device calls it for its part.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from jax_tilekern.interop.originals import jnp, lax
from jax_tilekern.partitioning.rule import Dims, ShardingRule
from jax_tilekern.primitives.operation import (
    Operation,
    Outcome,
    Planner,
    Rewrite,
    define,
    no_refusal,
)


def define_along_axis(
    name: str,
    reference: Callable[..., Any],
    *,
    cuda: Callable[..., Outcome],
    results: Callable[..., int] | None = None,
    axis: str | None = None,
    refusal: Callable[..., Any] = no_refusal,
    several_results: bool = True,
    **rules: Any,
) -> Callable[..., Any]:
    """Define an operation, which ``cuda`` plans on a GPU.

    ``results(**params)`` is the number of results, by default that of the operands. ``axis`` is the
    name of the parameter that has the axis. Without one it is the last axis of a single operand.
    ``rules`` are those of :class:`~jax_tilekern.primitives.operation.Operation` that do not follow.
    """

    def batch(
        _: Any, operands: Sequence[Array], dims: Sequence[int | None], **params: Any
    ) -> tuple[Any, Any]:
        if axis is None:
            (x,), (dim,), place = operands, dims, 0
            assert dim is not None
            found = bind(jnp.moveaxis(x, dim, place), **params)
        else:
            moved, place = moved_alike(operands, dims)
            params[axis] += place <= params[axis]
            found = bind(*moved, **params)
        return (found, [place] * len(found)) if several_results else (found, place)

    def sharding_rule(*operands: Any, **params: Any) -> ShardingRule:
        count = len(operands)
        return rule_along_axis(
            operands[0].shape,
            -1 if axis is None else params[axis],
            operands=count,
            results=count if results is None else results(**params),
        )

    def cpu(*_: Any, **params: Any) -> Rewrite:
        return Rewrite("XLA's own", functools.partial(reference, **params))

    given = {"batch": batch, "sharding_rule": sharding_rule, **rules}
    bind = define(
        Operation(
            name,
            reference,
            planners={"cpu": Planner(refusal, cpu), "cuda": Planner(refusal, cuda)},
            several_results=several_results,
            **given,
        )
    )
    return bind


def rule_along_axis(
    shape: Sequence[int], axis: int, *, operands: int, results: int, others: Sequence[Dims] = ()
) -> ShardingRule:
    """Let devices share all axes but one of arrays of one shape.

    ``others`` are the labels of further operands, which are the numbers of axes.
    """
    axis %= len(shape)
    labels = tuple(None if i == axis else i for i in range(len(shape)))
    sizes = {i: shape[i] for i in labels if i is not None}
    names = {i: f"axis {i}" for i in sizes}
    read = (*(labels,) * operands, *others)
    return ShardingRule(read, (labels,) * results, sizes, flops=math.prod(shape), names=names)


def moved_alike(operands: Sequence[Array], dims: Sequence[int | None]) -> tuple[list[Array], int]:
    """Return operands of one shape with the mapped axis at one place, and the place."""
    whole, place = next((x, dim) for x, dim in zip(operands, dims, strict=True) if dim is not None)
    kept = [i for i in range(whole.ndim) if i != place]
    sharding = jax.typeof(whole).sharding
    return [
        lax.broadcast_in_dim(x, whole.shape, kept, out_sharding=sharding)
        if dim is None
        else jnp.moveaxis(x, dim, place)
        for x, dim in zip(operands, dims, strict=True)
    ], place


def columns_of(x: Array, axis: int = -1) -> Array:
    """Return the position of each element along an axis.

    It is an ``iota`` and nothing else: by it XLA knows that a sort is stable, which takes another
    ``iota`` otherwise.
    """
    sharding = jax.typeof(x).sharding
    return lax.broadcasted_iota(np.int32, x.shape, axis % x.ndim, out_sharding=sharding)
