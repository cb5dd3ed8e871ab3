"""Small arrays of a lane: views of others, and arrays made of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from jax_tilekern.epilogue.cuda_text import computed_type, literal, rounded
from jax_tilekern.epilogue.understood import all_of, undivided
from jax_tilekern.ops.kernel.translation.values import (
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
from jax_tilekern.ops.kernel.translation.writer import LaneWriter, rule

Places = Sequence[Buffer | None]


def result_type(eqn: Any, i: int = 0) -> tuple[np.dtype[Any], Shape]:
    aval = eqn.outvars[i].aval
    return np.dtype(aval.dtype), tuple(aval.shape)


# -- Views ------------------------------------------------------------------------------------


@rule("copy", "stop_gradient", "optimization_barrier")
@rule("name", **all_of("name"))
@rule("pvary", **all_of("axes"))
@rule("device_put", **all_of("devices srcs copy_semantics"))
def _copies(_: LaneWriter, __: Any, operands: list[Value], ___: Places) -> list[Value]:
    return operands


@rule("reshape", **all_of("new_sizes dimensions"), sharding=undivided)
@rule("squeeze", **all_of("dimensions"))
def _reshape(_: LaneWriter, eqn: Any, operands: list[Value], __: Places) -> list[Value]:
    (x,) = operands
    dtype, shape = result_type(eqn)
    if eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None:
        x = _transposed(x, eqn.params["dimensions"])
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


@rule("broadcast_in_dim", **all_of("shape broadcast_dimensions"), sharding=undivided)
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


@rule("tile", **all_of("reps"))
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


@rule("empty", **all_of("shape dtype"), out_sharding=undivided)
@rule("empty2", **all_of("dtype memory_space"))
def _empty(_: LaneWriter, eqn: Any, __: list[Value], ___: Places) -> list[Value]:
    dtype, shape = result_type(eqn)
    return [everywhere(dtype, shape, literal(np.zeros((), dtype), dtype))]


@rule("transpose", **all_of("permutation"))
def _transpose(_: LaneWriter, eqn: Any, operands: list[Value], __: Places) -> list[Value]:
    return [_transposed(operands[0], eqn.params["permutation"])]


def _transposed(x: Value, permutation: Sequence[int]) -> Value:
    inverse = [permutation.index(i) for i in range(len(permutation))]
    return x.view(tuple(x.shape[d] for d in permutation), lambda i: [i[d] for d in inverse])


@rule("rev", **all_of("dimensions"))
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


@rule("slice", **all_of("start_indices limit_indices strides"))
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


@rule("split", **all_of("sizes axis"))
def _split(_: LaneWriter, eqn: Any, operands: list[Value], __: Places) -> list[Value]:
    (x,), axis, found, start = operands, eqn.params["axis"], [], 0
    for size in eqn.params["sizes"]:
        shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
        starts = [start if d == axis else 0 for d in range(len(shape))]
        found.append(sliced(x, shape, starts, (1,) * len(shape)))
        start += size
    return found


@rule("unstack", **all_of("axis"))
def _unstack(_: LaneWriter, eqn: Any, operands: list[Value], __: Places) -> list[Value]:
    (x,), axis = operands, eqn.params["axis"]
    return [at_index(x, axis, i) for i in range(x.shape[axis])]


def at_index(x: Value, axis: int, index: Index) -> Value:
    """Return the elements at an index of one dimension, which the result lacks."""
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    return x.view(shape, lambda i: [*i[:axis], index, *i[axis:]])


@rule("iota", **all_of("dtype shape dimension"), sharding=undivided)
def _iota(_: LaneWriter, eqn: Any, __: list[Value], ___: Places) -> list[Value]:
    dtype, shape = result_type(eqn)
    dim, kind = eqn.params["dimension"], computed_type(dtype)
    return [Value(dtype, shape, lambda i: rounded(f"static_cast<{kind}>({i[dim]})", dtype))]


@rule("pow")
def _power(writer: LaneWriter, eqn: Any, operands: list[Value], places: Places) -> list[Value]:
    x, y = operands
    if x.dtype == y.dtype:
        return [writer.elementwise(eqn, operands, places[0])]
    return writer.meaning(lambda x, y: lax.pow(x, y.astype(x.dtype)), eqn, operands)


@rule("polynomial", **all_of("unroll"))
def _polynomial(writer: LaneWriter, eqn: Any, operands: list[Value], _: Places) -> list[Value]:
    """Evaluate by Horner's rule; the constant coefficient comes first."""

    def means(x: Any, *coefficients: Any) -> Any:
        *rest, result = coefficients
        for coefficient in reversed(rest):
            result = result * x + coefficient
        return result

    return writer.meaning(means, eqn, operands)


# -- Arrays made of others ----------------------------------------------------------------------


@rule("concatenate", **all_of("dimension"))
@rule("stack", **all_of("axis"))
def _concatenate(
    writer: LaneWriter, eqn: Any, operands: list[Value], places: Places
) -> list[Value]:
    dtype, shape = result_type(eqn)
    stacks = eqn.primitive.name == "stack"
    axis = eqn.params["axis" if stacks else "dimension"]
    buffer, start = writer.array(dtype, shape, places[0]), 0
    with writer.written(buffer):
        for x in operands:
            own = (*x.shape[:axis], 1, *x.shape[axis:]) if stacks else x.shape
            with writer.elements(own, buffer) as i:
                source = [*i[:axis], *i[axis + 1 :]] if stacks else i
                target = [*i[:axis], plus(start, i[axis]), *i[axis + 1 :]]
                writer.line(buffer.store(target, x.at(source)))
            start += own[axis]
    return [in_memory(buffer)]


@rule("pad", **all_of("padding_config"))
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
    with writer.elements(counts, buffer) as i:
        source = [plus(a, index) for a, index in zip(first, i, strict=True)]
        target = [
            plus(low, times(index, interior + 1))
            for index, (low, _, interior) in zip(source, config, strict=True)
        ]
        writer.line(buffer.store(target, x.at(source)))
    return [in_memory(buffer)]
