"""How long a row takes: wall time on a CPU, device time on a GPU."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.calls.case import Case
from benchmarks.calls.operations import Function
from benchmarks.measurement.side_times import Side, device_times
from benchmarks.measurement.side_times import pairs as side_pairs
from jax_tilekern.cli import machine
from jax_tilekern.cli.timing import Pairs, interleaved
from jax_tilekern.tuning.random_operands import Operands, beyond_cache
from jax_tilekern.tuning.wall_time import ready, repeated, wall_seconds

# A call of the CPU backend costs tens of microseconds; in calls this long that is a few percent.
_LONG_CALL = 1e-3
_LONGEST_CHAIN = 64
_PAIRS = 12
_MOST_CALLS = 200
# A call of another peer that takes longer than this is timed in so few rounds.
_SLOW_CALL, _SLOW_PAIRS = 50e-3, 3
# Warm-up ends when two blocks in a row took the same time to within this, or after some seconds.
_STABLE, _LONGEST_WARM_UP = 0.03, 3.0
_CLOCKS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
_BANDWIDTH_CALLS = 16


@dataclass(frozen=True)
class Measurement:
    """Times of one row.

    Attributes
    ----------
    pairs
        What is reported.
    others
        Ours and each other peer.
    method
        What ``pairs`` are, in words.
    products_per_call
        How many times one jitted call did the row, of which ``pairs`` has the time of one.
    wall
        Time of the same calls by the host's clock, as a check: on a GPU it includes what the
        host needs for a call.
    kernels
        Names of what each side ran on the GPU, from the profile.
    clocks
        The GPU's while it did these calls, under the names of ``nvidia-smi``.
    """

    pairs: Pairs
    others: Mapping[str, Pairs]
    method: str
    products_per_call: int
    wall: Pairs
    kernels: Mapping[str, list[str]] = field(default_factory=dict)
    clocks: Mapping[str, str] = field(default_factory=dict)


def measure_on_cpu(
    case: Case, operands: Operands, seconds: float, others: Mapping[str, Function]
) -> Measurement:
    """Measure by wall time, with operands where the caches keep them.

    A product too short to be timed alone is done several times in one call, each on the result
    of the one before, if the result can be an operand; both sides do the same. Other operations
    are not chained: XLA makes one of many transposes or additions.
    """
    ours, peer = case.ours, case.peer
    peer_operands = case.peer_operands(operands)
    sides = (partial(ours, *operands), partial(peer, *peer_operands))
    fastest = min(map(_fastest_of, sides))
    products = 1
    if _chains(case, operands):
        products = min(_LONGEST_CHAIN, math.ceil(_LONG_CALL / fastest))
    if products == 1:
        method = "wall time of a call"
    else:
        # Random factors of this size keep the result's size as it is.
        scale = 1 / math.sqrt(case.row.sizes["k"])
        operands = operands[0], (operands[1] * scale).astype(operands[1].dtype)
        ours, peer = (jax.jit(_chain(side, products)) for side in (ours, peer))
        sides = (partial(ours, *operands), partial(peer, *operands))
        method = f"wall time of a call that chains {products} products, divided by {products}"
    wall_seconds(lambda: [side() for side in sides])
    pairs = interleaved(*sides, seconds=seconds).divided(products)
    found = {
        name: interleaved(partial(ours, *operands), partial(other, *operands), seconds=seconds)
        for name, other in others.items()
    }
    return Measurement(pairs, found, method, products, wall=pairs)


def _fastest_of(side: Callable[[], Any]) -> float:
    ready(side())
    return min(wall_seconds(side) for _ in range(3))


def _chains(case: Case, operands: Operands) -> bool:
    lhs = operands[0]
    if case.row.operation != "matmul" or not jnp.issubdtype(lhs.dtype, jnp.floating):
        return False  # Integers overflow.
    result = jax.eval_shape(case.peer, *operands)
    return (result.shape, result.dtype) == (lhs.shape, lhs.dtype)


def _chain(product: Callable[[Array, Array], Array], length: int) -> Callable[..., Array]:
    def chained(lhs: Array, rhs: Array) -> Array:
        for _ in range(length):
            lhs = product(lhs, rhs)
        return lhs

    return chained


def measure_on_gpu(
    case: Case, operands: Operands, seconds: float, l2_bytes: int, others: Mapping[str, Function]
) -> Measurement:
    """Measure by the profiler's device time, with operands that are not in the cache.

    Where the profile does not tell the sides apart, what is reported is the wall time of a call
    within a long row of calls, and ``method`` says so.
    """
    sets = beyond_cache(operands, case.operands, l2_bytes)
    ours = _rotating(case.ours, sets)
    peer = _rotating(case.peer, list(map(case.peer_operands, sets)))
    others_run = {name: _rotating(other, sets) for name, other in others.items()}

    calls = _warm_up(ours, peer, seconds)
    sides = {"ours": Side(ours, calls, _PAIRS), "peer": Side(peer, calls, _PAIRS)}
    sides |= {name: _other_side(run, calls, seconds) for name, run in others_run.items()}
    rotation = f"operands rotated among {len(sets)} copies"
    try:
        times = device_times(sides)
        pairs, wall = (side_pairs(times_of, "peer") for times_of in (times.device, times.host))
        found = {name: side_pairs(times.device, name) for name in others}
        kernels = times.kernels
        method = f"device time by the profiler, blocks of {calls} calls, {rotation}"
    # Also what the profiler itself raises; the products have run before, so it is not theirs.
    except RuntimeError as error:
        pairs = wall = _wall_pairs(sides["ours"], sides["peer"], seconds)
        found = {name: _wall_pairs(sides["ours"], sides[name], seconds) for name in others}
        kernels = {}
        method = f"wall time of a call in a row of {calls} ({error}), {rotation}"
    clocks = _clocks_during(lambda: (repeated(ours, calls), repeated(peer, calls)))
    return Measurement(pairs, found, method, 1, wall, kernels, clocks)


def _other_side(run: Callable[[], Any], most_calls: int, seconds: float) -> Side:
    """Return another peer as a side that takes no longer than ours and the peer may."""
    call = min(wall_seconds(run) for _ in range(2))
    calls = min(most_calls, max(1, int(seconds / (2 * _PAIRS * call))))
    return Side(run, calls, _SLOW_PAIRS if call > _SLOW_CALL else _PAIRS)


def _wall_pairs(ours: Side, peer: Side, seconds: float) -> Pairs:
    """Return wall times of a call within a row of calls."""
    blocks = (partial(repeated, side.run, side.calls) for side in (ours, peer))
    pairs = interleaved(*blocks, seconds=seconds, least=min(5, peer.rounds), most=peer.rounds)
    return Pairs(pairs.divided(ours.calls).ours, pairs.divided(peer.calls).peer)


def _clocks_during(work: Callable[[], Any]) -> dict[str, str]:
    """Return clocks, power and temperature of the first GPU while it works."""
    ready(work())
    with ThreadPoolExecutor(1) as other_thread:
        # Its failure costs the clocks only.
        looking = other_thread.submit(machine.facts, "nvidia_smi")
        while not looking.done():
            ready(work())
    found, _ = looking.result()
    gpus = found.get("nvidia_smi")
    return {name: gpus[0][name] for name in _CLOCKS} if gpus else {}


def _rotating(side: Function, sets: Sequence[Operands]) -> Callable[[], Any]:
    rotation = itertools.cycle(sets)
    return lambda: side(*next(rotation))


def _warm_up(ours: Callable[[], Any], peer: Callable[[], Any], seconds: float) -> int:
    """Run both until their time is stable; return how many calls a block takes."""
    wall_seconds(lambda: (ours(), peer()))
    call = max(wall_seconds(partial(repeated, side, 4)) / 4 for side in (ours, peer))
    calls = min(_MOST_CALLS, max(1, int(seconds / (2 * _PAIRS * call))))

    end = time.perf_counter() + _LONGEST_WARM_UP
    before = math.inf
    while time.perf_counter() < end:
        now = sum(wall_seconds(partial(repeated, side, calls)) for side in (ours, peer))
        if abs(now - before) <= _STABLE * now:
            break
        before = now
    return calls


def bandwidths() -> dict[str, float]:
    """Return the bytes per second that the default device's memory moves.

    Returns
    -------
    dict[str, float]
        ``read_bytes_per_second`` of a sum of many numbers, and ``copy_bytes_per_second``, read and
        written together, of adding one to each.
    """
    numbers = jnp.ones(1 << (26 if jax.default_backend() == "cpu" else 28), jnp.float32)
    increment: Callable[[Array], Array] = jax.jit(lambda x: x + 1, donate_argnums=0)
    total = jax.jit(jnp.sum)

    def incremented() -> Array:
        nonlocal numbers
        numbers = increment(numbers)
        return numbers

    # Each side several times in a row, since the last may be waited for while the others run.
    read, copy = (
        min(wall_seconds(partial(repeated, call, _BANDWIDTH_CALLS)) for _ in range(4))
        for call in (lambda: total(numbers), incremented)
    )
    moved = _BANDWIDTH_CALLS * numbers.nbytes
    return {"read_bytes_per_second": moved / read, "copy_bytes_per_second": 2 * moved / copy}
