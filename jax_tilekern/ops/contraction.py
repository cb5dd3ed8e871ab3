"""The primitive behind every matrix product: a contraction over labelled dimensions.

It is closed under differentiation and batching. The cotangent of an operand is a contraction of
the other operand with the output's cotangent, written straight into the operand's own dimension
order; ``vmap`` adds one label to whatever carries the mapped axis. Neither moves any data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_tilekern import compat, ffi, primitive
from jax_tilekern.compiler import NvrtcNotFound
from jax_tilekern.plans.arithmetic import (
    FP8,
    Converted,
    cpu_arithmetic,
    cuda_arithmetic,
    precision_name,
)
from jax_tilekern.plans.contraction import Contraction, Labels, matmul_geometry
from jax_tilekern.plans.cpu import has_amx
from jax_tilekern.plans.geometry import MatmulGeometry
from jax_tilekern.plans.gpu import NoGpu, current_gpu
from jax_tilekern.plans.matmul import plan_matmul
from jax_tilekern.plans.product import NoKernel, Product
from jax_tilekern.primitive import Fallback, Kernel, Operation, Rewrite


def contract(
    lhs: Array, rhs: Array, contraction: Contraction, *, precision: Any, out_dtype: np.dtype[Any]
) -> Array:
    """Contract two arrays.

    Parameters
    ----------
    lhs, rhs
        Operands; where their types differ, both are cast to a common one first.
    contraction
        Labels of their dimensions and of the result's.
    precision
        Canonical, as :func:`jax_tilekern.compat.canonicalize_precision` returns it.
    out_dtype
        Type of the result.
    """
    lhs, rhs = _common_type(lhs, rhs)
    result: Array = _bind(
        lhs, rhs, contraction=contraction, precision=precision, out_dtype=np.dtype(out_dtype)
    )
    return result


def shard_like(x: Array, labels: Labels, wanted: Labels, sharding: NamedSharding | None) -> Array:
    """Reshard an operand as an output is sharded, under a mesh with explicit axes.

    The dimensions that the output has take its axes; the others are gathered, because a kernel
    contracts whole dimensions.
    """
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return x
    axes = dict(zip(wanted, sharding.spec, strict=False))
    spec = PartitionSpec(*(axes.get(label) for label in labels))
    return x if jax.typeof(x).sharding.spec == spec else jax.sharding.reshard(x, spec)


def _common_type(lhs: Array, rhs: Array) -> tuple[Array, Array]:
    types = lhs.dtype, rhs.dtype
    if types[0] == types[1] or all(t in FP8 for t in types):
        return lhs, rhs
    try:
        common = jnp.promote_types(*types)
    except (
        jax.dtypes.TypePromotionError
    ):  # an 8-bit float has no implicit promotion; the wider type holds it
        common = max(types, key=lambda t: t.itemsize)
    return lhs.astype(common), rhs.astype(common)


def _reference(
    lhs: Array, rhs: Array, *, contraction: Contraction, precision: Any, out_dtype: Any
) -> Array:
    out = lax.dot_general(
        lhs,
        rhs,
        contraction.dimension_numbers,
        precision=precision,
        preferred_element_type=out_dtype,
    )
    return _transposed(out, contraction.dot_general_out, contraction.out)


def _transposed(x: Array, labels: Labels, wanted: Labels) -> Array:
    return x if labels == wanted else lax.transpose(x, tuple(map(labels.index, wanted)))


# Differentiation: the operand's cotangent has the operand's own labels.


def _cotangent(
    lhs: Array, rhs: Array, contraction: Contraction, like: Any, precision: Any
) -> Array:
    lhs = shard_like(lhs, contraction.lhs, contraction.out, like.sharding)
    rhs = shard_like(rhs, contraction.rhs, contraction.out, like.sharding)
    return contract(lhs, rhs, contraction, precision=precision, out_dtype=like.dtype)


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
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    contraction: Contraction,
    **params: Any,
) -> tuple[Array, int]:
    """Label the mapped axis where it lies; an operand without it is not touched."""
    mapped = 1 + max(*contraction.lhs, *contraction.rhs, -1, -1)

    def labelled(labels: Labels, dim: int | None) -> Labels:
        return labels if dim is None else (*labels[:dim], mapped, *labels[dim:])

    batched = Contraction(
        labelled(contraction.lhs, dims[0]),
        labelled(contraction.rhs, dims[1]),
        (mapped, *contraction.out),
    )
    lhs, rhs = operands
    return contract(lhs, rhs, batched, **params), 0


# Lowering. A planner gets MLIR values, so it can see where they come from.


class _Operand(NamedTuple):
    """A value to read, with the labels and sizes of its dimensions where it lies."""

    value: Any
    labels: Labels
    shape: tuple[int, ...]
    aval: Any


def _where_it_lies(operand: _Operand) -> _Operand:
    """Look through the transpose that makes an operand, if one does."""
    source = compat.transposed_from(operand.value)
    if source is None:
        return operand
    value, permutation = source
    inverse = [permutation.index(i) for i in range(len(permutation))]
    shape = tuple(operand.shape[i] for i in inverse)
    labels = tuple(operand.labels[i] for i in inverse)
    return _Operand(value, labels, shape, jax.core.ShapedArray(shape, operand.aval.dtype))


class _Platform(NamedTuple):
    """What a platform's kernels do.

    ``arithmetic(lhs, rhs, out, precision)`` chooses from the types; ``obstacle(geometry)`` says
    what keeps kernels from a geometry, if anything does; ``kernel(ctx, lhs, rhs, geometry,
    arithmetic)`` plans the rest.
    """

    arithmetic: Callable[..., str | Converted | None]
    obstacle: Callable[[MatmulGeometry], str | None]
    kernel: Callable[..., Kernel | Fallback]


def _plan(
    platform: _Platform,
    ctx: Any,
    lhs: Any,
    rhs: Any,
    *,
    contraction: Contraction,
    precision: Any,
    out_dtype: np.dtype[Any],
) -> Kernel | Rewrite | Fallback:
    lhs_aval, rhs_aval = ctx.avals_in
    sizes = (*lhs_aval.shape, *rhs_aval.shape)
    if not all(isinstance(size, int) for size in sizes):
        return Fallback("a plan needs every size, and this shape is symbolic")
    if 0 in sizes:
        return Fallback("an empty product has nothing to compute")
    if all(lhs_aval.shape[contraction.lhs.index(x)] == 1 for x in contraction.contracted):
        # For example per-example gradients, whose norms then never touch memory.
        return Fallback("nothing is contracted, and XLA fuses an outer product into what uses it")

    name = precision_name(precision)
    arithmetic = platform.arithmetic(lhs_aval.dtype, rhs_aval.dtype, out_dtype, name)
    if arithmetic is None:
        types = f"{lhs_aval.dtype} x {rhs_aval.dtype} -> {out_dtype}"
        return Fallback(f"no kernel for {types} at precision {name}")
    if isinstance(arithmetic, Converted):
        return Rewrite(
            f"computed as {arithmetic.operands} -> {arithmetic.result}: {arithmetic.reason}",
            functools.partial(_converted, arithmetic, contraction, precision, out_dtype),
        )

    as_given = (
        _Operand(lhs, contraction.lhs, lhs_aval.shape, lhs_aval),
        _Operand(rhs, contraction.rhs, rhs_aval.shape, rhs_aval),
    )
    obstacle: str | None = None
    for left, right in (tuple(map(_where_it_lies, as_given)), as_given):
        labels = Contraction(left.labels, right.labels, contraction.out)
        oriented = matmul_geometry(labels, left.shape, right.shape)
        if isinstance(oriented, str):
            obstacle = oriented
            continue
        obstacle = platform.obstacle(oriented.geometry)
        if obstacle is None:
            if oriented.swapped:
                left, right = right, left
            ctx = ctx.replace(avals_in=[left.aval, right.aval])
            return platform.kernel(ctx, left.value, right.value, oriented.geometry, arithmetic)
    return Rewrite(
        f"operands reordered first: {obstacle}",
        functools.partial(_reordered, contraction, precision, out_dtype),
    )


def _converted(
    types: Converted,
    contraction: Contraction,
    precision: Any,
    out_dtype: np.dtype[Any],
    lhs: Array,
    rhs: Array,
) -> Array:
    if lhs.dtype not in FP8:
        lhs, rhs = lhs.astype(types.operands), rhs.astype(types.operands)
    out = contract(lhs, rhs, contraction, precision=precision, out_dtype=types.result)
    return out.astype(out_dtype)


def _reordered(
    contraction: Contraction, precision: Any, out_dtype: np.dtype[Any], lhs: Array, rhs: Array
) -> Array:
    plain = contraction.mergeable()
    out = contract(
        _transposed(lhs, contraction.lhs, plain.lhs),
        _transposed(rhs, contraction.rhs, plain.rhs),
        plain,
        precision=precision,
        out_dtype=out_dtype,
    )
    return _transposed(out, plain.out, contraction.out)


def _cpu_kernel(
    ctx: Any, lhs: Any, rhs: Any, geometry: MatmulGeometry, arithmetic: str
) -> Kernel | Fallback:
    attributes = {
        "sizes": (*geometry.batch, geometry.m, geometry.n, geometry.k),
        "lhs_strides": geometry.lhs_strides,
        "rhs_strides": geometry.rhs_strides,
        "out_strides": geometry.out_strides,
    }
    few = min(geometry.m, geometry.n) < 8
    if arithmetic in ("bfloat16", "int8") and has_amx() and not few and _k_major_lhs(geometry):
        return Fallback(f"XLA multiplies {arithmetic} in this CPU's matrix units (AMX)")
    if (
        geometry.m == geometry.n == 1
        and not geometry.lhs_strides[-1] == geometry.rhs_strides[-2] == 1
    ):
        return Fallback(
            "XLA is faster where the vectors of a dot product are not contiguous (0.01)"
        )
    arrays = {name: np.array(values, np.int64) for name, values in attributes.items()}
    types = [str(aval.dtype) for aval in (*ctx.avals_in, *ctx.avals_out)]
    return Kernel(
        name=ffi.cpu_matmul_kernel(types, **arrays),
        reason=f"{arithmetic}, {_major_orders(geometry)}",
        emit=lambda: ffi.cpu_call(ctx, "jax_tilekern_cpu_matmul", (lhs, rhs), **arrays),
    )


def _cuda_kernel(
    ctx: Any, lhs: Any, rhs: Any, geometry: MatmulGeometry, arithmetic: str
) -> Kernel | Fallback:
    try:
        gpu = current_gpu()
        lhs_type, rhs_type, out_type = (aval.dtype for aval in (*ctx.avals_in, *ctx.avals_out))
        product = Product(geometry, lhs_type, rhs_type, out_type, arithmetic)
        plan = plan_matmul(product, gpu)
    except (NoGpu, NvrtcNotFound) as error:
        return Fallback(str(error))
    if isinstance(plan, NoKernel):
        return Fallback(plan.reason)
    return Kernel(
        name=plan.name,
        reason=plan.reason,
        emit=lambda: ffi.cuda_launch(ctx, (lhs, rhs), plan),
    )


def _k_major_lhs(geometry: MatmulGeometry) -> bool:
    return geometry.lhs_strides[-1] == 1


def _major_orders(geometry: MatmulGeometry) -> str:
    lhs = "k" if _k_major_lhs(geometry) else "m"
    rhs = "n" if geometry.rhs_strides[-1] == 1 else "k"
    return f"lhs {lhs}-major, rhs {rhs}-major"


def _no_unit_stride(geometry: MatmulGeometry) -> str | None:
    for name, strides in (("lhs", geometry.lhs_strides), ("rhs", geometry.rhs_strides)):
        if 1 not in strides[-2:]:
            return f"a batch dimension is the innermost of {name}"
    return None


_bind = primitive.define(
    Operation(
        name="tilekern_contract",
        reference=_reference,
        transposes={0: _lhs_cotangent, 1: _rhs_cotangent},
        batch=_batch,
        planners={
            "cpu": functools.partial(
                _plan, _Platform(cpu_arithmetic, lambda geometry: None, _cpu_kernel)
            ),
            "cuda": functools.partial(
                _plan, _Platform(cuda_arithmetic, _no_unit_stride, _cuda_kernel)
            ),
        },
        describe=lambda contraction, **_: str(contraction),
    )
)
