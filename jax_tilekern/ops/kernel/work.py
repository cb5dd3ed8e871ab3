"""What a function of a lane does, as one kernel and under ``vmap``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from jax_tilekern.epilogue.primitives import INNER_JAXPR, is_copy, is_elementwise, translation
from jax_tilekern.interop import compat
from jax_tilekern.ops.kernel.translation.meanings import meaning_of
from jax_tilekern.plans.lane_cost import LaneWork

# Arrays of a lane of more elements are in memory.
IN_REGISTERS = 64
# Steps of a ``while`` loop, whose number no jaxpr has. Most of the work of either side is in loops.
NOMINAL_STEPS = 16
THREEFRY = 100
VIEWS = frozenset({"transpose", "slice", "rev", "squeeze", "split", "unstack", "dynamic_slice"})
# Primitives for which XLA launches kernels of their own, and how many.
_XLA_KERNELS = {
    **dict.fromkeys(("cholesky", "lu", "qr", "geqrf", "householder_product"), 4),
    **dict.fromkeys(("eigh", "svd", "tridiagonal_solve"), 4),
    **dict.fromkeys(("triangular_solve", "top_k"), 2),
    **dict.fromkeys(("dot_general", "sort", "argmax", "argmin", "concatenate", "scatter"), 1),
    **{f"reduce_{x}": 1 for x in ("sum", "prod", "max", "min", "and", "or", "xor")},
    **{f"cum{x}": 1 for x in ("sum", "prod", "max", "min", "logsumexp")},
}
MATRICES = ("cholesky", "lu", "qr", "geqrf", "householder_product", "triangular_solve",
            "eigh", "svd")  # fmt: skip
# XLA's kernels of matrices pass over small ones so often (records of ``benchmarks linalg``).
_PASSES = {**dict.fromkeys(MATRICES, 40), "tridiagonal_solve": 10}
# Cycles of a row of a tridiagonal system, from its SASS: elimination takes 90 for a row at each end
# together, and substitution 30.
TRIDIAGONAL = 60
# Jacobi's sweeps.
ITERATIONS = {"eigh": 40, "svd": 60}


def work_of(closed: Any, lanes: int, mapped: Iterable[bool]) -> LaneWork:
    """Return the work of a jaxpr of one lane, of whose operands some are ``mapped``."""
    given = dict(zip(closed.jaxpr.invars, mapped, strict=True))
    own = {x for x, is_mapped in given.items() if is_mapped}
    moved = sum(_bytes(x) * (lanes if x in own else 1) for x in given)
    moved += lanes * sum(map(_bytes, closed.jaxpr.outvars))
    found = _work(closed.jaxpr, own, lanes)
    return found + LaneWork(bytes=moved, xla_kernels=1, xla_bytes=moved)


def _work(jaxpr: Any, mapped: set[Any], lanes: int) -> LaneWork:
    """Return the work of equations; add to ``mapped`` what lanes have of their own."""
    total = LaneWork()
    for eqn in jaxpr.eqns:
        are_mapped = [not compat.is_literal(x) and x in mapped for x in eqn.invars]
        total += _equation(eqn, are_mapped, lanes)
        if any(are_mapped) or eqn.primitive.name in ("while", "scan"):
            mapped.update(eqn.outvars)
    return total


def _inner(closed: Any, mapped: Sequence[bool], lanes: int) -> LaneWork:
    jaxpr = closed.jaxpr
    own = {x for x, is_mapped in zip(jaxpr.invars, mapped, strict=True) if is_mapped}
    return _work(jaxpr, own, lanes)


def _equation(eqn: Any, mapped: Sequence[bool], lanes: int) -> LaneWork:
    name, params = eqn.primitive.name, eqn.params
    meaning = meaning_of(eqn)
    if meaning is not None:
        return _inner(meaning, mapped, lanes)
    if name in INNER_JAXPR:
        return _inner(compat.closed_jaxpr(params[INNER_JAXPR[name]]), mapped, lanes)
    if name == "scan":
        consts, carried = compat.scan_parts(eqn)
        read = [*mapped[:consts], *[True] * carried, *mapped[consts + carried :]]
        body = _inner(compat.closed_jaxpr(params["jaxpr"]), read, lanes)
        steps: int = params["length"]
        return steps * (body + _step(eqn.outvars, lanes))
    if name == "while":
        first = params["cond_nconsts"]
        second = first + params["body_nconsts"]
        state = [True] * len(eqn.outvars)
        condition, body = (compat.closed_jaxpr(params[x]) for x in ("cond_jaxpr", "body_jaxpr"))
        return NOMINAL_STEPS * (
            _inner(condition, [*mapped[:first], *state], lanes)
            + _inner(body, [*mapped[first:second], *state], lanes)
            + _step(eqn.outvars, lanes)
            + LaneWork(xla_conditions=1)
        )
    if name == "cond":
        # The threads of a warp take different branches one after another; vmap computes all.
        branches = map(compat.closed_jaxpr, params["branches"])
        return sum((_inner(x, mapped[1:], lanes) for x in branches), LaneWork())
    return elementwise_work(eqn, mapped, lanes)


def _step(carried: Sequence[Any], lanes: int) -> LaneWork:
    """Return the work of a step itself: a fusion of XLA reads and writes what the loop carries."""
    return LaneWork(xla_kernels=1, xla_bytes=2.0 * lanes * sum(map(_bytes, carried)))


def elementwise_work(eqn: Any, mapped: Sequence[bool], lanes: int) -> LaneWork:
    name = eqn.primitive.name
    results = sum(map(_size, eqn.outvars))
    operands = [_size(x) for x in eqn.invars]
    in_memory = sum(n > IN_REGISTERS for n in operands)
    kernels = _XLA_KERNELS.get(name, 0)
    moved = sum(
        _bytes(x) * (lanes if own else 1) for x, own in zip(eqn.invars, mapped, strict=True)
    ) + lanes * sum(map(_bytes, eqn.outvars))
    moved *= _PASSES.get(name, bool(kernels))
    of_xla = LaneWork(xla_kernels=kernels, xla_bytes=moved)
    if is_copy(name) or name in VIEWS:
        return of_xla
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        steps = results * math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
        return of_xla + LaneWork(instructions=steps, accesses=steps * in_memory)
    if name == "tridiagonal_solve":
        return of_xla + LaneWork(instructions=TRIDIAGONAL * operands[-1])
    if name in MATRICES:
        steps = ITERATIONS.get(name, 1) * max(operands) ** 1.5
        return of_xla + LaneWork(instructions=steps, accesses=steps * (in_memory > 0))
    if name == "sort":
        return of_xla + LaneWork(instructions=results**2 / 4, accesses=in_memory * results**2 / 4)
    each = 1
    if name == "threefry2x32":
        each = THREEFRY
    elif is_elementwise(name) and name != "convert_element_type":
        each = translation(name, eqn.params).instructions
    elements = max([results, *operands]) if kernels else results
    written = elements if elements > IN_REGISTERS and not kernels else 0
    return of_xla + LaneWork(
        instructions=elements * each, accesses=written + min(in_memory, 1) * elements
    )


def _size(x: Any) -> int:
    return math.prod(x.aval.shape)


def _bytes(x: Any) -> int:
    size: int = _size(x) * x.aval.dtype.itemsize
    return size
