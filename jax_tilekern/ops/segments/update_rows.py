"""Rows added to those of a table: the primitive."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from jax_tilekern.ops.element_types import wide_dtype
from jax_tilekern.ops.segments.batches import concatenated_batches, in_front, whole
from jax_tilekern.ops.segments.edges import EdgeOperands, SegmentCall, gathered_rows
from jax_tilekern.ops.segments.few_rows import add_few_rows
from jax_tilekern.ops.segments.keys import rows_of
from jax_tilekern.ops.segments.lowering import FEW_ROWS, problem_of, updated_rows
from jax_tilekern.ops.segments.reduce import reduce_rows
from jax_tilekern.plans.gpu import NoGpu, current_gpu
from jax_tilekern.plans.policy import current_policy
from jax_tilekern.plans.segments import on_cpu
from jax_tilekern.plans.segments.problem import SegmentReduction
from jax_tilekern.plans.segments.select import scatters_into_table, updates_few_rows
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    Outcome,
    Planner,
    Rewrite,
    define,
    no_refusal,
)


def update_rows(table: Array, updates: Array, *placed: Array) -> Array:
    """Return a table with rows added to its own, of its type; each sum is rounded once.

    ``placed`` is that of the plan of the updates. Batches follow one another in the operands.
    """
    result: Array = _bind(table, updates, *placed, batch=1)
    return result


def _by_reduction(table: Array, updates: Array, *placed: Array, batch: int) -> Array:
    """Add up all updates of each row first, which fits many updates."""
    wide = wide_dtype(table.dtype)
    totals = reduce_rows(
        updates,
        *placed,
        reduction="sum",
        segments=table.shape[0] // batch,
        dtype=wide,
        batch=batch,
    )
    return (table.astype(wide) + totals).astype(table.dtype)


def _rows_to_update(table: Any, keys: Array, batch: int) -> Array:
    """Return the row of each update, which is out of bounds for an update of none."""
    rows = rows_of(keys, table.shape[0] // batch, batch)
    return jnp.where(rows < 0, table.shape[0], rows)


def _reference(table: Array, updates: Array, keys: Array, *_: Array, batch: int) -> Array:
    wide, rows = wide_dtype(table.dtype), _rows_to_update(table, keys, batch)
    added = table.astype(wide).at[rows].add(updates.astype(wide), mode="drop")
    return added.astype(table.dtype)


def _cotangents(
    cotangent: Array, table: Any, updates: Any, keys: Array, *_: Array, batch: int
) -> list[Array]:
    return [cotangent, gathered_rows(cotangent, _rows_to_update(table, keys, batch))]


def _batch(
    _: Any, operands: Sequence[Array], dims: Sequence[int | None], *, batch: int
) -> tuple[Array, int]:
    """Concatenate the tables and the updates of the batch."""
    size, moved = in_front(operands, dims)
    table, updates, keys, *order, bounds = (
        whole(x, d is not None, size) for x, d in zip(moved, dims, strict=True)
    )
    placed = concatenated_batches(keys, order, bounds, bins=table.shape[1] + 2 * batch)
    flat = (x.reshape(math.prod(x.shape[:2]), *x.shape[2:]) for x in (table, updates))
    result = _bind(*flat, *placed, batch=size * batch)
    return result.reshape(size, -1, *result.shape[1:]), 0


def _totals(batch: int) -> Rewrite:
    function = functools.partial(_by_reduction, batch=batch)
    return Rewrite("updates are reduced to rows, which are added to the table", function)


def _problem(operands: Sequence[Operand], batch: int) -> SegmentReduction | str:
    table, *updates = (x.aval for x in operands)
    call = SegmentCall.of_rows(
        "sum",
        table.dtype,
        segments=table.shape[0] // batch,
        batch=batch,
        is_sorted=len(operands) == 4,
    )
    return problem_of(EdgeOperands.of(updates, call), call)


def _add_few_rows(table: Array, updates: Array, keys: Array, *_: Array, batch: int) -> Array:
    return add_few_rows(table, updates, _rows_to_update(table, keys, batch))


def _cuda(operands: Sequence[Operand], _: Any, *, batch: int) -> Outcome:
    problem = _problem(operands, batch)
    try:
        gpu = current_gpu()
    except NoGpu as error:
        return Fallback(str(error))
    if isinstance(problem, str):
        return _totals(batch)
    if (scatter := scatters_into_table(problem, gpu)) is not None:
        return Fallback("XLA's scatter adds rows to the table", scatter)
    if (few := updates_few_rows(problem, gpu, has_table=True)) is not None:
        return Rewrite(FEW_ROWS, functools.partial(_add_few_rows, batch=batch), few)
    return _totals(batch)


def _cpu(operands: Sequence[Operand], _: Any, *, batch: int) -> Outcome:
    problem = _problem(operands, batch)
    if isinstance(problem, str):
        return _totals(batch)
    if current_policy() != "kernels" and (why := on_cpu.why_scattered(problem)) is not None:
        return Fallback(why)
    if on_cpu.updates_table(problem):
        table, updates, keys, *_order = operands
        return updated_rows(problem, updates.value, keys.value, table.value)
    return _totals(batch)


_bind = define(
    Operation(
        name="tilekern_update_rows",
        reference=_reference,
        transposes={(0, 1): _cotangents},
        batch=_batch,
        sharding_rule=None,
        planners={"cpu": Planner(no_refusal, _cpu), "cuda": Planner(no_refusal, _cuda)},
        describe=lambda **_: "update rows",
        composed=_by_reduction,
    )
)
