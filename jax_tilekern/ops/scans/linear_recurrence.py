"""``linear_recurrence``: a linear recurrence along an axis, closed under differentiation.

The primitive multiplies by the coefficient of an element, or of the one before it (``is_before``).
Each of both is the other's transpose, in the opposite direction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad
from jax_tilekern.interop.originals import jnp, lax
from jax_tilekern.ops.along_axis import define_along_axis, rule_along_axis
from jax_tilekern.ops.element_types import wide_dtype
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.scans.combinations import combination
from jax_tilekern.ops.scans.lowering import (
    planned_scan,
    scan_input,
)
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    PlannedKernel,
)


@jitted("axis", "reverse")
def linear_recurrence(
    a: ArrayLike,
    b: ArrayLike,
    *,
    axis: int,
    reverse: bool = False,
    initial: ArrayLike | None = None,
) -> Array:
    """Compute ``h[t] = a[t] * h[t - 1] + b[t]`` along an axis.

    Each array is read once and the result is written once on a GPU; the result has the same bits
    at every call. Derivatives of every order are recurrences, too. Devices share all axes but the
    recurrence's own.

    Parameters
    ----------
    a, b
        Coefficients and inputs, floats or complex numbers, whose types are promoted and whose
        shapes broadcast. 16-bit floats are combined in float32, and rounded once.
    axis
        The axis; may be negative, counted in the broadcast shape.
    reverse
        Whether ``h[t] = a[t] * h[t + 1] + b[t]``.
    initial
        What precedes the first element, of a shape that broadcasts to that of an element:
        the result's without the axis. ``None`` is zero.

    Returns
    -------
    Array
        The states ``h``.

    Raises
    ------
    TypeError
        If an operand is no array of floats or complex numbers.
    ValueError
        If shapes do not broadcast, or the axis is out of range.

    Notes
    -----
    Chunks of a sequence are combined by the products of their coefficients, as
    :func:`jax.lax.associative_scan` combines them. Where such a product overflows, the result is
    NaN or infinite even if every state is finite.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.linear_recurrence(jnp.full(4, 0.5), jnp.ones(4), axis=0)
    Array([1.   , 1.5  , 1.75 , 1.875], dtype=float32)
    """
    optional = compat.given(initial=initial)
    compat.check_arraylike("linear_recurrence", a, b, **optional)
    given = (a, b, *optional.values())
    scalars = (jax.core.ShapedArray((), x.dtype, x.weak_type) for x in map(jax.typeof, given))
    dtype = jax.eval_shape(lambda *xs: functools.reduce(jnp.add, xs), *scalars).dtype
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            f"linear_recurrence: operands of type {dtype}; they must be floats or complex numbers"
        )
    a, b, *first = (compat.as_type(x, dtype) for x in given)
    if not isinstance(axis, int | np.integer):
        raise TypeError(f"linear_recurrence: axis is {axis!r}; it is an integer")
    try:
        shape = jnp.broadcast_shapes(a.shape, b.shape)
    except ValueError as error:
        raise ValueError(
            f"linear_recurrence: the shapes {a.shape} and {b.shape} do not broadcast"
        ) from error
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"linear_recurrence: axis {axis} is out of range for the shape {shape}")
    axis %= len(shape)
    state = shape[:axis] + shape[axis + 1 :]
    for x in first:
        if not _broadcasts(x.shape, state):
            raise ValueError(
                f"linear_recurrence: initial has the shape {x.shape}, which does not broadcast to "
                f"{state}, that of an element along axis {axis} of {shape}"
            )
    a, b = (jnp.broadcast_to(x, shape) for x in (a, b))
    first = [jnp.broadcast_to(x, state) for x in first]
    result: Array = recurrence(a, b, *first, axis=axis, reverse=bool(reverse), is_before=False)
    return result


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    sizes = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(n in (1, size) for n, size in sizes)


def _combine(earlier: Sequence[Any], later: Sequence[Any]) -> list[Any]:
    (a, h), (b, g) = earlier, later
    return [a * b, b * h + g]


def element_before(x: Array, axis: int, reverse: bool, first: ArrayLike = 0) -> Array:
    """Return for each element the one before it in the order of a scan."""
    size = x.shape[axis]
    if size == 0:
        return x
    start = lax.slice_in_dim(x, 0, 1, axis=axis)
    start = lax.full_like(start, 0) + jnp.asarray(first, x.dtype)
    if reverse:
        return lax.concatenate([lax.slice_in_dim(x, 1, size, axis=axis), start], axis)
    return lax.concatenate([start, lax.slice_in_dim(x, 0, size - 1, axis=axis)], axis)


def _reference(
    a: Array, b: Array, *initial: Array, axis: int, reverse: bool, is_before: bool
) -> Array:
    dtype = b.dtype
    a, b, *states = (x.astype(wide_dtype(dtype)) for x in (a, b, *initial))
    if is_before:
        a = element_before(a, axis, reverse)
    if not b.size:
        return b.astype(dtype)
    for x in states:
        at = slice(-1, None) if reverse else slice(0, 1)
        index = (*(slice(None),) * axis, at)
        b = b.at[index].add(a[index] * jnp.expand_dims(x, axis))
    _, h = lax.associative_scan(_combine, (a, b), reverse, axis)
    result: Array = h.astype(dtype)
    return result


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    axis: int,
    reverse: bool,
    is_before: bool,
) -> tuple[Any, Any]:
    a, b, *initial = primals
    da, db, *dinitial = tangents
    params = {"axis": axis, "reverse": reverse, "is_before": is_before}
    h = recurrence(*primals, **params)
    if type(da) is not ad.Zero:
        # Products are rounded once, with the tangent that they are added to.
        wide = wide_dtype(b.dtype)
        start = jnp.expand_dims(initial[0], axis) if initial else 0
        before = element_before(h, axis, reverse, start).astype(wide)
        own = da.astype(wide)
        term = (element_before(own, axis, reverse) if is_before else own) * before
        db = (term if type(db) is ad.Zero else term + db.astype(wide)).astype(b.dtype)
    elif type(db) is ad.Zero:
        db = ad.instantiate_zeros(db)
    first = [x for x in dinitial if type(x) is not ad.Zero]
    return h, recurrence(a, db, *first, **params)


def _transposes(*, axis: int, reverse: bool, is_before: bool) -> Mapping[Any, Callable[..., Any]]:
    def of_inputs(cotangent: Array, a: Array, *_: Any, **__: Any) -> tuple[Array]:
        g = recurrence(a, cotangent, axis=axis, reverse=not reverse, is_before=not is_before)
        return (g,)

    def of_inputs_and_initial(
        cotangent: Array, a: Array, *_: Any, **__: Any
    ) -> tuple[Array, Array]:
        (g,) = of_inputs(cotangent, a)
        place = a.shape[axis] - 1 if reverse else 0
        first, own = (
            lax.index_in_dim(x, place, axis, keepdims=False).astype(wide_dtype(g.dtype))
            for x in (a, g)
        )
        return g, (first * own).astype(g.dtype)

    return {(1,): of_inputs, (1, 2): of_inputs_and_initial}


def _batch(
    axis_data: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    axis: int,
    **params: Any,
) -> tuple[Array, int]:
    place = next((dim for dim in dims[:2] if dim is not None), 0)
    moved = axis + (axis >= place)
    # The initial state has no such axis.
    of_state = place - (moved < place)
    placed = [
        _with_axis(x, dim, at, axis_data.size)
        for x, dim, at in zip(operands, dims, (place, place, of_state), strict=False)
    ]
    return recurrence(*placed, axis=moved, **params), place


def _with_axis(x: Array, dim: int | None, place: int, size: int) -> Array:
    """Return an operand with the mapped axis at a place."""
    if dim is not None:
        return jnp.moveaxis(x, dim, place)
    shape = (*x.shape[:place], size, *x.shape[place:])
    return jnp.broadcast_to(lax.expand_dims(x, (place,)), shape)


def _sharding_rule(a: Any, _: Any, *initial: Any, axis: int, **__: Any) -> ShardingRule:
    state = tuple(i for i in range(a.ndim) if i != axis)
    others = [state] * len(initial)
    return rule_along_axis(a.shape, axis, operands=2, results=1, others=others)


def _cuda(
    operands: Sequence[Operand], _: Any, *, axis: int, reverse: bool, is_before: bool
) -> PlannedKernel | Fallback:
    dtype = np.dtype(operands[0].aval.dtype)
    is_complex = dtype.kind == "c"
    # The coefficient of what precedes the first element does not matter.
    initial = ("1", "0", None, None) if is_complex else ("1", None)
    return planned_scan(
        f"linear_recurrence {dtype}",
        operands,
        axis=axis,
        reverse=reverse,
        inputs=lambda: (scan_input(dtype, is_before=is_before), scan_input(dtype)),
        combination=lambda: combination(_combine, (dtype, dtype)),
        outputs=(1,),
        initial=initial if len(operands) > 2 else (),
        in_levels=True,
    )


recurrence = define_along_axis(
    "tilekern_linear_recurrence",
    _reference,
    several_results=False,
    like_results=lambda a, b, *_, **__: lax.add(a, b),
    jvp=_jvp,
    transposes=_transposes,
    batch=_batch,
    sharding_rule=_sharding_rule,
    cuda=_cuda,
    describe=lambda axis, reverse, **_: (
        f"linear_recurrence along axis {axis}{', reversed' if reverse else ''}"
    ),
)
