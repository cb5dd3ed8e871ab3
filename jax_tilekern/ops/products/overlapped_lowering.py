"""Kernels of products that overlap with their communication, of the parts that devices send."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from jax_tilekern.epilogue.scalar_function import trace_scalars
from jax_tilekern.interop import compat
from jax_tilekern.ops.products.contraction import contract
from jax_tilekern.ops.products.contraction_lowering import (
    CUDA,
    LoweredProduct,
    cuda_kernel,
    state_problem,
)
from jax_tilekern.ops.products.fused_lowering import fused_kernel
from jax_tilekern.plans import overlap
from jax_tilekern.plans.contraction import Contraction
from jax_tilekern.plans.gemm.arithmetic import accumulator_dtype
from jax_tilekern.plans.launch import LaunchPlan
from jax_tilekern.plans.overlap import MeshAxis
from jax_tilekern.plans.policy import policy
from jax_tilekern.primitives.operation import Fallback, Operand, PlannedKernel


class _Part:
    """Takes the place of the MLIR value of a part of an array. Nothing makes it by a transpose."""

    owner = None


def _part(x: Any, rows: int) -> Operand:
    return Operand(_Part(), jax.core.ShapedArray((rows, *x.shape[1:]), x.dtype))


def exchange_parts(
    x: Any, w: Any, out: Any, axis: MeshAxis, contraction: Contraction, *, scatters: bool
) -> tuple[int, ...] | str:
    """Return the rows of the parts that a device sends, or why they are not overlapped."""
    sent = out if scatters else x
    sizes = _sizes(x, w, contraction)
    found = overlap.parts_of_rows(
        scatters=scatters,
        axis=axis,
        rows=sent.shape[0],
        sent=_bytes(sent),
        lhs=_bytes(x),
        out=_bytes(out),
        flops=2.0 * math.prod(sizes.values()) * (1 if scatters else axis.size),
        dtype=x.dtype,
    )
    if isinstance(found, str):
        return found
    if jax.process_count() > 1:
        return "devices of several processes do not exchange parts"
    return overlap.why_no_exchange() or found


def _sizes(x: Any, w: Any, contraction: Contraction) -> dict[int, int]:
    """Return the size of each label on a device."""
    labels, shapes = (*contraction.lhs, *contraction.rhs), (*x.shape, *w.shape)
    return dict(zip(labels, shapes, strict=True))


def _bytes(x: Any) -> int:
    size: int = math.prod(x.shape) * x.dtype.itemsize
    return size


def _emitted(plan: LaunchPlan, found: _Parts, scratch: Sequence[Any]) -> PlannedKernel:
    """Return the kernel of an exchange, which reads whole arrays and the device's number."""
    operands = [*found.arrays, compat.partition_id()]
    return PlannedKernel(found.name, plan.reason, plan, operands, scratch=scratch)


def exchanged_kernel(
    operands: Sequence[Operand], *, scatters: bool, keeps: bool, **params: Any
) -> PlannedKernel | str:
    """Return the kernels of a product whose rows are exchanged, or why a collective does it."""
    if scatters:
        return scattered_kernel(operands, **params)
    return _gathered_kernel(operands, keeps=keeps, **params)


def _gathered_kernel(
    operands: Sequence[Operand], *, axis: MeshAxis, keeps: bool, **params: Any
) -> PlannedKernel | str:
    x, w = operands
    out = result_type(x.aval, w.aval, axis.size, params["contraction"], params["out_dtype"])
    rows = exchange_parts(x.aval, w.aval, out, axis, params["contraction"], scatters=False)
    if isinstance(rows, str):
        return rows
    found = _parts(operands, rows, [], **params)
    if isinstance(found, str):
        return found
    shard, *others = x.aval.shape
    gathered = jax.core.ShapedArray((axis.size * shard, *others), x.aval.dtype)
    plan = overlap.gather_plan(found.parts, axis, keeps=keeps)
    return _emitted(plan, found, [] if keeps else [gathered])


def scattered_kernel(
    operands: Sequence[Operand], *, axis: MeshAxis, **params: Any
) -> PlannedKernel | str:
    """Return the kernels of a product whose terms are scattered, or why a collective does it.

    A third operand is a further term.
    """
    x, w, *addends = operands
    out = result_type(x.aval, w.aval, 1 / axis.size, params["contraction"], params["out_dtype"])
    rows = exchange_parts(x.aval, w.aval, out, axis, params["contraction"], scatters=True)
    if isinstance(rows, str):
        return rows
    found = _parts(operands, rows, [out] * (axis.size - 1), **params)
    if isinstance(found, str):
        return found
    received = jax.core.ShapedArray((axis.size - 1, *out.shape), out.dtype)
    plan = overlap.scatter_plan(found.parts, 1 if addends else None, axis, _bytes(out))
    return _emitted(plan, found, [received, received])


class _Parts(NamedTuple):
    """The products of parts of rows, and the arrays that they read; those with the rows first."""

    name: str
    parts: Sequence[overlap.Part]
    arrays: Sequence[Any]


def _parts(
    operands: Sequence[Operand], rows: Sequence[int], received: Sequence[Any], **params: Any
) -> _Parts | str:
    """Return the products of parts of so many rows, or why there is none.

    ``received`` has the types of the terms of other devices, which further products add.
    """
    x, w, *addends = operands
    arrays, parts, name = [x.value, *(each.value for each in addends)], list[overlap.Part](), ""
    for count in rows:
        own = [_part(each.aval, count) for each in (x, *addends)]
        terms = [_part(each, count) for each in received]
        factors, added = [own[0], w], own[1:]
        of_parts = {id(each.value): i for i, each in enumerate(own)}
        plans, reads = list[LaunchPlan](), list[list[int]]()
        for more in [added, [*added, *terms]] if terms else [added]:
            kernel = _product(factors, more, **params)
            if isinstance(kernel, str):
                return kernel
            assert isinstance(kernel.call, LaunchPlan)
            read = kernel.operands[: len(factors) + len(added)]
            others = [value for value in read if id(value) not in of_parts]
            arrays += [value for value in others if value not in arrays[len(own) :]]
            places = {id(value): arrays.index(value, len(own)) for value in others} | of_parts
            plans.append(kernel.call)
            reads.append([places[id(value)] for value in read])
            name = name or kernel.name
        parts.append(overlap.Part(count, plans, reads))
    return _Parts(name, parts, arrays)


def _sum(accumulator: Array, *terms: Array) -> Array:
    return functools.reduce(lambda total, x: total + x.astype(total.dtype), terms, accumulator)


def result_type(
    x: Any, w: Any, factor: float, contraction: Contraction, out_dtype: np.dtype[Any]
) -> Any:
    """Return the type of the result, which has ``factor`` times as many rows as ``x``."""
    sizes = _sizes(x, w, contraction)
    rows, *others = (sizes[label] for label in contraction.out)
    return jax.core.ShapedArray((int(rows * factor), *others), out_dtype)


# The whole call is compared with a product and a collective, so its parts are not left to XLA.
@policy("kernels")
def _product(
    factors: Sequence[Operand],
    added: Sequence[Operand] = (),
    *,
    contraction: Contraction,
    precision: Any,
    out_dtype: np.dtype[Any],
) -> PlannedKernel | str:
    """Return the kernel of a product of parts, plus further terms, or why there is none."""
    state = functools.partial(
        state_problem, contract, CUDA, contraction=contraction, precision=precision
    )
    if added:
        accumulator = accumulator_dtype(factors[0].aval.dtype, out_dtype)
        traced = trace_scalars(_sum, accumulator, out_dtype, [x.aval.dtype for x in added])
        return fused_kernel(
            factors,
            None,
            added,
            contraction=contraction,
            operand_labels=(contraction.out,) * len(added),
            function=traced[0],
            accumulator=accumulator,
            state=state,
        )
    problem = state(factors, out_dtype=out_dtype)
    if not isinstance(problem, LoweredProduct):
        return problem.reason
    kernel = cuda_kernel(problem.product, problem.operands)
    return kernel.reason if isinstance(kernel, Fallback) else kernel
