"""``cumsum``, ``cumprod``, ``cummax``, ``cummin`` and ``cumlogsumexp``: JAX's semantics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp, lax
from jax_tilekern.interop.patch import replace
from jax_tilekern.ops.along_axis import define_along_axis
from jax_tilekern.ops.element_types import is_narrow, wide_dtype
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.scans.combinations import combination
from jax_tilekern.ops.scans.linear_recurrence import element_before, recurrence
from jax_tilekern.ops.scans.lowering import (
    planned_scan,
    scan_input,
)
from jax_tilekern.plans.gpu import why_no_gpu
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    PlannedKernel,
)

Kind = Literal["sum", "prod", "max", "min", "logsumexp"]

# Functions of two elements.
_COMBINE: dict[Kind, Callable[[Any, Any], Any]] = {
    "sum": lambda x, y: x + y,
    "prod": lambda x, y: x * y,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "logsumexp": jnp.logaddexp,
}


@jitted("axis", "dtype", "reverse")
def cumsum(
    a: ArrayLike,
    axis: int | None = None,
    dtype: DTypeLike | None = None,
    out: None = None,
    *,
    reverse: bool = False,
) -> Array:
    """Cumulative sum along an axis, with the semantics of :func:`jax.numpy.cumsum`.

    On a GPU a kernel reads the array once, and the result has the same bits at every call. Floats
    are added in float32 at least, and each sum is rounded once.

    Parameters
    ----------
    a
        Array of any rank.
    axis
        The axis; may be negative. ``None`` flattens the array.
    dtype
        Type of the result. By default that of ``a``; booleans are counted.
    out
        Not supported, as in JAX.
    reverse
        Whether sums begin at the end of the axis, as in :func:`jax.lax.cumsum`.

    Returns
    -------
    Array
        Of the shape of ``a``, or of one dimension where there is no axis.

    Raises
    ------
    ValueError
        If the axis is out of range.
    TypeError
        If ``a`` is no array.
    NotImplementedError
        If there is an ``out``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.cumsum(jnp.arange(4), reverse=True)
    Array([6, 6, 5, 3], dtype=int32)
    """
    return _as_numpy(jnp.cumsum, "sum", a, axis, dtype, out, reverse)


@jitted("axis", "dtype", "reverse")
def cumprod(
    a: ArrayLike,
    axis: int | None = None,
    dtype: DTypeLike | None = None,
    out: None = None,
    *,
    reverse: bool = False,
) -> Array:
    """Cumulative product along an axis, with the semantics of :func:`jax.numpy.cumprod`.

    The parameters are those of :func:`cumsum`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.cumprod(jnp.arange(1, 5))
    Array([ 1,  2,  6, 24], dtype=int32)
    """
    return _as_numpy(jnp.cumprod, "prod", a, axis, dtype, out, reverse)


def _as_numpy(
    function: Callable[..., Array],
    kind: Kind,
    a: ArrayLike,
    axis: int | None,
    dtype: DTypeLike | None,
    out: None,
    reverse: bool,
) -> Array:
    # JAX's function raises the errors.
    result = jax.eval_shape(lambda a: function(a, axis, dtype, out), a)
    if result.dtype == np.bool_:
        counted = _as_numpy(function, kind, jnp.asarray(a) != 0, axis, None, None, reverse)
        return counted.astype(np.bool_)
    x = compat.as_type(a, result.dtype).reshape(result.shape)
    if is_narrow(x.dtype) and not is_narrow(jnp.result_type(a)):
        # XLA would scan elements that are not rounded.
        x = lax.optimization_barrier(x)
    place = 0 if axis is None else axis % max(1, x.ndim)
    total = _bind(x, kind=kind, axis=place, reverse=bool(reverse))
    return compat.with_type(total, result.dtype, result.weak_type)


@jitted("axis", "reverse")
def cummax(operand: ArrayLike, axis: int = 0, reverse: bool = False) -> Array:
    """Cumulative maximum along an axis, with the semantics of :func:`jax.lax.cummax`.

    Parameters
    ----------
    operand
        Array of numbers. After a NaN all maxima are NaN.
    axis
        The axis, which is not negative.
    reverse
        Whether maxima begin at the end of the axis.

    Raises
    ------
    ValueError
        If the axis is negative or out of range.
    TypeError
        If the operand is boolean or no array.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.cummax(jnp.array([1, 3, 2, 5]))
    Array([1, 3, 3, 5], dtype=int32)
    """
    return _as_lax(lax.cummax, "max", operand, axis, reverse)


@jitted("axis", "reverse")
def cummin(operand: ArrayLike, axis: int = 0, reverse: bool = False) -> Array:
    """Cumulative minimum along an axis, with the semantics of :func:`jax.lax.cummin`.

    The parameters are those of :func:`cummax`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.cummin(jnp.array([4, 5, 2, 3]))
    Array([4, 4, 2, 2], dtype=int32)
    """
    return _as_lax(lax.cummin, "min", operand, axis, reverse)


@jitted("axis", "reverse")
def cumlogsumexp(operand: ArrayLike, axis: int = 0, reverse: bool = False) -> Array:
    """Cumulative ``log(sum(exp(x)))``, with the semantics of :func:`jax.lax.cumlogsumexp`.

    The parameters are those of :func:`cummax`; the operand is of floats.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.cumlogsumexp(jnp.zeros(2)).shape
    (2,)
    """
    return _as_lax(lax.cumlogsumexp, "logsumexp", operand, axis, reverse)


def _as_lax(
    function: Callable[..., Array], kind: Kind, operand: ArrayLike, axis: int, reverse: bool
) -> Array:
    compat.check_arraylike(f"cum{kind}", operand)
    operand = jnp.asarray(operand)
    # JAX's function raises the errors.
    jax.eval_shape(lambda x: function(x, axis, reverse), operand)
    result: Array = _bind(operand, kind=kind, axis=int(axis), reverse=bool(reverse))
    return result


def _reference(x: Array, *, kind: Kind, axis: int, reverse: bool) -> Array:
    # JAX would combine narrow floats in their own type.
    wide = x if kind in ("max", "min") else x.astype(wide_dtype(x.dtype))
    result: Array = getattr(lax, f"cum{kind}")(wide, axis, reverse).astype(x.dtype)
    return result


# What precedes the first element, whose result is the element itself.
_BEFORE: dict[Kind, float] = {"prod": 1, "max": np.nan, "min": np.nan, "logsumexp": -np.inf}


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, kind: Kind, axis: int, reverse: bool
) -> tuple[Any, Any]:
    """Return the tangent of a result as a linear recurrence: each is a function of two numbers."""
    result, (tangent,) = _bind(*primals, kind=kind, axis=axis, reverse=reverse), tangents
    x, y, dx = (z.astype(wide_dtype(result.dtype)) for z in (*primals, result, tangent))
    before = element_before(y, axis, reverse, _BEFORE[kind])
    a, b = _partial_derivatives(kind, before, x, y)
    derivative = recurrence(a, b * dx, axis=axis, reverse=reverse, is_before=False)
    return result, derivative.astype(result.dtype)


def _partial_derivatives(kind: Kind, before: Array, x: Array, y: Array) -> tuple[Array, Array]:
    """Return the derivatives of ``y = combine(before, x)``."""
    if kind == "prod":
        return x, before
    if kind == "logsumexp":
        # Infinite numbers have no difference.
        weights = (jnp.where(z == y, 1, jnp.exp(z - y)).astype(y.dtype) for z in (before, x))
        a, b = weights
        return a, b
    is_kept = before > x if kind == "max" else before < x
    share = jnp.where(before == x, 0.5, 0)
    a = jnp.where(is_kept, 1, share).astype(y.dtype)
    return a, 1 - a


def _cotangent(cotangent: Array, _: Any, *, kind: Kind, axis: int, reverse: bool) -> Array:
    result: Array = _bind(cotangent, kind=kind, axis=axis, reverse=not reverse)
    return result


def _refusal(x: Any, *, axis: int, **_: Any) -> Fallback | None:
    if x.shape[axis] == 1:
        return Fallback("nothing is combined", is_loss=False)
    return None


def _cuda(
    operands: Sequence[Operand], _: Any, *, kind: Kind, axis: int, reverse: bool
) -> PlannedKernel | Fallback:
    dtype = np.dtype(operands[0].aval.dtype)
    if dtype.kind in "bc" and kind not in ("sum", "prod"):
        return Fallback(f"no kernel has cum{kind} of {dtype}")
    return planned_scan(
        f"cum{kind} {dtype}",
        operands,
        axis=axis,
        reverse=reverse,
        inputs=lambda: (scan_input(dtype),),
        combination=lambda: combination(_of_one(kind), (dtype,)),
        outputs=(0,),
    )


@functools.cache
def _of_one(kind: Kind) -> Callable[..., Any]:
    """Return the function of values of one element."""
    combine = _COMBINE[kind]
    return lambda earlier, later: [combine(*earlier, *later)]


_bind = define_along_axis(
    "tilekern_cumulative",
    _reference,
    axis="axis",
    refusal=_refusal,
    several_results=False,
    jvp=_jvp,
    is_linear=lambda kind, **_: kind == "sum",
    transposes={0: _cotangent},
    cuda=_cuda,
    describe=lambda kind, axis, **_: f"cum{kind} along axis {axis}",
)


def _in_place_of_jax(function: Any, operand: Array, *, axis: int, reverse: bool) -> Any:
    original = functools.partial(getattr(lax, function.__name__), axis=axis, reverse=reverse)
    # It raises the errors: that of booleans, which jnp.cumsum adds up.
    jax.eval_shape(original, operand)
    # JAX combines narrow floats in their own type. On a CPU its derivatives are faster.
    if (is_narrow(operand.dtype) and function not in (cummax, cummin)) or (
        function is not cumsum and why_no_gpu() is not None
    ):
        return original(operand)
    return function(operand, axis=axis, reverse=reverse)


for _function in (cumsum, cumprod, cummax, cummin, cumlogsumexp):
    _primitive = getattr(lax, f"{_function.__name__}_p")
    replace(_primitive, functools.partial(_in_place_of_jax, _function))
