"""What each thread of a group does that evaluates a lane together."""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Any, NamedTuple

from jax_tilekern.epilogue.primitives import is_copy, is_elementwise, translation
from jax_tilekern.interop import compat
from jax_tilekern.ops.kernel.translation.flattened import (
    MAX_TERMS,
    MOST_HELD,
    flattened,
    held_in_loop,
    with_deferred,
)
from jax_tilekern.ops.kernel.translation.meanings import meaning_of
from jax_tilekern.ops.kernel.work import (
    ITERATIONS,
    MATRICES,
    NOMINAL_STEPS,
    THREEFRY,
    TRIDIAGONAL,
    VIEWS,
)
from jax_tilekern.plans.lane_cost import LaneWork

# Arrays of up to so many elements are in the registers of every thread, which compute them alike.
LONGEST_ALIKE = 16
# Accesses of a warp to rows that lie far from each other, in accesses to neighbours. Each takes as
# many cycles as there are rows, less what a cache line brings for the next accesses.
_FAR = 8
# Accesses for a term of a product by a vector that all threads read, four elements at a time.
_OF_VECTOR = 0.25
# Jacobi's sweeps of matrices of float32.
_SWEEPS = 7
# What one thread does for its group.
_BY_ONE_THREAD = "scatter"


def has_arrays_beyond(size: int, closed: Any) -> bool:
    """Whether a jaxpr has an array of more elements."""
    return any(
        _size(x) > size
        for eqn in compat.leaf_equations(closed.jaxpr)
        for x in (*eqn.invars, *eqn.outvars)
    )


def group_work(closed: Any, threads: int, parts: tuple[int, int] = (0, 0)) -> LaneWork:
    """Return the work of one of the threads that evaluate a jaxpr of a lane.

    ``parts`` has the numbers of constants and of carried operands of the body of a loop.
    """
    program = with_deferred(flattened(closed), LONGEST_ALIKE)
    held: set[Any] = set()
    size = 0
    for arrays in held_in_loop(program, *parts, LONGEST_ALIKE):
        size += sum(-(-x.parts // threads) * x.size for x in arrays)
        if size <= MOST_HELD:
            held.update(program.invars[x.number] for x in arrays)
    known = _Known(program.deferred, held)
    return sum((_equation(x, threads, known) for x in program.eqns), LaneWork())


class _Known(NamedTuple):
    deferred: Set[Any]  # values that are computed where they are read
    held: Set[Any]  # matrices of which threads have parts in registers


def _equation(eqn: Any, threads: int, known: _Known) -> LaneWork:
    name, params = eqn.primitive.name, eqn.params

    def inner(jaxpr: Any) -> LaneWork:
        return group_work(compat.closed_jaxpr(jaxpr), threads)

    meaning = meaning_of(eqn)
    if meaning is not None:
        return inner(meaning)
    if name == "scan":
        stacked = len(eqn.outvars) - compat.scan_parts(eqn)[1]
        steps: int = params["length"]
        body = compat.closed_jaxpr(params["jaxpr"])
        return steps * (
            group_work(body, threads, compat.scan_parts(eqn))
            + LaneWork(accesses=stacked, barriers=2 * stacked)
        )
    if name == "while":
        return NOMINAL_STEPS * (inner(params["cond_jaxpr"]) + inner(params["body_jaxpr"]))
    if name == "cond":
        # A lane takes one branch; lanes take any of them.
        branches = [inner(x) for x in params["branches"]]
        return max(branches, key=lambda work: work.instructions + work.accesses)
    if is_copy(name) or name in VIEWS:
        return LaneWork()
    return _elementwise_work(eqn, threads, known)


def _elementwise_work(eqn: Any, threads: int, known: _Known) -> LaneWork:
    name, out = eqn.primitive.name, eqn.outvars[0]
    results = sum(map(_size, eqn.outvars))
    operands = [_size(x) for x in eqn.invars]
    in_memory: float = sum(
        n > LONGEST_ALIKE and (compat.is_literal(x) or x not in known.deferred)
        for x, n in zip(eqn.invars, operands, strict=True)
    )

    def share(elements: int) -> int:
        return elements if elements <= LONGEST_ALIKE else -(-elements // threads)

    is_held = any(not compat.is_literal(x) and x in known.held for x in eqn.invars)
    if is_held and name != "dot_general":
        return LaneWork(
            instructions=-(-results // threads), accesses=_OF_VECTOR * results / threads
        )
    is_stored = results > LONGEST_ALIKE and out not in known.deferred

    steps, each, reductions = share(results), 1, 0
    if name == "dot_general":
        terms = math.prod(
            eqn.invars[0].aval.shape[d] for d in eqn.params["dimension_numbers"][0][0]
        )
        steps *= terms
        if results <= LONGEST_ALIKE < terms:
            steps, reductions = results * share(terms), 1
        elif is_held or (out in known.deferred and terms == 1):
            in_memory = _OF_VECTOR
        elif results > LONGEST_ALIKE and terms > MAX_TERMS and _is_along_rows(eqn):
            in_memory *= _FAR
    elif name == "tridiagonal_solve":
        systems = math.prod(eqn.invars[0].aval.shape[:-1])
        steps = TRIDIAGONAL * share(systems) * results // max(systems, 1)
    elif name == "eigh" and max(operands) > LONGEST_ALIKE:
        return _eigh_work(eqn.invars[0].aval.shape, threads)
    elif name in MATRICES:
        steps = int(ITERATIONS.get(name, 1) * max(operands) ** 1.5)
    elif name == "sort":
        steps *= eqn.invars[0].aval.shape[eqn.params["dimension"]]
    elif name.startswith(("reduce_", "arg", "cum")):
        steps, reductions = share(operands[0]), int(results <= LONGEST_ALIKE < operands[0])
    elif name.startswith(_BY_ONE_THREAD):
        steps = operands[-1]
    elif name == "threefry2x32":
        each = THREEFRY
    elif is_elementwise(name) and name != "convert_element_type":
        each = translation(name, eqn.params).instructions
    return LaneWork(
        instructions=steps * each,
        accesses=steps * in_memory + is_stored * share(results),
        reductions=reductions,
        barriers=2 * is_stored,
    )


def _eigh_work(shape: tuple[int, ...], threads: int) -> LaneWork:
    """Return the work of Jacobi's rotations: instructions from the SASS of ``diagonalise``."""
    *batch, n, _ = shape
    pairs = (n + 1) // 2
    rounds = math.prod(batch) * _SWEEPS * (2 * pairs - 1)
    blocks, elements = -(-pairs * (pairs + 1) // 2 // threads), -(-pairs * n // threads)
    return rounds * LaneWork(
        instructions=80 + 60 * blocks + 25 * elements,
        accesses=6 + 12 * blocks + 6 * elements,
        barriers=2,
    )


def _is_along_rows(eqn: Any) -> bool:
    """Whether threads read long rows of the first operand side by side."""
    contracted = eqn.params["dimension_numbers"][0][0]
    return len(eqn.invars[0].aval.shape) - 1 in contracted


def _size(x: Any) -> int:
    return math.prod(x.aval.shape)
