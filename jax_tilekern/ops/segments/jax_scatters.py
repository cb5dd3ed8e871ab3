"""JAX's own scatters, where they update rows of a table, as reductions to segments.

``patch`` replaces the scatters of ``.at[rows].add``, of ``jax.ops.segment_sum`` and of the
derivatives of gathers. The operation means what JAX's primitive means, with its parameters; on a
GPU it is a reduction to segments where that is predicted to be faster.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad
from jax_tilekern.interop.global_modes import by_xla, intercepting
from jax_tilekern.interop.patch import replace
from jax_tilekern.ops.element_types import wide_dtype
from jax_tilekern.ops.segments.edges import neutral_element
from jax_tilekern.ops.segments.functions import combined, reduced
from jax_tilekern.ops.segments.plan import segment_plan
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import NoGpu, current_gpu
from jax_tilekern.plans.launch import PredictedUs
from jax_tilekern.plans.policy import current_policy
from jax_tilekern.plans.segments.problem import Combiner, MapOperand, SegmentReduction
from jax_tilekern.plans.segments.select import predicted_microseconds
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    Outcome,
    Planner,
    Rewrite,
    define,
)

SCATTERS: dict[Combiner, compat.Primitive] = {
    "sum": lax.scatter_add_p,
    "prod": lax.scatter_mul_p,
    "max": lax.scatter_max_p,
    "min": lax.scatter_min_p,
}
_MODES = (
    lax.GatherScatterMode.CLIP,
    lax.GatherScatterMode.FILL_OR_DROP,
    lax.GatherScatterMode.PROMISE_IN_BOUNDS,
)


@dataclass(frozen=True)
class _Rows:
    """Leading dimensions of a scatter to rows: batches, and then windows with the same indices."""

    batches: int
    windows: int

    @classmethod
    def of(cls, operand: Any, indices: Any, updates: Any, **params: Any) -> _Rows | None:
        """Return them if a scatter updates whole rows, by one index each that may repeat."""
        numbers: lax.ScatterDimensionNumbers = params["dimension_numbers"]
        if len(numbers.scatter_dims_to_operand_dims) != 1 or indices.shape[-1] != 1:
            return None
        (axis,) = numbers.scatter_dims_to_operand_dims
        batches = len(numbers.operand_batching_dims)
        many = indices.ndim - 1 - batches
        windows = axis - batches
        leading = tuple(range(batches))
        if (
            windows < 0
            or many == 0
            or numbers.operand_batching_dims != leading
            or numbers.scatter_indices_batching_dims != leading
            or numbers.inserted_window_dims != (axis,)
            or numbers.update_window_dims
            != (*range(batches, axis), *range(axis + many, updates.ndim))
            or updates.shape[:axis] != operand.shape[:axis]
            or updates.shape[axis + many :] != operand.shape[axis + 1 :]
            or params["unique_indices"]
            or params["mode"] not in _MODES
            or operand.dtype not in CXX_TYPES
            or operand.dtype.kind not in "fiuV"
            or updates.dtype != operand.dtype
        ):
            return None
        return cls(batches, windows)


def scatter(reduction: Combiner, operand: Any, indices: Any, updates: Any, **params: Any) -> Array:
    """Replace JAX's primitive where it updates rows, unless types have shardings."""
    operands = [jnp.asarray(x) for x in (operand, indices, updates)]
    if _Rows.of(*operands, **params) is None or any(
        compat.explicit_sharding(jax.typeof(x)) is not None for x in operands
    ):
        result: Array = SCATTERS[reduction].bind(*operands, **params)
    else:
        result = _bind(*operands, reduction=reduction, **params)
    return result


def by_segments(
    operand: Array,
    indices: Array,
    updates: Array,
    *,
    reduction: Combiner,
    is_neutral: bool = False,
    **params: Any,
) -> Array:
    """Compute JAX's scatter to rows as a reduction to segments.

    With ``is_neutral`` the operand is the neutral element everywhere.
    """
    found = _Rows.of(operand, indices, updates, **params)
    assert found is not None

    def update_rows(operand: Array, indices: Array, updates: Array) -> Array:
        plan = segment_plan(
            indices.ravel(),
            operand.shape[0],
            indices_are_sorted=params["indices_are_sorted"],
            mode=params["mode"],
        )
        rows = updates.reshape(plan.size, *operand.shape[1:])
        if is_neutral:
            return reduced(reduction, rows, plan)
        return combined(reduction, operand, rows, plan)

    function = update_rows
    for axes in ((0, None, 0),) * found.windows + ((0, 0, 0),) * found.batches:
        function = jax.vmap(function, axes)
    return function(operand, indices, updates)


# The rules of JAX's primitive apply; they bind this operation where they update rows again.


def _reference(*operands: Array, reduction: Combiner, **params: Any) -> Array:
    result: Array = SCATTERS[reduction].bind(*operands, **params)
    return result


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    reduction: Combiner,
    **params: Any,
) -> tuple[Any, Any]:
    with intercepting():
        result: tuple[Any, Any] = ad.primitive_jvps[SCATTERS[reduction]](
            primals, tangents, **params
        )
    return result


def _cotangents(
    cotangent: Array, operand: Any, indices: Array, updates: Any, **params: Any
) -> Sequence[Array]:
    def scattered(operand: Array, updates: Array) -> Array:
        return _reference(operand, indices, updates, **params)

    @by_xla
    def transposed(cotangent: Array) -> Sequence[Array]:
        result: Sequence[Array] = jax.linear_transpose(scattered, operand, updates)(cotangent)
        return result

    return transposed(cotangent)


def _cotangent_of_product(
    cotangent: Array, operand: Any, indices: Array, updates: Array, **params: Any
) -> Array:
    """Multiply the cotangent as the operand is multiplied."""
    result: Array = _bind(cotangent, indices, updates, **params)
    return result


def _transposes(*, reduction: Combiner, **_: Any) -> dict[Any, Any]:
    if reduction == "sum":
        return {(0, 2): _cotangents}
    return {0: _cotangent_of_product} if reduction == "prod" else {}


def _batch(
    axis_data: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    reduction: Combiner,
    **params: Any,
) -> tuple[Array, int]:
    rule = compat.batching_rule(SCATTERS[reduction])
    with intercepting():
        result: tuple[Array, int] = rule(axis_data, operands, dims, **params)
    return result


# Lowering.


def _refusal(
    operand: Any,
    indices: Any,
    updates: Any,
    *,
    reduction: Combiner,
    is_neutral: bool = True,
    **params: Any,
) -> Fallback | None:
    """Refuse what is not predicted to be faster."""
    if current_policy() == "kernels":
        return None
    try:
        gpu = current_gpu()
    except NoGpu as error:
        return Fallback(str(error))
    found = _Rows.of(operand, indices, updates, **params)
    assert found is not None
    shape, dtype = operand.shape, np.dtype(operand.dtype)
    rows = found.batches + found.windows
    columns = math.prod(shape[rows + 1 :])
    edges = math.prod(updates.shape) // columns
    problem = SegmentReduction(
        reduction=reduction,
        edges=edges,
        segments=shape[rows],
        batch=math.prod(shape[:rows]),
        columns=columns,
        operands=(MapOperand(dtype, edges),),
        indices=0,
        text=None,
        value=wide_dtype(dtype),
        out_dtype=dtype,
        ordered=not params["indices_are_sorted"],
    )
    ours, xla = predicted_microseconds(problem, gpu)
    if not is_neutral:
        # The results are read, and combined with the table. XLA may update the table in place.
        bandwidth = gpu.rates.memory_bandwidth * gpu.rates.cycles_per_microsecond
        of_element = problem.value.itemsize + 2 * dtype.itemsize
        ours += math.prod(shape) * of_element / bandwidth
    if ours < xla:
        return None
    return Fallback("XLA's scatter is as fast", PredictedUs(ours, xla))


def _cuda(operands: Sequence[Operand], _: Any, *, reduction: Combiner, **params: Any) -> Outcome:
    operand = operands[0]
    neutral = neutral_element(reduction, operand.aval.dtype)
    is_neutral = compat.splat_of(operand.value) == neutral
    avals = (x.aval for x in operands)
    refused = _refusal(*avals, reduction=reduction, is_neutral=is_neutral, **params)
    if refused is not None:
        return refused
    function = functools.partial(by_segments, reduction=reduction, is_neutral=is_neutral, **params)
    return Rewrite("updates are reduced to segments", function)


_bind = define(
    Operation(
        name="tilekern_scatter_rows",
        reference=_reference,
        jvp=_jvp,
        transposes=_transposes,
        batch=_batch,
        sharding_rule=None,
        planners={"cuda": Planner(_refusal, _cuda)},
        describe=lambda reduction, **_: f"scatter of rows, {reduction}",
        composed=by_segments,
    )
)

for _name, _primitive in SCATTERS.items():
    replace(_primitive, functools.partial(scatter, _name))
