"""The lowering of a reduction to segments: a kernel, or the reason why there is none."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_tilekern.epilogue.cuda_text import computed_type, cuda_text
from jax_tilekern.epilogue.understood import Untranslatable
from jax_tilekern.interop import ffi
from jax_tilekern.ops.element_types import wide_dtype
from jax_tilekern.ops.planned_kernel import planned_kernel
from jax_tilekern.ops.segments.batches import by_batch
from jax_tilekern.ops.segments.edges import (
    EdgeOperands,
    Fill,
    Reduce,
    SegmentCall,
    by_scatter,
    columns_of,
    edge_values,
)
from jax_tilekern.ops.segments.few_rows import add_few_rows
from jax_tilekern.ops.segments.fill import filled
from jax_tilekern.ops.segments.keys import rows_of
from jax_tilekern.plans.gpu import NoGpu, current_gpu
from jax_tilekern.plans.launch import NOT_PREDICTED
from jax_tilekern.plans.policy import current_policy
from jax_tilekern.plans.segments import on_cpu
from jax_tilekern.plans.segments.cost import scatter_type
from jax_tilekern.plans.segments.problem import MapOperand, MapText, SegmentReduction
from jax_tilekern.plans.segments.select import (
    is_filled_by_kernel,
    plan_segments,
    reads_keys,
    sorts,
    updates_few_rows,
)
from jax_tilekern.primitives.operation import Fallback, Operand, PlannedKernel, Rewrite

FEW_ROWS = "XLA updates few rows; its order of additions is not fixed"


def described(*, call: SegmentCall) -> str:
    what = f" of {call.function.name}" if call.function else ""
    return f"segment_{call.reduction}{what}, {call.batch * call.segments} segments"


def refusal(*_: Any, call: SegmentCall) -> Fallback | None:
    """Return why no kernel reduces a call on any platform."""
    return None if call.segments else Fallback("there is no segment", is_loss=False)


def on_cuda(
    operands: Sequence[Operand], _: Any, *, call: SegmentCall
) -> PlannedKernel | Rewrite | Fallback:
    problem = problem_of(EdgeOperands.of([x.aval for x in operands], call), call)
    if isinstance(problem, str):
        return Fallback(problem)
    try:
        gpu = current_gpu()
    except NoGpu as error:
        return Fallback(str(error))
    if call.counted is not None and sorts(problem.of_rows(*call.counted), gpu):
        return Rewrite("edges are counted between bounds", functools.partial(_counted, call=call))
    few = updates_few_rows(problem, gpu, has_table=False)
    if few is not None:
        fill = filled if is_filled_by_kernel(problem.results, problem.out_dtype, gpu) else None
        return Rewrite(FEW_ROWS, functools.partial(_add_few_rows, call=call, fill=fill), few)
    values = EdgeOperands.of([x.value for x in operands], call)
    # XLA drops a sort whose results nothing reads.
    order = (values.keys,) if reads_keys(problem, gpu) else (*values.order, values.bounds)
    found = planned_kernel((*values.arrays, *values.indices, *order), plan_segments, problem)
    if isinstance(found, Fallback) and found.predicted_us != NOT_PREDICTED:
        dtype = scatter_type(problem, gpu)
        fill = filled if is_filled_by_kernel(problem.results, dtype, gpu) else None
        is_wide = dtype == problem.value
        if fill is not None or not is_wide:
            scatter = functools.partial(_scattered, call=call, fill=fill, is_wide=is_wide)
            return Rewrite(found.reason, scatter, found.predicted_us)
    return found


def _counted(*operands: Array, call: SegmentCall) -> Array:
    counts = by_batch(jnp.diff(EdgeOperands.of(operands, call).bounds), call.batch)
    return counts[:, 1:-1].ravel().astype(call.dtype)


def _scattered(*operands: Array, call: SegmentCall, fill: Fill | None, is_wide: bool) -> Array:
    return by_scatter(EdgeOperands.of(operands, call), call, fill, is_wide=is_wide)


def _add_few_rows(*operands: Array, call: SegmentCall, fill: Fill | None) -> Array:
    read = EdgeOperands.of(operands, call)
    updates = edge_values(read.arrays, read.indices, call.gathers, call.function)
    shape = (call.batch * call.segments, *updates.shape[1:])
    table = (fill or jnp.full)(shape, np.zeros((), call.dtype))
    rows = rows_of(read.keys, call.segments, call.batch)
    rows = jnp.where(rows < 0, table.shape[0], rows)
    return add_few_rows(table, updates, rows, is_zero=True)


def on_cpus(
    reduce: Reduce, operands: Sequence[Operand], _: Any, *, call: SegmentCall
) -> PlannedKernel | Rewrite | Fallback:
    """Plan a call for this CPU, whose kernels reduce values that are stored."""
    avals = EdgeOperands.of([x.aval for x in operands], call)
    if call.function is not None:
        shape = (avals.keys.shape[0], *columns_of(x.shape for x in avals.arrays))
        avals = avals._replace(arrays=(jax.core.ShapedArray(shape, call.function.out_dtypes[0]),))
    problem = problem_of(avals, call.over_stored_values())
    if isinstance(problem, str):
        return Fallback(problem)
    if call.function is None and on_cpu.updates_neutral_rows(problem):
        read = EdgeOperands.of([x.value for x in operands], call)
        return updated_rows(problem, *read.arrays, read.keys)
    why = on_cpu.why_slower(problem)
    if why is not None and current_policy() != "kernels":
        return Fallback(why)
    if call.function is not None:
        function = functools.partial(_reduce_stored_values, reduce, call=call)
        return Rewrite("XLA computes the values of the edges", function)
    values = EdgeOperands.of([x.value for x in operands], call)
    by_key = on_cpu.reads_keys(problem)
    # XLA drops a sort whose results nothing reads.
    index = (values.keys,) if by_key else (*values.order, values.bounds)
    target = ffi.CpuCall(ffi.CPU_SEGMENT_REDUCE, on_cpu.attributes(problem))
    return PlannedKernel(
        f"cpu_segment_{call.reduction} {call.dtype}",
        "edges as they lie" if by_key else "edges by segment",
        target,
        (*values.arrays, *index),
    )


def updated_rows(problem: SegmentReduction, updates: Any, keys: Any, *table: Any) -> PlannedKernel:
    """Return a CPU's kernel that combines rows with those of a table, or of no edge."""
    target = ffi.CpuCall(ffi.CPU_UPDATE_ROWS, on_cpu.update_attributes(problem))
    return PlannedKernel(
        f"cpu_update_rows {problem.operands[0].dtype}",
        f"{problem.edges} updates of {problem.segments} rows",
        target,
        (updates, keys, *table),
        aliases={2: 0} if table else {},
    )


def _reduce_stored_values(reduce: Reduce, *operands: Array, call: SegmentCall) -> Array:
    """Reduce the values of edges that XLA computes and stores."""
    read = EdgeOperands.of(operands, call)
    values = edge_values(read.arrays, read.indices, call.gathers, call.function)
    return reduce(read._replace(arrays=(values,), indices=(), plans=()), call.over_stored_values())


def problem_of(avals: EdgeOperands, call: SegmentCall) -> SegmentReduction | str:
    """Return what a kernel reduces, or why none does."""
    dtype, value = call.dtype, wide_dtype(call.dtype)
    trailing = columns_of(x.shape for x in avals.arrays)
    columns = math.prod(trailing)
    types = [x.dtype for x in avals.arrays]
    text = None
    if any(
        x.ndim > 2 and x.shape[1:] != trailing and math.prod(x.shape[1:]) > 1 for x in avals.arrays
    ):
        return "an array is broadcast over some of its dimensions"
    try:
        if call.function is not None:
            found = cuda_text(call.function)
            text = MapText(tuple(map(computed_type, types)), found.statements, found.results[0])
        elif jnp.issubdtype(dtype, jnp.complexfloating):
            if call.reduction != "sum":
                return f"no kernel reduces {dtype}"
            # Real and imaginary parts are two columns.
            value = dtype = np.dtype(f"f{dtype.itemsize // 2}")
            types, columns = [dtype], 2 * columns
        computed_type(types[0]), computed_type(dtype)
    except Untranslatable as error:
        return str(error)
    if call.function is None and types[0] != dtype and value != wide_dtype(types[0]):
        return f"no kernel reduces {types[0]} to {dtype}"
    if dtype == np.bool_:
        return "no kernel reduces booleans"
    return SegmentReduction(
        reduction=call.reduction,
        edges=avals.keys.shape[0],
        segments=call.segments,
        batch=call.batch,
        columns=columns,
        operands=tuple(
            MapOperand(
                np.dtype(kind), x.shape[0], index, math.prod(x.shape[1:]) == 1 and columns > 1
            )
            for x, kind, index in zip(avals.arrays, types, call.gathers, strict=True)
        ),
        indices=call.indices,
        text=text,
        value=value,
        out_dtype=np.dtype(dtype),
        ordered=not call.is_sorted,
    )
