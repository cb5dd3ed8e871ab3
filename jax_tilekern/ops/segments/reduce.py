"""Reductions to segments of a function of gathered rows: the primitive.

Edges have values, which are a function of scalars of some arrays, each read at the edge's own row
or at a gathered one. The values are never stored: a kernel computes them as it reduces. The
operation is closed under differentiation.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.ops.segments import derivatives
from jax_tilekern.ops.segments.batches import (
    by_batch,
    concatenated_batches,
    first_of_batches,
    in_front,
    whole,
)
from jax_tilekern.ops.segments.edges import EdgeOperands, SegmentCall, by_scatter
from jax_tilekern.ops.segments.lowering import described, on_cpus, on_cuda, refusal
from jax_tilekern.ops.segments.sharded import unordered_composition
from jax_tilekern.plans.segments.problem import Combiner
from jax_tilekern.primitives.operation import Operation, Planner, define


def reduce_segments(operands: EdgeOperands, call: SegmentCall) -> Array:
    """Return a row for each segment of each batch; without edges it is the neutral element."""
    result: Array = _bind(*operands.flat(), call=call)
    return result


def reduce_rows(
    rows: Array,
    *placed: Array,
    reduction: Combiner,
    segments: int,
    dtype: np.dtype[Any],
    batch: int = 1,
    counted: tuple[int, np.dtype[Any]] | None = None,
) -> Array:
    """Reduce rows, one for each edge.

    ``placed`` has the keys, the order unless the keys ascend, and the bounds of
    :class:`EdgeOperands`; ``counted`` is that of :class:`SegmentCall`.
    """
    call = SegmentCall.of_rows(
        reduction,
        dtype,
        segments=segments,
        batch=batch,
        is_sorted=len(placed) == 2,
        counted=counted,
    )
    result: Array = _bind(rows, *placed, call=call)
    return result


def _reference(*operands: Array, call: SegmentCall) -> Array:
    return by_scatter(EdgeOperands.of(operands, call), call)


def _batch(
    _: Any, operands: Sequence[Array], dims: Sequence[int | None], *, call: SegmentCall
) -> tuple[Array, int]:
    """Concatenate the edges and the segments of the batch."""
    size, moved = in_front(operands, dims)
    read = EdgeOperands.of(moved, call)
    is_mapped = EdgeOperands.of([d is not None for d in dims], call)
    arrays: list[Array] = []
    gathers: list[int | None] = []
    indices: list[Array] = []
    known: dict[tuple[int, int], int] = {}
    for x, mapped, index in zip(read.arrays, is_mapped.arrays, call.gathers, strict=True):
        if index is None:
            x, mapped = whole(x, mapped, size), True
        arrays.append(lax.collapse(x, 0, 2) if mapped else x)
        if index is None:
            gathers.append(None)
            continue
        rows = x.shape[1] if mapped else 0
        if (index, rows) not in known:
            known[index, rows] = len(indices)
            own = whole(read.indices[index], is_mapped.indices[index], size)
            if mapped:
                own = jnp.where((own >= 0) & (own < rows), own + first_of_batches(size, rows), -1)
            indices.append(own.ravel())
        gathers.append(known[index, rows])
    placed = concatenated_batches(
        whole(read.keys, is_mapped.keys, size),
        [whole(x, mapped, size) for x, mapped in zip(read.order, is_mapped.order, strict=True)],
        whole(read.bounds, is_mapped.bounds, size),
        bins=call.bins,
    )
    result = _bind(
        *(*arrays, *indices, *placed),
        call=dataclasses.replace(
            call,
            gathers=tuple(gathers),
            indices=len(indices),
            planned=(),
            batch=size * call.batch,
        ),
    )
    return by_batch(result, size), 0


_bind = define(
    Operation(
        name="tilekern_segment_reduce",
        reference=_reference,
        like_results=derivatives.like_results,
        jvp=functools.partial(derivatives.jvp, reduce_segments),
        transposes=functools.partial(derivatives.transposes, reduce_segments),
        batch=_batch,
        sharding_rule=None,
        planners={
            "cpu": Planner(refusal, functools.partial(on_cpus, reduce_segments)),
            "cuda": Planner(refusal, on_cuda),
        },
        describe=described,
        composed=unordered_composition(reduce_segments),
    )
)
