"""``quantile``, ``percentile`` and ``median``: JAX's semantics over elements of given ranks."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp
from jax_tilekern.interop.patch import replace_function
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.selection.order_statistics import order_statistics

Axes = int | tuple[int, ...] | None


@jitted("axis", "out", "overwrite_input", "method", "keepdims")
def quantile(
    a: ArrayLike,
    q: ArrayLike,
    axis: Axes = None,
    out: None = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = False,
    *,
    weights: ArrayLike | None = None,
) -> Array:
    """Return quantiles along axes, with the semantics of :func:`jax.numpy.quantile`.

    Parameters
    ----------
    a
        Array of real numbers.
    q
        A number or a vector of numbers from 0 to 1.
    axis
        The axis or axes; ``None`` takes all elements.
    out, overwrite_input
        As in JAX, not supported.
    method
        ``"linear"``, ``"lower"``, ``"higher"``, ``"midpoint"``, ``"nearest"`` or
        ``"inverted_cdf"``.
    keepdims
        Whether the axes stay, with size 1.
    weights
        Weights of the elements, for ``"inverted_cdf"``. JAX's function computes this method.

    Returns
    -------
    Array
        The quantiles, those of a vector ``q`` along a first axis. NaN where an element is NaN.

    Raises
    ------
    ValueError
        If the method is another one, ``q`` has several dimensions, or an axis is out of range.
    TypeError
        If ``a`` or ``q`` is no array.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.quantile(jnp.arange(11.0), jnp.array([0.1, 0.55]))
    Array([1. , 5.5], dtype=float32)
    """
    compat.check_arraylike("quantile", a, q)
    # The types that JAX declares lack the weights.
    function: Any = jnp.quantile
    jaxs = functools.partial(
        function, axis=axis, out=out, overwrite_input=overwrite_input, method=method,
        keepdims=keepdims, weights=weights,
    )  # fmt: skip
    a, q = jnp.asarray(a), jnp.asarray(q)
    if weights is not None or method == "inverted_cdf" or a.size == 0:
        result: Array = jaxs(a, q)
        return result
    # JAX's function raises the errors, and has the type and shape of the result.
    wanted = jax.eval_shape(jaxs, a, q)
    rows = _rows(a.astype(wanted.dtype), axis)
    place = q.ravel() * (rows.shape[-1] - 1)
    low, high = jnp.floor(place), jnp.ceil(place)
    found = order_statistics(rows, jnp.concatenate([low, high]).astype(np.int32))
    lower, higher = jnp.split(found, 2, -1)
    between = _between(lower, higher, place - low, method)
    # The quantiles come first.
    return jnp.moveaxis(between, -1, 0).astype(wanted.dtype).reshape(wanted.shape)


@jitted("axis", "out", "overwrite_input", "method", "keepdims")
def percentile(
    a: ArrayLike,
    q: ArrayLike,
    axis: Axes = None,
    out: None = None,
    overwrite_input: bool = False,
    method: str = "linear",
    keepdims: bool = False,
    *,
    weights: ArrayLike | None = None,
) -> Array:
    """Return percentiles along axes, with the semantics of :func:`jax.numpy.percentile`.

    Parameters
    ----------
    a, axis, out, overwrite_input, method, keepdims, weights
        Those of :func:`quantile`.
    q
        A number or a vector of numbers from 0 to 100.

    Returns
    -------
    Array
        The quantiles of ``q / 100``.

    Raises
    ------
    ValueError, TypeError
        As :func:`quantile`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.percentile(jnp.arange(11.0), 25)
    Array(2.5, dtype=float32)
    """
    compat.check_arraylike("percentile", a, q)
    share = jnp.asarray(q) / 100
    return quantile(a, share, axis, out, overwrite_input, method, keepdims, weights=weights)


@jitted("axis", "out", "overwrite_input", "keepdims")
def median(
    a: ArrayLike,
    axis: Axes = None,
    out: None = None,
    overwrite_input: bool = False,
    keepdims: bool = False,
) -> Array:
    """Return the median along axes, with the semantics of :func:`jax.numpy.median`.

    Parameters
    ----------
    a, axis, out, overwrite_input, keepdims
        Those of :func:`quantile`.

    Returns
    -------
    Array
        The mean of the two middle elements, which are the same where their number is odd.

    Raises
    ------
    ValueError
        If an axis is out of range or empty.
    TypeError
        If ``a`` is no array.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.median(jnp.array([[3.0, 1.0, 2.0], [4.0, 9.0, 5.0]]), axis=1)
    Array([2., 5.], dtype=float32)
    """
    compat.check_arraylike("median", a)
    a = jnp.asarray(a)
    jax.eval_shape(lambda: jnp.median(a, axis, out, overwrite_input, keepdims))
    return quantile(a, 0.5, axis, out, overwrite_input, "midpoint", keepdims)


def _rows(a: Array, axis: Axes) -> Array:
    """Return an array whose last axis has the elements along the axes."""
    if axis is None:
        return a.ravel()
    axes = [i % a.ndim for i in (axis if isinstance(axis, tuple) else (axis,))]
    kept = [i for i in range(a.ndim) if i not in axes]
    moved = a.transpose(*kept, *axes)
    return moved.reshape(*moved.shape[: len(kept)], math.prod(a.shape[i] for i in axes))


def _between(lower: Array, higher: Array, share: Array, method: str) -> Array:
    """Return what lies between two elements, in the arithmetic of JAX's function."""
    if method == "linear":
        return lower.astype(share.dtype) * (1 - share) + higher.astype(share.dtype) * share
    if method == "midpoint":
        return (lower + higher) * np.array(0.5, lower.dtype)
    if method == "nearest":
        return jnp.where(share <= 0.5, lower, higher)
    return lower if method == "lower" else higher


def _in_place_of_jax(
    a: Array, q: Array, axis: Axes, method: str, keepdims: bool, squash_nans: bool,
    weights: Array | None = None,
) -> Any:  # fmt: skip
    """Compute what the function does that quantiles of ``jax.numpy`` call."""
    if squash_nans or weights is not None or method == "inverted_cdf":
        return NotImplemented
    return quantile(a, q, axis, method=method, keepdims=keepdims)


replace_function(compat.QUANTILE, _in_place_of_jax)
