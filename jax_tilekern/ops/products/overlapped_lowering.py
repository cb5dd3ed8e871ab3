"""Kernels of products that overlap with their communication, of the parts that devices send."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

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


def _part(shape: Sequence[int], dtype: Any, parts: int) -> Operand:
    rows, *others = shape
    return Operand(_Part(), jax.core.ShapedArray((rows // parts, *others), dtype))


def exchange_parts(
    x: Any, w: Any, out: Any, axis: MeshAxis, contraction: Contraction, *, scatters: bool
) -> int | str:
    """Return in how many parts a device's rows are sent, or why they are not overlapped."""
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


def _emitted(
    plan: LaunchPlan, kernel: PlannedKernel, part: Operand, whole: Operand, scratch: Sequence[Any]
) -> PlannedKernel:
    """Return the kernel of an exchange, which reads whole arrays and the device's number."""
    operands = [whole.value if x is part.value else x for x in kernel.operands]
    operands.append(compat.partition_id())
    return PlannedKernel(kernel.name, plan.reason, plan, operands, scratch=scratch)


def exchanged_kernel(
    operands: Sequence[Operand], *, scatters: bool, keeps: bool, **params: Any
) -> PlannedKernel | str:
    """Return the kernels of a product whose rows are exchanged, or why a collective does it."""
    if scatters:
        return _scattered_kernel(operands, **params)
    return _gathered_kernel(operands, keeps=keeps, **params)


def _gathered_kernel(
    operands: Sequence[Operand], *, axis: MeshAxis, keeps: bool, **params: Any
) -> PlannedKernel | str:
    x, w = operands
    out = result_type(x.aval, w.aval, axis.size, params["contraction"], params["out_dtype"])
    parts = exchange_parts(x.aval, w.aval, out, axis, params["contraction"], scatters=False)
    if isinstance(parts, str):
        return parts
    part = _part(x.aval.shape, x.aval.dtype, parts)
    kernel = _product([part, w], **params)
    if isinstance(kernel, str):
        return kernel
    assert isinstance(kernel.call, LaunchPlan)
    lhs = kernel.operands.index(part.value)
    plan = overlap.gather_plan(kernel.call, lhs, axis, parts, keeps=keeps)
    rows, *others = x.aval.shape
    gathered = jax.core.ShapedArray((axis.size * rows, *others), x.aval.dtype)
    return _emitted(plan, kernel, part, x, [] if keeps else [gathered])


def _scattered_kernel(
    operands: Sequence[Operand],
    *,
    axis: MeshAxis,
    contraction: Contraction,
    precision: Any,
    out_dtype: np.dtype[Any],
) -> PlannedKernel | str:
    x, w = operands
    params = {"contraction": contraction, "precision": precision, "out_dtype": out_dtype}
    out = result_type(x.aval, w.aval, 1 / axis.size, contraction, out_dtype)
    parts = exchange_parts(x.aval, w.aval, out, axis, contraction, scatters=True)
    if isinstance(parts, str):
        return parts
    part = _part(x.aval.shape, x.aval.dtype, axis.size * parts)
    term = _product([part, w], **params)
    if isinstance(term, str):
        return term
    others = [_part(out.shape, out_dtype, parts) for _ in range(axis.size - 1)]
    accumulator = accumulator_dtype(x.aval.dtype, out_dtype)
    traced = trace_scalars(_sum, accumulator, out_dtype, [out_dtype] * len(others))
    total = fused_kernel(
        [part, w],
        None,
        others,
        contraction=contraction,
        operand_labels=(contraction.out,) * len(others),
        function=traced[0],
        accumulator=accumulator,
        state=functools.partial(
            state_problem, contract, CUDA, contraction=contraction, precision=precision
        ),
    )
    if isinstance(total, str):
        return total
    assert isinstance(term.call, LaunchPlan)
    assert isinstance(total.call, LaunchPlan)
    read = total.operands[: len(term.operands)]
    plan = overlap.scatter_plan(
        term.call,
        total.call,
        term.operands.index(part.value),
        [term.operands.index(value) for value in read],
        axis,
        parts,
        _bytes(others[0].aval),
    )
    terms = jax.core.ShapedArray((axis.size - 1, *out.shape), out_dtype)
    return _emitted(plan, term, part, x, [terms, terms])


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
def _product(operands: Sequence[Operand], **params: Any) -> PlannedKernel | str:
    problem = state_problem(contract, CUDA, operands, **params)
    if not isinstance(problem, LoweredProduct):
        return problem.reason
    kernel = cuda_kernel(problem.product, problem.operands)
    return kernel.reason if isinstance(kernel, Fallback) else kernel
