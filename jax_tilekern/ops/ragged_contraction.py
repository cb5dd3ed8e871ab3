"""The primitive behind every grouped GEMM: a contraction of each group's rows.

It is closed under differentiation and batching: the cotangent of an operand is a ragged
contraction of the other one with the output's cotangent, written straight into the operand's own
dimension order, and ``vmap`` adds one label to whatever carries the mapped axis. Neither moves any
data.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding

from jax_tilekern.interop import compat, ffi
from jax_tilekern.ops.group_bounds import group_bounds
from jax_tilekern.ops.labelled_lowering import (
    LabelledOperand,
    Platform,
    cast_first,
    chosen_arithmetic,
    cpu_attributes,
    ways_to_read,
)
from jax_tilekern.ops.labelled_operands import (
    broadcasted,
    common_type,
    converted,
    product_by_lax,
    transposed,
)
from jax_tilekern.ops.planned_kernel import planned_kernel
from jax_tilekern.partitioning.local_program import Shard
from jax_tilekern.partitioning.rule import ShardingRule, sizes_of
from jax_tilekern.plans.gemm.arithmetic import Converted, cpu_arithmetic, cuda_arithmetic
from jax_tilekern.plans.gemm.contraction import Contraction, Labels, labelled
from jax_tilekern.plans.grouped_gemm.contraction import RaggedContraction, ragged_geometry
from jax_tilekern.plans.grouped_gemm.problem import GroupedProduct
from jax_tilekern.plans.grouped_gemm.select import plan_grouped_gemm
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


def contract_groups(
    lhs: Array,
    rhs: Array,
    bounds: Array,
    contraction: RaggedContraction,
    *,
    precision: Any,
    out_dtype: np.dtype[Any],
    out_sharding: NamedSharding | None = None,
) -> Array:
    """Contract two arrays group by group.

    Parameters
    ----------
    lhs, rhs
        Operands; where their types differ, both are cast to a common one first.
    bounds
        ``int32``, in order along its last dimension and between 0 and the number of rows.
    contraction
        Labels of their dimensions and of the result's. A label of the bounds need not be the
        result's.
    precision
        Canonical, as :func:`jax_tilekern.interop.compat.canonicalize_precision` returns it.
    out_dtype
        Type of the result.
    out_sharding
        Sharding of the result, which a mesh with explicit axes requires.
    """
    lhs, rhs = common_type(lhs, rhs, out_dtype, precision)
    out = contraction.out
    contracted = contraction.contracted if contraction.ragged_dimension == "k" else ()
    summed = tuple(x for x in contraction.bounds if x not in (*out, *contracted, contraction.group))
    if summed:
        # Groups differ along these dimensions, so each index is a product of its own.
        narrow = jnp.issubdtype(out_dtype, jnp.floating) and np.dtype(out_dtype).itemsize < 4
        sums = np.dtype(np.float32 if narrow else out_dtype)
        each = dataclasses.replace(contraction, out=(*summed, *out))
        products = contract_groups(
            lhs,
            rhs,
            bounds,
            each,
            precision=precision,
            out_dtype=sums,
            out_sharding=compat.with_leading_dims(out_sharding, len(summed)),
        )
        return products.sum(range(len(summed)), dtype=sums).astype(out_dtype)
    result: Array = _bind(
        lhs,
        rhs,
        bounds,
        contraction=contraction,
        precision=precision,
        out_dtype=np.dtype(out_dtype),
        out_sharding=out_sharding,
    )
    return result


def _reference(
    lhs: Array, rhs: Array, bounds: Array, *, out_sharding: NamedSharding | None, **params: Any
) -> Array:
    product = compat.with_automatic_axes(functools.partial(masked_product, **params), out_sharding)
    result: Array = product(lhs, rhs, bounds)
    return result


def masked_product(
    lhs: Array,
    rhs: Array,
    bounds: Array,
    *,
    contraction: RaggedContraction,
    precision: Any,
    out_dtype: Any,
) -> Array:
    """Give the operands the group label, with zeros in rows of other groups, as JAX does."""
    rows = lhs.shape[contraction.lhs.index(contraction.ragged)]
    ends = lax.expand_dims(bounds, [bounds.ndim])
    position = lax.broadcasted_iota(np.int32, (*bounds.shape[:-1], 1, rows), bounds.ndim)
    mask = (ends[..., :-1, :] <= position) & (position < ends[..., 1:, :])
    mask_labels = (*contraction.bounds, contraction.ragged)

    def expanded(x: Array, labels: Labels) -> tuple[Array, Labels]:
        wanted = (*(label for label in mask_labels if label not in labels), *labels)
        sizes = dict(zip((*mask_labels, *labels), (*mask.shape, *x.shape), strict=True))
        x = broadcasted(x, labels, wanted, sizes)
        own = broadcasted(mask, mask_labels, wanted, sizes)
        return lax.select(own, x, lax.full_like(x, 0)), wanted

    lhs, lhs_labels = expanded(lhs, contraction.lhs)
    rhs_labels = contraction.rhs
    if contraction.ragged_dimension == "k":
        rhs, rhs_labels = expanded(rhs, rhs_labels)
    dense = Contraction(lhs_labels, rhs_labels, contraction.out)
    return product_by_lax(lhs, rhs, dense, precision=precision, out_dtype=out_dtype)


# Differentiation: the operand's cotangent has the operand's own labels.


def _lhs_cotangent(
    cotangent: Array,
    lhs: Any,
    rhs: Array,
    bounds: Array,
    *,
    contraction: RaggedContraction,
    precision: Any,
    **_: Any,
) -> Array:
    c = contraction
    # The operand with the ragged label comes first.
    first, second = (cotangent, c.out), (rhs, c.rhs)
    if c.ragged_dimension == "k":
        first, second = second, first
    labels = RaggedContraction(first[1], second[1], c.bounds, c.lhs, c.ragged, c.group)
    return contract_groups(
        first[0],
        second[0],
        bounds,
        labels,
        precision=precision,
        out_dtype=lhs.dtype,
        out_sharding=compat.cotangent_sharding(lhs),
    )


def _rhs_cotangent(
    cotangent: Array,
    lhs: Array,
    rhs: Any,
    bounds: Array,
    *,
    contraction: RaggedContraction,
    precision: Any,
    **_: Any,
) -> Array:
    c = contraction
    labels = RaggedContraction(c.lhs, c.out, c.bounds, c.rhs, c.ragged, c.group)
    return contract_groups(
        lhs,
        cotangent,
        bounds,
        labels,
        precision=precision,
        out_dtype=rhs.dtype,
        out_sharding=compat.cotangent_sharding(rhs),
    )


def _batch(
    axis_data: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    contraction: RaggedContraction,
    out_sharding: NamedSharding | None,
    **params: Any,
) -> tuple[Array, int]:
    """Label the mapped axis in place; an operand without it is unchanged."""
    c = contraction
    lhs, rhs, bounds = operands
    if dims[2] is not None:
        # A few numbers, of which those of the groups stay adjacent.
        bounds = jnp.moveaxis(bounds, dims[2], 0)
    mapped = 1 + max(*c.lhs, *c.rhs, *c.out)
    batched = RaggedContraction(
        labelled(c.lhs, mapped, dims[0]),
        labelled(c.rhs, mapped, dims[1]),
        labelled(c.bounds, mapped, None if dims[2] is None else 0),
        (mapped, *c.out),
        c.ragged,
        c.group,
    )
    out_sharding = compat.sharding_under_vmap(axis_data, out_sharding, 0)
    return contract_groups(lhs, rhs, bounds, batched, out_sharding=out_sharding, **params), 0


# Partitioning: each device has the bounds of its own rows and groups.


def sharding_rule(
    lhs: Any, rhs: Any, bounds: Any, *, contraction: RaggedContraction, **_: Any
) -> ShardingRule:
    """Return the labels that devices may share."""
    c = contraction
    prefix = (*c.bounds[:-1], None)
    sizes = sizes_of((prefix, bounds.shape), (c.lhs, lhs.shape), (c.rhs, rhs.shape))
    sizes[c.group] = bounds.shape[-1] - 1
    # Each row is multiplied for one group only.
    flops = 2 * math.prod(sizes.values()) / max(1, sizes[c.group])
    return ShardingRule((c.lhs, c.rhs, prefix), (c.out,), sizes, flops=flops, names=c.names)


def localised(
    shard: Shard, lhs: Array, rhs: Array, bounds: Array, *, contraction: RaggedContraction, **_: Any
) -> tuple[Array, Array, Array]:
    """Give a device the bounds of its own rows and groups."""
    group, ragged = contraction.group, contraction.ragged
    if shard.is_split(group):
        # Groups that pad the last device's part have no rows.
        bounds = part_of(shard, bounds, bounds.ndim - 1, group, overlap=1)
    if shard.is_split(ragged):
        bounds = jnp.clip(bounds - shard.start(ragged), 0, shard.size(ragged))
    return lhs, rhs, bounds


def part_of(shard: Shard, x: Array, dim: int, label: int, overlap: int = 0) -> Array:
    """Return a device's part of an array that it has whole, and ``overlap`` elements more."""
    size = shard.size(label)
    pads = [(0, 0)] * x.ndim
    pads[dim] = (0, size * shard.parts(label) + overlap - x.shape[dim])
    return lax.dynamic_slice_in_dim(
        jnp.pad(x, pads, mode="edge"), shard.start(label), size + overlap, axis=dim
    )


def _source(
    operands: Sequence[Operand], *, contraction: RaggedContraction, **params: Any
) -> tuple[Sequence[Operand], Params]:
    *labelled_operands, bounds = operands
    lhs, rhs = (x.source for x in _labelled(labelled_operands, contraction))
    labels = dataclasses.replace(contraction, lhs=lhs.labels, rhs=rhs.labels)
    return (
        [*(Operand(x.value, x.aval) for x in (lhs, rhs)), bounds],
        {**params, "contraction": labels},
    )


def _labelled(operands: Sequence[Operand], contraction: RaggedContraction) -> list[LabelledOperand]:
    labels = (contraction.lhs, contraction.rhs)
    return [LabelledOperand(*x, own) for x, own in zip(operands, labels, strict=True)]


# Lowering: state the problem, then plan it.


def _cuda_arithmetic(*types: Any) -> str | Converted | None:
    arithmetic = cuda_arithmetic(*types)
    # Split-float16 emulation has no grouped kernel, and plain float32 is as accurate.
    return "f32" if arithmetic == "f32_emulated" else arithmetic


_CPU = Platform(cpu_arithmetic, needs_unit_stride=False)
CUDA = Platform(_cuda_arithmetic, needs_unit_stride=True)


def _refusal(
    platform: Platform,
    lhs: Any,
    rhs: Any,
    bounds: Any,
    *,
    precision: Any,
    out_dtype: np.dtype[Any],
    **_: Any,
) -> Fallback | None:
    if bounds.shape[-1] == 1:
        return Fallback("a product of no groups has nothing to compute")
    arithmetic = chosen_arithmetic(platform, lhs, rhs, out_dtype, precision)
    return arithmetic if isinstance(arithmetic, Fallback) else None


class RaggedProblem(NamedTuple):
    """A grouped GEMM and the arrays that it reads."""

    product: GroupedProduct
    # MLIR values of the arrays that the kernel reads, in the product's order, and the bounds.
    operands: tuple[Any, Any, Any]
    # Batch strides, that of the group, and the strides of m and n of each further array.
    further_strides: tuple[tuple[int, ...], ...]


def state_problem(
    platform: Platform,
    operands: Sequence[Operand],
    *,
    contraction: RaggedContraction,
    precision: Any,
    out_dtype: np.dtype[Any],
    further: Sequence[Labels] = (),
    **_: Any,
) -> RaggedProblem | Rewrite | Fallback:
    """State the grouped GEMM that a contraction is, or return how it is computed without one.

    ``further`` has the labels of further arrays that an epilogue reads and writes.
    """
    *factors, bounds = operands
    lhs, rhs = _labelled(factors, contraction)
    arithmetic = chosen_arithmetic(platform, lhs.aval, rhs.aval, out_dtype, precision)
    if isinstance(arithmetic, Fallback):
        return arithmetic
    params = {"precision": precision, "out_dtype": out_dtype}
    if isinstance(arithmetic, Converted):
        return cast_first(
            arithmetic, functools.partial(_converted, arithmetic, contraction, **params)
        )
    if contraction.ragged_dimension == "k" and contraction.contracted:
        together = (contraction.ragged, *contraction.contracted)
        if math.prod(lhs.aval.shape[contraction.lhs.index(x)] for x in together) >= 2**31:
            return Fallback("more rows than an int32 counts, if all indices' rows are one's")
        return Rewrite(
            "rows gathered by group first: other dimensions are contracted with the ragged one",
            functools.partial(_gathered, contraction, **params),
        )
    obstacle: str | None = None
    for left, right in ways_to_read(lhs, rhs):
        labels = dataclasses.replace(contraction, lhs=left.labels, rhs=right.labels)
        found = ragged_geometry(
            labels, left.aval.shape, right.aval.shape, bounds.aval.shape, further
        )
        obstacle = found if isinstance(found, str) else platform.obstacle(found.geometry.product)
        if isinstance(found, str) or obstacle is not None:
            continue
        if found.swapped:
            left, right = right, left
        types = (left.aval.dtype, right.aval.dtype, out_dtype)
        return RaggedProblem(
            GroupedProduct(found.geometry, *types, arithmetic),
            (left.value, right.value, bounds.value),
            found.further_strides,
        )
    assert obstacle is not None
    if contraction.mergeable() == contraction:
        return Fallback(obstacle)
    return Rewrite(
        f"operands reordered first: {obstacle}",
        functools.partial(_reordered, contraction, **params),
    )


def _cuda_kernel(problem: RaggedProblem) -> Kernel | Fallback:
    return planned_kernel(problem.operands, plan_grouped_gemm, problem.product)


def _cpu_kernel(problem: RaggedProblem) -> Kernel:
    geometry, arithmetic = problem.product.geometry, problem.product.arithmetic
    attributes: dict[str, int | tuple[int, ...]] = {
        **cpu_attributes(geometry.product),
        # An attribute that is an array must not be empty.
        "bounds_strides": geometry.bounds_strides or (0,),
        "ragged_k": int(geometry.ragged == "k"),
    }
    return Kernel(
        "ragged_matmul",
        f"each group's rows by the kernel of a product of their number; computes in {arithmetic}",
        ffi.CpuCall(ffi.CPU_RAGGED_MATMUL, attributes),
        problem.operands,
    )


def _converted(
    types: Converted,
    contraction: RaggedContraction,
    lhs: Array,
    rhs: Array,
    bounds: Array,
    *,
    precision: Any,
    out_dtype: np.dtype[Any],
) -> Array:
    lhs, rhs = converted(types, lhs, rhs)
    out = contract_groups(
        lhs, rhs, bounds, contraction, precision=precision, out_dtype=types.result
    )
    return out.astype(out_dtype)


def _gathered(
    contraction: RaggedContraction, lhs: Array, rhs: Array, bounds: Array, **params: Any
) -> Array:
    """Contract other dimensions along with the ragged one: bring the rows of a group together.

    The rows of all indices of those dimensions become rows of one ragged dimension, ordered by
    their groups.
    """
    c = contraction
    sizes = dict(zip((*c.lhs, *c.bounds), (*lhs.shape, *bounds.shape), strict=True))
    rows = sizes[c.ragged]
    batch = tuple(x for x in c.batch if x in c.bounds)
    wanted = (*batch, *c.contracted, c.group)
    bounds = broadcasted(bounds, c.bounds, wanted, sizes)
    shape = bounds.shape
    bounds = bounds.reshape(*shape[: len(batch)], -1, shape[-1])
    together = bounds.shape[-2] * rows

    position = lax.broadcasted_iota(np.int32, (*bounds.shape[:-1], rows), bounds.ndim - 1)
    group = (bounds[..., 1:, None] <= position[..., None, :]).sum(-2, dtype=np.int32)
    group = jnp.where(position < bounds[..., :1], bounds.shape[-1], group)
    order = jnp.argsort(group.reshape(*shape[: len(batch)], together), stable=True)

    def gathered(x: Array, labels: Labels) -> tuple[Array, Labels]:
        own = tuple(label for label in batch if label in labels)
        outer = (*own, *c.contracted, c.ragged)
        rest = tuple(label for label in labels if label not in outer)
        x = transposed(x, labels, (*outer, *rest))
        x = x.reshape(*x.shape[: len(own)], together, *x.shape[len(outer) :])
        take = functools.partial(jnp.take, axis=0, unique_indices=True, mode="clip")
        for label in reversed(batch):
            take = jax.vmap(take, (0 if label in own else None, 0))
        return take(x, order), (*batch, c.ragged, *rest)

    lhs, lhs_labels = gathered(lhs, c.lhs)
    rhs, rhs_labels = gathered(rhs, c.rhs)
    sums = jnp.diff(bounds).sum(-2, dtype=np.int32)
    labels = RaggedContraction(lhs_labels, rhs_labels, (*batch, c.group), c.out, c.ragged, c.group)
    return contract_groups(lhs, rhs, group_bounds(sums, together), labels, **params)


def _reordered(
    contraction: RaggedContraction, lhs: Array, rhs: Array, bounds: Array, **params: Any
) -> Array:
    plain = contraction.mergeable()
    sizes = dict(
        zip((*contraction.lhs, *contraction.rhs), (*lhs.shape, *rhs.shape), strict=True)
    ) | dict(zip(contraction.bounds, bounds.shape, strict=True))
    out = contract_groups(
        transposed(lhs, contraction.lhs, plain.lhs),
        transposed(rhs, contraction.rhs, plain.rhs),
        broadcasted(bounds, contraction.bounds, plain.bounds, sizes),
        plain,
        **params,
    )
    return transposed(out, plain.out, contraction.out)


_bind = define(
    Operation(
        name="tilekern_contract_groups",
        reference=_reference,
        transposes={0: _lhs_cotangent, 1: _rhs_cotangent},
        batch=_batch,
        sharding_rule=sharding_rule,
        planners={
            name: Planner.in_two_steps(
                functools.partial(_refusal, platform),
                functools.partial(state_problem, platform),
                emit,
            )
            for name, platform, emit in (("cpu", _CPU, _cpu_kernel), ("cuda", CUDA, _cuda_kernel))
        },
        describe=lambda contraction, **_: str(contraction),
        localised=localised,
        source=_source,
        in_float32=lambda **params: {**params, "out_dtype": np.dtype(np.float32)},
    )
)
