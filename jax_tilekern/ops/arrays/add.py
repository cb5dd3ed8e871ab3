"""``add``: JAX's semantics over one primitive; the worked example of ``docs/add-an-operation.md``.

The primitive takes operands of one type and rank, of which sizes of 1 are broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.typing import ArrayLike

from jax_tilekern.interop import compat, ffi
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.arrays.sum import sum as sum_over
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.planned_kernel import chosen_cpu_kernel, planned_kernel
from jax_tilekern.partitioning.rule import ShardingRule, rule_over_axes
from jax_tilekern.plans.add import ADDED_DTYPES, AddedDims, plan_add
from jax_tilekern.plans.policy import current_policy
from jax_tilekern.plans.policy.workload import add_workload
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    PlannedKernel,
    Planner,
    define,
)

# The CPU's handler adds row by row.
_SHORT = 128
# XLA computes a program of fewer operations in the thread that calls it.
_FEW = 1000


@jitted()
def add(x: ArrayLike, y: ArrayLike, /) -> Array:
    """Sum of two arrays, with the semantics of :func:`jax.numpy.add`.

    It is a function, and no ufunc: it has no ``out``, ``where``, ``at`` or ``reduce``. XLA fuses an
    addition with what is around it, which a kernel of its own rules out: this one is here to be
    read.

    Parameters
    ----------
    x, y
        Arrays or scalars whose shapes broadcast; what is broadcast is not materialised. Their
        types are promoted as JAX promotes them.

    Returns
    -------
    Array
        Of the broadcast shape and the promoted type.

    Raises
    ------
    TypeError
        If an operand is not an array or a scalar, or the shapes do not broadcast.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.add(jnp.ones((2, 3)), jnp.arange(3))
    Array([[1., 2., 3.],
           [1., 2., 3.]], dtype=float32)
    """
    result = jax.eval_shape(jnp.add, x, y)
    operands = [compat.as_type(operand, result.dtype) for operand in (x, y)]
    rank = len(result.shape)
    total = _bind(*(lax.expand_dims(operand, range(rank - operand.ndim)) for operand in operands))
    return compat.with_type(total, result.dtype, result.weak_type)


def _cotangents(cotangent: Array, x: Any, y: Any) -> tuple[Array, Array]:
    return _summed_to(cotangent, x), _summed_to(cotangent, y)


def _summed_to(cotangent: Array, like: Any) -> Array:
    """Sum over what ``like`` was broadcast over."""
    axes = [i for i, size in enumerate(like.shape) if size != cotangent.shape[i]]
    if axes:
        cotangent = sum_over(cotangent, axes, keepdims=True)
    sharding = compat.explicit_sharding(like)
    return cotangent if sharding is None else jax.sharding.reshard(cotangent, sharding)


def _batch(_: Any, operands: Sequence[Array], dims: Sequence[int | None]) -> tuple[Array, int]:
    """Put the mapped axis where the first operand that has it has it."""
    mapped = next(dim for dim in dims if dim is not None)
    aligned = [
        lax.expand_dims(x, (mapped,)) if dim is None else jnp.moveaxis(x, dim, mapped)
        for x, dim in zip(operands, dims, strict=True)
    ]
    return _bind(*aligned), mapped


def _sharding_rule(x: Any, y: Any) -> ShardingRule:
    """Label dimensions by their index; every device has broadcast dimensions whole."""
    shape = tuple(map(max, x.shape, y.shape))
    operands = tuple(
        (tuple(i if size == shape[i] else None for i, size in enumerate(a.shape)), tuple(a.shape))
        for a in (x, y)
    )
    return rule_over_axes(operands, tuple(range(x.ndim)), flops=math.prod(shape))


# Lowering: a planner answers with a kernel, or with the reason why there is none.


def _refusal(x: Any, y: Any) -> Fallback | None:
    return None if x.dtype in ADDED_DTYPES else Fallback(f"no kernel adds {x.dtype}")


def _cuda(operands: Sequence[Operand], _: Any) -> PlannedKernel | Fallback:
    x, y = operands
    dims = AddedDims.of(x.aval.shape, y.aval.shape)
    return planned_kernel((x.value, y.value), plan_add, dims, x.aval.dtype)


def _cpu(operands: Sequence[Operand], _: Any) -> PlannedKernel | Fallback:
    x, y = operands
    dims = AddedDims.of(x.aval.shape, y.aval.shape)
    *outer, columns = dims.sizes
    if outer and columns < _SHORT:
        return Fallback(f"XLA adds rows of {columns} elements")
    if current_policy() != "kernels":
        if math.prod(dims.sizes) < _FEW:
            return Fallback("XLA adds few elements without a call")
        if any(compat.transposed_from(operand.value) for operand in operands):
            return Fallback("XLA reads an operand before its transpose")
    call = ffi.CpuCall(ffi.CPU_ADD, dims._asdict())
    kernel = PlannedKernel(f"cpu_add {x.aval.dtype}", str(dims), call, (x.value, y.value))
    return chosen_cpu_kernel(add_workload(dims, x.aval.dtype), kernel)


_bind = define(
    Operation(
        name="tilekern_add",
        reference=jnp.add,
        transposes={(0, 1): _cotangents},
        batch=_batch,
        sharding_rule=_sharding_rule,
        planners={"cpu": Planner(_refusal, _cpu), "cuda": Planner(_refusal, _cuda)},
        describe=lambda: "add",
    )
)
