"""Times of several sides, in rounds of blocks of calls that alternate."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_tilekern.cli import machine
from jax_tilekern.tuning.device_time import CallBlock, run_blocks
from jax_tilekern.tuning.wall_time import ready, repeated, wall_seconds

_ROUNDS = 5
_MOST_CALLS = 20
_STABLE_ROUNDS, _MOST_STABLE_CALLS = 12, 200
# Warm-up ends when two blocks in a row took the same time to within this, or after some seconds.
_STABLE, _LONGEST_WARM_UP = 0.03, 3.0
_BANDWIDTH_CALLS = 16
# The longest call, in seconds, that the host's work for a call may hide.
_SHORT_CALL = 1e-3
# What the operands of the rows of one profile may take.
PROFILE_BYTES = 12 << 30

Runs = Mapping[str, Callable[[], Any]]
_Row = TypeVar("_Row")


@dataclass(frozen=True)
class Side:
    """A side to be timed: what makes one call, compiled and warm, and how many are a block."""

    run: Callable[[], Any]
    calls: int


class Times(NamedTuple):
    """Times of a call of each side in each round.

    Attributes
    ----------
    device
        What is reported: spans on the device, or wall times on a CPU.
    host
        The same blocks by the host's clock, which includes what the GPU waits.
    method
        What ``device`` has, in words.
    sm_mhz
        The clock of the GPU's SMs, where it was asked for.
    """

    device: Mapping[str, tuple[float, ...]]
    host: Mapping[str, tuple[float, ...]]
    method: str
    sm_mhz: int | None = None

    def medians(self) -> dict[str, float]:
        """Return the median time of each side."""
        return {name: float(np.median(times)) for name, times in self.device.items()}

    def fields(self) -> dict[str, Any]:
        """Return what a record has: times, and ratios to ours with their percentiles."""
        ours = np.array(self.device["ours"])
        ratios = {
            name: np.percentile(np.array(times) / ours, (50, 10, 90)).tolist()
            for name, times in self.device.items()
            if name != "ours"
        }
        wall = {name: float(np.median(times)) for name, times in self.host.items()}
        more = {"wall_seconds": wall if wall != self.medians() else {}, "sm_mhz": self.sm_mhz}
        return {
            "seconds": self.medians(),
            "ratio": {name: found[0] for name, found in ratios.items()},
            "spread": {name: found[1:] for name, found in ratios.items()},
            "method": self.method,
            **{key: value for key, value in more.items() if value},
        }


def rotating(sides: Mapping[str, Callable[..., Any]], sets: Mapping[str, Sequence[Any]]) -> Runs:
    """Return what calls each side with the next of its sets of arguments.

    All sides share one rotation; otherwise a side would find the arguments of the preceding one
    in L2.
    """
    turns = itertools.count()

    def run(name: str) -> Any:
        return sides[name](*sets[name][next(turns) % len(sets[name])])

    return {name: partial(run, name) for name in sets}


def _order(sides: Iterable[str], rounds: int) -> list[str]:
    """Return whose each block is: every other round is in the opposite order."""
    names = list(sides)
    return [x for number in range(rounds) for x in (names[::-1] if number % 2 else names)]


def block_times(found: Sequence[CallBlock], calls: Mapping[str, int]) -> Times:
    """Return the times of a call in each block of each side."""
    blocks = {name: [block for block in found if block.side == name] for name in calls}
    return Times(
        {name: tuple(x.device_seconds(calls[name]) for x in blocks[name]) for name in calls},
        {name: tuple(x.host_seconds / calls[name] for x in blocks[name]) for name in calls},
        "device time by the profiler",
    )


def device_times(runs: Runs, seconds: float) -> Times:
    """Return the device times of compiled sides that make one call each; wall times on a CPU."""
    if jax.default_backend() == "cpu":
        return wall_times(runs, seconds)
    return times_of_rows([runs], seconds)[0]


def stable_times(runs: Runs, seconds: float) -> Times:
    """Return the device times of sides, in many calls that begin when they are stable."""
    _warm_up(runs)
    (times,) = times_of_rows([runs], seconds, _STABLE_ROUNDS, _MOST_STABLE_CALLS)
    return times._replace(sm_mhz=_sm_mhz(runs["ours"]))


def _warm_up(runs: Runs) -> None:
    """Run all sides until their time is stable."""
    end, before = time.perf_counter() + _LONGEST_WARM_UP, math.inf
    while time.perf_counter() < end:
        now = sum(wall_seconds(partial(repeated, run, 20)) for run in runs.values())
        if abs(now - before) <= _STABLE * now:
            break
        before = now


def _sm_mhz(run: Callable[[], Any]) -> int | None:
    """Return the clock of the first GPU's SMs while it works, where the driver says it."""
    with ThreadPoolExecutor(1) as other_thread:
        looking = other_thread.submit(machine.probe_results, "nvidia_smi")
        while not looking.done():
            ready(run())
    gpus = looking.result()[0].get("nvidia_smi")
    return int(gpus[0]["clocks.sm"].split()[0]) if gpus else None


def wall_times(runs: Runs, seconds: float) -> Times:
    """Return the wall times of compiled sides that make one call each."""
    return _wall_times(_sides(runs, seconds, _ROUNDS, _MOST_CALLS), seconds)


def short_times(runs: Runs, seconds: float) -> Times:
    """Return wall times, and device times of the sides whose call takes at most a millisecond.

    The host takes tens of microseconds for each call, which may be longer than the kernel. The
    profiler slows programs of many launches, so a device time counts only below the wall time.
    """
    wall = wall_times(runs, seconds)
    short = {name: run for name, run in runs.items() if wall.medians()[name] <= _SHORT_CALL}
    if not short or jax.default_backend() == "cpu":
        return wall
    profiled = times_of_rows([short], seconds)[0]
    spans = {
        name: times
        for name, times in profiled.device.items()
        if profiled.medians()[name] < wall.medians()[name]
    }
    if not spans:
        return wall
    method = f"{wall.method}; {profiled.method}: {', '.join(spans)}"
    return Times({**wall.device, **spans}, wall.device, method)


def times_of_rows(
    rows: Sequence[Runs], seconds: float, rounds: int = _ROUNDS, most_calls: int = _MOST_CALLS
) -> list[Times]:
    """Return the device times of the sides of each row.

    One profile serves all rows, since it takes longer to start than a row. Where it is not clear,
    each row gets its own, and wall times if that is not clear either.

    Parameters
    ----------
    rows
        Functions by side that make one call each; compiled and warm.
    seconds
        Time to spend on each row.
    rounds, most_calls
        Blocks of each side, and the most calls in a block.
    """
    sides = [_sides(row, seconds, rounds, most_calls) for row in rows]
    order = [f"{i} {name}" for i, row in enumerate(sides) for name in _order(row, rounds)]
    flat = {f"{i} {name}": side for i, row in enumerate(sides) for name, side in row.items()}
    calls = {name: side.calls for name, side in flat.items()}
    try:
        blocks = run_blocks({name: side.run for name, side in flat.items()}, calls, order)
    # The sides have run before, so an error is the profiler's.
    except RuntimeError as error:
        if len(rows) > 1:
            return [x for row in rows for x in times_of_rows([row], seconds, rounds, most_calls)]
        return [_wall_times(sides[0], seconds, f" ({error})")]
    found = block_times(blocks, calls)
    return [
        Times(_row_times(found.device, i), _row_times(found.host, i), found.method)
        for i in range(len(rows))
    ]


def rows_of_a_profile(rows: Iterable[_Row], needed: Callable[[_Row], int]) -> Iterator[list[_Row]]:
    """Yield groups of rows whose operands, of ``needed`` bytes, the GPU holds at the same time."""
    group: list[_Row] = []
    held = 0
    for row in rows:
        if group and held + needed(row) > PROFILE_BYTES:
            yield group
            group, held = [], 0
        group.append(row)
        held += needed(row)
    if group:
        yield group


def _row_times(times: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return what is found of one row, by the names of its sides."""
    named = ((name.partition(" "), value) for name, value in times.items())
    return {side: value for (number, _, side), value in named if number == str(row)}


def _sides(row: Runs, seconds: float, rounds: int, most_calls: int) -> dict[str, Side]:
    """Return sides whose blocks take an equal share of the time."""
    share = seconds / (rounds * len(row))
    result = {}
    for name, run in row.items():
        ready(run())
        call = wall_seconds(partial(repeated, run, 4)) / 4
        result[name] = Side(run, min(most_calls, max(1, int(share / call))))
    return result


def wall_rounds(runs: Runs, seconds: float, least: int = 5, most: int = 400) -> dict[str, Any]:
    """Return wall times of a call of each side, one after the other, for some seconds."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    end, names, rounds = time.perf_counter() + seconds, list(runs), 0
    while rounds < least or (rounds < most and time.perf_counter() < end):
        for name in names[::-1] if rounds % 2 else names:
            times[name].append(wall_seconds(runs[name]))
        rounds += 1
    return times


def _wall_times(sides: Mapping[str, Side], seconds: float, why: str = "") -> Times:
    """Return wall times in as many rounds as the time allows; blocks of short calls take little."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    end, names, rounds = time.perf_counter() + seconds, list(sides), 0
    while rounds < _ROUNDS or time.perf_counter() < end:
        for name in names[::-1] if rounds % 2 else names:
            side = sides[name]
            times[name].append(wall_seconds(partial(repeated, side.run, side.calls)) / side.calls)
        rounds += 1
    found = {name: tuple(values) for name, values in times.items()}
    return Times(found, {}, f"wall time of a call in a row of calls{why}")


def bandwidths() -> dict[str, float]:
    """Return the bytes per second that the default device's memory moves.

    Those of a read are of a sum of many numbers, and those of a copy, read and written together, of
    adding one to each.
    """
    numbers = jnp.ones(1 << (26 if jax.default_backend() == "cpu" else 28), jnp.float32)
    increment: Callable[[jax.Array], jax.Array] = jax.jit(lambda x: x + 1, donate_argnums=0)
    total = jax.jit(jnp.sum)

    def incremented() -> jax.Array:
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
