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
from jax_tilekern.plans.gemm.select import kernel_us
from jax_tilekern.plans.gpu import NoGpu, current_gpu
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
    plan: LaunchPlan, name: str, values: Sequence[Any], scratch: Sequence[Any]
) -> PlannedKernel:
    """Return the kernel of an exchange, which reads whole arrays and the device's number."""
    operands = [*values, compat.partition_id()]
    return PlannedKernel(name, plan.reason, plan, operands, scratch=scratch)


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
    parts = exchange_parts(x.aval, w.aval, out, axis, params["contraction"], scatters=False)
    if isinstance(parts, str):
        return parts
    rows = [x.aval.shape[0] // parts] * parts
    part = _part(x.aval, rows[0])
    kernel = _product([part, w], **params)
    if isinstance(kernel, str):
        return kernel
    assert isinstance(kernel.call, LaunchPlan)
    lhs = kernel.operands.index(part.value)
    plan = overlap.gather_plan(kernel.call, lhs, axis, rows, keeps=keeps)
    shard, *others = x.aval.shape
    gathered = jax.core.ShapedArray((axis.size * shard, *others), x.aval.dtype)
    values = [x.value if value is part.value else value for value in kernel.operands]
    return _emitted(plan, kernel.name, values, [] if keeps else [gathered])


def scattered_kernel(
    operands: Sequence[Operand],
    *,
    axis: MeshAxis,
    contraction: Contraction,
    precision: Any,
    out_dtype: np.dtype[Any],
) -> PlannedKernel | str:
    """Return the kernels of a product whose terms are scattered, or why a collective does it.

    A third operand is a further term.
    """
    x, w, *addends = operands
    params = {"contraction": contraction, "precision": precision, "out_dtype": out_dtype}
    out = result_type(x.aval, w.aval, 1 / axis.size, contraction, out_dtype)
    parts = exchange_parts(x.aval, w.aval, out, axis, contraction, scatters=True)
    if isinstance(parts, str):
        return parts
    # Those of which kernels read parts come first.
    arrays = [x.value, *(each.value for each in addends)]
    planned, names = list[overlap.PartOfScatter](), list[str]()
    for rows in _rows_of_parts(x.aval, w, out, parts, **params):
        parted = [_part(each.aval, rows) for each in (x, *addends)]
        of_parts = {id(each.value): i for i, each in enumerate(parted)}
        factors, added = [parted[0], w], parted[1:]
        terms = [_part(out, rows) for _ in range(axis.size - 1)]
        calls, reads = list[LaunchPlan](), list[list[int]]()
        for kernel in (
            _product(factors, added, **params),
            _product(factors, [*added, *terms], **params),
        ):
            if isinstance(kernel, str):
                return kernel
            assert isinstance(kernel.call, LaunchPlan)
            read = kernel.operands[: len(factors) + len(added)]
            others = [value for value in read if id(value) not in of_parts]
            arrays += [value for value in others if value not in arrays[len(parted) :]]
            places = {id(value): arrays.index(value, len(parted)) for value in others} | of_parts
            calls.append(kernel.call)
            reads.append([places[id(value)] for value in read])
            names.append(kernel.name)
        planned.append(overlap.PartOfScatter(rows, calls[0], calls[1], *reads))
    addend = 1 if addends else None
    plan = overlap.scatter_plan(planned, 0, addend, axis, _bytes(out))
    received = jax.core.ShapedArray((axis.size - 1, *out.shape), out_dtype)
    return _emitted(plan, names[0], arrays, [received, received])


def _rows_of_parts(x: Any, w: Operand, out: Any, parts: int, **params: Any) -> Sequence[int]:
    """Return the rows of each part of a device's rows in a scatter."""
    rows = out.shape[0]
    equal = [rows // parts] * parts
    if parts != 2 or overlap.current_parts() or not overlap.is_asked_for():
        return equal
    try:
        gpu = current_gpu()
    except NoGpu:
        return equal

    def product_us(rows: int) -> float:
        problem = state_problem(contract, CUDA, [_part(x, rows), w], **params)
        if not isinstance(problem, LoweredProduct):
            return 0.0
        return kernel_us(problem.product, gpu)

    return overlap.split_rows(rows, _bytes(out), product_us)


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
