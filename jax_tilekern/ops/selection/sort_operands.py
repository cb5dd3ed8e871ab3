"""``sort_operands`` and ``lexsort``: sorts by several keys, JAX's semantics over one primitive."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad
from jax_tilekern.interop.originals import jnp, lax
from jax_tilekern.interop.patch import replace
from jax_tilekern.ops.along_axis import columns_of, define_along_axis
from jax_tilekern.ops.arguments import integer
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.planned_kernel import planned_kernel
from jax_tilekern.ops.selection.sort import sorted_rows
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.plans.launch import NOT_PREDICTED
from jax_tilekern.plans.policy import current_policy
from jax_tilekern.plans.selection.sort_rows import plan_sort_rows
from jax_tilekern.plans.selection.sorted_operands import SortedOperands
from jax_tilekern.plans.selection.sorted_rows import SortedRows
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Rewrite,
)


@jitted("dimension", "is_stable", "num_keys")
def sort_operands(
    operand: ArrayLike | Sequence[ArrayLike],
    dimension: int = -1,
    is_stable: bool = True,
    num_keys: int = 1,
) -> Array | tuple[Array, ...]:
    """Sort arrays together by the first ones, with the semantics of :func:`jax.lax.sort`.

    Parameters
    ----------
    operand
        An array, or arrays of one shape.
    dimension
        The axis; may be negative.
    is_stable
        Whether elements with equal keys keep their order.
    num_keys
        How many of the arrays are keys. The first one is the primary key.

    Returns
    -------
    Array or tuple of Array
        As many as the operands, all in the order of the keys. NaN is the largest element, -0 equals
        0, and complex numbers are ordered by their real parts, then by the imaginary ones.

    Raises
    ------
    ValueError
        If ``num_keys`` or the dimension is out of range.
    TypeError
        If there is no operand, one is no array, or shapes differ.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> year, month, name = jnp.array([2, 1, 2]), jnp.array([5, 9, 3]), jnp.array([0, 1, 2])
    >>> jtk.sort_operands((year, month, name), num_keys=2)[2]
    Array([1, 2, 0], dtype=int32)
    """
    several = isinstance(operand, Sequence)
    operands: Any = operand if several else [operand]
    compat.check_arraylike("sort_operands", *operands)
    operands = [jnp.asarray(x) for x in operands]
    shapes = list(dict.fromkeys(x.shape for x in operands))
    if len(shapes) != 1:
        raise TypeError(f"sort_operands: the operands must have one shape, and have {shapes}")
    num_keys = integer("sort_operands", "num_keys", num_keys)
    if not 1 <= num_keys <= len(operands):
        raise ValueError(
            f"sort_operands: num_keys is {num_keys}; there are {len(operands)} operands"
        )
    axis, rank = integer("sort_operands", "dimension", dimension), len(shapes[0])
    if not -rank <= axis < rank:
        raise ValueError(f"sort_operands: dimension {axis} is out of range for {shapes[0]}")
    results = _bind(*operands, dimension=axis % rank, is_stable=bool(is_stable), num_keys=num_keys)
    return tuple(results) if several else results[0]


@jitted("axis")
def lexsort(keys: Array | Sequence[ArrayLike], axis: int = -1) -> Array:
    """Return the indices that sort by several keys, with the semantics of ``jax.numpy.lexsort``.

    Parameters
    ----------
    keys
        Arrays of one shape. The last one is the primary key.
    axis
        The axis; may be negative.

    Returns
    -------
    Array
        Indices along the axis, of JAX's default integer type. Equal elements keep their order.

    Raises
    ------
    ValueError
        If shapes differ, or the axis is out of range.
    TypeError
        If there is no key, or one is no array.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.lexsort((jnp.array([5, 9, 3]), jnp.array([2, 1, 2])))
    Array([1, 2, 0], dtype=int32)
    """
    compat.check_arraylike("lexsort", *keys)
    arrays = [jnp.asarray(x) for x in keys]
    # JAX's function raises the errors, and has the type of the result.
    wanted = compat.type_of_whole(lambda *keys: jnp.lexsort(keys, axis), *arrays)
    if not wanted.shape:
        return jnp.zeros((), wanted.dtype)
    place = axis % len(wanted.shape)
    operands = [*arrays[::-1], columns_of(arrays[-1], place)]
    *_, indices = _bind(*operands, dimension=place, is_stable=True, num_keys=len(arrays))
    result: Array = indices.astype(wanted.dtype)
    return result


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, dimension: int, **params: Any
) -> tuple[Any, Any]:
    positions = columns_of(primals[0], dimension)
    *results, order = _bind(*primals, positions, dimension=dimension, **params)
    return results, [
        compat.zero_tangent(y)
        if type(x) is ad.Zero
        else jnp.take_along_axis(x, order, dimension, mode="promise_in_bounds")
        for x, y in zip(tangents, results, strict=True)
    ]


def _cuda(
    operands: Sequence[Operand], _: Any, *, dimension: int, num_keys: int, **__: Any
) -> Rewrite | Fallback:
    keys, payloads = operands[:num_keys], operands[num_keys:]
    shape = keys[0].aval.shape
    counts = tuple(compat.counted_dimension(x.value) == dimension for x in payloads)
    rows, columns = math.prod(shape) // shape[dimension], shape[dimension]
    sorts = []
    for i, (key, aval) in enumerate(keys):
        results = {"values": i == 0, "indices": len(operands) > 1}
        problem = SortedRows(rows, columns, np.dtype(aval.dtype), "ascending", **results)
        found = planned_kernel((key,), plan_sort_rows, problem)
        # Where XLA is as fast in a sort by one key, kernels may be faster than its sort by several.
        if isinstance(found, Fallback) and (num_keys == 1 or found.predicted_us == NOT_PREDICTED):
            return found
        sorts.append(found.predicted_us)
    way = functools.partial(_by_argsorts, dimension=dimension, num_keys=num_keys, counts=counts)
    times = NOT_PREDICTED
    if current_policy() != "kernels":
        sizes = [np.dtype(x.aval.dtype).itemsize for x in operands]
        gathered = [
            size for size, is_position in zip(sizes[num_keys:], counts, strict=True)
            if not is_position
        ]  # fmt: skip
        problem_of_all = SortedOperands(
            rows, columns, tuple(sizes[:num_keys]), tuple(sizes[num_keys:]), tuple(gathered)
        )
        times = problem_of_all.predicted(sorts, current_gpu())
        if times.ours is None or times.xla is None or times.xla < times.ours:
            return Fallback("XLA is predicted as fast as a sort for each key, and gathers", times)
    return Rewrite("a sort of rows for each key", way, times)


def _by_argsorts(
    *operands: Array, dimension: int, num_keys: int, counts: Sequence[bool]
) -> list[Array]:
    """Sort stably by each key, the last one first.

    ``counts`` says which payloads are positions along the dimension.
    """
    rows = [jnp.moveaxis(x, dimension, -1) for x in operands]
    if len(rows) == 1:
        results = sorted_rows(rows[0], values=True)
    else:
        order: Any = None
        for i in reversed(range(num_keys)):
            key = rows[i] if order is None else _gathered(rows[i], order)
            *values, step = sorted_rows(key, values=i == 0, indices=True)
            order = step if order is None else _gathered(order, step)
        results = values + [_gathered(x, order) for x in rows[1:num_keys]]
        for x, is_position in zip(rows[num_keys:], counts, strict=True):
            results.append(order.astype(x.dtype) if is_position else _gathered(x, order))
    return [jnp.moveaxis(x, -1, dimension) for x in results]


def _gathered(x: Array, order: Any) -> Array:
    return jnp.take_along_axis(x, order, -1, mode="promise_in_bounds")


_bind = define_along_axis(
    "tilekern_sort_operands",
    lambda *operands, **params: lax.sort(operands, **params),
    axis="dimension",
    jvp=_jvp,
    cuda=_cuda,
    describe=lambda num_keys, **_: f"sort by {num_keys} keys" if num_keys > 1 else "sort",
)


replace(lax.sort_p, lambda *operands, **params: sort_operands(operands, **params))
