"""Reductions to segments of a function of gathered rows: the primitive and its rules.

Edges have values, which are a function of scalars of some arrays, each read at the edge's own row
or at a gathered one. The values are never stored: a kernel computes them as it reduces. The
operation is closed under differentiation: a tangent is the sum of another function, linear in the
tangents, and the cotangent of gathered rows is a sum to the segments of their numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.epilogue.cuda_text import Untranslatable, computed_type, cuda_text
from jax_tilekern.epilogue.scalar_function import ScalarFunction
from jax_tilekern.epilogue.scalars import evaluated as evaluated_on_scalars
from jax_tilekern.interop import compat, ffi
from jax_tilekern.interop.compat import ad
from jax_tilekern.ops.planned_kernel import planned_kernel
from jax_tilekern.ops.segments.edges import (
    EdgeOperands,
    Edges,
    by_scatter,
    columns_of,
    columns_of_shapes,
    edge_values,
    gathered_rows,
    value_dtype,
)
from jax_tilekern.ops.segments.keys import rows_of
from jax_tilekern.ops.segments.order import bounds_of_sorted, of_batches, order_by_key
from jax_tilekern.partitioning import params_text
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.plans.gpu import NoGpu, current_gpu
from jax_tilekern.plans.policy import current_policy
from jax_tilekern.plans.segments import on_cpu
from jax_tilekern.plans.segments.problem import (
    Combiner,
    MapOperand,
    MapText,
    SegmentReduction,
)
from jax_tilekern.plans.segments.select import plan_segments, unsorted_kernel
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    Params,
    PlannedKernel,
    Planner,
    Rewrite,
    define,
)


def reduce_segments(
    operands: EdgeOperands,
    edges: Edges,
    *,
    reduction: Combiner,
    function: ScalarFunction | None,
    dtype: np.dtype[Any],
    linear: int = 0,
) -> Array:
    """Reduce the values of edges to segments.

    Parameters
    ----------
    operands, edges
        What is read.
    reduction
        How values are combined.
    function
        The values: a function of one element of each array. ``None`` for the one array itself.
    dtype
        Type of the result; floats are reduced in float32 at least.
    linear
        In how many of the last arrays the function is jointly linear.

    Returns
    -------
    Array
        A row for each segment of each batch; segments without edges have the neutral element.
    """
    result: Array = _bind(
        *operands.flat(),
        edges=edges,
        reduction=reduction,
        function=function,
        dtype=dtype,
        linear=linear,
    )
    return result


# Meaning.


def _reference(
    *operands: Array,
    edges: Edges,
    reduction: Combiner,
    function: ScalarFunction | None,
    dtype: np.dtype[Any],
    **_: Any,
) -> Array:
    read = EdgeOperands.of(operands, edges)
    return by_scatter(read.arrays, read.indices, read.keys, edges, reduction, function, dtype)


# Differentiation.


def _scalar_function(
    name: str, function: Callable[..., Any], dtypes: Sequence[Any], out: np.dtype[Any]
) -> ScalarFunction:
    """Trace a function of scalars of known types."""

    def python(*scalars: Any) -> list[Any]:
        return [function(*scalars)]

    with compat.without_mesh():
        jaxpr = jax.make_jaxpr(python)(*(jax.core.ShapedArray((), x) for x in dtypes))

    def unified(*scalars: Any) -> list[Any]:
        # Its rules are of types that do not vary over manual axes.
        return evaluated_on_scalars(jaxpr.jaxpr, jaxpr.consts, compat.unify_varying(*scalars))

    return ScalarFunction(name, jaxpr, unified, (out,), (None,))


def _evaluated(function: ScalarFunction | None) -> Callable[..., Any]:
    """Return the function of scalars as JAX computes it, before the cast to its type."""
    if function is None:
        return lambda x: x
    call = compat.jaxpr_as_fun(function.jaxpr)
    return lambda *scalars: call(*scalars)[0]


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    edges: Edges,
    reduction: Combiner,
    function: ScalarFunction | None,
    dtype: np.dtype[Any],
    linear: int,
) -> tuple[Any, Any]:
    result = _bind(
        *primals, edges=edges, reduction=reduction, function=function, dtype=dtype, linear=linear
    )
    read = EdgeOperands.of(primals, edges)
    count = len(read.arrays)
    moving = [i for i in range(count) if type(tangents[i]) is not ad.Zero]
    if not moving or not jnp.issubdtype(dtype, jnp.inexact):
        return result, compat.zero_tangent(result)
    if reduction == "prod":
        raise NotImplementedError(
            "segment_prod has a derivative for unique indices alone: pass unique_indices=True if "
            "they are; segment_reduce has none of products"
        )
    given = [tangents[i] for i in moving]
    if reduction == "sum" and function is None:
        return result, _bind(
            *given,
            *primals[1:],
            edges=edges,
            reduction=reduction,
            function=None,
            dtype=dtype,
            linear=0,
        )
    evaluated = _evaluated(function)

    def tangent(*scalars: Any) -> Any:
        values, changes = scalars[:count], scalars[-len(moving) :]

        def of_moving(*own: Any) -> Any:
            operands = list(values)
            for i, x in zip(moving, own, strict=True):
                operands[i] = x
            return evaluated(*operands)

        value, change = jax.jvp(of_moving, tuple(values[i] for i in moving), changes)
        if reduction == "sum":
            return change
        chosen = value.astype(dtype) == scalars[count]
        return jnp.where(chosen, change, jnp.zeros_like(change))

    arrays, gathers, indices = list(read.arrays), list(edges.gathers), list(read.indices)
    if reduction != "sum":
        # Those that are the extremum share its tangent.
        arrays.append(result)
        gathers.append(len(indices))
        indices.append(rows_of(read.keys, edges.segments, edges.batch))
    further = dataclasses.replace(
        edges,
        gathers=(*gathers, *(edges.gathers[i] for i in moving)),
        indices=len(indices),
    )
    operands = read._replace(arrays=(*arrays, *given), indices=tuple(indices))
    name = function.name if function else f"segment_{reduction}"
    types = [x.dtype for x in operands.arrays]
    traced = _scalar_function(f"tangent of {name}", tangent, types, dtype)
    change = reduce_segments(
        operands, further, reduction="sum", function=traced, dtype=dtype, linear=len(moving)
    )
    if reduction != "sum":

        def is_chosen(*scalars: Any) -> Any:
            value = evaluated(*scalars[:count]).astype(dtype)
            return (value == scalars[count]).astype(dtype)

        counted = _scalar_function(f"extrema of {name}", is_chosen, types[: count + 1], dtype)
        number = reduce_segments(
            operands._replace(arrays=tuple(arrays)),
            dataclasses.replace(further, gathers=tuple(gathers)),
            reduction="sum",
            function=counted,
            dtype=dtype,
        )
        change = change / jnp.maximum(number, jnp.ones_like(number))
    return result, change


def _transposes(
    *, edges: Edges, function: ScalarFunction | None, linear: int, **_: Any
) -> dict[tuple[int, ...], Callable[..., Any]]:
    if function is None:
        return {(0,): _cotangents}
    count = len(edges.gathers)
    return {tuple(range(count - linear, count)): _cotangents} if linear else {}


def _cotangents(
    cotangent: Array,
    *operands: Any,
    edges: Edges,
    function: ScalarFunction | None,
    linear: int,
    **_: Any,
) -> list[Array]:
    read = EdgeOperands.of(operands, edges)
    count = len(read.arrays)
    moving = range(count - linear, count) if function is not None else range(1)
    known = [i for i in range(count) if i not in moving]
    evaluated = _evaluated(function)
    result_rows = rows_of(read.keys, edges.segments, edges.batch)
    arrays = (cotangent, *(read.arrays[i] for i in known))
    gathers = (0, *(None if (g := edges.gathers[i]) is None else g + 1 for i in known))
    indices = (result_rows, *read.indices)
    trailing = columns_of([cotangent])

    def cotangent_of(target: int) -> Array:
        aval = read.arrays[target]

        def scalar(change: Any, *others: Any) -> Any:
            def of_target(x: Any) -> Any:
                scalars: list[Any] = [None] * count
                for i, value in zip(known, others, strict=True):
                    scalars[i] = value
                for i in moving:
                    scalars[i] = x if i == target else jnp.zeros((), read.arrays[i].dtype)
                return evaluated(*scalars)

            like = jax.ShapeDtypeStruct((), aval.dtype)
            made = jax.eval_shape(of_target, like)
            (own,) = jax.linear_transpose(of_target, like)(change.astype(made.dtype))
            return own

        own = None
        if function is not None:
            types = [x.dtype for x in arrays]
            own = _scalar_function(f"cotangent of {function.name}", scalar, types, aval.dtype)
        place = edges.gathers[target]
        if place is None:
            if own is None:
                values = _of_segments(cotangent, result_rows, edges).astype(aval.dtype)
            else:
                values = edge_values(arrays, indices, gathers, own)
        else:
            values = _to_rows(read, place, aval, arrays, gathers, indices, own, edges)
        summed = [i for i, n in enumerate(trailing, 1) if aval.shape[i] == 1 and n != 1]
        return jnp.sum(values, summed, keepdims=True) if summed else values

    return [cotangent_of(i) for i in moving]


def _of_segments(x: Array, rows: Array, edges: Edges) -> Array:
    """Return the row of each edge's segment; batches stay apart, so that devices share them."""
    if edges.batch == 1:
        return gathered_rows(x, rows)
    tables, rows = _with_batches(x, edges), _with_batches(rows, edges)
    first = lax.broadcasted_iota(np.int32, (edges.batch, 1), 0) * edges.segments
    result: Array = jax.vmap(gathered_rows)(tables, jnp.where(rows < 0, -1, rows - first))
    return result.reshape(-1, *result.shape[2:])


def _to_rows(
    read: EdgeOperands,
    place: int,
    aval: Any,
    arrays: tuple[Array, ...],
    gathers: tuple[int | None, ...],
    indices: tuple[Array, ...],
    function: ScalarFunction | None,
    edges: Edges,
) -> Array:
    """Sum values of edges to the rows that they were gathered from."""
    rows = aval.shape[0]
    index = read.indices[place]
    # Numbers out of bounds read zeros, and belong to no row.
    if place in edges.planned:
        order, bounds = read.plans[edges.planned.index(place)]
    else:
        order, bounds = order_by_key(index, bins=rows + 2)
    if function is None:
        # The kernel of the identity does not gather.
        (i,) = (g for g in gathers if g is not None)
        arrays, gathers, indices = (gathered_rows(arrays[0], indices[i]),), (None,), ()
    other = Edges(gathers, len(indices), (), rows, 1, is_sorted=False)
    return reduce_segments(
        EdgeOperands(arrays, indices, (), index, (order,), bounds),
        other,
        reduction="sum",
        function=function,
        dtype=aval.dtype,
    )


# Batching.


def _batch(
    _: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    edges: Edges,
    **params: Any,
) -> tuple[Array, int]:
    """Let the edges and the segments of the batch follow one another."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    moved = EdgeOperands.of(
        [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)],
        edges,
    )
    is_mapped = EdgeOperands.of([d is not None for d in dims], edges)
    number = lax.broadcasted_iota(np.int32, (size, 1), 0)

    def whole(x: Array, mapped: bool) -> Array:
        """Return an array with the batch in front."""
        return x if mapped else jnp.broadcast_to(x, (size, *x.shape))

    arrays: list[Array] = []
    gathers: list[int | None] = []
    indices: list[Array] = []
    known: dict[tuple[int, int], int] = {}
    for x, mapped, index in zip(moved.arrays, is_mapped.arrays, edges.gathers, strict=True):
        if index is None:
            x = whole(x, mapped)
            arrays.append(x.reshape(-1, *x.shape[2:]))
            gathers.append(None)
            continue
        arrays.append(x.reshape(-1, *x.shape[2:]) if mapped else x)
        rows = x.shape[1] if mapped else 0
        if (index, rows) not in known:
            known[index, rows] = len(indices)
            own = whole(moved.indices[index], is_mapped.indices[index])
            if mapped:
                own = jnp.where((own >= 0) & (own < rows), own + number * rows, -1)
            indices.append(own.ravel())
        gathers.append(known[index, rows])
    order = [whole(x, mapped) for x, mapped in zip(moved.order, is_mapped.order, strict=True)]
    placed = of_batches(
        whole(moved.keys, is_mapped.keys),
        order,
        whole(moved.bounds, is_mapped.bounds),
        bins=edges.bins,
    )
    batched = dataclasses.replace(
        edges,
        gathers=tuple(gathers),
        indices=len(indices),
        planned=(),
        batch=size * edges.batch,
    )
    result = _bind(
        *EdgeOperands(tuple(arrays), tuple(indices), (), *placed).flat(),
        edges=batched,
        **params,
    )
    return result.reshape(size, -1, *result.shape[1:]), 0


# Lowering.


def _problem(
    avals: EdgeOperands,
    *,
    edges: Edges,
    reduction: Combiner,
    function: ScalarFunction | None,
    dtype: np.dtype[Any],
) -> SegmentReduction | str:
    """Return what a kernel reduces, or why none does."""
    value = value_dtype(dtype)
    columns = math.prod(columns_of(avals.arrays))
    types = [x.dtype for x in avals.arrays]
    text = None
    if any(
        x.ndim > 2 and x.shape[1:] != columns_of(avals.arrays) and math.prod(x.shape[1:]) > 1
        for x in avals.arrays
    ):
        return "an array is broadcast over some of its dimensions"
    if function is None:
        if jnp.issubdtype(dtype, jnp.complexfloating):
            if reduction != "sum":
                return f"no kernel reduces {dtype}"
            # Real and imaginary parts are two columns.
            value = dtype = np.dtype(f"f{dtype.itemsize // 2}")
            types, columns = [dtype], 2 * columns
        try:
            computed_type(types[0]), computed_type(dtype)
        except Untranslatable as error:
            return str(error)
        if types[0] != dtype and value != value_dtype(types[0]):
            return f"no kernel reduces {types[0]} to {dtype}"
    else:
        try:
            found = cuda_text(function)
            computed = tuple(map(computed_type, types))
            computed_type(dtype)
        except Untranslatable as error:
            return str(error)
        text = MapText(computed, found.statements, found.results[0])
    if dtype == np.bool_:
        return "no kernel reduces booleans"
    return SegmentReduction(
        reduction=reduction,
        edges=avals.keys.shape[0],
        segments=edges.segments,
        batch=edges.batch,
        columns=columns,
        operands=tuple(
            MapOperand(
                np.dtype(kind), x.shape[0], index, math.prod(x.shape[1:]) == 1 and columns > 1
            )
            for x, kind, index in zip(avals.arrays, types, edges.gathers, strict=True)
        ),
        indices=edges.indices,
        text=text,
        value=value,
        out_dtype=np.dtype(dtype),
        ordered=not edges.is_sorted,
    )


def _refusal(*_: Any, edges: Edges, **__: Any) -> Fallback | None:
    return None if edges.segments else Fallback("there is no segment")


def _cuda(
    operands: Sequence[Operand],
    _: Any,
    *,
    edges: Edges,
    reduction: Combiner,
    function: ScalarFunction | None,
    dtype: np.dtype[Any],
    **__: Any,
) -> PlannedKernel | Fallback:
    avals = EdgeOperands.of([x.aval for x in operands], edges)
    problem = _problem(avals, edges=edges, reduction=reduction, function=function, dtype=dtype)
    if isinstance(problem, str):
        return Fallback(problem)
    try:
        gpu = current_gpu()
    except NoGpu as error:
        return Fallback(str(error))
    values = EdgeOperands.of([x.value for x in operands], edges)
    # XLA drops a sort whose results nothing reads.
    order = (values.keys,) if unsorted_kernel(problem, gpu) else (*values.order, values.bounds)
    return planned_kernel((*values.arrays, *values.indices, *order), plan_segments, problem)


def _cpu(
    operands: Sequence[Operand],
    _: Any,
    *,
    edges: Edges,
    reduction: Combiner,
    function: ScalarFunction | None,
    dtype: np.dtype[Any],
    **__: Any,
) -> PlannedKernel | Rewrite | Fallback:
    avals = EdgeOperands.of([x.aval for x in operands], edges)
    stored = avals
    if function is not None:
        shape = (avals.keys.shape[0], *columns_of(avals.arrays))
        stored = avals._replace(arrays=(jax.core.ShapedArray(shape, function.out_dtypes[0]),))
    of_rows = dataclasses.replace(edges, gathers=(None,), indices=0, planned=())
    problem = _problem(stored, edges=of_rows, reduction=reduction, function=None, dtype=dtype)
    if isinstance(problem, str):
        return Fallback(problem)
    why = on_cpu.why_slower(problem)
    if why is not None and current_policy() != "kernels":
        return Fallback(why)
    if function is not None:
        return Rewrite(
            "XLA computes the values of the edges",
            functools.partial(
                _of_values, edges=edges, reduction=reduction, function=function, dtype=dtype
            ),
        )
    values = EdgeOperands.of([x.value for x in operands], edges)
    by_key = on_cpu.reads_keys(problem)
    # XLA drops a sort whose results nothing reads.
    index = (values.keys,) if by_key else (*values.order, values.bounds)
    call = ffi.CpuCall(ffi.CPU_SEGMENT_REDUCE, on_cpu.attributes(problem))
    how = "edges as they lie" if by_key else "edges by segment"
    return PlannedKernel(f"cpu_segment_{reduction} {dtype}", how, call, (*values.arrays, *index))


def _of_values(
    *operands: Array, edges: Edges, function: ScalarFunction | None, **params: Any
) -> Array:
    """Reduce the values of edges that XLA computes and stores."""
    read = EdgeOperands.of(operands, edges)
    values = edge_values(read.arrays, read.indices, edges.gathers, function)
    of_rows = dataclasses.replace(edges, gathers=(None,), indices=0, planned=())
    rows = read._replace(arrays=(values,), indices=(), plans=())
    return reduce_segments(rows, of_rows, function=None, **params)


def _described(*, edges: Edges, reduction: Combiner, function: Any, **_: Any) -> str:
    what = f" of {function.name}" if function else ""
    return f"segment_{reduction}{what}, {edges.batch * edges.segments} segments"


def _composed(*operands: Array, edges: Edges, linear: int, **params: Any) -> Array:
    """Sort anew on each device, which has some of the batches and edges."""
    read = EdgeOperands.of(operands, edges)
    keys = _with_batches(read.keys, edges) - _first_bins(edges.batch, edges)
    result: Array = _bind_unordered(
        *(
            x if i is not None else _with_batches(x, edges)
            for x, i in zip(read.arrays, edges.gathers, strict=True)
        ),
        *(_with_batches(x, edges) for x in read.indices),
        keys,
        edges=dataclasses.replace(edges, planned=(), batch=1),
        **params,
    )
    return result.reshape(-1, *result.shape[2:])


def _with_batches(x: Array, edges: Edges) -> Array:
    """Return rows of edges with the batch in front."""
    return x.reshape(edges.batch, x.shape[0] // edges.batch, *x.shape[1:])


def _first_bins(batch: int, edges: Edges) -> Array:
    """Return the number of the first bin of each batch."""
    return lax.broadcasted_iota(np.int32, (batch, 1), 0) * (edges.segments + 2)


_bind = define(
    Operation(
        name="tilekern_segment_reduce",
        reference=_reference,
        jvp=_jvp,
        transposes=_transposes,
        batch=_batch,
        sharding_rule=None,
        planners={"cpu": Planner(_refusal, _cpu), "cuda": Planner(_refusal, _cuda)},
        describe=_described,
        composed=_composed,
    )
)


# On several devices: each reduces its edges, and orders them by itself. Batches are in front of the
# edges, each with keys of its own. Gathered arrays have the rows of all batches.


def _unordered_reference(
    *operands: Array,
    edges: Edges,
    reduction: Combiner,
    function: ScalarFunction | None,
    dtype: np.dtype[Any],
) -> Array:
    arrays, indices, keys, own = _without_batches(operands, edges)
    result = by_scatter(arrays, indices, keys, own, reduction, function, dtype)
    return result.reshape(own.batch, -1, *result.shape[1:])


def _on_device(*operands: Array, edges: Edges, **params: Any) -> Array:
    arrays, indices, keys, own = _without_batches(operands, edges)
    order: tuple[Array, ...] = ()
    if edges.is_sorted:
        bounds = bounds_of_sorted(keys, bins=own.bins)
    else:
        first, bounds = order_by_key(keys, bins=own.bins)
        order = (first,)
    result = reduce_segments(EdgeOperands(arrays, indices, (), keys, order, bounds), own, **params)
    return result.reshape(own.batch, -1, *result.shape[1:])


def _without_batches(
    operands: Sequence[Array], edges: Edges
) -> tuple[tuple[Array, ...], tuple[Array, ...], Array, Edges]:
    """Let the edges of the batches follow one another."""
    count = len(edges.gathers)
    *indices, keys = operands[count:]
    batch = keys.shape[0]
    arrays = (
        x if i is not None else x.reshape(-1, *x.shape[2:])
        for x, i in zip(operands[:count], edges.gathers, strict=True)
    )
    return (
        tuple(arrays),
        tuple(x.ravel() for x in indices),
        (keys + _first_bins(batch, edges)).ravel(),
        dataclasses.replace(edges, batch=batch),
    )


def _sharding_rule(
    *operands: Any,
    edges: Edges,
    reduction: Combiner,
    function: ScalarFunction | None,
    dtype: np.dtype[Any],
) -> ShardingRule:
    arrays = operands[: len(edges.gathers)]
    rows = [x.shape[1 if i is None else 0 :] for x, i in zip(arrays, edges.gathers, strict=True)]
    columns = columns_of_shapes(rows)
    batch, edge, first = 0, 1, 2

    def labels(shape: tuple[int, ...], index: int | None) -> tuple[int | None, ...]:
        own = (first + i if shape[1 + i] == n else None for i, n in enumerate(columns))
        return (None, *own) if index is not None else (batch, edge, *own)

    sizes = {
        **dict(zip((batch, edge), operands[-1].shape, strict=True)),
        **{first + i: n for i, n in enumerate(columns)},
    }
    names = {
        batch: "batches",
        edge: "edges",
        **{first + i: f"axis {1 + i}" for i in range(len(columns))},
    }
    return ShardingRule(
        (
            *(labels(shape, i) for shape, i in zip(rows, edges.gathers, strict=True)),
            *((batch, edge),) * (edges.indices + 1),
        ),
        ((batch, None, *range(first, first + len(columns))),),
        sizes,
        flops=math.prod(sizes.values()),
        names=names,
        zero_padding=reduction == "sum" and function is None,
        combined_by=("sum" if reduction == "prod" else reduction,),
        unsplit=frozenset({edge}) if reduction == "prod" else frozenset(),
    )


def _in_float32(*, dtype: np.dtype[Any], **params: Any) -> Params:
    return {**params, "dtype": value_dtype(dtype)}


def _rewritten(_: Sequence[Operand], __: Any, **params: Any) -> Rewrite:
    return Rewrite("every device orders its own edges", functools.partial(_on_device, **params))


def _no_batch(*_: Any, **__: Any) -> tuple[Any, Any]:
    raise AssertionError("it is bound when a program is lowered")


_bind_unordered = define(
    Operation(
        name="tilekern_segment_reduce_unordered",
        reference=_unordered_reference,
        batch=_no_batch,
        sharding_rule=_sharding_rule,
        planners={platform: Planner(_refusal, _rewritten) for platform in ("cpu", "cuda")},
        describe=_described,
        in_float32=_in_float32,
    )
)

params_text.register(
    Edges,
    lambda edges: dataclasses.asdict(edges),
    lambda data: Edges(
        **{
            **data,
            "gathers": tuple(data["gathers"]),
            "planned": tuple(data["planned"]),
        }
    ),
)
