"""Sorts and counts of small integers, by the stable sort that orders segments."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, dtypes
from jax.typing import ArrayLike

from jax_tilekern.interop import compat
from jax_tilekern.ops.arguments import integer
from jax_tilekern.ops.explicit import Sharding, by_automatic_axes, resharded, spec_of
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.segments.functions import reduced
from jax_tilekern.ops.segments.plan import number_of_segments, plan_of


def sort_by_key(keys: ArrayLike, *values: ArrayLike, num_keys: int) -> tuple[Array, ...]:
    """Sort small integers, and arrays along with them.

    The sort is stable. On a GPU it is a radix sort of the bits that ``num_keys`` has.

    Parameters
    ----------
    keys
        A vector of integers from 0 to ``num_keys - 1``. Those below come first, those above last,
        in their order in ``keys``.
    *values
        Arrays whose first dimension has as many elements.
    num_keys
        Number of keys, static.

    Returns
    -------
    tuple of Array
        The keys in ascending order, then each array in this order.

    Raises
    ------
    TypeError
        If the keys are no integers.
    ValueError
        If the keys are no vector, an array has another number of rows, or ``num_keys`` is negative.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.sort_by_key(jnp.array([2, 0, 2, 1]), jnp.arange(4), num_keys=3)
    (Array([0, 1, 2, 2], dtype=int32), Array([1, 3, 0, 2], dtype=int32))
    """
    compat.check_arraylike("sort_by_key", keys, *values)
    return _sorted(keys, values, number_of_segments("sort_by_key", keys, num_keys, "num_keys"))


@jitted("num_keys")
def _sorted(keys: ArrayLike, values: tuple[ArrayLike, ...], num_keys: int) -> tuple[Array, ...]:
    plan = plan_of(
        "sort_by_key", keys, num_keys, is_sorted=False, clip=False, what="keys", argument="num_keys"
    )
    keys = jnp.asarray(keys)
    assert plan.order is not None
    arrays = [jnp.asarray(x) for x in values]
    for x in arrays:
        if x.ndim == 0 or x.shape[0] != keys.shape[0]:
            raise ValueError(
                f"sort_by_key: an array of shape {x.shape} for {keys.shape[0]} keys: its first "
                "dimension has an element for each key"
            )
    read = [keys, *arrays]

    def in_order(operands: tuple[list[Array], Array]) -> list[Array]:
        given, order = operands
        return [x.at[order].get(mode="promise_in_bounds") for x in given]

    return tuple(
        by_automatic_axes(
            in_order, (read, plan.order), lambda: [(None, *spec_of(x)[1:]) for x in read]
        )
    )


def bincount(
    x: ArrayLike,
    weights: ArrayLike | None = None,
    minlength: int = 0,
    *,
    length: int | None = None,
    out_sharding: Sharding | None = None,
) -> Array:
    """Count integers, with the semantics of :func:`jax.numpy.bincount`.

    Parameters
    ----------
    x
        A vector of integers or booleans. Negative ones count as 0, those from ``length`` on do not
        count.
    weights
        What is added up for each integer in place of 1.
    minlength
        The least length of the result, where there is no ``length``.
    length
        The length of the result; by default that of the largest integer, which takes a concrete
        array.
    out_sharding
        Sharding of the result on a mesh with explicit axes.

    Returns
    -------
    Array
        Counts of JAX's integer type, or sums of the weights' type.

    Raises
    ------
    TypeError
        If ``x`` has no integers.
    ValueError
        If ``x`` is no vector, or the weights are not as many.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.bincount(jnp.array([1, 0, 1]), length=3)
    Array([1, 2, 0], dtype=int32)
    """
    compat.check_arraylike("bincount", x, **compat.given(weights=weights))
    if length is None:
        shortest = integer("bincount", "minlength", minlength)
        length = max(number_of_segments("bincount", x, None, "length"), shortest)
    counts = _bincount(x, weights, number_of_segments("bincount", x, length, "length"))
    return resharded(counts, out_sharding)


@jitted("length")
def _bincount(x: ArrayLike, weights: ArrayLike | None, length: int) -> Array:
    x = jnp.asarray(x)
    if x.dtype == np.bool_:
        x = x.astype(np.int32)
    ids: Any = jnp.maximum(x, jnp.zeros_like(x))
    plan = plan_of(
        "bincount",
        ids,
        length,
        is_sorted=False,
        clip=False,
        what="elements of x",
        argument="length",
    )
    if weights is None:
        counts = reduced("sum", jnp.ones(x.shape, np.int32), plan)
        return counts.astype(dtypes.canonicalize_dtype(int))
    weights = jnp.asarray(weights)
    if weights.shape != x.shape:
        raise ValueError(f"bincount: weights of shape {weights.shape} for x of shape {x.shape}")
    dtype = np.dtype(jnp.result_type(weights.dtype))
    return reduced("sum", weights, plan, dtype)
