"""The primitive behind every matrix product: a contraction over labelled dimensions.

It is closed under differentiation and batching. The cotangent of an operand is a contraction of
the other operand with the output's cotangent, written straight into the operand's own dimension
order; ``vmap`` adds one label to whatever carries the mapped axis. Neither moves any data.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jax_tilekern.interop import compat, ffi
from jax_tilekern.ops.labelled_lowering import (
    LabelledOperand,
    Platform,
    cast_first,
    chosen_arithmetic,
    cpu_attributes,
    ways_to_read,
)
from jax_tilekern.ops.labelled_operands import (
    common_type,
    converted,
    product_by_lax,
    transposed,
)
from jax_tilekern.ops.planned_kernel import chosen_cpu_kernel, planned_kernel
from jax_tilekern.partitioning.rule import ShardingRule, sizes_of
from jax_tilekern.plans.cpu import product_reason
from jax_tilekern.plans.gemm.arithmetic import (
    Converted,
    cpu_arithmetic,
    cuda_arithmetic,
)
from jax_tilekern.plans.gemm.contraction import Contraction, Labels, matmul_geometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.select import plan_matmul
from jax_tilekern.plans.policy.workload import of_product
from jax_tilekern.primitives.operation import (
    Fallback,
    Kernel,
    Operand,
    Operation,
    Params,
    Planner,
    Rewrite,
    define,
)


def contract(
    lhs: Array,
    rhs: Array,
    contraction: Contraction,
    *,
    precision: Any,
    out_dtype: np.dtype[Any],
    out_sharding: NamedSharding | None = None,
) -> Array:
    """Contract two arrays.

    Parameters
    ----------
    lhs, rhs
        Operands; where their types differ, both are cast to a common one first.
    contraction
        Labels of their dimensions and of the result's.
    precision
        Canonical, as :func:`jax_tilekern.interop.compat.canonicalize_precision` returns it.
    out_dtype
        Type of the result.
    out_sharding
        Sharding of the result on a mesh with explicit axes; by default what follows from the
        operands'.
    """
    lhs, rhs = common_type(lhs, rhs, out_dtype, precision)
    result: Array = _bind(
        lhs,
        rhs,
        contraction=contraction,
        precision=precision,
        out_dtype=np.dtype(out_dtype),
        out_sharding=out_sharding,
    )
    return result


# Differentiation: the operand's cotangent has the operand's own labels, and its sharding.


def _cotangent(
    lhs: Array, rhs: Array, contraction: Contraction, like: Any, precision: Any
) -> Array:
    return contract(
        lhs,
        rhs,
        contraction,
        precision=precision,
        out_dtype=like.dtype,
        out_sharding=compat.cotangent_sharding(like),
    )


def _lhs_cotangent(
    cotangent: Array, lhs: Any, rhs: Array, *, contraction: Contraction, precision: Any, **_: Any
) -> Array:
    labels = Contraction(contraction.out, contraction.rhs, contraction.lhs)
    return _cotangent(cotangent, rhs, labels, lhs, precision)


def _rhs_cotangent(
    cotangent: Array, lhs: Array, rhs: Any, *, contraction: Contraction, precision: Any, **_: Any
) -> Array:
    labels = Contraction(contraction.lhs, contraction.out, contraction.rhs)
    return _cotangent(lhs, cotangent, labels, rhs, precision)


def _batch(
    axis_data: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    contraction: Contraction,
    out_sharding: NamedSharding | None,
    **params: Any,
) -> tuple[Array, int]:
    """Label the mapped axis in place; an operand without it is unchanged."""
    batched = contraction.mapped(*dims)
    lhs, rhs = operands
    out_sharding = compat.sharding_under_vmap(axis_data, out_sharding, 0)
    return contract(lhs, rhs, batched, out_sharding=out_sharding, **params), 0


# Partitioning: the labels state which dimensions may be split among devices.


def sharding_rule(lhs: Any, rhs: Any, *, contraction: Contraction, **_: Any) -> ShardingRule:
    """Return the rule of a contraction, whose labels are those of the product."""
    c = contraction
    sizes = sizes_of((c.lhs, lhs.shape), (c.rhs, rhs.shape))
    return ShardingRule(
        (c.lhs, c.rhs), (c.out,), sizes, flops=2 * math.prod(sizes.values()), names=c.names
    )


def source(
    operands: Sequence[Operand], *, contraction: Contraction, **params: Any
) -> tuple[Sequence[Operand], Params]:
    """Return the operands where they lie in memory, and the contraction of those."""
    lhs, rhs = (x.source for x in _labelled(operands, contraction))
    labels = Contraction(lhs.labels, rhs.labels, contraction.out)
    return [Operand(x.value, x.aval) for x in (lhs, rhs)], {**params, "contraction": labels}


def _labelled(operands: Sequence[Operand], contraction: Contraction) -> list[LabelledOperand]:
    labels = (contraction.lhs, contraction.rhs)
    return [LabelledOperand(*x, own) for x, own in zip(operands, labels, strict=True)]


# Lowering: state the problem, then plan it.

_CPU = Platform(cpu_arithmetic, needs_unit_stride=False)
CUDA = Platform(cuda_arithmetic, needs_unit_stride=True)


def _refusal(
    platform: Platform,
    lhs: Any,
    rhs: Any,
    *,
    contraction: Contraction,
    precision: Any,
    out_dtype: np.dtype[Any],
    **_: Any,
) -> Fallback | None:
    if all(lhs.shape[contraction.lhs.index(x)] == 1 for x in contraction.contracted):
        # XLA fuses for example the norms of per-example gradients, which then need no memory.
        return Fallback("nothing is contracted, and XLA fuses an outer product into what uses it")
    arithmetic = chosen_arithmetic(platform, lhs, rhs, out_dtype, precision)
    return arithmetic if isinstance(arithmetic, Fallback) else None


class Problem(NamedTuple):
    """A contraction as a kernel sees it."""

    product: Product
    # MLIR values of the arrays that the kernel reads, in the product's order.
    operands: tuple[Any, Any]
    # Batch strides and the strides of m and n of each further array.
    further_strides: tuple[tuple[int, ...], ...]


def state_problem(
    platform: Platform,
    operands: Sequence[Operand],
    *,
    contraction: Contraction,
    precision: Any,
    out_dtype: np.dtype[Any],
    further: Sequence[Labels] = (),
    **_: Any,
) -> Problem | Rewrite | Fallback:
    """State the product that a contraction is, or return how it is computed without stating one.

    ``further`` has the labels of further arrays that an epilogue reads and writes.
    """
    lhs, rhs = _labelled(operands, contraction)
    arithmetic = chosen_arithmetic(platform, lhs.aval, rhs.aval, out_dtype, precision)
    if isinstance(arithmetic, Fallback):
        return arithmetic
    if isinstance(arithmetic, Converted):
        return cast_first(
            arithmetic,
            functools.partial(_converted, arithmetic, contraction, precision, out_dtype),
        )
    obstacle: str | None = None
    for left, right in ways_to_read(lhs, rhs):
        labels = Contraction(left.labels, right.labels, contraction.out)
        found = matmul_geometry(labels, left.aval.shape, right.aval.shape, further)
        obstacle = found if isinstance(found, str) else platform.obstacle(found.geometry)
        if isinstance(found, str) or obstacle is not None:
            continue
        if found.swapped:
            left, right = right, left
        types = (left.aval.dtype, right.aval.dtype, out_dtype)
        return Problem(
            Product(found.geometry, *types, arithmetic),
            (left.value, right.value),
            found.further_strides,
        )
    return Rewrite(
        f"operands reordered first: {obstacle}",
        functools.partial(_reordered, contraction, precision, out_dtype),
    )


def _cuda_kernel(problem: Problem) -> Kernel | Fallback:
    return planned_kernel(problem.operands, plan_matmul, problem.product)


def _cpu_kernel(problem: Problem) -> Kernel | Fallback:
    product = problem.product
    geometry, arithmetic = product.geometry, product.arithmetic
    if geometry.m == geometry.n == 1 and {geometry.lhs_strides[-1], geometry.rhs_strides[-2]} != {
        1
    }:
        return Fallback("no kernel reads the vectors of a dot product unless they are contiguous")
    attributes = cpu_attributes(geometry)
    types = [str(dtype) for dtype in (product.lhs_dtype, product.rhs_dtype, product.out_dtype)]
    name = ffi.cpu_matmul_kernel(types, attributes)
    call = ffi.CpuCall(ffi.CPU_MATMUL, attributes)
    kernel = Kernel(name, product_reason(name, arithmetic), call, problem.operands)
    return chosen_cpu_kernel(of_product(product), kernel)


def _planner(platform: Platform, emit: Callable[[Problem], Kernel | Fallback]) -> Planner:
    """Return the planner of a platform, whose kernels ``emit`` plans."""

    def plan(
        operands: Sequence[Operand],
        avals: Any,
        *,
        contraction: Contraction,
        precision: Any,
        out_dtype: np.dtype[Any],
        **_: Any,
    ) -> Kernel | Rewrite | Fallback:
        of_call = {"contraction": contraction, "precision": precision}
        lhs, rhs = (x.aval for x in operands)
        arithmetic = chosen_arithmetic(platform, lhs, rhs, out_dtype, precision)
        wraps = lhs.dtype == rhs.dtype and lhs.dtype.kind == out_dtype.kind == "i"
        if isinstance(arithmetic, Converted) and wraps:
            wide = plan(operands, avals, **of_call, out_dtype=arithmetic.result)
            if isinstance(wide, Fallback):
                # XLA computes the call as it is, and nothing wider.
                return wide
        problem = state_problem(platform, operands, **of_call, out_dtype=out_dtype)
        if not isinstance(problem, Problem):
            return problem
        return emit(problem)

    return Planner(functools.partial(_refusal, platform), plan)


def _converted(
    types: Converted,
    contraction: Contraction,
    precision: Any,
    out_dtype: np.dtype[Any],
    lhs: Array,
    rhs: Array,
) -> Array:
    lhs, rhs = converted(types, lhs, rhs)
    out = contract(lhs, rhs, contraction, precision=precision, out_dtype=types.result)
    return out.astype(out_dtype)


def _reordered(
    contraction: Contraction, precision: Any, out_dtype: np.dtype[Any], lhs: Array, rhs: Array
) -> Array:
    plain = contraction.mergeable()
    out = contract(
        transposed(lhs, contraction.lhs, plain.lhs),
        transposed(rhs, contraction.rhs, plain.rhs),
        plain,
        precision=precision,
        out_dtype=out_dtype,
    )
    return transposed(out, plain.out, contraction.out)


def as_dot_general(
    contraction: Contraction, precision: Any, out_dtype: np.dtype[Any], **_: Any
) -> tuple[compat.Primitive, dict[str, Any]]:
    """Return the primitive of JAX's, and its parameters, as which policies see a contraction."""
    return compat.dot_general_p, {
        "dimension_numbers": contraction.dimension_numbers,
        "precision": precision,
        "preferred_element_type": out_dtype,
        "out_sharding": None,
    }


_bind = define(
    Operation(
        name="tilekern_contract",
        reference=product_by_lax,
        transposes={0: _lhs_cotangent, 1: _rhs_cotangent},
        batch=_batch,
        sharding_rule=sharding_rule,
        planners={
            "cpu": _planner(_CPU, _cpu_kernel),
            "cuda": _planner(CUDA, _cuda_kernel),
        },
        describe=lambda contraction, **_: str(contraction),
        source=source,
        in_float32=lambda **params: {**params, "out_dtype": np.dtype(np.float32)},
        stands_for=as_dot_general,
    )
)
