"""Loops and branches of a lane."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jax_tilekern.epilogue.cuda_text import computed_type
from jax_tilekern.epilogue.understood import Untranslatable, all_of
from jax_tilekern.interop import compat
from jax_tilekern.ops.kernel.translation.arrays import Places, at_index, result_type
from jax_tilekern.ops.kernel.translation.flattened import flattened, operands_of_products
from jax_tilekern.ops.kernel.translation.reductions import accumulated
from jax_tilekern.ops.kernel.translation.values import Buffer, Index, Value, everywhere, in_memory
from jax_tilekern.ops.kernel.translation.writer import LaneWriter, rule

# A loop over arrays that are in registers is unrolled if it has up to so many equations in all.
_UNROLLED_EQUATIONS = 64


class _Variable:
    """A variable of C++: what a loop carries, or the result of branches."""

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape
        self.buffer: Buffer | None = None
        self.name = ""

    @property
    def value(self) -> Value:
        if self.buffer is not None:
            return in_memory(self.buffer)
        return everywhere(self.dtype, self.shape, self.name)


def _declared(
    writer: LaneWriter,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    place: Buffer | None = None,
    initial: str = "",
) -> _Variable:
    variable = _Variable(dtype, shape)
    if np.prod(shape, dtype=int) == 1:
        variable.name = writer.name("c")
        writer.line(f"{computed_type(dtype)} {variable.name}{initial and f' = {initial}'};")
    else:
        variable.buffer = writer.array(dtype, shape, place)
    return variable


def _carried(
    writer: LaneWriter,
    values: Sequence[Value],
    read: Sequence[Value],
    places: Places,
    held: Mapping[int, Buffer] | None = None,
) -> list[_Variable]:
    """Return variables that begin as values, in the values' own memory where nothing else reads it.

    The loop also reads ``read``. Some variables are ``held`` in registers.
    """
    variables = []
    for i, (value, place) in enumerate(zip(values, places, strict=True)):
        if value.size == 1:
            variables.append(_declared(writer, value.dtype, value.shape, initial=value.first))
            continue
        variable = _Variable(value.dtype, value.shape)
        others = [*values[:i], *values[i + 1 :], *read]
        if held and i in held:
            variable.buffer = held[i]
            writer.filled(value, held[i])
        else:
            variable.buffer = writer.to_update(value, writer.place_in_loop(place), others)
        variables.append(variable)
    return variables


def _assign(writer: LaneWriter, variables: Sequence[_Variable], values: Sequence[Value]) -> None:
    """Give all variables new values at once."""
    names = {x.name for x in variables if x.buffer is None}
    buffers = {x.buffer for x in variables if x.buffer is not None}
    pending = []
    for variable, value in zip(variables, values, strict=True):
        if variable.buffer is None:
            new = value.first
            if new == variable.name:
                continue
            if new in names:
                new = writer.scalar(value.dtype, new).first
            pending.append(f"{variable.name} = {new};")
    copies: list[tuple[Buffer, Value]] = []
    for variable, value in zip(variables, values, strict=True):
        if variable.buffer is None or value.whole is variable.buffer:
            continue
        copies.append((variable.buffer, value))
    if len(copies) > 1 or any(buffers & value.buffers for _, value in copies):
        copies = [
            (buffer, writer.copied(value) if buffers & value.buffers else value)
            for buffer, value in copies
        ]
    # Variables that broadcast a scalar variable read that one.
    for buffer, value in copies:
        writer.filled(value, buffer)
    for statement in pending:
        writer.line(statement)


@contextlib.contextmanager
def _body(writer: LaneWriter, variables: Sequence[_Variable]) -> Iterator[None]:
    with writer.body_of_loop([x.buffer for x in variables if x.buffer is not None]):
        yield


def _finished(writer: LaneWriter, variables: Sequence[_Variable]) -> list[Value]:
    for variable in variables:
        if variable.buffer is not None:
            variable.buffer = writer.owned(writer.released(variable.buffer))
    return [x.value for x in variables]


@rule(
    "scan",
    **all_of("reverse length jaxpr unroll"),
    # The number of constants and of carried operands: in jax 0.10, and from 0.11 on.
    **all_of("num_consts num_carry ft_in ft_out"),
)
def _scan(writer: LaneWriter, eqn: Any, operands: list[Value], places: Places) -> list[Value]:
    consts, carries = compat.scan_parts(eqn)
    length, body = eqn.params["length"], compat.closed_jaxpr(eqn.params["jaxpr"])
    known, initial, xs = (
        operands[:consts],
        operands[consts : consts + carries],
        operands[consts + carries :],
    )
    xs = [writer.nearby(x) for x in xs]
    known, held = writer.in_registers(body, known, initial, places)
    multiplied = operands_of_products(flattened(body))[consts + carries :]
    variables = _carried(writer, initial, [*known, *xs], places[:carries], held)
    stacked: list[Buffer] = []
    for i in range(carries, len(eqn.outvars)):
        dtype, shape = result_type(eqn, i)
        place = places[i]
        stacked.append(writer.array(dtype, shape) if place is None else writer.owned(place))
    if length == 0:
        return [*_finished(writer, variables), *map(in_memory, stacked)]
    down = eqn.params["reverse"]
    if length * max(1, len(body.jaxpr.eqns)) <= _UNROLLED_EQUATIONS and length <= 8:
        loop = writer.loop(length, unroll=True, down=down)
    else:
        read = [x for x in xs if any(buffer.stored for buffer in x.buffers)]
        loop = writer.steps(length, sum(x.size // length for x in read), down=down)
    rows_ahead = writer.loaded_ahead(xs, length, down=down)
    with loop as t, _body(writer, variables):
        loaded = rows_ahead(t)
        rows = [
            loaded[i] if i in loaded else writer.evaluated(at_index(x, 0, t))
            for i, x in enumerate(xs)
        ]
        rows = [writer.nearby(x) if m else x for x, m in zip(rows, multiplied, strict=True)]
        results = writer.jaxpr(body, [*known, *(x.value for x in variables), *rows])
        for buffer, value in zip(stacked, results[carries:], strict=True):
            with writer.elements(value.shape, buffer) as indices:
                writer.line(buffer.store((t, *indices), value.at(indices)))
        _assign(writer, variables, results[:carries])
    return [*_finished(writer, variables), *map(in_memory, stacked)]


@rule("while", **all_of("cond_nconsts cond_jaxpr body_nconsts body_jaxpr"))
def _while(writer: LaneWriter, eqn: Any, operands: list[Value], places: Places) -> list[Value]:
    condition_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    condition = compat.closed_jaxpr(eqn.params["cond_jaxpr"])
    body = compat.closed_jaxpr(eqn.params["body_jaxpr"])
    tested, known = (
        operands[:condition_consts],
        operands[condition_consts : condition_consts + body_consts],
    )
    initial = operands[condition_consts + body_consts :]
    variables = _carried(writer, initial, [*tested, *known], places)
    with writer.block("while (true)"):
        with writer.body_of_loop():
            (goes_on,) = writer.jaxpr(condition, [*tested, *(x.value for x in variables)])
            any_goes_on = goes_on.first
            if goes_on.size != 1:
                goes_on = writer.copied(goes_on)
                any_goes_on = accumulated(writer, goes_on.dtype, "or", goes_on.shape, goes_on.at)
            writer.line(f"if (!({any_goes_on})) break;")
        # If each element ends at its own step, the body must not overwrite ended elements.
        with writer.body_of_loop() if goes_on.shape else _body(writer, variables):
            results = writer.jaxpr(body, [*known, *(x.value for x in variables)])
            if goes_on.shape:
                results = [
                    _where(writer, goes_on, new, variable.value)
                    for new, variable in zip(results, variables, strict=True)
                ]
            _assign(writer, variables, results)
    return _finished(writer, variables)


def _where(writer: LaneWriter, chosen: Value, new: Value, old: Value) -> Value:
    """Choose between values by a condition for each index of their first dimensions."""
    if old.whole is not None and new.whole is old.whole:
        return old

    def element(indices: Sequence[Index]) -> str:
        condition = chosen.at(indices[: len(chosen.shape)])
        return f"({condition} ? {new.at(indices)} : {old.at(indices)})"

    value = Value(old.dtype, old.shape, element, None, chosen.buffers | new.buffers | old.buffers)
    return writer.evaluated(value)


@rule("cond", **all_of("branches branches_platforms"))
def _cond(writer: LaneWriter, eqn: Any, operands: list[Value], places: Places) -> list[Value]:
    index, *arguments = operands
    branches = [compat.closed_jaxpr(x) for x in eqn.params["branches"]]
    # An index that is known is that of a platform, whose branch alone has to have a translation.
    if index.first.isdigit():
        return writer.jaxpr(branches[int(index.first)], arguments, places)
    variables = [
        _declared(writer, *result_type(eqn, i), place)
        for i, place in zip(range(len(eqn.outvars)), places, strict=True)
    ]
    for i, branch in enumerate(branches):
        # An index out of bounds takes the last branch.
        test = f"if ({index.first} == {i})" if i + 1 < len(branches) else ""
        with writer.block(f"{'else ' if i and test else 'else' if i else ''}{test}"):
            results = writer.jaxpr(branch, arguments)
            for variable, value in zip(variables, results, strict=True):
                if variable.buffer is None:
                    writer.line(f"{variable.name} = {value.first};")
                else:
                    writer.filled(value, variable.buffer)
    return [x.value for x in variables]


@rule("platform_index", **all_of("platforms"))
def _platform(_: LaneWriter, eqn: Any, __: list[Value], ___: Places) -> list[Value]:
    """Choose the branch of ``lax.platform_dependent`` for CUDA, or the default."""
    for i, platforms in enumerate(eqn.params["platforms"]):
        if platforms is None or "cuda" in platforms:
            return [everywhere(np.dtype(np.int32), (), str(i))]
    raise Untranslatable("no branch of platform_dependent for cuda")
