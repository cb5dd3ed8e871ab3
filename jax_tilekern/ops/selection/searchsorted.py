"""``searchsorted`` and ``digitize``: JAX's semantics over one primitive."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.global_modes import by_xla
from jax_tilekern.interop.originals import jnp
from jax_tilekern.interop.patch import replace_function
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.planned_kernel import planned_kernel
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.plans.selection.searchsorted import Searches, plan_searchsorted
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    PlannedKernel,
    Planner,
    define,
    no_refusal,
)


@jitted("side", "method")
def searchsorted(
    a: ArrayLike,
    v: ArrayLike,
    side: str = "left",
    sorter: ArrayLike | None = None,
    *,
    method: str = "scan",
) -> Array:
    """Search a sorted array, with the semantics of :func:`jax.numpy.searchsorted`.

    Parameters
    ----------
    a
        Vector that ascends, or that ``sorter`` sorts.
    v
        Queries of any shape.
    side
        ``"left"``: a query belongs before the elements that equal it; ``"right"``: after them.
    sorter
        Indices that sort ``a``.
    method
        As in JAX. Where a kernel computes ``"scan"``, the default, it takes the steps of JAX's
        binary search. JAX's function computes the others.

    Returns
    -------
    Array
        For each query the index at which it keeps the order, int32.

    Raises
    ------
    ValueError
        If ``a`` is no vector, or ``side`` or ``method`` is another one.
    TypeError
        If an operand is no array.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.searchsorted(jnp.array([1, 2, 2, 3]), jnp.array([2, 5]), side="right")
    Array([3, 4], dtype=int32)
    """
    compat.check_arraylike("searchsorted", a, v, **compat.given(sorter=sorter))
    a, v = jnp.asarray(a), jnp.asarray(v)
    # JAX's function raises the errors, and has the type of the result.
    wanted = jax.eval_shape(lambda: jnp.searchsorted(a, v, side, sorter, method=method)).dtype
    if method != "scan" or a.size == 0 or wanted != np.int32:
        return jnp.searchsorted(a, v, side, sorter, method=method)
    common = jnp.result_type(a, v)
    a = a if sorter is None else a[jnp.asarray(sorter)]
    found: Array = _bind(a.astype(common), v.astype(common), side=side)
    return found


@jitted("right", "method")
def digitize(
    x: ArrayLike, bins: ArrayLike, right: bool = False, *, method: str | None = None
) -> Array:
    """Return the bins of numbers, with the semantics of :func:`jax.numpy.digitize`.

    Parameters
    ----------
    x
        Numbers, of any shape.
    bins
        Vector of the edges of the bins, which ascends or descends.
    right
        Whether a bin has its right edge in place of its left one.
    method
        That of :func:`searchsorted`.

    Returns
    -------
    Array
        The index of the bin of each number, int32: 0 before the first edge.

    Raises
    ------
    ValueError
        If ``bins`` is no vector, or the method is another one.
    TypeError
        If an operand is no array.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.digitize(jnp.array([0.5, 2.0, 9.0]), jnp.array([1.0, 2.0, 3.0]))
    Array([0, 2, 3], dtype=int32)
    """
    compat.check_arraylike("digitize", x, bins)
    x, bins = jnp.asarray(x), jnp.asarray(bins)
    # JAX's function raises the errors.
    jax.eval_shape(lambda: jnp.digitize(x, bins, right, method=method))
    if bins.size == 0:
        return jnp.zeros_like(x, dtype=np.int32)
    ascends = bins[-1] >= bins[0]
    edges = jnp.where(ascends, bins, bins[::-1])
    found = searchsorted(edges, x, "left" if right else "right", method=method or "scan")
    return jnp.where(ascends, found, bins.size - found)


def _reference(a: Array, v: Array, *, side: str) -> Array:
    return jnp.searchsorted(a, v, side)


def _jvp(primals: Sequence[Any], _: Any, **params: Any) -> tuple[Any, Any]:
    found = _bind(*primals, **params)
    return found, compat.zero_tangent(found)


def _batch(
    _: Any, operands: Sequence[Array], dims: Sequence[int | None], *, side: str
) -> tuple[Array, int]:
    (a, v), (of_a, of_v) = operands, dims
    if of_a is not None:
        # Each query is searched for in an array of its own.
        search = by_xla(functools.partial(_reference, side=side))
        return jax.vmap(search, (of_a, of_v))(a, v), 0
    assert of_v is not None
    return _bind(a, jnp.moveaxis(v, of_v, 0), side=side), 0


def _sharding_rule(_: Any, v: Any, **__: Any) -> ShardingRule:
    """Every device has the array, and its own queries."""
    labels = tuple(range(v.ndim))
    names = {i: f"axis {i}" for i in labels}
    return ShardingRule(
        ((None,), labels), (labels,), dict(enumerate(v.shape)), flops=v.size, names=names
    )


def _cuda(operands: Sequence[Operand], _: Any, *, side: str) -> PlannedKernel | Fallback:
    (a, of_a), (v, of_v) = operands
    problem = Searches(
        of_a.shape[0], math.prod(of_v.shape), np.dtype(of_a.dtype), right=side == "right"
    )
    return planned_kernel((a, v), plan_searchsorted, problem)


_bind = define(
    Operation(
        name="tilekern_searchsorted",
        reference=_reference,
        jvp=_jvp,
        batch=_batch,
        sharding_rule=_sharding_rule,
        planners={"cuda": Planner(no_refusal, _cuda)},
        describe=lambda side: f"searchsorted, {side}",
    )
)


def _in_place_of_jax(
    a: Array, v: Array, /, *, side: str, method: str, dtype: Any, **others: Any
) -> Any:
    """Compute what the function does that binary searches of ``jax.numpy`` call."""
    is_known = method == "scan" and side in ("left", "right") and not others
    if not is_known or dtype != np.int32 or a.dtype != v.dtype or a.ndim != 1 or a.size == 0:
        return NotImplemented
    return _bind(a, v, side=side)


replace_function(compat.SEARCHSORTED, _in_place_of_jax)
