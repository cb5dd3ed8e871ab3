"""Reductions, cumulative reductions and products of small arrays of a lane."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tilekern.epilogue.cuda_text import computed_type, literal
from jax_tilekern.epilogue.understood import all_of, anything, undivided
from jax_tilekern.interop import compat
from jax_tilekern.ops.kernel.translation.arrays import Places, result_type
from jax_tilekern.ops.kernel.translation.values import (
    Buffer,
    Index,
    Shape,
    Value,
    everywhere,
    in_memory,
    row_major,
)
from jax_tilekern.ops.kernel.translation.writer import LaneWriter, rule


def _lowest(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "b":
        return False
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf


def _highest(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "b":
        return True
    return np.iinfo(dtype).max if dtype.kind in "iu" else np.inf


# The function of two elements, and its neutral element.
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
    """Write the reduction of elements in row-major order; return its result.

    Of many elements, each thread of a group reduces its own, and then the group their results.
    """
    name, function = writer.name("r"), _REDUCTIONS[kind][0]
    kind_of_sum, identity = computed_type(dtype), _identity(kind, dtype)
    if kind == "sum" and kind_of_sum in ("float", "double") and writer.has_partial_sums(shape):
        # Each addition waits for the one before.
        writer.line(f"{kind_of_sum} {name}[4] = {{{', '.join([identity] * 4)}}};")
        with writer.elements(shape) as indices:
            part = f"{name}[{indices[-1]} % 4]"
            writer.line(f"{part} = lax::{function}({part}, {element(indices)});")
        return writer.rounded(dtype, f"({name}[0] + {name}[1] + ({name}[2] + {name}[3]))")
    writer.line(f"{kind_of_sum} {name} = {identity};")
    is_spread = writer.is_spread(math.prod(shape))
    with (writer.spread if is_spread else writer.elements)(shape) as indices:
        writer.line(f"{name} = lax::{function}({name}, {element(indices)});")
    if is_spread:
        writer.line(f"{name} = lax::reduced_in_group<kThreads>({name}, {_combine(kind)});")
    return writer.rounded(dtype, name)


def _combine(kind: str) -> str:
    return f"[](auto x, auto y) {{ return lax::{_REDUCTIONS[kind][0]}(x, y); }}"


def _accumulated_together(
    writer: LaneWriter,
    buffer: Buffer,
    kind: str,
    shape: Sequence[int],
    element: Callable[[Sequence[Index], Sequence[Index]], str],
    common: Callable[[Sequence[Index]], None],
) -> None:
    """Write reductions to each element of a short array, in one loop over what they reduce."""
    dtype, size, function = buffer.dtype, math.prod(buffer.shape), _REDUCTIONS[kind][0]
    name = writer.name("r")
    sums = Buffer(name, dtype, buffer.shape, row_major(buffer.shape))
    writer.line(f"{computed_type(dtype)} {name}[{size}];")
    with writer.elements(buffer.shape) as kept:
        writer.line(sums.store(kept, _identity(kind, dtype)))
    with writer.spread(shape) as reduced:
        common(reduced)
        with writer.elements(buffer.shape) as kept:
            sum_ = f"lax::{function}({sums.load(kept)}, {element(kept, reduced)})"
            writer.line(sums.store(kept, sum_))
    writer.line(f"lax::reduce_in_group<kThreads>({name}, {_combine(kind)});")
    with writer.elements(buffer.shape) as kept:
        writer.line(buffer.store(kept, writer.rounded(dtype, sums.load(kept))))


def _reductions(
    writer: LaneWriter,
    eqn: Any,
    operands: Sequence[Value],
    place: Buffer | None,
    kind: str,
    shape: Sequence[int],
    element: Callable[[Sequence[Index], Sequence[Index]], str],
    before: Callable[[Sequence[Index]], None] = lambda _: None,
    common: Callable[[Sequence[Index]], None] = lambda _: None,
) -> Value:
    """Write the reductions of ``element(kept, reduced)`` to each element of a result.

    ``before(kept)`` writes what the terms of one reduction have in common, and ``common(reduced)``
    what the reductions have.
    """
    dtype, kept_shape = result_type(eqn)

    def result(kept: Sequence[Index]) -> str:
        before(kept)
        return accumulated(writer, dtype, kind, shape, lambda reduced: element(kept, reduced))

    if writer.is_deferred(eqn):
        return writer.deferred(dtype, kept_shape, result, operands)
    size = math.prod(kept_shape)
    if size > 1 and writer.is_unrolled(size) and writer.is_spread(math.prod(shape)):
        buffer = writer.array(dtype, kept_shape)
        _accumulated_together(writer, buffer, kind, shape, element, common)
        return in_memory(buffer)
    return _for_each(writer, dtype, kept_shape, place, result)


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
    with writer.elements(shape, buffer) as indices:
        writer.line(buffer.store(indices, result(indices)))
    return in_memory(buffer)


@rule(*(f"reduce_{kind}" for kind in _REDUCTIONS), axes=anything, out_sharding=undivided)
def _reduce(writer: LaneWriter, eqn: Any, operands: list[Value], places: Places) -> list[Value]:
    (x,) = operands
    kind, axes = eqn.primitive.name.removeprefix("reduce_"), eqn.params["axes"]
    computed_type(x.dtype)

    def element(kept: Sequence[Index], reduced: Sequence[Index]) -> str:
        return x.at(_merged(kept, reduced, axes))

    return [_reductions(writer, eqn, operands, places[0], kind, _sizes(x, axes), element)]


def _sizes(x: Value, axes: Sequence[int]) -> list[int]:
    return [x.shape[d] for d in sorted(axes)]


def _merged(kept: Sequence[Index], reduced: Sequence[Index], axes: Sequence[int]) -> list[Index]:
    inner, outer = iter(reduced), iter(kept)
    return [next(inner if d in axes else outer) for d in range(len(kept) + len(reduced))]


@rule("reduce", **all_of("computation jaxpr dimensions"))
def _reduce_by(writer: LaneWriter, eqn: Any, operands: list[Value], places: Places) -> list[Value]:
    """Reduce arrays together, by a function of the scalars so far and the next ones."""
    count, axes = len(eqn.outvars), eqn.params["dimensions"]
    arrays, initial = operands[:count], operands[count:]
    function = compat.closed_jaxpr(eqn.params["jaxpr"])
    buffers = [writer.array(*result_type(eqn, i), place) for i, place in enumerate(places)]
    with writer.elements(buffers[0].shape, buffers[0]) as kept:
        names = [writer.name("r") for _ in arrays]
        for name, x in zip(names, initial, strict=True):
            writer.line(f"{x.cxx} {name} = {x.first};")
        with writer.elements(_sizes(arrays[0], axes)) as reduced, writer.body_of_loop():
            accumulated = [
                everywhere(x.dtype, (), name) for x, name in zip(arrays, names, strict=True)
            ]
            place = _merged(kept, reduced, axes)
            following = [writer.scalar(x.dtype, x.at(place)) for x in arrays]
            results = writer.jaxpr(function, [*accumulated, *following])
            # A result may be another's variable.
            found = [writer.scalar(x.dtype, x.first) for x in results]
            for name, x in zip(names, found, strict=True):
                writer.line(f"{name} = {x.first};")
        for buffer, name in zip(buffers, names, strict=True):
            writer.line(buffer.store(kept, name))
    return [in_memory(buffer) for buffer in buffers]


@rule("argmax", "argmin", **all_of("axes index_dtype"))
def _arg(writer: LaneWriter, eqn: Any, operands: list[Value], places: Places) -> list[Value]:
    (x,), (axis,) = operands, eqn.params["axes"]
    dtype, shape = result_type(eqn)
    better = ">" if eqn.primitive.name == "argmax" else "<"

    def is_better(x: str, y: str) -> str:
        # The first NaN is the result.
        return f"{x} {better} {y} || ({x} != {x} && {y} == {y})"

    def result(kept: Sequence[Index]) -> str:
        column = _elements_along(x, axis, kept)
        best, where = writer.name("r"), writer.name("r")
        writer.line(f"{x.cxx} {best} = {column(0)};")
        writer.line(f"int {where} = 0;")
        is_spread = writer.is_spread(x.shape[axis])
        with (writer.spread if is_spread else writer.elements)((x.shape[axis],)) as (i,):
            value = writer.scalar(x.dtype, column(i)).first
            with writer.block(f"if ({is_better(value, best)})"):
                writer.line(f"{best} = {value};")
                writer.line(f"{where} = {i};")
        if is_spread:
            compare = f"[](auto x, auto y) {{ return {is_better('x', 'y')}; }}"
            writer.line(f"lax::find_in_group<kThreads>({best}, {where}, {compare});")
        return writer.scalar(dtype, f"lax::convert<{computed_type(dtype)}>({where})").first

    return [_for_each(writer, dtype, shape, places[0], result)]


def _elements_along(x: Value, axis: int, others: Sequence[Index]) -> Callable[[Index], str]:
    return lambda i: x.at([*others[:axis], i, *others[axis:]])


@rule("cumsum", "cumprod", "cummax", "cummin", **all_of("axis reverse"))
def _cumulative(writer: LaneWriter, eqn: Any, operands: list[Value], places: Places) -> list[Value]:
    (x,), axis, down = operands, eqn.params["axis"], eqn.params["reverse"]
    kind = eqn.primitive.name.removeprefix("cum")
    buffer, size = writer.array(x.dtype, x.shape, places[0]), x.shape[axis]
    rest = (*x.shape[:axis], *x.shape[axis + 1 :])
    # Threads of a group sum up parts of a long line one after another, or have lines of their own.
    in_parts = writer.is_spread(size) and writer.is_unrolled(math.prod(rest))
    with (
        writer.written(buffer),
        writer.elements(rest) if in_parts else writer.elements(rest, buffer) as others,
    ):
        column = _elements_along(x, axis, others)
        name, identity = writer.name("r"), _identity(kind, x.dtype)
        writer.line(f"{x.cxx} {name} = {identity};")

        def add(i: Index) -> None:
            sum_ = writer.rounded(x.dtype, f"lax::{_REDUCTIONS[kind][0]}({name}, {column(i)})")
            writer.line(f"{name} = {sum_};")

        if in_parts:
            with writer.part(size, down=down) as i:
                add(i)
            before = f"{name}, {identity}, {_combine(kind)}"
            writer.line(f"{name} = lax::reduced_before<kThreads>({before});")
            loop = writer.part(size, down=down)
        else:
            loop = writer.loop(size, unroll=writer.is_unrolled(x.size), down=down)
        with loop as i:
            add(i)
            writer.line(buffer.store([*others[:axis], i, *others[axis:]], name))
    return [in_memory(buffer)]


@rule("cumlogsumexp", **all_of("axis reverse"))
def _cumulative_logsumexp(
    writer: LaneWriter, eqn: Any, operands: list[Value], _: Places
) -> list[Value]:
    axis, reverse = eqn.params["axis"], eqn.params["reverse"]

    def means(x: Any) -> Any:
        def step(sum_: Any, row: Any) -> tuple[Any, Any]:
            return (jnp.logaddexp(sum_, row),) * 2

        rows = jnp.moveaxis(x, axis, 0)
        nothing = jnp.full(rows.shape[1:], -jnp.inf, x.dtype)
        return jnp.moveaxis(lax.scan(step, nothing, rows, reverse=reverse)[1], 0, axis)

    return writer.meaning(means, eqn, operands)


def _is_precision(value: Any) -> bool:
    """Whether float32 arithmetic is as precise. An algorithm is not met by every arithmetic."""
    both = value if isinstance(value, tuple) else (value,)
    return all(x is None or isinstance(x, lax.Precision) for x in both)


@rule(
    "dot_general",
    **all_of("dimension_numbers preferred_element_type"),
    out_sharding=undivided,
    precision=_is_precision,
)
def _dot_general(
    writer: LaneWriter, eqn: Any, operands: list[Value], places: Places
) -> list[Value]:
    lhs, rhs = operands
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    kind = computed_type(result_type(eqn)[0])

    def free(x: Value, *used: Sequence[int]) -> list[int]:
        return [d for d in range(len(x.shape)) if not any(d in dims for dims in used)]

    lhs_free = free(lhs, lhs_contracted, lhs_batch)
    rhs_free = free(rhs, rhs_contracted, rhs_batch)

    def read(x: Value, dims: Sequence[int], indices: Sequence[Index]) -> str:
        element = x.at([indices[dims.index(d)] for d in range(len(x.shape))])
        return element if x.cxx == kind else f"lax::convert<{kind}>({element})"

    def divided(i: Sequence[Index]) -> tuple[Sequence[Index], Sequence[Index], Sequence[Index]]:
        batch, rest = i[: len(lhs_batch)], i[len(lhs_batch) :]
        return batch, rest[: len(lhs_free)], rest[len(lhs_free) :]

    def term(i: Sequence[Index], k: Sequence[Index]) -> str:
        batch, rows, columns = divided(i)
        left = read(lhs, [*lhs_batch, *lhs_free, *lhs_contracted], [*batch, *rows, *k])
        right = read(rhs, [*rhs_batch, *rhs_free, *rhs_contracted], [*batch, *columns, *k])
        return f"lax::mul({left}, {right})"

    def before(i: Sequence[Index]) -> None:
        batch, rows, columns = divided(i)
        writer.prepare(lhs, dict(zip((*lhs_batch, *lhs_free), (*batch, *rows), strict=True)))
        writer.prepare(rhs, dict(zip((*rhs_batch, *rhs_free), (*batch, *columns), strict=True)))

    def common(k: Sequence[Index]) -> None:
        writer.prepare(lhs, dict(zip(lhs_contracted, k, strict=True)))
        writer.prepare(rhs, dict(zip(rhs_contracted, k, strict=True)))

    contracted = [lhs.shape[d] for d in lhs_contracted]
    return [_reductions(writer, eqn, operands, places[0], "sum", contracted, term, before, common)]
