"""``segment_sum`` and the other reductions to segments: the public functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax import Array, dtypes, lax
from jax.typing import ArrayLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp, ops
from jax_tilekern.ops.arguments import check_choice
from jax_tilekern.ops.element_types import wide_dtype
from jax_tilekern.ops.explicit import (
    Sharding,
    by_automatic_axes,
    resharded,
    spec_of,
)
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.segments.edges import EdgeOperands, SegmentCall, trace_values
from jax_tilekern.ops.segments.keys import from_the_first, keys_of, rows_of
from jax_tilekern.ops.segments.plan import (
    Ids,
    SegmentPlan,
    checked_plan,
    integers,
    is_clipped,
    is_too_large,
    number_of_segments,
    plan_of,
)
from jax_tilekern.ops.segments.reduce import reduce_rows, reduce_segments
from jax_tilekern.ops.segments.update_rows import update_rows
from jax_tilekern.plans.segments.problem import Combiner

Kind = Combiner | Literal["mean"]
_COMBINE = {"prod": jnp.multiply, "max": jnp.maximum, "min": jnp.minimum}


def segment_sum(
    data: ArrayLike,
    segment_ids: Ids,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Any = None,
    out_sharding: Sharding | None = None,
) -> Array:
    """Sum rows by segment, with the semantics of :func:`jax.ops.segment_sum`.

    Floats of 16 bits are summed in float32 and rounded once. On a GPU, XLA's scatter computes sums
    where it is predicted to be faster, in no fixed order; ``policy("kernels")`` makes results the
    same at every call.

    Parameters
    ----------
    data
        Array whose first dimension has the edges, or broadcasts to them.
    segment_ids
        The segment of each edge, of any integer type, or a :func:`segment_plan`.
    num_segments
        Number of segments; by default one more than the largest id, which takes a concrete array.
    indices_are_sorted
        Whether the ids are known to ascend. If they do not, sums are wrong; no memory is read or
        written out of bounds.
    unique_indices
        Accepted as JAX has it.
    bucket_size
        Accepted as JAX has it: sums are accurate without buckets.
    mode
        What ids out of bounds mean, as in :func:`segment_plan`. A plan has its own mode.
    out_sharding
        Sharding of the result on a mesh with explicit axes.

    Returns
    -------
    Array
        ``(num_segments, *data.shape[1:])`` of the type of ``data``. Empty segments are zeros.

    Raises
    ------
    TypeError
        If the ids are no array of integers, or a sum or a product is of booleans.
    ValueError
        If there are not as many ids as edges, ``num_segments`` is negative, or a plan has another
        number of segments or another mode.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.segment_sum(jnp.arange(6.0).reshape(3, 2), jnp.array([1, 1, 0]), 2)
    Array([[4., 5.],
           [2., 4.]], dtype=float32)
    """
    result = _checked("sum", data, segment_ids, num_segments, indices_are_sorted, mode)
    return resharded(result, out_sharding)


def segment_prod(
    data: ArrayLike,
    segment_ids: Ids,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Any = None,
    out_sharding: Sharding | None = None,
) -> Array:
    """Multiply rows by segment, with the semantics of :func:`jax.ops.segment_prod`.

    Parameters, results and errors are those of :func:`segment_sum`. Empty segments are ones. As
    JAX's, it has a derivative for unique indices alone, and is JAX's for these.
    """
    result = _checked(
        "prod", data, segment_ids, num_segments, indices_are_sorted, mode, unique_indices
    )
    return resharded(result, out_sharding)


def segment_max(
    data: ArrayLike,
    segment_ids: Ids,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Any = None,
    out_sharding: Sharding | None = None,
) -> Array:
    """Return the maximum of rows by segment, with the semantics of :func:`jax.ops.segment_max`.

    Parameters, results and errors are those of :func:`segment_sum`. Empty segments are the lowest
    value of the type. Elements that are the maximum share its derivative.
    """
    result = _checked("max", data, segment_ids, num_segments, indices_are_sorted, mode)
    return resharded(result, out_sharding)


def segment_min(
    data: ArrayLike,
    segment_ids: Ids,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Any = None,
    out_sharding: Sharding | None = None,
) -> Array:
    """Return the minimum of rows by segment, with the semantics of :func:`jax.ops.segment_min`.

    Parameters, results and errors are those of :func:`segment_sum`. Empty segments are the highest
    value of the type. Elements that are the minimum share its derivative.
    """
    result = _checked("min", data, segment_ids, num_segments, indices_are_sorted, mode)
    return resharded(result, out_sharding)


def segment_mean(
    data: ArrayLike,
    segment_ids: Ids,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    mode: Any = None,
) -> Array:
    """Return the mean of rows by segment.

    Parameters, results and errors are those of :func:`segment_sum`. Empty segments are zeros.
    Integers give floats, as in :func:`jax.numpy.mean`.
    """
    return _checked("mean", data, segment_ids, num_segments, indices_are_sorted, mode)


def _mean(data: Array, plan: SegmentPlan, *, has_order: bool) -> Array:
    dtype = jax.eval_shape(jnp.mean, data).dtype
    wide = wide_dtype(dtype)
    total = reduced("sum", data.astype(dtype), plan, wide)
    counts = _counts(plan, (math.prod(data.shape[1:]), wide), has_order=has_order)
    counts = jnp.maximum(counts, 1).astype(wide)
    return (total / counts.reshape(-1, *(1,) * (data.ndim - 1))).astype(dtype)


def _counts(plan: SegmentPlan, total: tuple[int, np.dtype[Any]], *, has_order: bool) -> Array:
    """Return the number of edges of each segment, beside a sum of columns and a type.

    A GPU takes the bounds of a sum that reads them. A CPU takes those of a plan, and counts edges
    faster than it sorts them.
    """

    def counted(plan: SegmentPlan) -> Array:
        return reduced("sum", jnp.ones(plan.size, np.int32), plan, counted=total)

    if not has_order:
        return counted(plan)
    counts: Array = lax.platform_dependent(plan, cpu=_edges_between_bounds, default=counted)
    return counts


def _edges_between_bounds(plan: SegmentPlan) -> Array:
    return jnp.diff(plan.bounds)[1:-1]


def segment_reduce(
    function: Callable[..., Any],
    *arrays: ArrayLike,
    segment_ids: Ids,
    num_segments: int | None = None,
    gather: Sequence[Ids | None] | None = None,
    reduction: Combiner = "sum",
    indices_are_sorted: bool = False,
    mode: Any = None,
) -> Array:
    """Reduce a function of the edges' data, which is never stored, to segments.

    It is ``segment_sum(vmap(function)(*(x[index] for x, index in zip(arrays, gather))), ids)`` in
    one kernel on a GPU: messages of a graph's edges, or a sparse matrix times a dense one. Its
    derivatives, of any order, are calls of this kind.

    Parameters
    ----------
    function
        A function of scalars, one of each array: any elementwise JAX function. A call is
        traced once for each function object and the values of the variables that it reads.
    *arrays
        Arrays whose first dimension has the edges, or rows that edges gather. The further
        dimensions are the same, or of size 1, or missing.
    segment_ids, num_segments, indices_are_sorted, mode
        As in :func:`segment_sum`.
    gather
        For each array the number of the row that each edge reads, or a :func:`segment_plan` of
        these numbers, or ``None`` for an array of edges. Negative numbers count from the last row,
        but those of a plan are out of bounds. A number out of bounds reads zeros. A plan saves the
        sort that the derivative needs.
    reduction
        ``"sum"``, ``"max"``, ``"min"`` or ``"prod"``.

    Returns
    -------
    Array
        A row for each segment, of the function's type.

    Raises
    ------
    TypeError
        If the function is not one of scalars, indices are no arrays of integers, or a sum or a
        product is of booleans.
    ValueError
        If the arrays' shapes do not fit, or a plan has another number of segments or another mode.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> nodes = jnp.arange(6.0).reshape(3, 2)
    >>> source, target = jnp.array([0, 1, 2]), jnp.array([1, 1, 0])
    >>> weights = jnp.array([1.0, 10.0, 100.0])
    >>> jtk.segment_reduce(
    ...     lambda x, w: x * w, nodes, weights, segment_ids=target, num_segments=3,
    ...     gather=(source, None))
    Array([[400., 500.],
           [ 20.,  31.],
           [  0.,   0.]], dtype=float32)
    """
    compat.check_arraylike("segment_reduce", *arrays)
    read = [jnp.asarray(x) for x in arrays]
    if not read:
        raise TypeError("segment_reduce takes at least one array")
    check_choice("segment_reduce", "reduction", reduction, get_args(Combiner))
    places = (None,) * len(read) if gather is None else tuple(gather)
    if len(places) != len(read):
        raise ValueError(f"segment_reduce: {len(places)} entries of gather for {len(read)} arrays")
    plan = plan_of(
        "segment_reduce",
        segment_ids,
        number_of_segments("segment_reduce", segment_ids, num_segments),
        indices_are_sorted,
        clip=is_clipped("segment_reduce", mode, segment_ids),
    )
    for i, (x, place) in enumerate(zip(read, places, strict=True)):
        if x.ndim == 0 or (place is None and x.shape[0] != plan.size):
            raise ValueError(f"segment_reduce: array {i} has shape {x.shape} for {plan.size} edges")
    # Arrays with the same number of rows share their index arrays.
    keys = [
        None if place is None else (id(place), x.shape[0])
        for x, place in zip(read, places, strict=True)
    ]
    given: dict[Any, Any] = {
        key: place for key, place in zip(keys, places, strict=True) if key is not None
    }
    gathers = tuple(None if key is None else [*given].index(key) for key in keys)
    distinct: list[Array | SegmentPlan] = []
    for (_, rows), place in given.items():
        if isinstance(place, SegmentPlan):
            if rows != place.num_segments:
                raise ValueError(
                    f"segment_reduce: gather has a plan of {place.num_segments} rows for an array "
                    f"of {rows} rows"
                )
            index = checked_plan("segment_reduce", place).keys
            distinct.append(place)
        else:
            index = integers("segment_reduce", place, "entries of gather")
            distinct.append(index)
        if index.shape != (plan.size,):
            raise ValueError(
                f"segment_reduce: an entry of gather has shape {index.shape} for {plan.size} edges"
            )
    return _reduced_edges(
        read, distinct, plan, function=function, gathers=gathers, reduction=reduction
    )


@jitted("gathers", "reduction", functions=["function"])
def _reduced_edges(
    read: Sequence[Array],
    distinct: Sequence[Array | SegmentPlan],
    plan: SegmentPlan,
    *,
    function: Callable[..., Any],
    gathers: tuple[int | None, ...],
    reduction: Combiner,
) -> Array:
    """Reduce a function of edges by a plan; ``gathers`` has the place in ``distinct`` of each."""
    indices, plans, planned = [], [], []
    for i, place in enumerate(distinct):
        if isinstance(place, SegmentPlan):
            index = rows_of(place.keys, place.num_segments)
            # Edges that are sorted as they lie have an order, too.
            by_row = lax.iota(np.int32, place.size) if place.order is None else place.order
            plans += [by_row, place.bounds]
            planned.append(i)
        else:
            rows = read[gathers.index(i)].shape[0]
            index = keys_of(from_the_first(place, rows), rows)
        indices.append(index)
    rank = max(x.ndim for x in read)
    read = [x.reshape(*x.shape, *(1,) * (rank - x.ndim)) for x in read]
    try:
        shape = jnp.broadcast_shapes(*(x.shape[1:] for x in read))
    except ValueError as error:
        raise ValueError(f"segment_reduce: dimensions after the first: {error}") from None
    # A dimension that only some arrays lack is made whole.
    read = [
        x
        if x.shape[1:] in (shape, (1,) * len(shape))
        else jnp.broadcast_to(x, (x.shape[0], *shape))
        for x in read
    ]
    if not any(x.shape[1:] == shape for x in read):
        read[0] = jnp.broadcast_to(read[0], (read[0].shape[0], *shape))
    values, closed_over = trace_values(function, [x.dtype for x in read])
    check_values("segment_reduce", reduction, values.out_dtypes[0])
    scalars = [jnp.broadcast_to(x, (1, *(1,) * len(shape))) for x in closed_over]
    if scalars:
        zero = len(indices)
        indices.append(jnp.zeros(plan.size, np.int32))
        gathers = (*gathers, *(zero,) * len(scalars))
        read += scalars
    segments = SegmentCall(
        gathers,
        len(indices),
        tuple(planned),
        plan.num_segments,
        1,
        plan.order is None,
        reduction,
        values,
        values.out_dtypes[0],
    )
    operands = EdgeOperands.of([*read, *indices, *plans, *plan.placed], segments)
    whole = next(x for x in read if x.shape[1:] == shape)

    result: Array = by_automatic_axes(
        lambda operands: reduce_segments(operands, segments),
        operands,
        lambda: (None, *spec_of(whole)[1:]),
    )
    return result


@jitted("reduction", "dtype", "counted")
def reduced(
    reduction: Combiner,
    data: Array,
    plan: SegmentPlan,
    dtype: np.dtype[Any] | None = None,
    counted: tuple[int, np.dtype[Any]] | None = None,
) -> Array:
    wanted = np.dtype(data.dtype if dtype is None else dtype)

    def by_plan(operands: tuple[Array, SegmentPlan]) -> Array:
        data, plan = operands
        return reduce_rows(
            data,
            *plan.placed,
            reduction=reduction,
            segments=plan.num_segments,
            dtype=wanted,
            counted=counted,
        )

    result: Array = by_automatic_axes(by_plan, (data, plan), lambda: (None, *spec_of(data)[1:]))
    return result


def check_values(name: str, kind: Kind, dtype: Any) -> None:
    """Raise a ``TypeError`` for sums and products of booleans, which JAX does not have either."""
    if dtype == np.bool_ and kind in ("sum", "prod"):
        raise TypeError(
            f"{name}: a {kind} does not take bool; convert the values, as by .astype(jnp.int32)"
        )


def combined(reduction: Combiner, table: Array, rows: Array, plan: SegmentPlan) -> Array:
    """Combine rows of a table with all their updates, rounded once."""
    if reduction == "sum":
        return update_rows(table, rows, *plan.placed)
    wide = wide_dtype(table.dtype)
    updates = reduced(reduction, rows, plan, wide)
    return _COMBINE[reduction](table.astype(wide), updates).astype(table.dtype)


def _checked(
    kind: Kind,
    data: ArrayLike,
    segment_ids: Ids,
    num_segments: int | None,
    indices_are_sorted: bool,
    mode: Any,
    unique_indices: bool = False,
) -> Array:
    name = f"segment_{kind}"
    compat.check_arraylike(name, data)
    count = number_of_segments(name, segment_ids, num_segments)
    is_sorted, is_unique = bool(indices_are_sorted), bool(unique_indices)
    clip = is_clipped(name, mode, segment_ids)
    return _reduced(kind, data, segment_ids, count, is_sorted, is_unique, clip)


@jitted("kind", "segments", "is_sorted", "is_unique", "clip")
def _reduced(
    kind: Kind,
    data: ArrayLike,
    ids: Ids,
    segments: int,
    is_sorted: bool,
    is_unique: bool,
    clip: bool,
) -> Array:
    """Reduce rows by a plan or by ids of any shape, to which JAX broadcasts the rows."""
    name, data = f"segment_{kind}", jnp.asarray(data)
    if isinstance(data.dtype, np.dtype):
        # Where 64-bit types are off, an array of them has a result of 32 bits, as by jax.ops.
        data = data.astype(dtypes.canonicalize_dtype(data.dtype))
    if isinstance(ids, SegmentPlan):
        edges: tuple[int, ...] = (ids.size,)
    else:
        ids = integers(name, ids)
        edges = ids.shape
        if kind != "mean" and (is_too_large(ids, segments) or (kind == "prod" and is_unique)):
            jax_function: Any = getattr(ops, name)
            mode = lax.GatherScatterMode.CLIP if clip else None
            return jax_function(data, ids, segments, is_sorted, is_unique, mode=mode)  # type: ignore[no-any-return]
        ids = ids.ravel()
    if 0 not in edges:
        check_values(name, kind, data.dtype)
    plan = plan_of(name, ids, segments, is_sorted, clip=clip)
    row = data.shape[1:]
    try:
        rows = jnp.broadcast_to(data, (*edges, *row)).reshape(plan.size, *row)
    except ValueError:
        raise ValueError(
            f"{name}: data of shape {data.shape} for segment ids of shape {edges}: its first "
            "dimension has the edges"
        ) from None
    if kind == "mean":
        return _mean(rows, plan, has_order=isinstance(ids, SegmentPlan) or is_sorted)
    return reduced(kind, rows, plan)
