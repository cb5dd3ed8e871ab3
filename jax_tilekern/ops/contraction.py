"""The primitive behind every matrix product: a contraction over labelled dimensions.

It is closed under differentiation and batching. The cotangent of an operand is a contraction of
the other operand with the output's cotangent, written straight into the operand's own dimension
order; ``vmap`` adds one label to whatever carries the mapped axis. Neither moves any data.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jax_tilekern.ops.labelled_lowering import (
    Operand,
    Platform,
    chosen_arithmetic,
    cpu_attributes,
    readable,
    unplannable,
    where_it_lies,
)
from jax_tilekern.ops.labelled_operands import (
    common_type,
    converted,
    labelled,
    product_by_lax,
    transposed,
)
from jax_tilekern.ops.planned_kernel import planned_kernel
from jax_tilekern.partitioning.rule import ShardingRule, sizes_of
from jax_tilekern.plans.cpu import has_amx
from jax_tilekern.plans.gemm.arithmetic import Converted, cpu_arithmetic, cuda_arithmetic
from jax_tilekern.plans.gemm.contraction import Contraction, Oriented, matmul_geometry
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.select import plan_matmul
from jax_tilekern.primitives import compat, ffi
from jax_tilekern.primitives import operation as primitive
from jax_tilekern.primitives.operation import Fallback, Kernel, Operation, Planner, Rewrite, Source


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
        Canonical, as :func:`jax_tilekern.primitives.compat.canonicalize_precision` returns it.
    out_dtype
        Type of the result.
    out_sharding
        Sharding of the result on a mesh with explicit axes; by default what follows from the
        operands'.
    """
    lhs, rhs = common_type(lhs, rhs)
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
        out_sharding=compat.explicit_sharding(like),
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
    """Label the mapped axis where it lies; an operand without it is not touched."""
    mapped = 1 + max(*contraction.lhs, *contraction.rhs, -1, -1)
    batched = Contraction(
        labelled(contraction.lhs, mapped, dims[0]),
        labelled(contraction.rhs, mapped, dims[1]),
        (mapped, *contraction.out),
    )
    lhs, rhs = operands
    out_sharding = compat.sharding_under_vmap(axis_data, out_sharding, 0)
    return contract(lhs, rhs, batched, out_sharding=out_sharding, **params), 0


# Partitioning: the labels say which dimensions devices may share.


def _sharding_rule(lhs: Any, rhs: Any, *, contraction: Contraction, **_: Any) -> ShardingRule:
    c = contraction
    sizes = sizes_of((c.lhs, lhs.shape), (c.rhs, rhs.shape))
    return ShardingRule(
        (c.lhs, c.rhs), (c.out,), sizes, flops=2 * math.prod(sizes.values()), names=c.names
    )


def _source(ctx: Any, lhs: Any, rhs: Any, *, contraction: Contraction, **params: Any) -> Source:
    left, right = (
        where_it_lies(Operand(value, labels, aval))
        for value, labels, aval in zip(
            (lhs, rhs), (contraction.lhs, contraction.rhs), ctx.avals_in, strict=True
        )
    )
    labels = Contraction(left.labels, right.labels, contraction.out)
    return Source(
        (left.value, right.value), (left.aval, right.aval), {**params, "contraction": labels}
    )


# Lowering.


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
    if refusal := unplannable((lhs, rhs)):
        return refusal
    if all(lhs.shape[contraction.lhs.index(x)] == 1 for x in contraction.contracted):
        # For example per-example gradients, whose norms then never touch memory.
        return Fallback("nothing is contracted, and XLA fuses an outer product into what uses it")
    arithmetic = chosen_arithmetic(platform, lhs, rhs, out_dtype, precision)
    return arithmetic if isinstance(arithmetic, Fallback) else None


def _plan(
    platform: Platform,
    ctx: Any,
    lhs: Any,
    rhs: Any,
    *,
    contraction: Contraction,
    precision: Any,
    out_dtype: np.dtype[Any],
    **_: Any,
) -> Kernel | Rewrite | Fallback:
    lhs_aval, rhs_aval = ctx.avals_in
    arithmetic = chosen_arithmetic(platform, lhs_aval, rhs_aval, out_dtype, precision)
    if isinstance(arithmetic, Fallback):
        return arithmetic
    if isinstance(arithmetic, Converted):
        return Rewrite(
            f"computed as {arithmetic.operands} -> {arithmetic.result}: {arithmetic.reason}",
            functools.partial(_converted, arithmetic, contraction, precision, out_dtype),
        )

    def collapsed(left: Operand, right: Operand) -> Oriented | str:
        labels = Contraction(left.labels, right.labels, contraction.out)
        oriented = matmul_geometry(labels, left.aval.shape, right.aval.shape)
        if isinstance(oriented, str):
            return oriented
        return platform.obstacle(oriented.geometry) or oriented

    found = readable(
        Operand(lhs, contraction.lhs, lhs_aval), Operand(rhs, contraction.rhs, rhs_aval), collapsed
    )
    if isinstance(found, str):
        return Rewrite(
            f"operands reordered first: {found}",
            functools.partial(_reordered, contraction, precision, out_dtype),
        )
    ctx = ctx.replace(avals_in=[found.lhs.aval, found.rhs.aval])
    return platform.kernel(ctx, found.lhs.value, found.rhs.value, found.geometry, arithmetic)


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


def _cpu_kernel(
    ctx: Any, lhs: Any, rhs: Any, geometry: MatmulGeometry, arithmetic: str
) -> Kernel | Fallback:
    few = min(geometry.m, geometry.n) < 8
    if arithmetic in ("bfloat16", "int8") and has_amx() and not few and geometry.lhs_k_major:
        return Fallback(f"XLA multiplies {arithmetic} in this CPU's matrix units (AMX)")
    if (
        geometry.m == geometry.n == 1
        and not geometry.lhs_strides[-1] == geometry.rhs_strides[-2] == 1
    ):
        return Fallback(
            "XLA is faster where the vectors of a dot product are not contiguous (0.01)"
        )
    attributes = cpu_attributes(geometry)
    arrays = {name: np.array(values, np.int64) for name, values in attributes.items()}
    types = [str(aval.dtype) for aval in (*ctx.avals_in, *ctx.avals_out)]
    return Kernel(
        name=ffi.cpu_matmul_kernel(types, **arrays),
        reason=f"{arithmetic}, {geometry.major_orders}",
        emit=lambda: ffi.cpu_call(ctx, "jax_tilekern_cpu_matmul", (lhs, rhs), **arrays),
    )


def _cuda_kernel(
    ctx: Any, lhs: Any, rhs: Any, geometry: MatmulGeometry, arithmetic: str
) -> Kernel | Fallback:
    lhs_type, rhs_type, out_type = (aval.dtype for aval in (*ctx.avals_in, *ctx.avals_out))
    product = Product(geometry, lhs_type, rhs_type, out_type, arithmetic)
    return planned_kernel(ctx, (lhs, rhs), plan_matmul, product)


def _planner(platform: Platform) -> Planner:
    return Planner(functools.partial(_refusal, platform), functools.partial(_plan, platform))


def _as_dot_general(
    contraction: Contraction, precision: Any, out_dtype: np.dtype[Any], **_: Any
) -> tuple[compat.Primitive, dict[str, Any]]:
    return compat.dot_general_p, {
        "dimension_numbers": contraction.dimension_numbers,
        "precision": precision,
        "preferred_element_type": out_dtype,
        "out_sharding": None,
    }


_bind = primitive.define(
    Operation(
        name="tilekern_contract",
        reference=product_by_lax,
        transposes={0: _lhs_cotangent, 1: _rhs_cotangent},
        batch=_batch,
        sharding_rule=_sharding_rule,
        planners={
            "cpu": _planner(Platform(cpu_arithmetic, lambda geometry: None, _cpu_kernel)),
            "cuda": _planner(
                Platform(
                    cuda_arithmetic, lambda geometry: geometry.without_unit_stride, _cuda_kernel
                )
            ),
        },
        describe=lambda contraction, **_: str(contraction),
        source=_source,
        in_float32=lambda **params: {**params, "out_dtype": np.dtype(np.float32)},
        stands_for=_as_dot_general,
    )
)
