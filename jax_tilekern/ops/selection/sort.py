"""``sort`` and ``argsort``: JAX's semantics over one primitive."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp, lax
from jax_tilekern.ops.along_axis import columns_of, define_along_axis
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.planned_kernel import planned_kernel
from jax_tilekern.plans.selection.sort_rows import plan_sort_rows
from jax_tilekern.plans.selection.sorted_rows import Order, SortedRows
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    PlannedKernel,
)


@jitted("axis", "kind", "order", "stable", "descending")
def sort(
    a: ArrayLike,
    axis: int | None = -1,
    *,
    kind: None = None,
    order: None = None,
    stable: bool = True,
    descending: bool = False,
) -> Array:
    """Return a sorted copy of an array, with the semantics of :func:`jax.numpy.sort`.

    Parameters
    ----------
    a
        Array of any type.
    axis
        The axis; ``None`` sorts all elements.
    kind, order
        As in JAX, not supported.
    stable
        As in JAX. The sort is stable in either case.
    descending
        Whether the largest elements come first.

    Returns
    -------
    Array
        NaN is the largest element, and -0 equals 0.

    Raises
    ------
    TypeError
        If ``kind`` or ``order`` is given.
    ValueError
        If the axis is out of range.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.sort(jnp.array([3.0, 1.0, 2.0]), descending=True)
    Array([3., 2., 1.], dtype=float32)
    """
    rows, back = _as_rows("sort", a, axis, kind, order)
    del stable
    (values,) = _bind(
        rows, order="reversed" if descending else "ascending", values=True, indices=False
    )
    return back(values)


@jitted("axis", "kind", "order", "stable", "descending", "dtype")
def argsort(
    a: ArrayLike,
    axis: int | None = -1,
    *,
    kind: None = None,
    order: None = None,
    stable: bool = True,
    descending: bool = False,
    dtype: DTypeLike | None = None,
) -> Array:
    """Return the indices that sort an array, with the semantics of :func:`jax.numpy.argsort`.

    Parameters
    ----------
    a, axis, kind, order, descending
        Those of :func:`sort`.
    stable
        As in JAX. Equal elements keep their order in either case.
    dtype
        The type of the indices, JAX's default integer unless given.

    Returns
    -------
    Array
        Indices along the axis.

    Raises
    ------
    TypeError
        If ``kind`` or ``order`` is given.
    ValueError
        If the axis is out of range.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.argsort(jnp.array([3.0, 1.0, 2.0]))
    Array([1, 2, 0], dtype=int32)
    """
    rows, back = _as_rows("argsort", a, axis, kind, order)
    del stable
    wanted = jax.eval_shape(lambda: jnp.argsort(rows, dtype=dtype)).dtype
    (indices,) = _bind(
        rows, order="descending" if descending else "ascending", values=False, indices=True
    )
    return back(indices.astype(wanted))


def sorted_rows(x: Array, *, values: bool = False, indices: bool = False) -> list[Array]:
    """Return the elements of rows in ascending order, where they were in their rows, or both."""
    results: list[Array] = _bind(x, order="ascending", values=values, indices=indices)
    return results


def _as_rows(
    name: str, a: ArrayLike, axis: int | None, kind: Any, order: Any
) -> tuple[Array, Callable[[Array], Array]]:
    """Return an array whose last axis is sorted, and what moves the axis back in a result."""
    compat.check_arraylike(name, a)
    a = jnp.asarray(a)
    # JAX's function raises the errors.
    jax.eval_shape(lambda: getattr(jnp, name)(a, axis, kind=kind, order=order))
    if axis is None:
        return a.ravel(), lambda x: x
    return jnp.moveaxis(a, axis, -1), lambda x: jnp.moveaxis(x, -1, axis)


def _reference(x: Array, *, order: Order, values: bool, indices: bool) -> list[Array]:
    dimension = x.ndim - 1
    # Equal elements keep their order where both the elements and the result are reversed.
    x = lax.rev(x, [dimension]) if order == "descending" else x
    operands = [x]
    if indices:
        columns = columns_of(x)
        operands.append(lax.rev(columns, [dimension]) if order == "descending" else columns)
    results = list(lax.sort(operands, num_keys=1))[not values :]
    return results if order == "ascending" else [lax.rev(y, [dimension]) for y in results]


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, order: Order, values: bool, indices: bool
) -> tuple[Any, Any]:
    if not values:
        results = _bind(*primals, order=order, values=values, indices=indices)
        return results, [compat.zero_tangent(y) for y in results]
    elements, columns = _bind(*primals, order=order, values=True, indices=True)
    moved = jnp.take_along_axis(tangents[0], columns, -1, mode="promise_in_bounds")
    if not indices:
        return [elements], [moved]
    return [elements, columns], [moved, compat.zero_tangent(columns)]


def _cuda(operands: Sequence[Operand], _: Any, **params: Any) -> PlannedKernel | Fallback:
    ((x, aval),) = operands
    *outer, columns = aval.shape
    problem = SortedRows(math.prod(outer), columns, np.dtype(aval.dtype), **params)
    return planned_kernel((x,), plan_sort_rows, problem)


_bind = define_along_axis(
    "tilekern_sort",
    _reference,
    results=lambda values, indices, **_: values + indices,
    jvp=_jvp,
    cuda=_cuda,
    describe=lambda values, **_: "sort" if values else "argsort",
)
