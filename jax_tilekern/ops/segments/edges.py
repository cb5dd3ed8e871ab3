"""The operands of reductions to segments, and the meaning of a call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.epilogue.scalar_function import Role, ScalarFunction, trace_scalars
from jax_tilekern.interop.originals import ops
from jax_tilekern.ops.element_types import wide_dtype
from jax_tilekern.ops.segments.batches import by_batch, first_of_batches
from jax_tilekern.ops.segments.keys import highest, lowest, rows_of
from jax_tilekern.partitioning import params_text
from jax_tilekern.plans.segments.problem import EXTREMA, Combiner
from jax_tilekern.primitives.operation import lowering_platform


@dataclass(frozen=True)
class SegmentCall:
    """What a call reduces: its operands, how edges read them, and the values of edges."""

    # For each array, the index array with the rows that edges read; None for an edge's own row.
    gathers: tuple[int | None, ...]
    indices: int  # Number of index arrays, of int32. A number out of bounds reads zeros.
    # Index arrays whose own order and bounds are operands, for derivatives.
    planned: tuple[int, ...]
    segments: int  # of a batch
    batch: int  # number of batches
    is_sorted: bool  # whether keys ascend; otherwise there is an order
    reduction: Combiner
    # The values, a function of one element of each array; None for the one array itself.
    function: ScalarFunction | None
    dtype: np.dtype[Any]  # of the result; floats are reduced in float32 at least
    linear: int = 0  # in how many of the last arrays the function is jointly linear
    # The columns and the type of the sum whose edges a sum of ones counts.
    counted: tuple[int, np.dtype[Any]] | None = None

    @classmethod
    def of_rows(
        cls,
        reduction: Combiner,
        dtype: np.dtype[Any],
        *,
        segments: int,
        batch: int = 1,
        is_sorted: bool,
        counted: tuple[int, np.dtype[Any]] | None = None,
    ) -> SegmentCall:
        """Return the call that reduces an array of rows, one for each edge."""
        return cls(
            (None,), 0, (), segments, batch, is_sorted, reduction, None, np.dtype(dtype),
            counted=counted,
        )  # fmt: skip

    @property
    def bins(self) -> int:
        """Bins of all batches."""
        return self.batch * (self.segments + 2)

    @property
    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        """The types that decide whether 64-bit types are enabled."""
        return (self.dtype, *(self.function.dtypes if self.function else ()))

    def over_stored_values(self) -> SegmentCall:
        """Return the call that reduces the values of edges where they are stored."""
        return dataclasses.replace(
            self, gathers=(None,), indices=0, planned=(), function=None, linear=0
        )


params_text.register(SegmentCall, vars, lambda fields: SegmentCall(**fields))


class EdgeOperands(NamedTuple):
    """The operands of a call."""

    arrays: tuple[Any, ...]  # rows, whose other dimensions are the same or of size 1
    indices: tuple[Any, ...]  # a number of a row for each edge
    plans: tuple[tuple[Any, Any], ...]  # order and bounds of the planned indices
    keys: Any  # the bin of each edge
    order: tuple[Any, ...]  # the edges by their keys, or nothing
    bounds: Any  # where each bin begins

    @classmethod
    def of(cls, operands: Sequence[Any], call: SegmentCall) -> EdgeOperands:
        arrays = len(call.gathers)
        indices = arrays + call.indices
        plans = indices + 2 * len(call.planned)
        flat = operands[indices:plans]
        keys, *order, bounds = operands[plans:]
        return cls(
            tuple(operands[:arrays]),
            tuple(operands[arrays:indices]),
            tuple(zip(flat[::2], flat[1::2], strict=True)),
            keys,
            tuple(order),
            bounds,
        )

    def flat(self) -> list[Any]:
        plans = (x for plan in self.plans for x in plan)
        return [*self.arrays, *self.indices, *plans, self.keys, *self.order, self.bounds]


# The function that binds the operation.
Reduce = Callable[[EdgeOperands, SegmentCall], Array]


def columns_of(shapes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the sizes of the dimensions after the rows, which are the same or 1."""
    sizes = zip(*(shape[1:] for shape in shapes), strict=True)
    return tuple(next((n for n in each if n != 1), 1) for each in sizes)


def gathered_rows(x: Array, index: Array, *, batch: int = 1, fill: Any = 0) -> Array:
    """Return rows of ``x`` by their numbers; numbers out of bounds read ``fill``.

    Each batch of numbers is of rows of its own part of ``x``. Batches stay apart, so that devices
    share them.
    """
    if not x.shape[0]:
        return jnp.full((*index.shape, *x.shape[1:]), fill, x.dtype)
    if batch == 1:
        rows = jnp.asarray(x).at[index]
        return rows.get(mode="fill", fill_value=fill, wrap_negative_indices=False)
    index = by_batch(index, batch)
    result: Array = jax.vmap(functools.partial(gathered_rows, fill=fill))(
        by_batch(x, batch),
        jnp.where(index < 0, -1, index - first_of_batches(batch, x.shape[0] // batch)),
    )
    return lax.collapse(result, 0, 2)


def edge_values(
    arrays: Sequence[Array],
    indices: Sequence[Array],
    gathers: Sequence[int | None],
    function: ScalarFunction | None,
) -> Array:
    """Return the values of all edges, stored."""
    read = [
        x if i is None else gathered_rows(x, indices[i])
        for x, i in zip(arrays, gathers, strict=True)
    ]
    if function is None:
        return read[0]
    shape = (read[0].shape[0], *columns_of(x.shape for x in read))
    dims = range(len(shape))
    labels = [tuple(i for i in dims if x.shape[i] == shape[i] or i == 0) for x in read]
    squeezed = [
        lax.squeeze(x, [i for i in dims if i not in own])
        for x, own in zip(read, labels, strict=True)
    ]
    first = jnp.broadcast_to(read[0], shape)
    result: Array = function.over_labels(tuple(dims), labels[1:])(first, *squeezed[1:])[0]
    return result


def neutral_element(reduction: Combiner, dtype: np.dtype[Any]) -> Any:
    """Return what a reduction of no values is."""
    if reduction in ("sum", "prod"):
        return np.asarray(reduction == "prod", dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(-np.inf if reduction == "max" else np.inf, dtype)
    if dtype == np.bool_:
        return np.asarray(reduction == "min")
    return np.asarray(lowest(dtype) if reduction == "max" else highest(dtype), dtype)


_SCATTERS = {"sum": "add", "prod": "multiply", "max": "max", "min": "min"}


# Makes an array of a shape and of equal elements.
Fill = Callable[[Sequence[int], Any], Array]


def by_scatter(
    read: EdgeOperands, call: SegmentCall, fill: Fill | None = None, *, is_wide: bool = True
) -> Array:
    """Reduce by JAX's own operations, into an array that ``fill`` makes.

    Numbers of 16 bits are reduced in float32, unless they are extrema and not ``is_wide``.
    """
    values = edge_values(read.arrays, read.indices, call.gathers, call.function)
    # On CPUs a conversion is a pass of its own, which extrema do not need.
    is_wide = is_wide and not (call.reduction in EXTREMA and lowering_platform.value == "cpu")
    values = values.astype(wide_dtype(call.dtype) if is_wide else call.dtype)
    if call.batch == 1 and fill is None:
        by_jax = getattr(ops, f"segment_{call.reduction}")
        total: Array = by_jax(values, read.keys, call.segments, call.is_sorted)
        return total.astype(call.dtype)
    rows = by_batch(rows_of(read.keys, call.segments, call.batch), call.batch)
    shape = (call.batch, call.segments, *values.shape[1:])
    start = (fill or jnp.full)(shape, neutral_element(call.reduction, values.dtype))

    def reduced(start: Array, rows: Array, values: Array) -> Array:
        result: Array = getattr(start.at[rows], _SCATTERS[call.reduction])(
            values, mode="drop", indices_are_sorted=call.is_sorted
        )
        return result

    # Batches stay apart, so that devices share them.
    first = first_of_batches(call.batch, call.segments)
    rows = jnp.where(rows < 0, call.segments, rows - first)
    result = jax.vmap(reduced)(start, rows, values.reshape(*rows.shape, *shape[2:]))
    return lax.collapse(result, 0, 2).astype(call.dtype)


def trace_values(
    function: Callable[..., Any], dtypes: Sequence[np.dtype[Any]]
) -> tuple[ScalarFunction, list[Any]]:
    """Trace a user's function of scalars, and return the scalars that it closes over."""
    first = dtypes[0]
    role = Role("segment_reduce", "function")
    traced, closed_over, _ = trace_scalars(function, first, first, dtypes[1:], role)
    if traced.is_closure:
        raise NotImplementedError(
            f"{role.of(function)} closes over a value of the program, and has a branch, "
            "a loop or a function with a derivative of its own, which the types of a shard_map or "
            "of explicit axes do not allow; pass the value as an array of one row, with zeros as "
            "its gather"
        )
    if len(traced.out_dtypes) != 1 or traced.elements != 1:
        raise TypeError(
            f"{role.of(function)} returns {len(traced.out_dtypes)} values, of which "
            f"{traced.elements} are scalars; the value of an edge is one scalar"
        )
    return traced, closed_over
