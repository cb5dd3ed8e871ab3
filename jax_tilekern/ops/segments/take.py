"""Rows of a table by their numbers, and updates of rows: each is the transpose of the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.global_modes import mode_independent
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.explicit import by_automatic_axes, spec_of
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.segments.batches import concatenated_batches, in_front, whole
from jax_tilekern.ops.segments.edges import gathered_rows
from jax_tilekern.ops.segments.functions import check_values, combined
from jax_tilekern.ops.segments.keys import from_the_first, highest, lowest, rows_of
from jax_tilekern.ops.segments.order import order_by_key
from jax_tilekern.ops.segments.plan import (
    SegmentPlan,
    checked_plan,
    integers,
    is_clipped,
    is_too_large,
    plan_of,
    segment_plan,
)
from jax_tilekern.ops.segments.reduce import reduce_rows
from jax_tilekern.primitives.operation import Operation, define


@jitted("axis", "mode", "unique_indices", "indices_are_sorted", "fill_value")
def take(
    a: ArrayLike,
    indices: ArrayLike | SegmentPlan,
    axis: int | None = None,
    out: None = None,
    mode: str | None = None,
    unique_indices: bool = False,
    indices_are_sorted: bool = False,
    fill_value: Any = None,
) -> Array:
    """Take rows of a table, with the semantics of :func:`jax.numpy.take`.

    Rows are gathered by XLA, at the speed of memory. The gradient of the table is a
    :func:`segment_sum`, which sums in float32 at least, by a kernel or by XLA's scatter.

    Parameters
    ----------
    a
        The table.
    indices
        Numbers of rows, integers of any shape; or a :func:`segment_plan` of a vector of them, which
        saves the gradient's sort.
    axis
        The axis of the rows. On another axis than the first it is :func:`jax.numpy.take` itself.
        ``None`` is the first axis of a vector or of a plan's table, and the flattened array else.
    out
        Not supported, as in JAX.
    mode, unique_indices, indices_are_sorted, fill_value
        As in JAX. A plan has its own mode, and no other may be given.

    Returns
    -------
    Array
        ``(*indices.shape, *a.shape[1:])``.

    Raises
    ------
    TypeError
        If the indices are no array.
    ValueError
        If the indices are no integers, a plan is for another number of rows or has another mode, or
        ``mode`` is unknown.
    NotImplementedError
        If there is an ``out``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.take(jnp.arange(6.0).reshape(3, 2), jnp.array([2, 0]), axis=0)
    Array([[4., 5.],
           [0., 1.]], dtype=float32)
    """
    compat.check_arraylike("take", a)
    if out is not None:
        raise NotImplementedError("take: out is not supported")
    a = jnp.asarray(a)
    if isinstance(indices, SegmentPlan):
        if axis not in (None, 0) or a.ndim == 0 or a.shape[0] != indices.num_segments:
            raise ValueError(
                f"take: a plan of {indices.num_segments} rows, for axis {axis} of an array of "
                f"shape {a.shape}"
            )
        is_clipped("take", mode, indices)
        return _filled(a, checked_plan("take", indices), fill_value)

    compat.check_arraylike("take", a, indices)
    indices = jnp.asarray(indices)
    if indices.dtype != np.bool_ and not jnp.issubdtype(indices.dtype, jnp.integer):
        raise ValueError(f"take: indices are integers, not {indices.dtype}")

    def by_jax(a: Any, indices: Any) -> Array:
        return jnp.take(
            a, indices, axis, None, mode, unique_indices, indices_are_sorted, fill_value
        )

    # JAX's function raises the errors.
    result = compat.type_of_whole(by_jax, a, indices)
    is_first = a.ndim == 1 if axis is None else axis in (0, -a.ndim)
    is_number = jnp.issubdtype(a.dtype, jnp.number) or a.dtype == np.bool_
    if (
        not is_first
        or not is_number
        or indices.dtype == np.bool_
        or not a.size
        or not indices.size
        or is_too_large(indices, a.shape[0])
    ):
        return by_jax(a, indices)
    rows = a.shape[0]
    if mode == "wrap":
        indices = indices % rows
    elif mode != "clip":
        indices = from_the_first(indices, rows)
    plan = segment_plan(
        indices.ravel(),
        rows,
        indices_are_sorted=indices_are_sorted,
        mode="clip" if mode == "clip" else "drop",
    )
    return _filled(a, plan, fill_value).reshape(result.shape)


@jitted("indices_are_sorted", "mode")
def scatter_add(
    a: ArrayLike,
    indices: ArrayLike | SegmentPlan,
    updates: ArrayLike,
    *,
    indices_are_sorted: bool = False,
    mode: Any = None,
) -> Array:
    """Add rows to those of a table: ``a.at[indices].add(updates, mode=mode)``.

    Sums are those of float32 at least, and are rounded once.

    Parameters
    ----------
    a
        The table.
    indices
        The row of each update, integers of any shape; negative numbers count from the last row. Or
        a :func:`segment_plan`.
    updates
        A row for each index, or what broadcasts to them.
    indices_are_sorted, mode
        As in :func:`segment_sum`.

    Returns
    -------
    Array
        Of the table's shape and type.

    Raises
    ------
    TypeError
        If the indices are no array of integers, or the table and the updates are booleans.
    ValueError
        If shapes do not fit, or a plan has another mode.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.scatter_add(jnp.zeros(3), jnp.array([0, 2, 0]), jnp.array([1.0, 2.0, 3.0]))
    Array([4., 0., 2.], dtype=float32)
    """
    compat.check_arraylike("scatter_add", a)
    a, updates = jnp.asarray(a), jnp.asarray(updates)
    if a.ndim == 0:
        raise ValueError("scatter_add: a table has rows, and this array has no dimension")
    clip = is_clipped("scatter_add", mode, indices)
    edges: tuple[int, ...]
    if isinstance(indices, SegmentPlan):
        plan = checked_plan("scatter_add", indices)
        edges = (plan.size,)
        if plan.num_segments != a.shape[0]:
            raise ValueError(
                f"scatter_add: a plan of {plan.num_segments} rows for a table of {a.shape[0]}"
            )
    else:
        indices = integers("scatter_add", indices, "indices")
        edges = indices.shape
        numbers = from_the_first(indices.ravel(), a.shape[0])
        plan = plan_of(
            "scatter_add",
            numbers,
            a.shape[0],
            indices_are_sorted,
            clip=clip,
            what="indices",
            argument="a.shape[0]",
        )
    # The result is converted to the table's type last, as JAX does.
    dtype, row = jnp.result_type(a, updates), a.shape[1:]
    shape = (*edges, *row)
    if updates.ndim > len(shape) or any(
        own not in (1, size) for own, size in zip(updates.shape[::-1], shape[::-1], strict=False)
    ):
        raise ValueError(
            f"scatter_add: updates of shape {updates.shape} do not broadcast to {shape}, rows of a "
            "for each index"
        )

    @mode_independent
    def added(operands: tuple[Array, Any, SegmentPlan]) -> Array:
        a, updates, plan = operands
        rows = jnp.broadcast_to(updates, shape).astype(dtype).reshape(plan.size, *row)
        if 0 in edges:
            return a
        check_values("scatter_add", "sum", dtype)
        return combined("sum", a.astype(dtype), rows, plan).astype(a.dtype)

    result: Array = by_automatic_axes(added, (a, updates, plan), lambda: spec_of(a))
    return result


def _filled(a: Array, plan: SegmentPlan, fill_value: Any) -> Array:
    """Take rows; what a plan drops is filled as JAX fills it."""
    if fill_value is None:
        if jnp.issubdtype(a.dtype, jnp.inexact):
            fill_value = np.nan
        elif a.dtype == np.bool_:
            fill_value = True
        else:
            fill_value = lowest(a.dtype) or highest(a.dtype)
    # NaN is not equal to itself, but its bytes are.
    return _taken(a, plan, np.asarray(fill_value).astype(a.dtype).tobytes())


@jitted("fill")
def _taken(a: Array, plan: SegmentPlan, fill: bytes) -> Array:
    def taken(operands: tuple[Array, ...]) -> Array:
        rows: Array = _bind(*operands, batch=1, segments=operands[0].shape[0], fill=fill)
        return rows

    read = (a, *plan.placed)
    result: Array = by_automatic_axes(taken, read, lambda: (*spec_of(plan.keys), *spec_of(a)[1:]))
    return result


def _reference(a: Array, keys: Array, *_: Array, batch: int, segments: int, fill: bytes) -> Array:
    # Keys of no segment are out of bounds themselves.
    rows = keys if batch == 1 else rows_of(keys, segments, batch)
    return gathered_rows(a, rows, batch=batch, fill=np.frombuffer(fill, a.dtype)[0])


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, fill: bytes, **params: Any
) -> tuple[Any, Any]:
    taken = _bind(*primals, fill=fill, **params)
    return taken, _bind(tangents[0], *primals[1:], fill=bytes(len(fill)), **params)


def _cotangent(
    cotangent: Array, a: Any, *placed: Array, batch: int, segments: int, fill: bytes
) -> Array:
    return reduce_rows(
        cotangent, *placed, reduction="sum", segments=segments, dtype=a.dtype, batch=batch
    )


def _batch(
    _: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    batch: int,
    segments: int,
    fill: bytes,
) -> tuple[Array, int]:
    size, (a, keys, *order) = in_front(operands, dims)
    bins = batch * (segments + 2)
    if dims[0] is None:
        # All batches read one table, so its cotangent is one sum.
        keys = whole(keys, dims[1] is not None, size).ravel()
        placed: tuple[Array, ...] = (keys, *order_by_key(keys, bins=bins))
    else:
        keys, *first, bounds = (
            whole(x, d is not None, size) for x, d in zip((keys, *order), dims[1:], strict=True)
        )
        placed = concatenated_batches(keys, first, bounds, bins=bins)
        a, batch = a.reshape(math.prod(a.shape[:2]), *a.shape[2:]), size * batch
    taken = _bind(a, *placed, batch=batch, segments=segments, fill=fill)
    return taken.reshape(size, -1, *taken.shape[1:]), 0


_bind = define(
    Operation(
        name="tilekern_take_rows",
        reference=_reference,
        jvp=_jvp,
        transposes={0: _cotangent},
        batch=_batch,
        sharding_rule=None,
        planners={},
        describe=lambda **_: "take rows",
    )
)
