"""``sum``: JAX's signature and semantics over one primitive."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.interop import compat, ffi
from jax_tilekern.interop.originals import jnp, lax
from jax_tilekern.ops.element_types import wide_dtype
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.planned_kernel import chosen_cpu_kernel, planned_kernel
from jax_tilekern.partitioning.rule import ShardingRule, rule_over_axes
from jax_tilekern.plans.policy.workload import sum_workload
from jax_tilekern.plans.reduction.problem import SummedDims
from jax_tilekern.plans.reduction.select import plan_sum, sum_dtype
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    PlannedKernel,
    Planner,
    define,
)

Axes = tuple[int, ...]

# The types that the CPU's handler supports.
_CPU_DTYPES = tuple(
    np.dtype(t)
    for t in (
        np.float64, np.float32, jnp.bfloat16, np.float16, np.complex128, np.complex64,
        np.int64, np.int32, np.int16, np.int8, np.uint64, np.uint32, np.uint16, np.uint8,
    )
)  # fmt: skip


# The CPU's handler adds up run by run.
_SHORT = 128


@jitted("axis", "dtype", "keepdims", "promote_integers")
def sum(
    a: ArrayLike,
    axis: int | Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    out: None = None,
    keepdims: bool = False,
    initial: ArrayLike | None = None,
    where: ArrayLike | None = None,
    promote_integers: bool = True,
) -> Array:
    """Sum over axes, with the semantics of :func:`jax.numpy.sum`.

    The result is the same at every call: partial sums are added up in a fixed order.

    Parameters
    ----------
    a
        Array of any rank.
    axis
        One axis or several, which may be negative; ``None`` is all of them.
    dtype
        Type of the result. By default that of ``a``, with integers and booleans promoted as JAX
        promotes them. Floats are summed in float32 at least, and rounded once.
    out
        Not supported, as in JAX.
    keepdims
        Whether the summed axes stay, with size 1.
    initial
        A scalar that is added to every sum.
    where
        Which elements are summed, booleans that broadcast against ``a``.
    promote_integers
        Whether small integers are summed in JAX's default integer type, if there is no ``dtype``;
        otherwise in their own.

    Returns
    -------
    Array
        Without the summed axes, unless ``keepdims``.

    Raises
    ------
    ValueError
        If an axis is out of range, or named twice, ``initial`` is not a scalar, or ``where`` is not
        boolean or does not broadcast.
    TypeError
        If ``a`` is not an array, or an axis not an integer.
    NotImplementedError
        If there is an ``out``.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.sum(jnp.ones((3, 4)), axis=0)
    Array([3., 3., 3., 3.], dtype=float32)
    """
    result = jax.eval_shape(
        functools.partial(
            jnp.sum,
            axis=axis,
            dtype=dtype,
            out=out,
            keepdims=keepdims,
            promote_integers=promote_integers,
        ),
        a,
        initial=initial,
        where=where,
    )
    a = jnp.asarray(a)
    if axis is None:
        axes = tuple(range(a.ndim))
    else:
        given = axis if isinstance(axis, Sequence) else (axis,)
        axes = tuple(sorted(operator.index(x) % a.ndim for x in given))
    if where is not None:
        a = jnp.where(where, a, jnp.zeros((), a.dtype))
    if initial is None:
        total = _bind(a, axes=axes, dtype=result.dtype)
    else:
        total = _with_initial(a, axes, result.dtype, initial)
    if keepdims:
        total = lax.expand_dims(total, axes)
    return compat.with_type(total, result.dtype, result.weak_type)


def _with_initial(a: Array, axes: Axes, dtype: np.dtype[Any], initial: ArrayLike) -> Array:
    """Add ``initial`` before anything is rounded to a narrow float."""
    sums = wide_dtype(dtype)
    total = _bind(a, axes=axes, dtype=sums)
    initial = compat.as_type(initial, sums)
    return lax.bitwise_or(initial, total) if dtype.kind == "b" else lax.add(initial, total)


def _reference(x: Array, *, axes: Axes, dtype: np.dtype[Any]) -> Array:
    # JAX would sum in a narrow float that is requested explicitly, and in any of 8 bits.
    sums = wide_dtype(dtype)
    return jnp.sum(x, axes, None if x.dtype == sums else sums, promote_integers=False).astype(dtype)


def _cotangent(cotangent: Array, x: Any, *, axes: Axes, dtype: np.dtype[Any]) -> Array:
    kept = tuple(axis for axis in range(x.ndim) if axis not in axes)
    narrow = cotangent.astype(x.dtype)
    sharding = compat.explicit_sharding(x)
    return lax.broadcast_in_dim(narrow, x.shape, kept, out_sharding=sharding)


def _batch(
    _: Any, operands: Sequence[Array], dims: Sequence[int], *, axes: Axes, **params: Any
) -> tuple[Array, int]:
    (x,), (mapped,) = operands, dims
    shifted = tuple(axis + (axis >= mapped) for axis in axes)
    out_dim = mapped - len([axis for axis in shifted if axis < mapped])
    return _bind(x, axes=shifted, **params), out_dim


def _sharding_rule(x: Any, *, axes: Axes, **_: Any) -> ShardingRule:
    dims = tuple(range(x.ndim))
    kept = tuple(dim for dim in dims if dim not in axes)
    return rule_over_axes(((dims, x.shape),), kept, flops=x.size)


# Lowering.


def _refusal(x: Any, *, axes: Axes, **_: Any) -> Fallback | None:
    if all(x.shape[axis] == 1 for axis in axes):
        return Fallback("nothing is added up, and XLA copies or casts what is left", is_loss=False)
    return None


def _cuda(
    operands: Sequence[Operand], _: Any, *, axes: Axes, dtype: np.dtype[Any]
) -> PlannedKernel | Fallback:
    ((x, aval),) = operands
    if sum_dtype(aval.dtype, dtype) is None:
        return Fallback(f"no kernel sums {aval.dtype} to {dtype}")
    return planned_kernel((x,), plan_sum, SummedDims.of(aval.shape, axes), aval.dtype, dtype)


def _apart_run(dims: SummedDims, dtype: np.dtype[Any]) -> int | None:
    """Return the length of the runs of a sum that has several of them, each of adjacent rows."""
    innermost = len(dims.sizes) - (1 if dims.reduced[-1:] == (True,) else 2)
    numbers = 2 if dtype.kind == "c" else 1
    return numbers * math.prod(dims.sizes[innermost:]) if innermost >= 2 else None


def _cpu(
    operands: Sequence[Operand], _: Any, *, axes: Axes, dtype: np.dtype[Any]
) -> PlannedKernel | Fallback:
    ((x, aval),) = operands
    if dtype not in _CPU_DTYPES:
        return Fallback(f"no kernel sums {aval.dtype} to {dtype}")
    widened = dtype == np.float32 and aval.dtype in (jnp.bfloat16, np.float16)
    if aval.dtype != dtype and not widened:
        return Fallback(f"XLA casts {aval.dtype} to {dtype} while it sums")
    dims = SummedDims.of(aval.shape, axes)
    run = _apart_run(dims, aval.dtype)
    if run is not None and run < _SHORT:
        return Fallback(f"XLA adds up runs of {run} elements that lie apart")
    call = ffi.CpuCall(ffi.CPU_SUM, {"sizes": dims.sizes, "reduced": dims.reduced})
    kernel = PlannedKernel(f"cpu_sum {aval.dtype}", f"sizes {dims.sizes}", call, (x,))
    return chosen_cpu_kernel(sum_workload(dims, aval.dtype, dtype), kernel)


_bind = define(
    Operation(
        name="tilekern_sum",
        reference=_reference,
        transposes={0: _cotangent},
        batch=_batch,
        sharding_rule=_sharding_rule,
        planners={"cpu": Planner(_refusal, _cpu), "cuda": Planner(_refusal, _cuda)},
        describe=lambda axes, **_: f"sum over {', '.join(map(str, axes)) or 'no axis'}",
    )
)
