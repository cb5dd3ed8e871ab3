"""A jaxpr without calls and unused equations, and its values that need no memory.

A group of threads has a long array in memory that all of them see, and waits when it has been
written. An array each element of which is cheap to compute, and which one equation reads, each
element once, is computed there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax_tilekern.epilogue.primitives import INNER_JAXPR, is_elementwise
from jax_tilekern.epilogue.understood import refuse_unknown
from jax_tilekern.interop import compat
from jax_tilekern.ops.kernel.work import elementwise_work

# Terms of a sum or a product that is computed where it is read.
MAX_TERMS = 16
# Elements of matrices that a thread of a group has in registers over a loop.
MOST_HELD = 160
# Parts of a matrix that threads share out in a loop that is unrolled.
MAX_PARTS = 256
# They read each element of their operand at most once. ``split`` has several results.
_VIEWS = frozenset(
    {"broadcast_in_dim", "reshape", "rev", "slice", "squeeze", "transpose"}
    | {"copy", "name", "stop_gradient", "optimization_barrier", "pvary"}
)
_REDUCTIONS = tuple(f"reduce_{kind}" for kind in ("sum", "prod", "max", "min", "and", "or", "xor"))


@dataclass(frozen=True, eq=False)
class Variable:
    """The result of an equation of a call, of which there may be several."""

    aval: Any


@dataclass(frozen=True)
class Flattened:
    """Equations as those of a jaxpr."""

    eqns: Sequence[Any]
    invars: Sequence[Any]
    outvars: list[Any]
    constants: Mapping[Any, Any]
    deferred: frozenset[Any] = frozenset()  # values that are computed where they are read


def flattened(closed: Any) -> Flattened:
    """Inline the calls of a jaxpr, and leave out what nothing uses."""
    eqns: list[Any] = []
    constants: dict[Any, Any] = {}

    def inline(closed: Any, operands: Sequence[Any]) -> list[Any]:
        jaxpr = closed.jaxpr
        values = dict(zip(jaxpr.invars, operands, strict=True))
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            values[var] = Variable(var.aval)
            constants[values[var]] = value

        def read(atom: Any) -> Any:
            return atom if compat.is_literal(atom) else values[atom]

        for eqn in jaxpr.eqns:
            given = [read(x) for x in eqn.invars]
            name = eqn.primitive.name
            if name in INNER_JAXPR:
                refuse_unknown(eqn)
                results = inline(compat.closed_jaxpr(eqn.params[INNER_JAXPR[name]]), given)
            else:
                results = [Variable(x.aval) for x in eqn.outvars]
                eqns.append(eqn.replace(invars=given, outvars=results))
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(x) for x in jaxpr.outvars]

    invars = [Variable(x.aval) for x in closed.jaxpr.invars]
    outvars = inline(closed, invars)
    used = {x for x in outvars if not compat.is_literal(x)}
    kept = []
    for eqn in reversed(eqns):
        if not used.isdisjoint(eqn.outvars):
            used.update(compat.variables(eqn.invars))
            kept.append(eqn)
    return Flattened(kept[::-1], invars, outvars, constants)


def with_deferred(program: Flattened, short: int) -> Flattened:
    """Find the arrays of more than ``short`` elements that need no memory."""
    results = {x for x in program.outvars if not compat.is_literal(x)}
    # For each value, the equations that compute its elements: a number for one that computes each
    # element once, two for one that does so several times.
    readers: dict[Any, set[int]] = {}
    deferred = set()
    for number in reversed(range(len(program.eqns))):
        eqn = program.eqns[number]
        passes = {number}
        if len(eqn.outvars) == 1 and eqn.outvars[0] not in results:
            (out,) = eqn.outvars
            found = readers.get(out, set())
            if eqn.primitive.name in _VIEWS:
                passes = found
            elif _size(out) > short and len(found) == 1 and _is_cheap(eqn):
                deferred.add(out)
                passes = found
        for x in eqn.invars:
            if not compat.is_literal(x):
                once = _reads_once(eqn, x, short)
                readers.setdefault(x, set()).update(passes if once else {number, ~number})
    return dataclasses.replace(program, deferred=frozenset(deferred))


def operands_of_products(program: Flattened) -> list[bool]:
    """Return which operands products read."""
    products = (eqn for eqn in program.eqns if eqn.primitive.name == "dot_general")
    read = {x for eqn in products for x in compat.variables(eqn.invars)}
    return [x in read for x in program.invars]


class Held(NamedTuple):
    """A matrix, of which each thread of a group has rows or columns in registers over a loop."""

    number: int  # of the operand of the loop's body
    along: int  # the dimension that lies in a thread's registers
    parts: int  # rows or columns, which threads share out
    size: int  # of one of them


def held_in_loop(
    program: Flattened, constants: int, carried: int, short: int
) -> tuple[list[Held], list[Held], list[Held]]:
    """Find what threads should hold in registers in a loop, of whose body this is the program.

    The first operands are constants, and the next ones what the loop carries. Returns matrices
    whose rows are multiplied by vectors; sums; and matrices whose columns are. Threads read columns
    side by side, so they are held last. Nothing is held where accesses to memory take less than
    half of the time of the rest: loops over registers are unrolled, and a long program is fetched
    slowly.
    """

    def held(x: Any, number: int, along: int) -> list[Held]:
        parts, size = x.aval.shape[1 - along], x.aval.shape[along]
        is_short = short < parts <= MAX_PARTS and size <= MOST_HELD
        is_held = is_short and x.aval.dtype.itemsize == 4
        return [Held(number, along, parts, size)] if is_held else []

    numbers = {x: i for i, x in enumerate(program.invars)}
    matrices: tuple[list[Held], list[Held]] = [], []
    accesses = instructions = 0.0
    readers: dict[Any, list[Any]] = {}
    for eqn in program.eqns:
        for x in eqn.invars:
            if not compat.is_literal(x):
                readers.setdefault(x, []).append(eqn)
        if _size(eqn.outvars[0]) > short and not compat.jaxprs_of(eqn):
            instructions += elementwise_work(eqn, [False] * len(eqn.invars), 1).instructions
        if eqn.primitive.name == "dot_general":
            contracted, _ = eqn.params["dimension_numbers"]
            for i, (x, dims) in enumerate(zip(eqn.invars, contracted, strict=True)):
                other = eqn.invars[1 - i]
                is_product = len(x.aval.shape) == 2 and len(other.aval.shape) == len(dims) == 1
                if (
                    is_product
                    and not compat.is_literal(x)
                    and numbers.get(x, constants) < constants
                ):
                    for found in held(x, numbers[x], dims[0]):
                        matrices[1 - dims[0]].append(found)
                        accesses += found.parts * _cycles(found)
    sums = []
    for number in range(constants, constants + carried):
        x, out = program.invars[number], program.outvars[number - constants]
        is_sum = (
            len(x.aval.shape) == 2
            and [eqn.primitive.name for eqn in readers.get(x, ())] == ["add_any"]
            and readers[x][0].outvars[0] is out
            and out not in readers
            and x not in program.outvars
            and program.outvars.count(out) == 1
        )
        if is_sum:
            # Neighbouring threads have neighbouring columns, if there are many.
            sums += held(x, number, 0 if x.aval.shape[1] >= 32 else 1)
            accesses += 2 * _size(x)
    if 2 * accesses < instructions:
        return [], [], []
    rows, columns = (list(dict.fromkeys(x)) for x in matrices)
    return rows, sums, columns


def _cycles(held: Held) -> float:
    """Return the cycles of the L1 cache for a warp's accesses to rows or columns of a matrix."""
    if held.along == 0:
        return held.size
    # Each load of 16 bytes has the lines of all threads' rows, up to one for each thread.
    return held.size / 4 * min(held.size, 32)


def _size(x: Any) -> int:
    return math.prod(x.aval.shape)


def _terms(eqn: Any) -> int | None:
    """Return how many terms each element of a sum or a product has."""
    dims: Sequence[int]
    if eqn.primitive.name == "dot_general":
        dims = eqn.params["dimension_numbers"][0][0]
    elif eqn.primitive.name in _REDUCTIONS:
        dims = eqn.params["axes"]
    else:
        return None
    shape: tuple[int, ...] = eqn.invars[0].aval.shape
    return math.prod(shape[d] for d in dims)


def _is_cheap(eqn: Any) -> bool:
    terms = _terms(eqn)
    if terms is not None:
        return terms <= MAX_TERMS
    # A power of an integer is written as other equations.
    return is_elementwise(eqn.primitive.name) and eqn.primitive.name != "pow"


def _reads_once(eqn: Any, x: Any, short: int) -> bool:
    (out,) = eqn.outvars[:1]
    name = eqn.primitive.name
    if name == "dot_general":
        # A group computes all elements of a short result together.
        terms = _terms(eqn)
        return _size(out) <= short and terms is not None and terms > short
    if name in _REDUCTIONS:
        return True
    return (
        _size(out) == _size(x)
        if name == "broadcast_in_dim"
        else (name in _VIEWS or (is_elementwise(name) and out.aval.shape == x.aval.shape))
    )
