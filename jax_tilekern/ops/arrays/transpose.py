"""``transpose``: JAX's signature and semantics over one primitive."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
from jax import Array
from jax.typing import ArrayLike

from jax_tilekern.interop import ffi
from jax_tilekern.interop.originals import jnp, lax
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.planned_kernel import chosen_cpu_kernel, planned_kernel
from jax_tilekern.partitioning.rule import ShardingRule, rule_over_axes
from jax_tilekern.plans.cpu import is_streamed
from jax_tilekern.plans.policy.workload import transpose_workload
from jax_tilekern.plans.transpose.permutation import Permutation
from jax_tilekern.plans.transpose.select import plan_transpose
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    PlannedKernel,
    Planner,
    define,
)

Axes = tuple[int, ...]


@jitted("axes")
def transpose(a: ArrayLike, axes: Sequence[int] | None = None) -> Array:
    """Permute dimensions, with the semantics of :func:`jax.numpy.transpose`.

    Parameters
    ----------
    a
        Array of any rank and type.
    axes
        The result's dimension ``i`` is dimension ``axes[i]`` of ``a``; may be negative. ``None``
        reverses the dimensions.

    Returns
    -------
    Array
        Of the same type, bit for bit.

    Raises
    ------
    ValueError
        If ``axes`` is no permutation of the dimensions, or one is out of range.
    TypeError
        If ``a`` is not an array, or an axis not an integer.

    See Also
    --------
    explain : which kernel moves the array, and why.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.transpose(jnp.ones((2, 3, 4)), (2, 0, 1)).shape
    (4, 2, 3)
    """
    # JAX's function raises the exceptions, some of which concern values that are not arrays.
    jax.eval_shape(lambda: jnp.transpose(a, axes))
    a = jnp.asarray(a)
    given = reversed(range(a.ndim)) if axes is None else axes
    result: Array = _bind(a, axes=tuple(operator.index(axis) % a.ndim for axis in given))
    return result


def _reference(x: Array, *, axes: Axes) -> Array:
    return lax.transpose(x, axes)


def _cotangent(cotangent: Array, x: Any, *, axes: Axes) -> Array:
    result: Array = _bind(cotangent, axes=tuple(map(axes.index, range(len(axes)))))
    return result


def _batch(
    _: Any, operands: Sequence[Array], dims: Sequence[int], *, axes: Axes
) -> tuple[Array, int]:
    (x,), (mapped,) = operands, dims
    return _bind(x, axes=(mapped, *(axis + (axis >= mapped) for axis in axes))), 0


def _sharding_rule(x: Any, *, axes: Axes) -> ShardingRule:
    dims = tuple(range(x.ndim))
    return rule_over_axes(((dims, x.shape),), axes, flops=0)


# Lowering.


def _item_bytes(dtype: Any) -> int | None:
    """Return the size of an item in bytes, or None if kernels cannot move it."""
    if jnp.issubdtype(dtype, jax.dtypes.extended) or dtype == jax.dtypes.float0:
        return None
    if dtype.kind in "biufc":
        bits = 8 * int(dtype.itemsize)
    else:
        # This function supports types that NumPy lacks; their itemsize is at least 1.
        info: Any = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
        bits = int(info(dtype).bits)
    return bits // 8 if bits in (8, 16, 32, 64, 128) else None


def _refusal(x: Any, *, axes: Axes) -> Fallback | None:
    if _item_bytes(x.dtype) is None:
        return Fallback(f"no kernel moves {x.dtype}")
    return None


_FREE = Fallback("memory stays as it is, and a change of shape is free", is_loss=False)


def _permutation(x: Any, axes: Axes) -> Permutation | None:
    """Return what moves memory, or ``None`` if nothing does."""
    itemsize = _item_bytes(x.dtype)
    assert itemsize is not None
    permutation = Permutation.reduced(x.shape, axes, itemsize)
    return permutation if len(permutation.sizes) > 1 else None


def _cuda(operands: Sequence[Operand], _: Any, *, axes: Axes) -> PlannedKernel | Fallback:
    (x,) = operands
    permutation = _permutation(x.aval, axes)
    return _FREE if permutation is None else planned_kernel((x.value,), plan_transpose, permutation)


def _cpu(operands: Sequence[Operand], _: Any, *, axes: Axes) -> PlannedKernel | Fallback:
    (x,) = operands
    permutation = _permutation(x.aval, axes)
    if permutation is None:
        return _FREE
    sizes, order = tuple(permutation.sizes), tuple(permutation.order)
    call = ffi.CpuCall(
        ffi.CPU_TRANSPOSE,
        {"sizes": sizes, "permutation": order, "stream": int(is_streamed(permutation))},
    )
    kernel = PlannedKernel("cpu_transpose", f"sizes {sizes} in the order {order}", call, (x.value,))
    return chosen_cpu_kernel(transpose_workload(permutation), kernel)


def is_moved_by_kernel(x: Any, axes: Sequence[int]) -> bool:
    """Return whether a kernel of this CPU transposes an abstract value, and not XLA."""
    axes = tuple(axes)
    refused = _refusal(x, axes=axes) is not None or 0 in x.shape
    return not refused and isinstance(_cpu([Operand(None, x)], None, axes=axes), PlannedKernel)


_bind = define(
    Operation(
        name="tilekern_transpose",
        reference=_reference,
        transposes={0: _cotangent},
        batch=_batch,
        sharding_rule=_sharding_rule,
        planners={
            "cpu": Planner(_refusal, _cpu),
            "cuda": Planner(_refusal, _cuda),
        },
        describe=lambda axes: f"transpose {axes}",
    )
)
