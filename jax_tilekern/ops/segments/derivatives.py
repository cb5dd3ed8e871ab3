"""Derivatives of reductions to segments, which are reductions to segments themselves.

A tangent is the sum of another function, linear in the tangents, and the cotangent of gathered rows
is a sum to the segments of their numbers. The rules take the function that binds the operation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from jax_tilekern.epilogue.scalar_function import ScalarFunction
from jax_tilekern.epilogue.scalars import evaluated as evaluated_on_scalars
from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad, partial_eval
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.segments.edges import (
    EdgeOperands,
    Reduce,
    SegmentCall,
    by_scatter,
    columns_of,
    edge_values,
    gathered_rows,
)
from jax_tilekern.ops.segments.keys import rows_of
from jax_tilekern.ops.segments.order import order_by_key
from jax_tilekern.primitives.linearity import jvp_of

# Arrays, numbers of rows, and which of these each array is gathered by.
_Read = tuple[tuple[Array, ...], tuple[Array, ...], tuple[int | None, ...]]


def jvp(
    reduce: Reduce, primals: Sequence[Any], tangents: Sequence[Any], *, call: SegmentCall
) -> tuple[Any, Any]:
    """Return the reduction and its tangent; elements that are the extremum share its tangent."""
    read = EdgeOperands.of(primals, call)
    count = len(read.arrays)
    moving = [i for i in range(count) if type(tangents[i]) is not ad.Zero]
    if not moving or not jnp.issubdtype(call.dtype, jnp.inexact):
        result = reduce(read, call)
        return result, compat.zero_tangent(result)
    if call.reduction == "prod":
        raise NotImplementedError(
            "segment_prod has a derivative for unique indices alone: pass unique_indices=True if "
            "they are; segment_reduce has none of products"
        )
    given = tuple(tangents[i] for i in moving)
    if call.reduction == "sum" and call.function is None:
        return reduce(read, call), reduce(read._replace(arrays=given), call)
    evaluated = _evaluated(call.function)

    def tangent(*scalars: Any) -> Any:
        values = scalars[:count]
        changes = [compat.zero_tangent(x) for x in values]
        for i, change in zip(moving, scalars[-len(moving) :], strict=True):
            changes[i] = change
        change = jvp_of(evaluated, values, changes)[1]
        if call.reduction == "sum":
            return change
        return jnp.where(is_chosen(*scalars[count : count + 2]), change, jnp.zeros_like(change))

    def is_chosen(value: Any, extremum: Any) -> Any:
        return value.astype(call.dtype) == extremum

    arrays, gathers, indices = read.arrays, call.gathers, read.indices
    if call.reduction == "sum":
        result = reduce(read, call)
    else:
        # Programs that compute the values again may round them in other ways, and find no extremum.
        values = edge_values(arrays, indices, gathers, call.function)
        if call.function is not None:
            values = lax.optimization_barrier(values)
        stored = read._replace(arrays=(values,), indices=(), plans=())
        result = reduce(stored, call.over_stored_values())
        compared = lax.stop_gradient((values, result))
        arrays, gathers = (*arrays, *compared), (*gathers, None, len(indices))
        indices = (*indices, rows_of(read.keys, call.segments, call.batch))
    read = read._replace(indices=indices)
    types = [x.dtype for x in (*arrays, *given)]
    name = call.function.name if call.function else f"segment_{call.reduction}"

    traced = _scalar_function(f"tangent of {name}", tangent, types, call.dtype)
    change = reduce(
        read._replace(arrays=(*arrays, *given)),
        dataclasses.replace(
            call,
            gathers=(*gathers, *(call.gathers[i] for i in moving)),
            indices=len(indices),
            reduction="sum",
            function=traced,
            linear=len(moving),
        ),
    )
    if call.reduction != "sum":
        of_edge = dataclasses.replace(
            call.over_stored_values(),
            gathers=(None, 0),
            indices=1,
            reduction="sum",
            function=_scalar_function(
                f"extrema of {name}",
                lambda *scalars: is_chosen(*scalars).astype(call.dtype),
                [x.dtype for x in compared],
                call.dtype,
            ),
        )
        number = reduce(read._replace(arrays=compared, indices=indices[-1:], plans=()), of_edge)
        change = change / jnp.maximum(number, jnp.ones_like(number))
    return result, change


def like_results(*operands: Any, call: SegmentCall) -> Array:
    """Return an array like the result, whose type does not depend on the function of the values.

    JAX transposes the tangent of a function with a ``custom_vjp``, and does not evaluate it.
    """
    read = EdgeOperands.of(operands, call)
    if call.function is not None and call.linear:
        dtypes = [np.dtype(x.dtype) for x in read.arrays]
        out = call.function.out_dtypes[0]
        function = _scalar_function("", lambda *xs: sum(x.astype(out) for x in xs), dtypes, out)
        call = dataclasses.replace(call, function=function)
    return by_scatter(read, call)


def transposes(
    reduce: Reduce, *, call: SegmentCall
) -> dict[tuple[int, ...], Callable[..., Sequence[Array]]]:
    """Return the rule of the arrays in which the values are linear."""
    count = len(call.gathers)
    linear = count if call.function is None else call.linear
    moving = tuple(range(count - linear, count))

    def cotangents(cotangent: Array, *operands: Any, call: SegmentCall) -> list[Array]:
        return _cotangents(reduce, moving, cotangent, EdgeOperands.of(operands, call), call)

    return {moving: cotangents} if moving else {}


def _cotangents(
    reduce: Reduce,
    moving: Sequence[int],
    cotangent: Array,
    read: EdgeOperands,
    call: SegmentCall,
) -> list[Array]:
    known = tuple(i for i in range(len(read.arrays)) if i not in moving)
    dtypes = tuple(np.dtype(x.dtype) for x in read.arrays)
    rows = rows_of(read.keys, call.segments, call.batch)
    # A cotangent of values is a function of the cotangent, and of the arrays that are known.
    arrays = (cotangent, *(read.arrays[i] for i in known))
    gathers = (0, *(None if (g := call.gathers[i]) is None else g + 1 for i in known))
    indices = (rows, *read.indices)
    trailing = columns_of([cotangent.shape])

    def cotangent_of(target: int) -> Array:
        aval, function = read.arrays[target], None
        place = call.gathers[target]
        if call.function is None:
            # The kernel of the identity does not gather.
            given: _Read = ((gathered_rows(cotangent, rows, batch=call.batch),), (), (None,))
        else:
            function = _scalar_cotangent(call.function, known, target, dtypes, cotangent.dtype)
            given = (arrays, indices, gathers)
        if place is None:
            values = edge_values(*given, function).astype(aval.dtype)
        else:
            values = _to_rows(reduce, read, place, aval, given, function, call)
        summed = [i for i, n in enumerate(trailing, 1) if aval.shape[i] == 1 and n != 1]
        return jnp.sum(values, summed, keepdims=True) if summed else values

    return [cotangent_of(i) for i in moving]


def _to_rows(
    reduce: Reduce,
    read: EdgeOperands,
    place: int,
    aval: Any,
    given: _Read,
    function: ScalarFunction | None,
    call: SegmentCall,
) -> Array:
    """Sum values of edges to the rows that they were gathered from."""
    (arrays, indices, gathers), segments = given, aval.shape[0]
    index = read.indices[place]
    # Numbers out of bounds read zeros, and belong to no row.
    if place in call.planned:
        order, bounds = read.plans[call.planned.index(place)]
    else:
        order, bounds = order_by_key(index, bins=segments + 2)
    return reduce(
        EdgeOperands(arrays, indices, (), index, (order,), bounds),
        SegmentCall(
            gathers, len(indices), (), segments, 1, False, "sum", function, np.dtype(aval.dtype)
        ),
    )


# A gradient outside of a jit transposes the call each time. One function is one program.
@compat.cached(max_size=256)
def _scalar_cotangent(
    function: ScalarFunction,
    known: tuple[int, ...],
    target: int,
    dtypes: tuple[np.dtype[Any], ...],
    dtype: np.dtype[Any],
) -> ScalarFunction:
    """Return the cotangent of one array, given that of type ``dtype`` and the known arrays."""
    evaluated = _evaluated(function)

    def scalar(change: Any, *others: Any) -> Any:
        def with_target(x: Any) -> Any:
            scalars: list[Any] = [jnp.zeros((), each) for each in dtypes]
            for i, value in zip((*known, target), (*others, x), strict=True):
                scalars[i] = value
            return evaluated(*scalars)

        like = jax.ShapeDtypeStruct((), dtypes[target])
        made = jax.eval_shape(with_target, like)
        (own,) = jax.linear_transpose(with_target, like)(change.astype(made.dtype))
        return own

    types = [dtype, *(dtypes[i] for i in known)]
    return _scalar_function(f"cotangent of {function.name}", scalar, types, dtypes[target])


def _scalar_function(
    name: str, function: Callable[..., Any], dtypes: Sequence[Any], out: np.dtype[Any]
) -> ScalarFunction:
    """Trace a function of scalars of known types."""

    def python(*scalars: Any) -> list[Any]:
        return [function(*scalars)]

    with compat.without_mesh():
        jaxpr = jax.make_jaxpr(python)(*(jax.core.ShapedArray((), x) for x in dtypes))
    # A derivative may leave calls whose results nothing reads, and which have no derivative.
    used, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True], instantiate=True)
    jaxpr = jaxpr.replace(jaxpr=used)

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
