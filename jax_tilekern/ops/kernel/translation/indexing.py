"""Slices, gathers and scatters at indices that a lane computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from jax_tilekern.epilogue.cuda_text import computed_type
from jax_tilekern.epilogue.understood import all_of, one_of
from jax_tilekern.interop import compat
from jax_tilekern.ops.kernel.translation.arrays import Places, result_type, sliced
from jax_tilekern.ops.kernel.translation.values import Index, Value, in_memory, plus
from jax_tilekern.ops.kernel.translation.writer import LaneWriter, rule

_GATHER_AND_SCATTER_PARAMETERS = {
    **all_of("dimension_numbers indices_are_sorted unique_indices"),
    # The treatment of indices out of bounds. CUDA clips indices that are promised to be inside.
    "mode": one_of(
        lax.GatherScatterMode.CLIP,
        lax.GatherScatterMode.FILL_OR_DROP,
        lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    ),
}


def _clamped(writer: LaneWriter, start: Value, limit: int) -> Index:
    if limit == 0:
        return 0
    name = writer.name("n")
    writer.line(f"int {name} = lax::clamped_index({start.first}, {limit});")
    return name


def _starts(
    writer: LaneWriter, operand: Value, sizes: Sequence[int], indices: Sequence[Value]
) -> list[Index]:
    return [
        _clamped(writer, index, n - size)
        for n, size, index in zip(operand.shape, sizes, indices, strict=True)
    ]


@rule("dynamic_slice", **all_of("slice_sizes"))
def _dynamic_slice(writer: LaneWriter, eqn: Any, operands: list[Value], __: Places) -> list[Value]:
    x, *indices = operands
    _, shape = result_type(eqn)
    starts = _starts(writer, x, shape, indices[: len(shape)])
    return [sliced(x, shape, starts, (1,) * len(shape))]


@rule("dynamic_update_slice")
def _dynamic_update_slice(
    writer: LaneWriter, eqn: Any, operands: list[Value], places: Places
) -> list[Value]:
    x, update, *indices = operands
    starts = _starts(writer, x, update.shape, indices)
    buffer = writer.to_update(x, places[0])
    if buffer in update.buffers:
        update = writer.copied(update)
    with writer.elements(update.shape, buffer) as i:
        target = [plus(start, index) for start, index in zip(starts, i, strict=True)]
        writer.line(buffer.store(target, update.at(i)))
    return [in_memory(buffer)]


def _drops(eqn: Any) -> bool:
    return bool(eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP)


@rule("gather", **_GATHER_AND_SCATTER_PARAMETERS, **all_of("slice_sizes fill_value"))
def _gather(writer: LaneWriter, eqn: Any, operands: list[Value], places: Places) -> list[Value]:
    x, indices = operands
    dtype, shape = result_type(eqn)
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    drops = _drops(eqn)
    computed_type(dtype)
    limits = [n - size for n, size in zip(x.shape, sizes, strict=True)]
    hidden = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    offset_dims = numbers.offset_dims
    batch_dims = [d for d in range(len(shape)) if d not in offset_dims]
    fill = _fill_value(writer, eqn, dtype)

    def element(out: Sequence[Index]) -> tuple[list[str], list[Index]]:
        """Return the conditions under which an index is inside, and the element's place."""
        batch = [out[d] for d in batch_dims]
        offsets = iter([out[d] for d in offset_dims])
        place: list[Index] = [0 if d in hidden else next(offsets) for d in range(len(x.shape))]
        for dim, batch_dim in zip(
            numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
        ):
            place[dim] = batch[batch_dim]
        inside = []
        for k, d in enumerate(numbers.start_index_map):
            start = writer.scalar(indices.dtype, indices.at([*batch, k])).first
            if drops:
                inside.append(f"lax::is_index({start}, {limits[d]})")
            name: Index = f"lax::clamped_index({start}, {limits[d]})" if limits[d] else 0
            place[d] = plus(place[d], name)
        return inside, place

    if all(n == 1 for n in shape):
        inside, place = element((0,) * len(shape))
        value = x.at(place)
        if inside:
            value = f"{' && '.join(inside)} ? {value} : {fill}"
        return [writer.scalar(dtype, value, shape)]
    buffer = writer.array(dtype, shape, places[0])
    with writer.elements(shape, buffer) as i:
        inside, place = element(i)
        value = x.at(place)
        if inside:
            value = f"({' && '.join(inside)} ? {value} : {fill})"
        writer.line(buffer.store(i, value))
    return [in_memory(buffer)]


def _fill_value(writer: LaneWriter, eqn: Any, dtype: Any) -> str:
    value = eqn.params.get("fill_value")
    if value is None:
        if dtype.kind in "iu":
            info = np.iinfo(dtype)
            value = info.min if dtype.kind == "i" else info.max
        else:
            value = True if dtype.kind == "b" else np.nan
    return writer.constant(np.asarray(value).astype(dtype), dtype).first


@rule(
    *("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"),
    **_GATHER_AND_SCATTER_PARAMETERS,
    **all_of("update_jaxpr update_consts"),
)
def _scatter(writer: LaneWriter, eqn: Any, operands: list[Value], places: Places) -> list[Value]:
    x, indices, updates = operands
    numbers, drops = eqn.params["dimension_numbers"], _drops(eqn)
    computed_type(x.dtype)
    hidden = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window_dims = [d for d in range(len(x.shape)) if d not in hidden]
    sizes = [1] * len(x.shape)
    for d, update_dim in zip(window_dims, numbers.update_window_dims, strict=True):
        sizes[d] = updates.shape[update_dim]
    scatter_dims = [d for d in range(len(updates.shape)) if d not in numbers.update_window_dims]
    indices, updates = writer.evaluated(indices), writer.evaluated(updates)
    buffer = writer.to_update(x, places[0])
    if buffer in updates.buffers:
        updates = writer.copied(updates)
    if buffer in indices.buffers:
        indices = writer.copied(indices)
    # Several updates may be of one element.
    with writer.by_one(buffer), writer.elements(updates.shape) as i:
        batch = [i[d] for d in scatter_dims]
        place: list[Index] = [0] * len(x.shape)
        for d, update_dim in zip(window_dims, numbers.update_window_dims, strict=True):
            place[d] = i[update_dim]
        for dim, batch_dim in zip(
            numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
        ):
            place[dim] = batch[batch_dim]
        inside = []
        for k, d in enumerate(numbers.scatter_dims_to_operand_dims):
            start = writer.scalar(indices.dtype, indices.at([*batch, k])).first
            limit = x.shape[d] - sizes[d]
            if drops:
                inside.append(f"lax::is_index({start}, {limit})")
            place[d] = plus(place[d], f"lax::clamped_index({start}, {limit})" if limit else 0)
        with writer.block(f"if ({' && '.join(inside) or 'true'})"):
            value = updates.at(i)
            if eqn.params["update_jaxpr"] is not None:
                value = _updated(writer, eqn, buffer.load(place), value)
            writer.line(buffer.store(place, value))
    return [in_memory(buffer)]


def _updated(writer: LaneWriter, eqn: Any, old: str, update: str) -> str:
    """Write the function of an element and its update; return its result."""
    update_jaxpr = compat.closed_jaxpr(eqn.params["update_jaxpr"])
    dtype, _ = result_type(eqn)
    consts = [writer.constant(x, np.asarray(x).dtype) for x in eqn.params["update_consts"]]
    scalars = [writer.scalar(dtype, x) for x in (old, update)]
    with writer.body_of_loop():
        (result,) = writer.jaxpr(update_jaxpr, [*consts, *scalars])
    return result.first
