"""Writes the equations of a jaxpr as C++ statements of one lane.

An array of a lane is a C++ array. Loops over few elements are unrolled, so that the compiler keeps
the elements in registers; others stay loops over local memory. Arrays beyond a kibibyte lie in a
workspace, in which the elements of neighbouring lanes are neighbours.

Values of JAX do not change, but an update of an array whose old value nothing reads is written in
place. Therefore the writer knows which variables are read later, in each jaxpr that it is in.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_tilekern.epilogue.cuda_text import ScalarWriter, computed_type, literal
from jax_tilekern.epilogue.primitives import INNER_JAXPR, is_elementwise
from jax_tilekern.epilogue.understood import (
    Parameters,
    Untranslatable,
    broadcasts,
    located,
    refuse_unknown,
)
from jax_tilekern.interop import compat
from jax_tilekern.ops.kernel.translation.flattened import Flattened
from jax_tilekern.ops.kernel.translation.meanings import meaning_of
from jax_tilekern.ops.kernel.translation.refusals import refusal
from jax_tilekern.ops.kernel.translation.values import (
    Buffer,
    Index,
    Shape,
    Value,
    everywhere,
    in_memory,
    is_wide,
    row_major,
)

# Beyond this an array lies in the workspace, and so do arrays that together take more.
_LOCAL_BYTES, _ALL_LOCAL_BYTES = 1024, 16384
_WORKSPACE_ALIGNMENT = 16
_MAX_CONSTANT = 1024
# Statements with all unrolled loops. NVRTC takes about a second for 10,000.
_MAX_STATEMENTS = 40000
# Functions of dozens of instructions, which ``lanes.cuh`` has in ``tilekern::called`` too, and how
# many of them a kernel inlines.
_LONG_FUNCTION = re.compile(
    r"\blax::(acosh?|asinh?|atan[2h]?|cosh?|digamma|erf(?:_inv|c)?|expm1|lgamma|log(?:1p|2)?|pow|rem|"
    r"sinh?|tanh?|threefry2x32)\("
)
MAX_INLINED = 24
# Loops that read a few elements a step are unrolled so many times, if a step has few statements.
# Four of them are an instruction or so.
_STEPS_AT_A_TIME = 4
_MAX_ROW = 16
_MAX_STEP = 1500

Rule = Callable[["LaneWriter", Any, list[Value], Sequence[Buffer | None]], list[Value]]
# The rule of each primitive that is not elementwise, and the parameters that it understands.
RULES: dict[str, tuple[Rule, Parameters]] = {}


class TooLong(Exception):
    """The text of a kernel exceeds its limit."""


def rule(*names: str, **parameters: Callable[[Any], bool]) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a function as the rule of primitives.

    The rule gets equations whose parameters are all among ``parameters`` and accepted by them.
    """

    def register(function: Rule) -> Rule:
        RULES.update((name, (function, parameters)) for name in names)
        return function

    return register


def with_calls(statement: str) -> str:
    """Call long functions, which are inlined otherwise."""
    return _LONG_FUNCTION.sub(r"called::\1(", statement)


def broadcast(x: Value, shape: Shape, eqn: Any) -> Value:
    """Return an operand of an elementwise equation in the shape of the result."""
    if x.shape == shape:
        return x
    if not broadcasts(x.shape, shape):
        raise Untranslatable(
            f"no CUDA for {eqn.primitive.name} of shape {x.shape} for a result of shape {shape}"
        )
    if x.size == 1:
        return everywhere(x.dtype, shape, x.first)
    return x.view(shape, lambda i: [0 if n == 1 else k for n, k in zip(x.shape, i, strict=True)])


class _Scope:
    """The variables of a jaxpr that is being written, and when each one is read last."""

    def __init__(self, jaxpr: Flattened) -> None:
        self.deferred = jaxpr.deferred
        self.values: dict[Any, Value] = {}
        self.position = 0
        self.last_read: dict[Any, float] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            self.last_read.update((x, i) for x in compat.variables(eqn.invars))
        self.last_read.update((x, math.inf) for x in jaxpr.outvars if not compat.is_literal(x))

    def reads_later(self, buffer: Buffer) -> bool:
        return any(
            buffer in value.buffers and self.last_read.get(x, -1) > self.position
            for x, value in self.values.items()
        )


class LaneWriter:
    """Writes one kernel.

    Arrays of up to ``unrolled`` elements have unrolled loops. In the workspace, neighbouring
    elements of a lane's array are ``lanes`` elements apart. ``shorter`` is that of
    :class:`ScalarWriter`.
    """

    def __init__(
        self, unrolled: int, lanes: int, shorter: Mapping[str, tuple[str, int]] | None = None
    ) -> None:
        self._unrolled, self._lanes = unrolled, lanes
        self._scalars = ScalarWriter(shorter or {})
        self._names = itertools.count()
        self.statements = self._scalars.statements
        # Declared before the statements.
        self.prologue: list[str] = []
        # What the text includes besides the template's own header.
        self.headers: set[str] = set()
        self.workspace_bytes = 0
        self._local_bytes = 0
        self._unrolled_statements = 0
        self._long_functions = 0
        self._repeated = 1
        self._scopes: list[_Scope] = []
        # For each loop around the current place, the memory that its body may write.
        self._writable: list[set[Buffer]] = [set()]
        self._constants: dict[tuple[str, bytes], Value] = {}
        # For each block around the current place, the elements of deferred values that have names.
        self._computed: list[dict[Any, str]] = [{}]

    # -- Statements ---------------------------------------------------------------------------

    def line(self, text: str) -> None:
        self.statements.append(text)
        self._count(text)

    def _count(self, *statements: str) -> None:
        self._unrolled_statements += len(statements) * self._repeated
        if self._unrolled_statements > _MAX_STATEMENTS:
            raise TooLong
        found = sum(len(_LONG_FUNCTION.findall(text)) for text in statements)
        self._long_functions += found * self._repeated

    def body(self) -> list[str]:
        calls = self._long_functions > MAX_INLINED
        return [*self.prologue, *(with_calls(x) if calls else x for x in self.statements)]

    def name(self, prefix: str) -> str:
        """Return a new name."""
        return f"{prefix}{next(self._names)}"

    @contextlib.contextmanager
    def block(self, head: str) -> Iterator[None]:
        self.line(f"{head} {{")
        self._computed.append({})
        yield
        self._computed.pop()
        self.line("}")

    @contextlib.contextmanager
    def loop(self, size: int, *, unroll: bool, down: bool = False) -> Iterator[Index]:
        """Write a loop over indices; yields the index."""
        if size == 1:
            yield 0
            return
        i = self.name("i")
        self.line("#pragma unroll" if unroll else f"#pragma unroll {self._steps_at_a_time()}")
        head = (
            f"int {i} = {size - 1}; {i} >= 0; --{i}"
            if down
            else f"int {i} = 0; {i} < {size}; ++{i}"
        )
        factor = max(size, 1) if unroll else 1
        self._repeated *= factor
        with self.block(f"for ({head})"):
            yield i
        self._repeated //= factor

    def _steps_at_a_time(self) -> int:
        return 1

    @contextlib.contextmanager
    def steps(self, size: int, rows: int, *, down: bool = False) -> Iterator[Index]:
        """Write a loop over the steps of a ``scan``, each of which reads ``rows`` elements.

        An innermost loop that reads from memory is unrolled a few times if its body is short: the
        loads of several steps are then in flight at once.
        """
        start, before = len(self.statements), self._unrolled_statements
        with self.loop(size, unroll=False, down=down) as i:
            yield i
        length = (self._unrolled_statements - before) // self._repeated
        inner = self.statements[start + 1 :]
        is_innermost = not any(line.startswith(("#pragma unroll ", "while")) for line in inner)
        if 0 < rows <= _MAX_ROW and length <= _MAX_STEP and is_innermost:
            self.statements[start] = f"#pragma unroll {_STEPS_AT_A_TIME}"

    @contextlib.contextmanager
    def elements(
        self, shape: Sequence[int], into: Buffer | None = None, read: Sequence[Value] = ()
    ) -> Iterator[tuple[Index, ...]]:
        """Write loops over the elements of an array; yields the indices.

        The body may write to ``into``, at a place of its own for each element. It reads ``read``.
        """
        del into, read
        with contextlib.ExitStack() as stack:
            yield tuple(
                stack.enter_context(self.loop(size, unroll=math.prod(shape[i:]) <= self._unrolled))
                for i, size in enumerate(shape)
            )

    def is_unrolled(self, size: int) -> bool:
        return size <= self._unrolled

    # -- Threads that evaluate a lane together: here it is one, which does everything -------------

    @contextlib.contextmanager
    def written(self, buffer: Buffer) -> Iterator[None]:
        """Write to memory in the body, in parts that do not read what others write."""
        del buffer
        yield

    @contextlib.contextmanager
    def by_one(self, buffer: Buffer) -> Iterator[None]:
        """Write to memory in the body, by one thread if others see the memory."""
        del buffer
        yield

    def is_spread(self, size: int) -> bool:
        """Whether a reduction of so many elements is one of each thread's, and then of threads."""
        del size
        return False

    def in_registers(
        self,
        body: Any,
        constants: Sequence[Value],
        carried: Sequence[Value],
        places: Sequence[Buffer | None],
    ) -> tuple[list[Value], dict[int, Buffer]]:
        """Place arrays of a loop in registers of threads: constants, and some that it carries.

        Returns the constants, and places of carried values by their numbers.
        """
        del body, carried, places
        return list(constants), {}

    def released(self, buffer: Buffer) -> Buffer:
        """Return the place of a carried value behind the loop."""
        return buffer

    def nearby(self, x: Value) -> Value:
        """Return an operand, or a part of one, that is read often, copied to faster memory."""
        return x

    def loaded_ahead(
        self, xs: Sequence[Value], length: int, *, down: bool
    ) -> Callable[[Index], dict[int, Value]]:
        """Begin to load the first row of some arrays, of which each step of a loop reads one.

        Returns a function that begins to load the rows of the next step, and returns the rows of a
        step by the numbers of their arrays.
        """
        del xs, length, down
        return lambda _: {}

    def place_in_loop(self, place: Buffer | None) -> Buffer | None:
        """Return where a value may be that a loop reads and writes, of the place of its result."""
        return place

    def prepare(self, x: Value, known: Mapping[int, Index]) -> None:
        """Write what elements of a value have in common, given indices of some dimensions."""

    @contextlib.contextmanager
    def part(self, size: int, *, down: bool) -> Iterator[Index]:
        """Write a loop over a thread's part of a line; yields the index."""
        with self.loop(size, unroll=False, down=down) as i:
            yield i

    def has_partial_sums(self, shape: Sequence[int]) -> bool:
        """Whether a thread adds up an array of this shape in four parts."""
        del shape
        return False

    @contextlib.contextmanager
    def spread(self, shape: Sequence[int]) -> Iterator[tuple[Index, ...]]:
        """Write a loop over a thread's own elements; yields the indices."""
        with self.elements(shape) as indices:
            yield indices

    # -- Values -------------------------------------------------------------------------------

    def scalar(self, dtype: np.dtype[Any], expression: str, shape: Shape = ()) -> Value:
        """Name an expression; return it as a value of one element."""
        name = self.name("s")
        self.line(f"{computed_type(dtype)} {name} = {expression};")
        return everywhere(dtype, shape, name)

    def evaluated(self, value: Value) -> Value:
        """Return a value of one element by name, so that it stays when memory changes."""
        return self.scalar(value.dtype, value.first, value.shape) if value.size == 1 else value

    def constant(self, value: Any, dtype: np.dtype[Any]) -> Value:
        """Return a value that is known."""
        array = np.asarray(value, dtype)
        first = array.reshape(-1)[:1]
        if array.size and array.tobytes() == first.tobytes() * array.size:
            return everywhere(dtype, array.shape, literal(first[0], dtype))
        if array.size > _MAX_CONSTANT:
            raise Untranslatable(f"a constant of {array.size} elements; pass it as an argument")
        key = f"{dtype}{array.shape}", array.tobytes()
        if key not in self._constants:
            name = self.name("k")
            numbers = ", ".join(literal(x, dtype) for x in array.reshape(-1))
            size = max(1, array.size)
            self.prologue.append(f"const {computed_type(dtype)} {name}[{size}] = {{{numbers}}};")
            buffer = Buffer(name, dtype, array.shape, row_major(array.shape))
            self._constants[key] = in_memory(buffer)
        return self._constants[key]

    def array(self, dtype: np.dtype[Any], shape: Shape, place: Buffer | None = None) -> Buffer:
        """Declare an array without values, in ``place`` if it is too long for registers."""
        size = math.prod(shape)
        if place is not None and not self.is_unrolled(size):
            self._writable[-1].add(place)
            return place
        kind, name = computed_type(dtype), self.name("a")
        item = {"bool": 1, "float": 4}.get(kind, dtype.itemsize)
        if not self.is_unrolled(size):
            self._local_bytes += size * item
            if size * item > _LOCAL_BYTES or self._local_bytes > _ALL_LOCAL_BYTES:
                return self._in_workspace(name, dtype, shape, item)
        self.line(f"{kind} {name}[{max(1, size)}];")
        return self.owned(Buffer(name, dtype, shape, row_major(shape)))

    def _in_workspace(self, name: str, dtype: np.dtype[Any], shape: Shape, item: int) -> Buffer:
        kind, lanes = computed_type(dtype), self._lanes
        self.prologue.append(
            f"{kind}* const {name} = reinterpret_cast<{kind}*>(workspace + "
            f"{self.workspace_bytes}ll) + lane;"
        )
        size = math.prod(shape) * lanes * item
        self.workspace_bytes += -(-size // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
        strides = tuple(stride * lanes for stride in row_major(shape))
        return self.owned(Buffer(name, dtype, shape, strides, wide=is_wide((*shape, lanes))))

    def owned(self, buffer: Buffer) -> Buffer:
        """Let updates at this place write to a buffer."""
        self._writable[-1].add(buffer)
        return buffer

    def filled(self, value: Value, buffer: Buffer) -> Value:
        """Write a value's elements to memory."""
        flat = buffer.flattened()
        if value.flat is not None and flat is not None:
            with self.elements((value.size,), buffer) as (i,):
                self.line(flat.store((i,), value.flat(i)))
        else:
            with self.elements(value.shape, buffer, [value]) as indices:
                self.line(buffer.store(indices, value.at(indices)))
        return in_memory(buffer)

    def copied(self, value: Value, place: Buffer | None = None) -> Value:
        return self.filled(value, self.array(value.dtype, value.shape, place))

    def may_write(self, value: Value, others: Sequence[Value] = ()) -> bool:
        """Whether nothing reads a value's memory after the current equation, nor ``others``."""
        buffer = value.whole
        return (
            buffer is not None
            and buffer in self._writable[-1]
            and not any(buffer in x.buffers for x in others)
            and not any(scope.reads_later(buffer) for scope in self._scopes)
        )

    def to_update(self, value: Value, place: Buffer | None, others: Sequence[Value] = ()) -> Buffer:
        """Return memory that has a value's elements, and that may be written."""
        found = value if self.may_write(value, others) else self.copied(value, place)
        assert found.whole is not None
        return found.whole

    @contextlib.contextmanager
    def body_of_loop(self, writable: Sequence[Buffer] = ()) -> Iterator[None]:
        """Enter the body of a loop, which may write to the memory of the values it carries."""
        self._writable.append(set(writable))
        yield
        self._writable.pop()

    # -- Equations ----------------------------------------------------------------------------

    def jaxpr(
        self,
        closed: Any,
        operands: Sequence[Value],
        places: Sequence[Buffer | None] | None = None,
    ) -> list[Value]:
        """Write a jaxpr's equations; return its results, which may be written to ``places``."""
        jaxpr = self._program(closed)
        scope = _Scope(jaxpr)
        self._scopes.append(scope)
        scope.values.update(zip(jaxpr.invars, operands, strict=True))
        for var, value in jaxpr.constants.items():
            scope.values[var] = self.constant(value, np.dtype(var.aval.dtype))
        wanted: dict[Any, Buffer | None] = {}
        for x, place in zip(jaxpr.outvars, places or [None] * len(jaxpr.outvars), strict=True):
            if not compat.is_literal(x):
                wanted.setdefault(x, place)

        def read(x: Any) -> Value:
            if compat.is_literal(x):
                return self.constant(x.val, np.dtype(x.aval.dtype))
            return scope.values[x]

        for scope.position, eqn in enumerate(jaxpr.eqns):
            operands_read = [read(x) for x in eqn.invars]
            with located(eqn):
                results = self._equation(eqn, operands_read, [wanted.get(x) for x in eqn.outvars])
            scope.values.update(zip(eqn.outvars, map(self._lasting, results), strict=True))
        scope.position = len(jaxpr.eqns)
        found = [read(x) for x in jaxpr.outvars]
        self._scopes.pop()
        return found

    def _program(self, closed: Any) -> Flattened:
        jaxpr = closed.jaxpr
        constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        return Flattened(jaxpr.eqns, jaxpr.invars, jaxpr.outvars, constants)

    def _lasting(self, value: Value) -> Value:
        """Return a value whose elements do not change if memory is written that it reads."""
        return self.evaluated(value) if value.size == 1 and value.buffers else value

    def _equation(
        self, eqn: Any, operands: list[Value], places: Sequence[Buffer | None]
    ) -> list[Value]:
        name = eqn.primitive.name
        if name in RULES:
            write, understood = RULES[name]
            refuse_unknown(eqn, understood)
            return write(self, eqn, operands, places)
        if name in INNER_JAXPR:
            refuse_unknown(eqn)
            return self.jaxpr(compat.closed_jaxpr(eqn.params[INNER_JAXPR[name]]), operands, places)
        if is_elementwise(name):
            return [self.elementwise(eqn, operands, places[0])]
        meaning = meaning_of(eqn)
        if meaning is not None:
            return self.jaxpr(meaning, operands, places)
        raise Untranslatable(refusal(name))

    def meaning(self, function: Callable[..., Any], eqn: Any, operands: list[Value]) -> list[Value]:
        """Write an equation as a JAX function of its operands."""
        with compat.without_mesh():
            return self.jaxpr(jax.make_jaxpr(function)(*(x.aval for x in eqn.invars)), operands)

    def elementwise(self, eqn: Any, operands: list[Value], place: Buffer | None) -> Value:
        """Write an equation of each element; return its result."""
        (out,) = eqn.outvars
        dtype, shape = np.dtype(out.aval.dtype), tuple(out.aval.shape)
        read = [broadcast(x, shape, eqn) for x in operands]
        if math.prod(shape) == 1:
            return everywhere(dtype, shape, self.equation(eqn, [x.first for x in read]))
        is_flat = all(x.flat is not None for x in read)

        def element(indices: Sequence[Index]) -> str:
            return self.equation(eqn, [x.at(indices) for x in read])

        def at_position(i: Index) -> str:
            return self.equation(eqn, [x.at_position(i) for x in read])

        if self.is_deferred(eqn):
            return self.deferred(dtype, shape, element, read, at_position if is_flat else None)
        buffer = None if place else self._overwritten(dtype, read)
        buffer = buffer or self.array(dtype, shape, place)
        flat = buffer.flattened()
        if flat is not None and is_flat:
            with self.elements((math.prod(shape),), buffer) as (i,):
                self.line(flat.store((i,), at_position(i)))
        else:
            with self.elements(shape, buffer, read) as indices:
                self.line(buffer.store(indices, element(indices)))
        return in_memory(buffer)

    def _overwritten(self, dtype: np.dtype[Any], operands: Sequence[Value]) -> Buffer | None:
        """Return the memory of an operand that may have the results of an elementwise equation."""
        for i, x in enumerate(operands):
            others = [*operands[:i], *operands[i + 1 :]]
            is_long = x.dtype == dtype and not self.is_unrolled(x.size)
            if is_long and self.may_write(x, others):
                return x.whole
        return None

    def _known(self, place: tuple[Any, ...]) -> str | None:
        return next((names[place] for names in self._computed if place in names), None)

    def is_deferred(self, eqn: Any) -> bool:
        """Whether the result of an equation is computed where it is read."""
        return eqn.outvars[0] in self._scopes[-1].deferred

    def deferred(
        self,
        dtype: np.dtype[Any],
        shape: Shape,
        element: Callable[[Sequence[Index]], str],
        operands: Sequence[Value],
        at_position: Callable[[Index], str] | None = None,
    ) -> Value:
        """Return a value of which an element is written where it is read, once in a block."""
        own = object()

        def once(place: tuple[Any, ...], compute: Callable[[], str]) -> str:
            name = self._known(place)
            if name is None:
                name = self._computed[-1][place] = compute()
            return name

        return Value(
            dtype,
            shape,
            lambda i: once((own, *i), lambda: element(i)),
            at_position and (lambda i: once((own, "flat", i), lambda: at_position(i))),
            frozenset().union(*(x.buffers for x in operands)),
        )

    def equation(self, eqn: Any, operands: list[str]) -> str:
        """Write an elementwise equation of one element; return its result."""
        before = len(self.statements)
        (result,) = self._scalars.equation(eqn, operands)
        self._count(*self.statements[before:])
        return result

    def rounded(self, dtype: np.dtype[Any], expression: str) -> str:
        """Name an expression of the type that a type is computed in, rounded to it."""
        return self._scalars.named(dtype, expression)
