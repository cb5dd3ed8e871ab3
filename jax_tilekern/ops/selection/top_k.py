"""``top_k``: JAX's semantics over one primitive."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import lax
from jax_tilekern.interop.patch import replace
from jax_tilekern.ops.along_axis import define_along_axis
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.planned_kernel import planned_kernel
from jax_tilekern.plans.gpu import why_no_gpu
from jax_tilekern.plans.selection.top_k import plan_top_k
from jax_tilekern.plans.selection.top_k_problem import MAX_K, TopK
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    PlannedKernel,
)


@jitted("k", "axis", "is_stable")
def top_k(operand: ArrayLike, k: int, *, axis: int = -1, is_stable: bool = True) -> Sequence[Array]:
    """Return the largest elements along an axis, with the semantics of :func:`jax.lax.top_k`.

    Parameters
    ----------
    operand
        Array of integers or floats.
    k
        How many elements, at most the size of the axis.
    axis
        The axis; may be negative.
    is_stable
        As in JAX. Equal elements keep their order in either case.

    Returns
    -------
    values
        The largest elements in descending order, with ``k`` along the axis. Floats have the total
        order, NaN first.
    indices
        Where they are along the axis, int32. Of equal elements the first comes first.

    Raises
    ------
    ValueError
        If ``k`` is negative or exceeds the axis, or the axis is out of range.
    TypeError
        If the operand is complex or no array.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> values, indices = jtk.top_k(jnp.array([1.0, 5.0, 3.0]), 2)
    >>> indices
    Array([1, 2], dtype=int32)
    """
    del is_stable
    compat.check_arraylike("top_k", operand)
    operand = jnp.asarray(operand)
    k = operator.index(k)
    moved = jnp.moveaxis(operand, axis, -1)
    # JAX's function raises the errors, and says whether results are a list or a tuple.
    like = jax.eval_shape(lambda: lax.top_k(moved, k))
    results = [jnp.moveaxis(x, -1, axis) for x in _bind(moved, k=k)]
    found: Sequence[Array] = jax.tree.unflatten(jax.tree.structure(like), results)
    return found


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, k: int) -> tuple[Any, Any]:
    _, indices = results = _bind(*primals, k=k)
    moved = jnp.take_along_axis(tangents[0], indices, -1, mode="promise_in_bounds")
    return results, [moved, compat.zero_tangent(indices)]


def _refusal(x: Any, *, k: int) -> Fallback | None:
    if k == 0 or x.shape[-1] == 1:
        return Fallback("there is nothing to find", is_loss=False)
    return None


def _cuda(operands: Sequence[Operand], _: Any, *, k: int) -> PlannedKernel | Fallback:
    ((x, aval),) = operands
    *outer, columns = aval.shape
    problem = TopK(math.prod(outer), columns, k, np.dtype(aval.dtype))
    return planned_kernel((x,), plan_top_k, problem)


_bind = define_along_axis(
    "tilekern_top_k",
    lambda x, k: list(lax.top_k(x, k)),
    results=lambda **_: 2,
    refusal=_refusal,
    jvp=_jvp,
    cuda=_cuda,
    describe=lambda k: f"top {k}",
)


def _in_place_of_jax(operand: Array, *, k: Any, axis: int, **params: Any) -> Sequence[Array]:
    if not isinstance(k, int) or axis != operand.ndim - 1:
        results: Sequence[Array] = lax.top_k_p.bind(operand, k=k, axis=axis, **params)
        return results
    # Equal values keep their order. JAX's operation need not keep it.
    return top_k(operand, k)


replace(lax.top_k_p, _in_place_of_jax)


def _in_place_of_approximation(
    operand: Array, *, k: Any, reduction_dimension: int, is_max_k: bool, aggregate_to_topk: bool,
    **params: Any,
) -> Any:  # fmt: skip
    if why_no_gpu() is not None or not aggregate_to_topk or not isinstance(k, int) or k > MAX_K:
        find = lax.approx_max_k if is_max_k else lax.approx_min_k
        return find(operand, k, reduction_dimension, **params, aggregate_to_topk=aggregate_to_topk)
    values, indices = top_k(operand if is_max_k else -operand, k, axis=reduction_dimension)
    return [values if is_max_k else -values, indices]


replace(lax.approx_top_k_p, _in_place_of_approximation)
