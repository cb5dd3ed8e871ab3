"""The order of rows by small integer keys: a stable sort, and where each key begins."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from jax_tilekern.interop import compat, ffi
from jax_tilekern.interop.originals import jnp, lax
from jax_tilekern.ops.planned_kernel import planned_kernel
from jax_tilekern.ops.segments.batches import first_of_batches
from jax_tilekern.ops.segments.keys import bins_of
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.plans.segments.index_sort import IndexSort, plan_bounds, plan_index_sort
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    PlannedKernel,
    Planner,
    Rewrite,
    define,
    no_refusal,
)


def order_by_key(keys: Array, *, bins: int) -> tuple[Array, Array]:
    """Return the rows by ascending int32 key, in their order where keys are equal, and bounds.

    The bounds are the positions in this order where each bin begins, and the number of rows. See
    :mod:`jax_tilekern.ops.segments.keys`.
    """
    order, bounds = _bind(keys, bins=bins, is_sorted=False, places=False)
    return order, bounds


def order_and_places(keys: Array, *, bins: int) -> tuple[Array, Array, Array]:
    """Return the order of :func:`order_by_key`, the place of each row in it, and where bins begin.

    The number of rows is not among the bounds, so that they are those of the groups of all bins but
    the last.
    """
    order, places, begins = _bind(keys, bins=bins, is_sorted=False, places=True)
    return order, places, begins


def bounds_of_sorted(keys: Array, *, bins: int) -> Array:
    """Return the bounds of :func:`order_by_key` for keys that ascend.

    If the keys do not ascend, the bounds have no meaning, but they ascend.
    """
    bounds: Array
    (bounds,) = _bind(keys, bins=bins, is_sorted=True, places=False)
    return bounds


def _inverse(order: Array) -> Array:
    rows = lax.iota(np.int32, order.shape[0])
    # Zeros of the order's type, which may vary over devices.
    return jnp.zeros_like(order).at[order].set(rows, unique_indices=True, mode="promise_in_bounds")


def _reference(keys: Array, *, bins: int, is_sorted: bool, places: bool) -> list[Array]:
    if keys.ndim == 2:
        reference = functools.partial(_reference, bins=bins, is_sorted=is_sorted, places=places)
        return jax.vmap(reference)(keys)
    rows, keys = lax.iota(np.int32, keys.shape[0]), bins_of(keys, bins)
    order = []
    if not is_sorted:
        keys, rows = lax.sort((keys, rows), num_keys=1)
        order = [rows, *([_inverse(rows)] if places else [])]
    counts = jnp.zeros(bins + 1, np.int32).at[keys + 1].add(1)
    bounds = jnp.cumsum(counts, dtype=np.int32)
    return [*order, bounds[:-1] if places else bounds]


def _jvp(primals: Sequence[Any], _: Any, **params: Any) -> tuple[Any, Any]:
    results = _bind(*primals, **params)
    return results, [compat.zero_tangent(x) for x in results]


def _batch(
    _: Any, operands: Sequence[Array], dims: Sequence[int], **params: Any
) -> tuple[list[Array], list[int]]:
    """Map to keys of two dimensions, of which devices may share the batches."""
    keys = jnp.moveaxis(operands[0], dims[0], 0)
    # A layer of experts reads places, and takes the rows of all batches as its own.
    if params["places"]:
        results = _batches_at_once(keys, **params)
        return results, [0] * len(results)
    batches = keys.shape[:-1]
    results = _bind(keys.reshape(math.prod(batches), keys.shape[-1]), **params)
    return [x.reshape(*batches, *x.shape[1:]) for x in results], [0] * len(results)


def _batches_at_once(keys: Array, *, bins: int, is_sorted: bool, places: bool) -> list[Array]:
    """Sort all batches at once: their keys follow one another."""
    batch, rows = keys.shape
    flat = (bins_of(keys, bins) - 1 + first_of_batches(batch, bins)).ravel()
    *order, bounds = _bind(flat, bins=batch * bins, is_sorted=is_sorted, places=places)
    ends = 0 if places else 1
    starts = jnp.stack([bounds[i * bins : (i + 1) * bins + ends] for i in range(batch)])
    first = first_of_batches(batch, rows)
    return [*(each.reshape(batch, rows) - first for each in order), starts - first]


def _sharding_rule(keys: Any, *, is_sorted: bool, places: bool, **_: Any) -> ShardingRule:
    """Every device sorts all rows, of its own batches."""
    results = 1 if is_sorted else 2 + places
    batches = tuple(range(keys.ndim - 1))
    dims, sizes = (*batches, None), dict(zip(batches, keys.shape, strict=False))
    return ShardingRule((dims,), (dims,) * results, sizes, flops=keys.size)


def _rewritten_batches(**params: Any) -> Rewrite:
    return Rewrite(
        "keys of batches follow one another", functools.partial(_batches_at_once, **params)
    )


def _with_places_by_xla(reason: str, bins: int) -> Rewrite:
    def order_and_places(keys: Array) -> list[Array]:
        order, bounds = order_by_key(keys, bins=bins)
        return [order, _inverse(order), bounds[:-1]]

    return Rewrite(reason, order_and_places)


def _cuda(
    operands: Sequence[Operand], _: Any, *, bins: int, is_sorted: bool, places: bool
) -> PlannedKernel | Rewrite | Fallback:
    (keys,) = operands
    if keys.aval.ndim == 2:
        return _rewritten_batches(bins=bins, is_sorted=is_sorted, places=places)
    planner = plan_bounds if is_sorted else plan_index_sort
    sort = IndexSort(keys.aval.shape[0], bins, places)
    if places and not sort.in_one_pass:
        return _with_places_by_xla("XLA inverts an order of several passes", bins)
    return planned_kernel((keys.value,), planner, sort)


def _cpu(
    operands: Sequence[Operand], _: Any, *, bins: int, is_sorted: bool, places: bool
) -> PlannedKernel | Rewrite:
    if operands[0].aval.ndim == 2:
        return _rewritten_batches(bins=bins, is_sorted=is_sorted, places=places)
    if places:
        return _with_places_by_xla("XLA inverts the order", bins)
    call = ffi.CpuCall(ffi.CPU_ORDER_BY_KEY, {})
    return PlannedKernel("cpu_order_by_key", f"{bins} keys", call, (operands[0].value,))


_bind = define(
    Operation(
        name="tilekern_order_by_key",
        reference=_reference,
        several_results=True,
        jvp=_jvp,
        batch=_batch,
        sharding_rule=_sharding_rule,
        planners={"cpu": Planner(no_refusal, _cpu), "cuda": Planner(no_refusal, _cuda)},
        describe=lambda bins, **_: f"sort rows by {bins} keys",
    )
)
