"""Sorts of small arrays of a lane."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jax_tilekern.epilogue.understood import all_of
from jax_tilekern.interop.originals import lax
from jax_tilekern.ops.kernel.translation.arrays import Places
from jax_tilekern.ops.kernel.translation.values import Index, Value, in_memory
from jax_tilekern.ops.kernel.translation.writer import LaneWriter, rule

# Sorts of up to so many elements exchange neighbours, in registers.
_EXCHANGED = 6


@rule("sort", **all_of("dimension is_stable num_keys"))
def _sort(writer: LaneWriter, eqn: Any, operands: list[Value], _: Places) -> list[Value]:
    axis, keys = eqn.params["dimension"], eqn.params["num_keys"]

    def before(x: Sequence[str], y: Sequence[str]) -> str:
        """Return the condition that keys x come before keys y; NaN is the last."""
        condition = ""
        for key in reversed(range(keys)):
            is_less = f"lax::sorts_before({x[key]}, {y[key]})"
            equal = f"!lax::sorts_before({y[key]}, {x[key]})"
            condition = f"({is_less} || ({equal} && {condition}))" if condition else is_less
        return condition

    sort = _by_counting if writer.is_spread(operands[0].size) else _by_insertion
    return sort(writer, operands, axis, before)


Before = Callable[[Sequence[str], Sequence[str]], str]


def _by_counting(
    writer: LaneWriter, operands: list[Value], axis: int, before: Before
) -> list[Value]:
    """Sort long arrays: the place of an element is the number of those that come before it."""
    shape = operands[0].shape
    buffers = [writer.array(x.dtype, shape) for x in operands]
    with writer.elements(shape, buffers[0]) as indices:
        own, i = [writer.scalar(x.dtype, x.at(indices)).first for x in operands], indices[axis]
        rank = writer.name("n")
        writer.line(f"int {rank} = 0;")

        def place(i: Index) -> list[Index]:
            return [*indices[:axis], i, *indices[axis + 1 :]]

        with writer.loop(shape[axis], unroll=False) as j:
            other = [writer.scalar(x.dtype, x.at(place(j))).first for x in operands]
            tie = f"({j} < {i} && !{before(own, other)})"
            writer.line(f"{rank} += {before(other, own)} || {tie};")
        for buffer, value in zip(buffers, own, strict=True):
            writer.line(buffer.store(place(rank), value))
    return [in_memory(x) for x in buffers]


def _by_insertion(
    writer: LaneWriter, operands: list[Value], axis: int, before: Before
) -> list[Value]:
    """Sort stably by insertion; few elements by exchanges of neighbours."""
    copies = [writer.copied(x) for x in operands]
    buffers = [x.whole for x in copies]
    shape, size = copies[0].shape, copies[0].shape[axis]
    with writer.elements((*shape[:axis], *shape[axis + 1 :])) as others:

        def place(i: Index) -> list[Index]:
            return [*others[:axis], i, *others[axis:]]

        def elements(i: Index) -> list[str]:
            return [writer.scalar(x.dtype, x.at(place(i))).first for x in copies]

        def store(i: Index, values: Sequence[str]) -> None:
            for buffer, value in zip(buffers, values, strict=True):
                assert buffer is not None
                writer.line(buffer.store(place(i), value))

        if size <= _EXCHANGED and writer.is_unrolled(math.prod(shape)):
            for last in range(size - 1, 0, -1):
                for i in range(last):
                    with writer.block(""):
                        left, right = elements(i), elements(i + 1)
                        with writer.block(f"if ({before(right, left)})"):
                            store(i, right)
                            store(i + 1, left)
        elif size > 1:
            with writer.loop(size, unroll=False) as k:
                taken, j = elements(k), writer.name("i")
                writer.line(f"int {j} = {k};")
                with writer.block(f"for (; {j} > 0; --{j})"):
                    other = elements(f"({j} - 1)")
                    writer.line(f"if (!({before(taken, other)})) break;")
                    store(j, other)
                store(j, taken)
    return copies


@rule("top_k", **all_of("k axis is_stable"))
def _top_k(writer: LaneWriter, eqn: Any, operands: list[Value], _: Places) -> list[Value]:
    """Sort from the end: of equal elements the first one comes first."""
    k, axis = eqn.params["k"], eqn.params["axis"]

    def means(x: Any) -> list[Any]:
        numbers = lax.broadcasted_iota(jnp.int32, x.shape, axis)
        backwards = [lax.rev(y, (axis,)) for y in (x, numbers)]
        in_order = lax.sort(backwards, dimension=axis, is_stable=True, num_keys=1)
        first = [lax.rev(y, (axis,)) for y in in_order]
        return [lax.slice_in_dim(y, 0, k, axis=axis) for y in first]

    return writer.meaning(means, eqn, operands)
