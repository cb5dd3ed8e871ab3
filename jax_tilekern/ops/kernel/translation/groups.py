"""Writes a lane that a group of threads evaluates, which is a CTA (``lane_groups.cuh``).

Every thread computes the scalars and the short arrays, all of them the same values. So branches and
loops are those of all threads, and a barrier is reached by all. Long arrays are in memory that all
threads see. Threads share out the loops that write them, and the long reductions. A barrier stands
on both sides of what is written, because the threads read it before or after.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jax_tilekern.epilogue.cuda_text import computed_type
from jax_tilekern.ops.kernel.translation.arrays import at_index
from jax_tilekern.ops.kernel.translation.flattened import (
    MAX_PARTS,
    MOST_HELD,
    Flattened,
    Held,
    flattened,
    held_in_loop,
    with_deferred,
)
from jax_tilekern.ops.kernel.translation.values import (
    Buffer,
    Index,
    Shape,
    Value,
    in_memory,
    indices_of,
    plus,
    row_major,
)
from jax_tilekern.ops.kernel.translation.writer import MAX_INLINED, LaneWriter, with_calls

# Beyond this, arrays of a lane lie in the workspace. A CTA has 48 KiB unless it opts in to more, of
# which reductions take up to 4.
_SHARED_BYTES = 44 << 10
_ALIGNMENT = 16
# Bytes of a load of several elements, and how many elements a row of them may have in a thread that
# reads it once.
VECTOR, _MAX_ROW = 16, 16
_BARRIER = "lax::group_barrier<kThreads>();"
# Loops of shorter bodies, with as few long functions, are unrolled a few times, so that several
# elements are loaded at once.
_SHORT_BODY, _FEW_FUNCTIONS, _STEPS_AT_A_TIME = 64, 2, 4
# Steps of a loop over a row or a column of a matrix in memory that are unrolled.
_LOADS_AT_A_TIME = 16
# A thread adds up rows of so many terms in parts. An SM has few other warps to issue from.
_LONG_SUM = 32
# Bytes of an operand, which a loop reads a row at a time, that are copied to shared memory.
NEARBY_BYTES = 16 << 10


def has_rows(buffer: Buffer, lane_strides: Sequence[int]) -> bool:
    """Whether an operand's rows, in its last dimension, can be loaded 16 bytes at a time."""
    if len(buffer.shape) < 2 or buffer.wide or buffer.dtype.kind not in "fiu":
        return False
    if np.dtype(buffer.dtype).itemsize < 4 or buffer.shape[-1] < 2:
        return False
    strides = (buffer.shape[-1], *buffer.strides[:-1], *lane_strides)
    return buffer.strides[-1] == 1 and all(x * buffer.dtype.itemsize % VECTOR == 0 for x in strides)


def in_registers(name: str, fits: str, step: str, k: Index, otherwise: str) -> str:
    """Return an element of a thread's part of a matrix, if the parts fit in its registers."""
    return f"({fits} ? {name}[{fits} ? {step} : 0][{fits} ? {k} : 0] : {otherwise})"


def _half(step: Index) -> Index:
    """Return which of two rows belongs to a step."""
    return step % 2 if isinstance(step, int) else f"({step} % 2)"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class HeldBuffer(Buffer):
    """A matrix of which each thread has its own rows or columns in registers.

    If these do not fit, they are in memory. Elements are accessed in loops that threads share out.
    """

    memory: Buffer
    along: int
    fits: str
    steps: Mapping[Index, str]  # of those loops, by the index of a part

    def _place(self, indices: Sequence[Index]) -> str:
        step, k = self.steps[indices[1 - self.along]], indices[self.along]
        return in_registers(self.name, self.fits, step, k, self.memory._place(indices))

    @property
    def step(self) -> int | None:
        return None


class GroupWriter(LaneWriter):
    """Writes one kernel, in which ``kThreads`` threads evaluate a lane."""

    def __init__(self, unrolled: int, lanes: int) -> None:
        super().__init__(unrolled, lanes)
        self.shared_bytes = 0
        # Whether threads go different ways, and whether barriers stand around what is written.
        self._apart = self._between_barriers = False
        # How many statements there are where no thread has accessed memory since a barrier.
        self._after_barrier = -1
        # The statements of loops that threads share out, and the long functions in them. Calls
        # would be one after another, so these loops have them inlined first.
        self._of_loops: set[int] = set()
        self._long_functions_of_loops = 0
        # Operands that have rows, and those of which rows are loaded.
        self._with_rows: set[Buffer] = set()
        self.loaded_by_rows: set[Buffer] = set()
        # For the row of a thread in an unrolled loop, the number of that step.
        self._steps: dict[Index, str] = {}
        # How matrices are held in registers, and whether they are: a constant of C++. The elements
        # of a part, and that constant, while a loop over them is written.
        self._held: dict[Value, dict[Held, str]] = {}
        self._part: tuple[int, str] | None = None

    def _program(self, closed: Any) -> Flattened:
        return with_deferred(flattened(closed), self._unrolled)

    def array(self, dtype: np.dtype[Any], shape: Shape, place: Buffer | None = None) -> Buffer:
        size = math.prod(shape)
        if place is not None or self.is_unrolled(size):
            return super().array(dtype, shape, place)
        assert not self._apart, "a thread has no long arrays of its own"
        kind, name = computed_type(dtype), self.name("a")
        item = {"bool": 1, "float": 4}.get(kind, dtype.itemsize)
        bytes_ = -(-size * item // _ALIGNMENT) * _ALIGNMENT
        if self.shared_bytes + bytes_ <= _SHARED_BYTES:
            source = f"shared + {self.shared_bytes}"
            self.shared_bytes += bytes_
        else:
            source = f"workspace + {self.workspace_bytes}ll + lane * {bytes_}ll"
            self.workspace_bytes += bytes_ * self._lanes
        self.prologue.append(f"{kind}* const {name} = reinterpret_cast<{kind}*>({source});")
        return self.owned(Buffer(name, dtype, shape, row_major(shape), shared=True))

    def row_value(self, buffer: Buffer) -> Value:
        """Return the value of an operand for which :func:`has_rows` holds."""
        self._with_rows.add(buffer)
        if buffer.shape[-1] > _MAX_ROW:
            return in_memory(buffer)

        def load(indices: Sequence[Index]) -> str:
            *row, last = indices
            name = self._known((buffer, *row))
            return f"{name}[{last}]" if name else buffer.load(indices)

        return dataclasses.replace(in_memory(buffer), at=load)

    def in_registers(
        self,
        body: Any,
        constants: Sequence[Value],
        carried: Sequence[Value],
        places: Sequence[Buffer | None],
    ) -> tuple[list[Value], dict[int, Buffer]]:
        found = list(constants)
        sums: dict[int, Buffer] = {}
        if self._apart:
            return found, sums
        program, total = flattened(body), "0"
        for arrays in held_in_loop(program, len(constants), len(carried), self._unrolled):
            if not arrays:
                continue
            fits = self.name("b")
            sizes = (f"({x.parts} + kThreads - 1) / kThreads * {x.size}" for x in arrays)
            total = " + ".join((total, *sizes))
            self.line(f"constexpr bool {fits} = {total} <= {MOST_HELD};")
            for held in arrays:
                number = held.number - len(constants)
                if number < 0:
                    x = found[held.number]
                    name = self._registers(x.cxx, held, fits)
                    self._load_held(x, held, name, fits)
                    found[held.number] = self._held_value(x, held, name, fits)
                else:
                    x = carried[number]
                    name = self._registers(x.cxx, held, fits)
                    place = self.place_in_loop(places[number])
                    memory = self.array(x.dtype, x.shape, place)
                    sums[number] = self.owned(
                        HeldBuffer(
                            name, x.dtype, x.shape, memory.strides,
                            memory=memory, along=held.along, fits=fits, steps=self._steps,
                        )
                    )  # fmt: skip
        return found, sums

    def released(self, buffer: Buffer) -> Buffer:
        if not isinstance(buffer, HeldBuffer):
            return buffer
        with self.written(buffer.memory), self.elements(buffer.shape, buffer) as indices:
            self.line(buffer.memory.store(indices, buffer.load(indices)))
        return buffer.memory

    def _overwritten(self, dtype: np.dtype[Any], operands: Sequence[Value]) -> Buffer | None:
        held = (x.whole for x in operands if isinstance(x.whole, HeldBuffer))
        return next(held, None) or super()._overwritten(dtype, operands)

    def _registers(self, cxx: str, held: Held, fits: str) -> str:
        name, count = self.name("h"), f"({held.parts} + kThreads - 1) / kThreads"
        self.line(f"{cxx} {name}[{fits} ? {count} : 1][{fits} ? {held.size} : 1];")
        return name

    def _load_held(self, x: Value, held: Held, name: str, fits: str) -> None:
        """Load the parts of a thread."""
        i, count = self.name("i"), f"({held.parts} + kThreads - 1) / kThreads"
        with self.block(f"if constexpr ({fits})"):
            self.line("#pragma unroll")
            with self.block(f"for (int {i} = 0; {i} < {count}; ++{i})"):
                part = f"({i} * kThreads + rank)"
                with self.block(f"if ({part} < {held.parts})"):
                    if held.along == 1 and x.whole in self._with_rows:
                        self.loaded_by_rows.add(x.whole)
                        self.line(f"lax::load_row({name}[{i}], &{x.whole.load((part, 0))});")
                        return
                    with self.loop(held.size, unroll=True) as k:
                        element = x.at((k, part) if held.along == 0 else (part, k))
                        self.line(f"{name}[{i}][{k}] = {element};")

    def _held_value(self, x: Value, held: Held, name: str, fits: str) -> Value:
        def load(indices: Sequence[Index]) -> str:
            step = self._steps.get(indices[1 - held.along])
            if step is None or self._part != (held.size, fits):
                return x.at(indices)
            return in_registers(name, fits, step, indices[held.along], x.at(indices))

        value = dataclasses.replace(x, at=load)
        self._held[value] = {**self._held.get(x, {}), held: fits}
        return value

    def nearby(self, x: Value) -> Value:
        bytes_ = x.size * max(4, x.dtype.itemsize)
        is_far = any(buffer.stored for buffer in x.buffers) and not self.is_unrolled(x.size)
        if not is_far or bytes_ > NEARBY_BYTES or not self._has_room(bytes_):
            return x
        whole = x.whole
        if whole is not None and whole.step != 1:
            return x
        if whole is None or not whole.can_be_copied:
            return self.copied(x)
        found, zeros = self.array(x.dtype, x.shape), (0,) * len(x.shape)
        self._barrier()
        self._copy(whole, whole.load(zeros), found.load(zeros))
        self.line("cp_async_commit();")
        self._wait_for_copies()
        return in_memory(found)

    def loaded_ahead(
        self, xs: Sequence[Value], length: int, *, down: bool
    ) -> Callable[[Index], dict[int, Value]]:
        # For each array that is read: itself, one of its rows, and two rows in shared memory.
        copies: dict[int, tuple[Buffer, Buffer, Buffer]] = {}
        for i, x in enumerate(xs):
            rows = x.whole
            if self._apart or rows is None or not rows.can_be_copied:
                continue
            row = dataclasses.replace(rows, shape=rows.shape[1:], strides=rows.strides[1:])
            size = math.prod(row.shape)
            has_room = self._has_room(2 * size * x.dtype.itemsize)
            if row.step is not None and not self.is_unrolled(size) and has_room:
                copies[i] = rows, row, self.array(x.dtype, (2, *row.shape))
        if not copies:
            return super().loaded_ahead(xs, length, down=down)

        def begin(step: Index) -> None:
            for rows, row, both in copies.values():
                zeros = (0,) * len(row.shape)
                self._copy(row, rows.load((step, *zeros)), both.load((_half(step), *zeros)))
            self.line("cp_async_commit();")

        def at_step(step: Index) -> dict[int, Value]:
            self._wait_for_copies()
            with self.block(f"if ({step} != {0 if down else length - 1})"):
                begin(plus(step, -1 if down else 1))
            self._after_barrier = len(self.statements)  # These copies concern no other memory.
            return {
                i: at_index(in_memory(both), 0, _half(step)) for i, (_, _, both) in copies.items()
            }

        self._barrier()  # The shared memory has been read for the loop before.
        begin(length - 1 if down else 0)
        return at_step

    def _copy(self, rows: Buffer, source: str, target: str) -> None:
        """Begin to copy the elements of an operand, from the first one on."""
        size = math.prod(rows.shape)
        self.line(f"lax::begin_copy<kThreads, {size}>(&{target}, &{source}, {rows.step}ll);")

    def _wait_for_copies(self) -> None:
        self.line("cp_async_wait<0>();")
        self.line(_BARRIER)

    def has_partial_sums(self, shape: Sequence[int]) -> bool:
        # Innermost loops over so many elements are unrolled, in whole or by a multiple of four.
        return self._apart and len(shape) > 0 and shape[-1] >= _LONG_SUM

    def place_in_loop(self, place: Buffer | None) -> Buffer | None:
        if place is None or not self._has_room(math.prod(place.shape) * place.dtype.itemsize):
            return place
        return None

    def _has_room(self, bytes_: int) -> bool:
        return self.shared_bytes + bytes_ + _ALIGNMENT <= _SHARED_BYTES

    @contextlib.contextmanager
    def loop(self, size: int, *, unroll: bool, down: bool = False) -> Iterator[Index]:
        start, part = len(self.statements), self._part
        is_held = self._apart and part is not None and size == part[0] > 1
        with super().loop(size, unroll=unroll or is_held, down=down) as i:
            if is_held and part is not None:
                # Registers have known places. Otherwise several loads are in flight.
                self.statements[start] = f"#pragma unroll ({part[1]} ? {size} : {_LOADS_AT_A_TIME})"
            yield i

    def prepare(self, x: Value, known: Mapping[int, Index]) -> None:
        indices = [known.get(d) for d in range(len(x.shape))]
        row = [i for i in indices if i is not None]
        if len(row) == len(x.shape):
            x.at(row)
            return
        for held, fits in self._held.get(x, {}).items():
            if known.get(1 - held.along) in self._steps:
                self._part = held.size, fits
                return
        buffer, place = x.whole, (x.whole, *row)
        is_row = self._apart and buffer in self._with_rows and indices[:-1] == row
        is_short = x.shape[-1:] <= (_MAX_ROW,)
        if buffer is not None and is_row and is_short and self._known(place) is None:
            self.loaded_by_rows.add(buffer)
            name = self._computed[-1][place] = self.name("r")
            self.line(f"{x.cxx} {name}[{x.shape[-1]}];")
            self.line(f"lax::load_row({name}, &{buffer.load([*row, 0])});")

    def body(self) -> list[str]:
        calls = self._long_functions > MAX_INLINED
        calls_in_loops = self._long_functions_of_loops > MAX_INLINED
        return [
            *self.prologue,
            *(
                with_calls(line) if (calls_in_loops if i in self._of_loops else calls) else line
                for i, line in enumerate(self.statements)
            ),
        ]

    def _count(self, *statements: str) -> None:
        before = self._long_functions
        super()._count(*statements)
        if self._apart:
            self._long_functions_of_loops += self._long_functions - before
            self._long_functions = before

    # -- What threads share out ---------------------------------------------------------------

    def _barrier(self) -> None:
        if self.statements[-1:] != [_BARRIER] and len(self.statements) != self._after_barrier:
            self.line(_BARRIER)

    def _is_shared(self, buffer: Buffer) -> bool:
        return buffer.shared and not self._apart

    @contextlib.contextmanager
    def _each_by_itself(self) -> Iterator[None]:
        self._apart = True
        yield
        self._apart = False

    @contextlib.contextmanager
    def written(self, buffer: Buffer) -> Iterator[None]:
        if not self._is_shared(buffer) or self._between_barriers:
            yield
            return
        self._barrier()
        self._between_barriers = True
        yield
        self._between_barriers = False
        self._barrier()

    @contextlib.contextmanager
    def by_one(self, buffer: Buffer) -> Iterator[None]:
        if not self._is_shared(buffer):
            yield
            return
        with self.written(buffer), self.block("if (rank == 0)"), self._each_by_itself():
            yield

    @contextlib.contextmanager
    def elements(
        self, shape: Sequence[int], into: Buffer | None = None, read: Sequence[Value] = ()
    ) -> Iterator[tuple[Index, ...]]:
        if isinstance(into, HeldBuffer):
            with self.spread((shape[1 - into.along],)) as (part,):
                self._part = shape[into.along], into.fits
                with self.loop(shape[into.along], unroll=True) as k:
                    yield (k, part) if into.along == 0 else (part, k)
        elif into is None or not self._is_shared(into):
            with super().elements(shape) as indices:
                yield indices
        elif self.is_unrolled(math.prod(shape)):
            # A short array may be in registers, which have no indices.
            with self.by_one(into), super().elements(shape) as indices:
                yield indices
        else:
            rows = len(shape)
            # An array in registers is read at indices of unrolled loops.
            if any(not buffer.shared for value in read for buffer in value.buffers):
                ends = (d for d in range(rows) if self.is_unrolled(math.prod(shape[d:])))
                rows = next(ends, rows)
            with (
                self.written(into),
                self.spread(shape[:rows]) as row,
                super().elements(shape[rows:]) as column,
            ):
                yield (*row, *column)

    def _steps_at_a_time(self) -> int:
        # A thread by itself sums up or compares elements that it loads.
        return _STEPS_AT_A_TIME if self._apart else 1

    def is_spread(self, size: int) -> bool:
        return not self._apart and not self.is_unrolled(size)

    @contextlib.contextmanager
    def part(self, size: int, *, down: bool) -> Iterator[Index]:
        i, length = self.name("i"), f"({size} + kThreads - 1) / kThreads"
        own = f"{i} < (rank + 1) * ({length}) && {i} < {size}"
        head = f"for (int {i} = rank * ({length}); {own}; ++{i})"
        with self.block(head), self._each_by_itself():
            yield f"({size - 1} - {i})" if down else i

    @contextlib.contextmanager
    def spread(self, shape: Sequence[int]) -> Iterator[tuple[Index, ...]]:
        size, i, start = math.prod(shape), self.name("i"), len(self.statements)
        # The number of steps of all threads is known to the compiler, which unrolls a few of them.
        few = size <= MAX_PARTS
        first, head = self.name("i"), f"for (int {i} = rank; {i} < {size}; {i} += kThreads)"
        if few:
            head = f"for (int {first} = 0; {first} < {size}; {first} += kThreads)"
        self.line("#pragma unroll 1")
        long_functions = self._long_functions_of_loops
        with self.block(head), self._each_by_itself():
            if few:
                self.line(f"const int {i} = {first} + rank;")
                self._steps[i] = f"{first} / kThreads"
            with self.block(f"if ({i} < {size})" if few else ""):
                yield indices_of(i, shape)
        held, self._part = self._part, None
        inner = self.statements[start + 1 :]
        self._of_loops.update(range(start, len(self.statements)))
        has_loops = any(line.startswith("#pragma unroll ") for line in inner)
        long_functions = self._long_functions_of_loops - long_functions
        if held is not None:
            self.statements[start] = f"#pragma unroll ({held[1]} ? {MAX_PARTS // 32} : 1)"
        elif len(inner) <= _SHORT_BODY and long_functions <= _FEW_FUNCTIONS and not has_loops:
            self.statements[start] = (
                "#pragma unroll" if few else f"#pragma unroll {_STEPS_AT_A_TIME}"
            )
