"""Reductions to segments on several devices: each reduces its edges, and orders them by itself.

Batches are in front of the edges, each with keys of its own. Gathered arrays have the rows of all
batches. The rules take the function that binds the operation of one device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import Array, lax

from jax_tilekern.ops.element_types import wide_dtype
from jax_tilekern.ops.segments.batches import by_batch, first_of_batches
from jax_tilekern.ops.segments.edges import (
    EdgeOperands,
    Reduce,
    SegmentCall,
    by_scatter,
    columns_of,
)
from jax_tilekern.ops.segments.lowering import described, refusal
from jax_tilekern.ops.segments.order import bounds_of_sorted, order_by_key
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.primitives.operation import Operand, Operation, Params, Planner, Rewrite, define


def unordered_composition(reduce: Reduce) -> Callable[..., Array]:
    """Return the operation composed of one that sorts anew on each device."""

    def on_device(*operands: Array, call: SegmentCall) -> Array:
        read, own = _flat(operands, call)
        order: tuple[Array, ...] = ()
        if own.is_sorted:
            bounds = bounds_of_sorted(read.keys, bins=own.bins)
        else:
            first, bounds = order_by_key(read.keys, bins=own.bins)
            order = (first,)
        result = reduce(read._replace(order=order, bounds=bounds), own)
        return by_batch(result, own.batch)

    def rewritten(_: Sequence[Operand], __: Any, *, call: SegmentCall) -> Rewrite:
        function = functools.partial(on_device, call=call)
        return Rewrite("every device orders its own edges", function)

    bind = define(
        Operation(
            name="tilekern_segment_reduce_unordered",
            reference=_reference,
            batch=_no_batch,
            sharding_rule=_sharding_rule,
            planners={platform: Planner(refusal, rewritten) for platform in ("cpu", "cuda")},
            describe=described,
            in_float32=_in_float32,
        )
    )

    def composed(*operands: Array, call: SegmentCall) -> Array:
        read = EdgeOperands.of(operands, call)

        result: Array = bind(
            *(
                x if i is not None else by_batch(x, call.batch)
                for x, i in zip(read.arrays, call.gathers, strict=True)
            ),
            *(by_batch(x, call.batch) for x in read.indices),
            by_batch(read.keys, call.batch) - first_of_batches(call.batch, call.segments + 2),
            call=dataclasses.replace(call, planned=(), batch=1, linear=0),
        )
        return lax.collapse(result, 0, 2)

    return composed


def _flat(operands: Sequence[Any], call: SegmentCall) -> tuple[EdgeOperands, SegmentCall]:
    """Concatenate the edges of the batches."""
    count = len(call.gathers)
    *indices, keys = operands[count:]
    batch = keys.shape[0]
    arrays = tuple(
        x if i is not None else x.reshape(-1, *x.shape[2:])
        for x, i in zip(operands[:count], call.gathers, strict=True)
    )
    keys = (keys + first_of_batches(batch, call.segments + 2)).ravel()
    read = EdgeOperands(arrays, tuple(x.ravel() for x in indices), (), keys, (), None)
    return read, dataclasses.replace(call, batch=batch)


def _reference(*operands: Array, call: SegmentCall) -> Array:
    read, own = _flat(operands, call)
    result = by_scatter(read, own)
    return result.reshape(own.batch, -1, *result.shape[1:])


def _sharding_rule(*operands: Any, call: SegmentCall) -> ShardingRule:
    arrays = operands[: len(call.gathers)]
    rows = [x.shape[1 if i is None else 0 :] for x, i in zip(arrays, call.gathers, strict=True)]
    columns = columns_of(rows)
    batch, edge, first = 0, 1, 2

    def labels(shape: tuple[int, ...], index: int | None) -> tuple[int | None, ...]:
        own = (first + i if shape[1 + i] == n else None for i, n in enumerate(columns))
        return (None, *own) if index is not None else (batch, edge, *own)

    sizes = {
        **dict(zip((batch, edge), operands[-1].shape, strict=True)),
        **{first + i: n for i, n in enumerate(columns)},
    }
    names = {
        batch: "batches",
        edge: "edges",
        **{first + i: f"axis {1 + i}" for i in range(len(columns))},
    }
    return ShardingRule(
        (
            *(labels(shape, i) for shape, i in zip(rows, call.gathers, strict=True)),
            *((batch, edge),) * (call.indices + 1),
        ),
        ((batch, None, *range(first, first + len(columns))),),
        sizes,
        flops=math.prod(sizes.values()),
        names=names,
        zero_padding=call.reduction == "sum" and call.function is None,
        combined_by=("sum" if call.reduction == "prod" else call.reduction,),
        unsplit=frozenset({edge}) if call.reduction == "prod" else frozenset(),
    )


def _in_float32(*, call: SegmentCall) -> Params:
    return {"call": dataclasses.replace(call, dtype=wide_dtype(call.dtype))}


def _no_batch(*_: Any, **__: Any) -> tuple[Any, Any]:
    raise AssertionError("it is bound when a program is lowered")
