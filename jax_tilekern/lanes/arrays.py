"""Small arrays of a lane: shapes, reductions, products and sorts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jax_tilekern.epilogue.cuda_text import computed_type, literal
from jax_tilekern.lanes.values import (
    Buffer,
    Index,
    Shape,
    Value,
    everywhere,
    in_memory,
    plus,
    position,
    row_major,
    times,
)
from jax_tilekern.lanes.writer import LaneWriter, rule

Places = Sequence[Buffer | None]

# Sorts of up to so many elements exchange neighbours, in registers.
_EXCHANGED = 6


def result_type(eqn: Any, i: int = 0) -> tuple[np.dtype[Any], Shape]:
    """Return type and shape of a result of an equation."""
    aval = eqn.outvars[i].aval
    return np.dtype(aval.dtype), tuple(aval.shape)


# -- Views ------------------------------------------------------------------------------------


@rule("copy", "copy_p", "stop_gradient", "name", "pvary", "pcast", "optimization_barrier")
def _copies(_: LaneWriter, __: Any, operands: list[Value], ___: Places) -> list[Value]:
    return operands


@rule("device_put")
def _device_put(_: LaneWriter, __: Any, operands: list[Value], ___: Places) -> list[Value]:
    return operands


@rule("reshape", "squeeze", "expand_dims")
def _reshape(_: LaneWriter, eqn: Any, operands: list[Value], __: Places) -> list[Value]:
    (x,) = operands
    dtype, shape = result_type(eqn)
    if shape == x.shape:
        return [x]
    if x.size == 1:
        return [everywhere(dtype, shape, x.first)]
    kept = [n for n in shape if n != 1]
    if x.flat is None and kept == [n for n in x.shape if n != 1]:

        def without_ones(indices: Sequence[Index]) -> list[Index]:
            left = (i for i, n in zip(indices, shape, strict=True) if n != 1)
            return [0 if n == 1 else next(left) for n in x.shape]

        return [x.view(shape, without_ones)]
    strides = row_major(shape)
    return [
        Value(
            dtype,
            shape,
            lambda indices: x.at_position(_parenthesised(position(indices, strides))),
            x.flat,
            x.buffers,
        )
    ]


def _parenthesised(index: Index) -> Index:
    return f"({index})" if isinstance(index, str) and " " in index else index


@rule("broadcast_in_dim")
def _broadcast(__: LaneWriter, eqn: Any, operands: list[Value], ___: Places) -> list[Value]:
    x = operands[0]
    dtype, shape = result_type(eqn)
    if shape == x.shape:
        return [x]
    if x.size == 1:
        return [everywhere(dtype, shape, x.first)]
    dims = eqn.params["broadcast_dimensions"]

    def source(indices: Sequence[Index]) -> list[Index]:
        return [0 if n == 1 else indices[dim] for n, dim in zip(x.shape, dims, strict=True)]

    return [x.view(shape, source)]


@rule("tile")
def _tile(__: LaneWriter, eqn: Any, operands: list[Value], ___: Places) -> list[Value]:
    (x,) = operands
    _, shape = result_type(eqn)
    if x.size == 1:
        return [everywhere(x.dtype, shape, x.first)]

    def within(index: Index, size: int) -> Index:
        return index % size if isinstance(index, int) else f"({index}) % {size}"

    def source(indices: Sequence[Index]) -> list[Index]:
        return [within(i, n) for i, n in zip(indices, x.shape, strict=True)]

    return [x.view(shape, source)]


@rule("empty", "empty2")
def _empty(_: LaneWriter, eqn: Any, __: list[Value], ___: Places) -> list[Value]:
    dtype, shape = result_type(eqn)
    return [everywhere(dtype, shape, literal(np.zeros((), dtype), dtype))]


@rule("transpose")
def _transpose(_: LaneWriter, eqn: Any, operands: list[Value], __: Places) -> list[Value]:
    permutation = eqn.params["permutation"]
    inverse = [permutation.index(i) for i in range(len(permutation))]
    return [operands[0].view(result_type(eqn)[1], lambda i: [i[d] for d in inverse])]


@rule("rev")
def _reverse(_: LaneWriter, eqn: Any, operands: list[Value], __: Places) -> list[Value]:
    (x,) = operands
    reversed_dims = eqn.params["dimensions"]

    def source(indices: Sequence[Index]) -> list[Index]:
        return [
            _from_end(n, i) if d in reversed_dims else i
            for d, (n, i) in enumerate(zip(x.shape, indices, strict=True))
        ]

    return [x.view(x.shape, source)]


def _from_end(size: int, index: Index) -> Index:
    return size - 1 - index if isinstance(index, int) else f"({size - 1} - {index})"


@rule("slice")
def _slice(_: LaneWriter, eqn: Any, operands: list[Value], __: Places) -> list[Value]:
    starts = eqn.params["start_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    return [sliced(operands[0], result_type(eqn)[1], starts, strides)]


def sliced(x: Value, shape: Shape, starts: Sequence[Index], strides: Sequence[int]) -> Value:
    """Return the elements from ``starts`` on."""
    return x.view(
        shape,
        lambda indices: [
            plus(start, times(i, stride))
            for start, i, stride in zip(starts, indices, strides, strict=True)
        ],
    )


@rule("split")
def _split(_: LaneWriter, eqn: Any, operands: list[Value], __: Places) -> list[Value]:
    (x,), axis, found, start = operands, eqn.params["axis"], [], 0
    for size in eqn.params["sizes"]:
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        starts = [start if d == axis else 0 for d in range(len(shape))]
        found.append(sliced(x, shape, starts, (1,) * len(shape)))
        start += size
    return found


@rule("unstack")
def _unstack(_: LaneWriter, eqn: Any, operands: list[Value], __: Places) -> list[Value]:
    (x,), axis = operands, eqn.params["axis"]
    return [at_index(x, axis, i) for i in range(x.shape[axis])]


def at_index(x: Value, axis: int, index: Index) -> Value:
    """Return the elements at an index of one dimension, which the result lacks."""
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    return x.view(shape, lambda i: [*i[:axis], index, *i[axis:]])


@rule("iota")
def _iota(_: LaneWriter, eqn: Any, __: list[Value], ___: Places) -> list[Value]:
    dtype, shape = result_type(eqn)
    dim, kind = eqn.params["dimension"], computed_type(dtype)
    return [Value(dtype, shape, lambda i: f"static_cast<{kind}>({i[dim]})")]


# -- Arrays made of others ----------------------------------------------------------------------


@rule("concatenate", "stack")
def _concatenate(
    writer: LaneWriter, eqn: Any, operands: list[Value], places: Places
) -> list[Value]:
    dtype, shape = result_type(eqn)
    stacks = eqn.primitive.name == "stack"
    axis = eqn.params["axis" if stacks else "dimension"]
    buffer, start = writer.array(dtype, shape, places[0]), 0
    for x in operands:
        own = (*x.shape[:axis], 1, *x.shape[axis:]) if stacks else x.shape
        with writer.elements(own) as i:
            source = [*i[:axis], *i[axis + 1 :]] if stacks else i
            target = [*i[:axis], plus(start, i[axis]), *i[axis + 1 :]]
            writer.line(buffer.store(target, x.at(source)))
        start += own[axis]
    return [in_memory(buffer)]


@rule("pad")
def _pad(writer: LaneWriter, eqn: Any, operands: list[Value], places: Places) -> list[Value]:
    x, padding = operands
    dtype, shape = result_type(eqn)
    buffer = writer.array(dtype, shape, places[0])
    config = [tuple(map(int, each)) for each in eqn.params["padding_config"]]
    writer.filled(everywhere(dtype, shape, padding.first), buffer)
    # Where padding is negative, elements are cut off.
    first = [-(min(low, 0) // (interior + 1)) for low, _, interior in config]
    last = [
        min(n - 1, (size - 1 - low) // (interior + 1))
        for n, size, (low, _, interior) in zip(x.shape, shape, config, strict=True)
    ]
    counts = [max(0, b - a + 1) for a, b in zip(first, last, strict=True)]
    with writer.elements(counts) as i:
        source = [plus(a, index) for a, index in zip(first, i, strict=True)]
        target = [
            plus(low, times(index, interior + 1))
            for index, (low, _, interior) in zip(source, config, strict=True)
        ]
        writer.line(buffer.store(target, x.at(source)))
    return [in_memory(buffer)]


# -- Reductions ---------------------------------------------------------------------------------


def _lowest(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "b":
        return False
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf


def _highest(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "b":
        return True
    return np.iinfo(dtype).max if dtype.kind in "iu" else np.inf


# The function of two, and what it is of nothing.
_REDUCTIONS: dict[str, tuple[str, Callable[[np.dtype[Any]], Any]]] = {
    "sum": ("add_any", lambda _: 0),
    "prod": ("mul", lambda _: 1),
    "max": ("max", _lowest),
    "min": ("min", _highest),
    "and": ("bitwise_and", lambda dtype: True if dtype.kind == "b" else -1),
    "or": ("bitwise_or", lambda _: 0),
    "xor": ("bitwise_xor", lambda _: 0),
}


def _identity(kind: str, dtype: np.dtype[Any]) -> str:
    return literal(np.asarray(_REDUCTIONS[kind][1](dtype)).astype(dtype), dtype)


def accumulated(
    writer: LaneWriter,
    dtype: np.dtype[Any],
    kind: str,
    shape: Sequence[int],
    element: Callable[[Sequence[Index]], str],
) -> str:
    """Write the reduction of elements in row-major order; return its result."""
    name, function = writer.name("r"), _REDUCTIONS[kind][0]
    writer.line(f"{computed_type(dtype)} {name} = {_identity(kind, dtype)};")
    with writer.elements(shape) as indices:
        writer.line(f"{name} = lax::{function}({name}, {element(indices)});")
    return writer.rounded(dtype, name)


def _for_each(
    writer: LaneWriter,
    dtype: np.dtype[Any],
    shape: Shape,
    place: Buffer | None,
    result: Callable[[Sequence[Index]], str],
) -> Value:
    """Return an array of results, each of which takes statements of its own."""
    if math.prod(shape) == 1:
        return everywhere(dtype, shape, result((0,) * len(shape)))
    buffer = writer.array(dtype, shape, place)
    with writer.elements(shape) as indices:
        writer.line(buffer.store(indices, result(indices)))
    return in_memory(buffer)


@rule(*(f"reduce_{kind}" for kind in _REDUCTIONS))
def _reduce(writer: LaneWriter, eqn: Any, operands: list[Value], places: Places) -> list[Value]:
    (x,) = operands
    kind, axes = eqn.primitive.name.removeprefix("reduce_"), eqn.params["axes"]
    dtype, shape = result_type(eqn)
    computed_type(dtype)

    def result(kept: Sequence[Index]) -> str:
        def element(reduced: Sequence[Index]) -> str:
            inner, outer = iter(reduced), iter(kept)
            return x.at([next(inner if d in axes else outer) for d in range(len(x.shape))])

        return accumulated(writer, dtype, kind, [x.shape[d] for d in sorted(axes)], element)

    return [_for_each(writer, dtype, shape, places[0], result)]


@rule("argmax", "argmin")
def _arg(writer: LaneWriter, eqn: Any, operands: list[Value], places: Places) -> list[Value]:
    (x,), (axis,) = operands, eqn.params["axes"]
    dtype, shape = result_type(eqn)
    better = ">" if eqn.primitive.name == "argmax" else "<"

    def result(kept: Sequence[Index]) -> str:
        column = at_index_of(x, axis, kept)
        best, where = writer.name("r"), writer.name("r")
        writer.line(f"{x.cxx} {best} = {column(0)};")
        writer.line(f"int {where} = 0;")
        with writer.elements((x.shape[axis],)) as (i,):
            value = writer.scalar(x.dtype, column(i)).first
            # The first NaN is the result.
            with writer.block(
                f"if ({value} {better} {best} || ({value} != {value} && {best} == {best}))"
            ):
                writer.line(f"{best} = {value};")
                writer.line(f"{where} = {i};")
        return writer.scalar(dtype, f"lax::convert<{computed_type(dtype)}>({where})").first

    return [_for_each(writer, dtype, shape, places[0], result)]


def at_index_of(x: Value, axis: int, others: Sequence[Index]) -> Callable[[Index], str]:
    """Return the expression of an element along one dimension."""
    return lambda i: x.at([*others[:axis], i, *others[axis:]])


@rule(*(f"cum{kind}" for kind in ("sum", "prod", "max", "min")))
def _cumulative(writer: LaneWriter, eqn: Any, operands: list[Value], places: Places) -> list[Value]:
    (x,), axis = operands, eqn.params["axis"]
    kind = eqn.primitive.name.removeprefix("cum")
    buffer, size = writer.array(x.dtype, x.shape, places[0]), x.shape[axis]
    with writer.elements((*x.shape[:axis], *x.shape[axis + 1 :])) as others:
        column = at_index_of(x, axis, others)
        name = writer.name("r")
        writer.line(f"{x.cxx} {name} = {_identity(kind, x.dtype)};")
        with writer.loop(size, unroll=writer.is_unrolled(x.size), down=eqn.params["reverse"]) as i:
            sum_ = writer.rounded(x.dtype, f"lax::{_REDUCTIONS[kind][0]}({name}, {column(i)})")
            writer.line(f"{name} = {sum_};")
            writer.line(buffer.store([*others[:axis], i, *others[axis:]], name))
    return [in_memory(buffer)]


@rule("dot_general")
def _dot_general(
    writer: LaneWriter, eqn: Any, operands: list[Value], places: Places
) -> list[Value]:
    lhs, rhs = operands
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    dtype, shape = result_type(eqn)
    kind = computed_type(dtype)

    def free(x: Value, *used: Sequence[int]) -> list[int]:
        return [d for d in range(len(x.shape)) if not any(d in dims for dims in used)]

    lhs_free = free(lhs, lhs_contracted, lhs_batch)
    rhs_free = free(rhs, rhs_contracted, rhs_batch)

    def read(x: Value, dims: Sequence[int], indices: Sequence[Index]) -> str:
        element = x.at([indices[dims.index(d)] for d in range(len(x.shape))])
        return element if x.cxx == kind else f"lax::convert<{kind}>({element})"

    def result(i: Sequence[Index]) -> str:
        batch, rest = i[: len(lhs_batch)], i[len(lhs_batch) :]
        rows, columns = rest[: len(lhs_free)], rest[len(lhs_free) :]

        def term(k: Sequence[Index]) -> str:
            left = read(lhs, [*lhs_batch, *lhs_free, *lhs_contracted], [*batch, *rows, *k])
            right = read(rhs, [*rhs_batch, *rhs_free, *rhs_contracted], [*batch, *columns, *k])
            return f"lax::mul({left}, {right})"

        return accumulated(writer, dtype, "sum", [lhs.shape[d] for d in lhs_contracted], term)

    return [_for_each(writer, dtype, shape, places[0], result)]


# -- Sorts ----------------------------------------------------------------------------------------


@rule("sort")
def _sort(writer: LaneWriter, eqn: Any, operands: list[Value], _: Places) -> list[Value]:
    """Sort by insertion, which is stable; few elements by exchanges of neighbours."""
    axis, keys = eqn.params["dimension"], eqn.params["num_keys"]
    copies = [writer.copied(x) for x in operands]
    buffers = [x.whole for x in copies]
    shape, size = copies[0].shape, copies[0].shape[axis]

    def before(x: Sequence[str], y: Sequence[str]) -> str:
        """Return the condition that keys x come before keys y; NaN is the last."""
        condition = ""
        for key in reversed(range(keys)):
            is_less = f"lax::sorts_before({x[key]}, {y[key]})"
            equal = f"!lax::sorts_before({y[key]}, {x[key]})"
            condition = f"({is_less} || ({equal} && {condition}))" if condition else is_less
        return condition

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
