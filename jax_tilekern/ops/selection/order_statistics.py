"""Elements of rows by their ranks: what medians and quantiles are made of."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp, lax
from jax_tilekern.ops.along_axis import define_along_axis, rule_along_axis
from jax_tilekern.ops.planned_kernel import planned_kernel
from jax_tilekern.ops.selection.sort import sorted_rows
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.plans.selection.order_statistics import OrderStatistics, plan_order_statistics
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    PlannedKernel,
)


def order_statistics(x: Array, ranks: Array) -> Array:
    """Return the elements of these ranks along the last axis, or NaN where a row has a NaN.

    Ranks are a vector of int32, counted from the smallest element, and clipped to the rows.
    """
    values: Array
    (values,) = _bind(x, ranks, indices=False)
    return values


def _reference(x: Array, ranks: Array, *, indices: bool) -> list[Array]:
    results = sorted_rows(x, values=True, indices=indices)
    found = [jnp.take(y, ranks, -1, mode="clip") for y in results]
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return found
    # NaN is the last element.
    has_nan = jnp.isnan(lax.slice_in_dim(results[0], x.shape[-1] - 1, None, axis=x.ndim - 1))
    return [
        jnp.where(has_nan, np.array(y, z.dtype), z)
        for y, z in zip((np.nan, 0), found, strict=False)
    ]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, indices: bool) -> tuple[Any, Any]:
    values, columns = _bind(*primals, indices=True)
    moved = jnp.take_along_axis(tangents[0], columns, -1, mode="promise_in_bounds")
    # The NaN of a row is a constant.
    moved = jnp.where(jnp.isnan(values), jnp.zeros_like(moved), moved)
    if not indices:
        return [values], [moved]
    return [values, columns], [moved, compat.zero_tangent(columns)]


def _batch(
    _: Any, operands: Sequence[Array], dims: Sequence[int | None], *, indices: bool
) -> tuple[list[Array], list[int]]:
    (x, ranks), (dim, of_ranks) = operands, dims
    if of_ranks is not None:
        # Each row has ranks of its own.
        reference = functools.partial(_reference, indices=indices)
        results = jax.vmap(reference, (dim, of_ranks))(x, ranks)
    else:
        assert dim is not None
        results = _bind(jnp.moveaxis(x, dim, 0), ranks, indices=indices)
    return results, [0] * len(results)


def _sharding_rule(x: Any, _: Any, *, indices: bool) -> ShardingRule:
    """Every device has all ranks."""
    return rule_along_axis(x.shape, -1, operands=1, results=1 + indices, others=[(None,)])


def _cuda(operands: Sequence[Operand], _: Any, *, indices: bool) -> PlannedKernel | Fallback:
    (x, aval), (ranks, of_ranks) = operands
    *outer, columns = aval.shape
    dtype = np.dtype(aval.dtype)
    problem = OrderStatistics(math.prod(outer), columns, of_ranks.size, dtype, indices)
    return planned_kernel((x, ranks), plan_order_statistics, problem)


_bind = define_along_axis(
    "tilekern_order_statistics",
    _reference,
    jvp=_jvp,
    batch=_batch,
    sharding_rule=_sharding_rule,
    cuda=_cuda,
    describe=lambda **_: "order statistics",
)
