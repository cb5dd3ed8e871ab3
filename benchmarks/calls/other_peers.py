"""Peers that a row is compared with besides: whether they can compute it, and in what memory."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.calls.case import jitted
from benchmarks.calls.operations import OPERATIONS, Function, Peer
from benchmarks.calls.row import Row
from jax_tilekern.tuning.random_operands import Operands
from jax_tilekern.tuning.wall_time import ready, wall_seconds

# The most by which a right result differs from ours, relative to its norm: 8-bit products of
# another accumulation are this rough.
_ROUGH = 0.05


@dataclass(frozen=True)
class OtherPeer:
    """What is known of a peer before it is timed.

    Attributes
    ----------
    function
        It, compiled; ``None`` if it cannot compute the row.
    temporary_bytes
        What its program takes besides operands and results, if it compiles.
    failure
        Why there is no function.
    """

    function: Function | None = None
    temporary_bytes: int | None = None
    failure: str | None = None


def other_peers(
    row: Row, operands: Operands, ours: Any, *, reserved: int = 0, longest: float = math.inf
) -> Mapping[str, OtherPeer]:
    """Return the other peers that a row names, each of which has run once if it can.

    Parameters
    ----------
    row
        The call.
    operands
        Its operands.
    ours
        Our results, which theirs should be.
    reserved
        Bytes of the device that something else takes while they are timed.
    longest
        Seconds that a call may take.
    """
    known = OPERATIONS[row.operation].others
    return {
        name: _other_peer(row, known[name], operands, ours, reserved, longest)
        for name in row.others
    }


def compile_others(row: Row) -> None:
    """Compile the other peers that a row names, which :func:`other_peers` then finds."""
    for name in row.others:
        compiled(row, OPERATIONS[row.operation].others[name].side())


def _other_peer(
    row: Row, peer: Peer, operands: Operands, ours: Any, reserved: int, longest: float
) -> OtherPeer:
    temporary = None
    try:
        function = compiled(row, peer.side())
        temporary = temporary_bytes(function)
        if needed_bytes(operands, ours, temporary) + reserved > free_bytes():
            return OtherPeer(temporary_bytes=temporary, failure="out of memory")
        call = partial(function, *peer.operands(operands))
        difference = _difference(ready(call()), ours)
        seconds = wall_seconds(call) if longest < math.inf else 0.0
    except ModuleNotFoundError:
        return OtherPeer(failure="not installed")
    # Whatever it raises costs this peer alone.
    except Exception as error:
        exhausted = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        return OtherPeer(None, temporary, "out of memory" if exhausted else what)
    if not difference <= _ROUGH:
        return OtherPeer(None, temporary, f"wrong: differs from ours by {difference:.0%}")
    if seconds > longest:
        return OtherPeer(None, temporary, f"longer than {longest:g} s")
    return OtherPeer(function, temporary)


@functools.cache
def _compiled(call: Row, side: Any, structs: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
    return jitted(call, side).lower(*structs).compile()  # type: ignore[attr-defined]


def compiled(row: Row, side: Any) -> Any:
    """Return the function of a row by a side, compiled ahead; rows of the same call share it."""
    return _compiled(row.call, side, row.structs)


def temporary_bytes(function: Any) -> int | None:
    """Return what a compiled function takes besides operands and results, if XLA says it."""
    analysis = function.memory_analysis()
    return None if analysis is None else int(analysis.temp_size_in_bytes)


def needed_bytes(operands: Operands, results: Any, temporary: int | None) -> int:
    """Return the bytes that timing a peer takes besides the operands that are there.

    These are another set of operands to rotate among, two results at once and what is temporary.
    """
    sets: int = sum(x.nbytes for x in jax.tree.leaves((operands, results, results)))
    return sets + (temporary or 0)


def free_bytes() -> int:
    """Return the bytes that the default device has left."""
    statistics = jax.devices()[0].memory_stats()
    if statistics:
        return int(statistics["bytes_limit"]) - int(statistics["bytes_in_use"])
    return int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))


@jax.jit
def _relative(result: jax.Array, ours: jax.Array) -> jax.Array:
    wide = ours.astype(jnp.float32)
    relative: jax.Array = jnp.linalg.norm(result.astype(jnp.float32) - wide) / jnp.linalg.norm(wide)
    return relative


def _difference(results: Any, ours: Any) -> float:
    """Return the largest relative difference of results from ours; NaN if there is one."""
    pairs = zip(*map(jax.tree.leaves, (results, ours)), strict=True)
    differences = [float(_relative(*pair)) for pair in pairs]
    return math.nan if any(map(math.isnan, differences)) else max(differences)
