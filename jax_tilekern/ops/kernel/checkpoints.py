"""The values of a loop of lanes that reverse mode saves, and those that it computes again.

Without checkpoints a loop saves what the derivative of each step needs. With checkpoints it saves
the state that it carries before every ``every`` steps, and computes the steps, and the states
between two checkpoints, again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import partial_eval
from jax_tilekern.ops.kernel.translation.keys import is_key, raw_type, without_keys
from jax_tilekern.ops.kernel.work import work_of

# "auto" for a choice by the bytes to save, ``None`` for no checkpoints, or the steps between two.
Checkpoint = Literal["auto"] | int | None

# The bytes that a call of all lanes may save in "auto". A GPU writes and reads as many in 0.2 ms.
# It computes about 50 operations in the time that it takes to save a number and read it. So half as
# much saved memory is worth a second computation, unless that takes longer, and more bytes are
# saved then.
MAX_SAVED_BYTES = 256 << 20
_MANY_TIMES, _OPERATIONS, _BYTES_OF_NUMBER = 4, 50, 4
# Loops of up to so many steps have no checkpoints of their own.
_SHORT_LOOP = 8
# Stands for about the square root of the number of steps.
_ROOT = 0


def checked(checkpoint: Any) -> Checkpoint:
    """Return the user's argument ``checkpoint``, or raise an error."""
    if checkpoint is None:
        return None
    if isinstance(checkpoint, str) and checkpoint == "auto":
        return "auto"
    if isinstance(checkpoint, bool) or not isinstance(checkpoint, int):
        raise TypeError(
            f"checkpoint is {checkpoint!r}; it is 'auto', None, or the number of steps between two "
            "checkpoints"
        )
    if checkpoint < 1:
        raise ValueError(f"checkpoint={checkpoint}: there is at least one step between checkpoints")
    return checkpoint


class Division(NamedTuple):
    """A jaxpr in two parts."""

    first: Any  # depends on known operands alone; its last results are residuals
    second: Any  # the rest; its first operands are the residuals
    unknown_results: list[bool]  # which results the second part computes
    residuals: list[Any]  # their types
    checkpoint: Checkpoint  # the checkpoints for derivatives of loops in the second part


def divided(
    closed: Any,
    unknown: Sequence[bool],
    checkpoint: Checkpoint,
    lanes: int,
    saved_bytes: Callable[[Any, int], int],
) -> Division:
    """Divide a lane's jaxpr into what depends on known operands alone, and the rest.

    ``saved_bytes(first, count)`` is the size, for one lane, of the last ``count`` results of a
    first part.
    """
    if not _has_long_loop(closed.jaxpr):
        return _divided(closed, unknown, None, checkpoint)
    if checkpoint != "auto":
        return _divided(closed, unknown, checkpoint, checkpoint)

    def size(division: Division) -> int:
        bytes_ = lanes * saved_bytes(division.first, len(division.residuals))
        # A symbolic number counts as none.
        return bytes_ if isinstance(bytes_, int) else 0

    whole = _divided(closed, unknown, None, checkpoint)
    if not size(whole):
        return whole
    states = _divided(closed, unknown, 1, checkpoint)
    again = lanes * (_instructions(states) - _instructions(whole))
    takes_longer = again > _OPERATIONS * (size(whole) - size(states)) // _BYTES_OF_NUMBER
    if takes_longer and size(whole) <= _MANY_TIMES * MAX_SAVED_BYTES:
        return whole
    found = states if min(2 * size(states), MAX_SAVED_BYTES) < size(whole) else whole
    if size(found) <= MAX_SAVED_BYTES:
        return found
    return _divided(closed, unknown, _ROOT, checkpoint)


def _instructions(division: Division) -> float:
    """Return the instructions of a lane's second part."""
    closed = division.second
    return work_of(closed, 1, [True] * len(closed.in_avals)).instructions


def _divided(
    closed: Any, unknown: Sequence[bool], every: int | None, checkpoint: Checkpoint
) -> Division:
    jaxpr = closed if every is None else _with_checkpoints(closed, every)
    first, second, unknown_results, residuals = partial_eval.partial_eval_jaxpr_nounits(
        jaxpr, unknown, instantiate=False
    )
    left = checkpoint if every is None else None
    # Derivatives of custom functions of random keys save keys.
    saved = [raw_type(x) if is_key(x) else x for x in residuals]
    return Division(without_keys(first), without_keys(second), unknown_results, saved, left)


def _has_long_loop(jaxpr: Any) -> bool:
    return any(
        (eqn.primitive.name == "scan" and _is_long(eqn.params["length"]))
        or any(_has_long_loop(compat.closed_jaxpr(x).jaxpr) for x in compat.jaxprs_of(eqn))
        for eqn in jaxpr.eqns
    )


def _is_long(length: Any) -> bool:
    return isinstance(length, int) and length > _SHORT_LOOP


def _with_checkpoints(closed: Any, every: int) -> Any:
    types = [jax.core.ShapedArray(x.shape, x.dtype, weak_type=x.weak_type) for x in closed.in_avals]
    with compat.without_mesh():
        return jax.make_jaxpr(lambda *operands: _evaluated(closed, every, operands))(*types)


def _evaluated(closed: Any, every: int, operands: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr, with checkpoints in its loops."""

    def equation(eqn: Any, given: list[Any]) -> list[Any]:
        if eqn.primitive.name == "scan":
            return _scan(eqn, every, given)
        if compat.is_plain_jit(eqn):
            return _evaluated(compat.closed_jaxpr(eqn.params["jaxpr"]), every, given)
        if eqn.primitive.name == "cond" and not eqn.params.get("branches_platforms"):
            branches = [_function(x, every) for x in eqn.params["branches"]]
            return list(lax.switch(given[0], branches, *given[1:]))
        return compat.bind_equation(eqn, given)

    return compat.eval_jaxpr_by(equation, closed.jaxpr, closed.consts, operands)


def _function(jaxpr: Any, every: int) -> Callable[..., list[Any]]:
    closed = compat.closed_jaxpr(jaxpr)
    return lambda *operands: _evaluated(closed, every, operands)


def _scan(eqn: Any, every: int, operands: Sequence[Any]) -> list[Any]:
    """Evaluate a loop whose steps, and chunks of steps, are computed again when they are needed."""
    consts, carries = compat.scan_parts(eqn)
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    known, state, xs = (
        operands[:consts],
        tuple(operands[consts : consts + carries]),
        tuple(operands[consts + carries :]),
    )
    function = _function(eqn.params["jaxpr"], every)

    def step(state: Any, x: Any) -> tuple[Any, Any]:
        found = function(*known, *state, *x)
        return tuple(found[:carries]), tuple(found[carries:])

    def loop(body: Any, state: Any, xs: Any, length: int) -> tuple[Any, Any]:
        found: tuple[Any, Any] = lax.scan(body, state, xs, length, reverse)
        return found

    def steps(state: Any, xs: Any) -> tuple[Any, Any]:
        return loop(_again(step), state, xs, size)

    if not _is_long(length):
        return [x for part in loop(step, state, xs, length) for x in part]
    size = _chunk(length) if every == _ROOT else min(every, length)
    if size in (1, length):
        return [x for part in loop(_again(step), state, xs, length) for x in part]
    chunks, rest = divmod(length, size)
    # The steps that are left over are the last.
    start, own = (rest, slice(rest)) if reverse else (0, slice(length - rest, length))
    state, found = loop(
        _again(steps),
        state,
        tuple(x[start : start + chunks * size].reshape(chunks, size, *x.shape[1:]) for x in xs),
        chunks,
    )
    results = [x.reshape(chunks * size, *x.shape[2:]) for x in found]
    if rest:
        state, last = loop(_again(step), state, tuple(x[own] for x in xs), rest)
        results = [
            jnp.concatenate((y, x) if reverse else (x, y))
            for x, y in zip(results, last, strict=True)
        ]
    return [*state, *results]


def _again(function: Any) -> Any:
    # A loop is around it, so that the compiler cannot find the two computations to be the same.
    return jax.checkpoint(function, prevent_cse=False)


def _chunk(length: int) -> int:
    """Return the steps of a chunk: the root of the length, or what divides it and is near that."""
    root = math.isqrt(length - 1) + 1
    return next((size for size in range(root, root + root // 2) if length % size == 0), root)
