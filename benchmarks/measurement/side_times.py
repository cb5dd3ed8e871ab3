"""Times of several sides, in rounds of blocks of calls that alternate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax

from jax_tilekern.cli.timing import Pairs
from jax_tilekern.tuning.device_time import CallBlock, run_blocks
from jax_tilekern.tuning.wall_time import ready, repeated, wall_seconds

_ROUNDS = 5
_MOST_CALLS = 20

# What the operands of the rows of one profile may take.
PROFILE_BYTES = 12 << 30

Runs = Mapping[str, Callable[[], Any]]
_Row = TypeVar("_Row")


@dataclass(frozen=True)
class Side:
    """A side to be timed.

    Attributes
    ----------
    run
        Makes one call; should be compiled and warm.
    calls
        Calls in a block.
    rounds
        How many blocks; a side takes part in the first rounds.
    """

    run: Callable[[], Any]
    calls: int
    rounds: int


@dataclass(frozen=True)
class DeviceTimes:
    """What a profile says of each side.

    Attributes
    ----------
    device
        Span of a call on the device, of each side's blocks.
    host
        Time of a call in the same blocks by the host's clock, which includes what the GPU waits.
    kernels
        Names of what each side ran on the GPU.
    """

    device: Mapping[str, tuple[float, ...]]
    host: Mapping[str, tuple[float, ...]]
    kernels: Mapping[str, list[str]]


def pairs(times: Mapping[str, tuple[float, ...]], peer: str) -> Pairs:
    """Return our times and a peer's of the rounds in which it took part."""
    return Pairs(times["ours"][: len(times[peer])], times[peer])


def device_times(sides: Mapping[str, Side]) -> DeviceTimes:
    """Return the device time of a call of each side, in blocks that alternate.

    Raises
    ------
    Unattributed
        If the profile lacks what it takes.
    """
    calls = {name: side.calls for name, side in sides.items()}
    runs = {name: side.run for name, side in sides.items()}
    return of_blocks(run_blocks(runs, calls, _order(sides)), calls)


def _order(sides: Mapping[str, Side]) -> list[str]:
    """Return whose each block is: every other round is in the opposite order."""
    order: list[str] = []
    for number in range(max(side.rounds for side in sides.values())):
        names = [name for name, side in sides.items() if side.rounds > number]
        order += reversed(names) if number % 2 else names
    return order


def of_blocks(found: Sequence[CallBlock], calls: Mapping[str, int]) -> DeviceTimes:
    """Return the times of a call in each block of each side."""
    blocks = {name: [block for block in found if block.side == name] for name in calls}
    return DeviceTimes(
        {name: tuple(x.device_seconds(calls[name]) for x in blocks[name]) for name in calls},
        {name: tuple(x.host_seconds / calls[name] for x in blocks[name]) for name in calls},
        {
            name: list(dict.fromkeys(a.name for block in blocks[name] for a in block.activities))
            for name in calls
        },
    )


def times_of_sides(runs: Runs, seconds: float, profiled: bool = True) -> tuple[DeviceTimes, str]:
    """Return the times of sides and what they are in words: device times, or wall times on a CPU.

    Parameters
    ----------
    runs
        Functions by side that make one call each; compiled.
    seconds
        Time to spend.
    profiled
        Whether a GPU's times are the profiler's. It makes a call of thousands of launches several
        times as long, so such calls have wall times.
    """
    if not profiled or jax.default_backend() == "cpu":
        return _wall_times(_sides(runs, seconds)), "wall time of a call in a row of calls"
    return times_of_rows([runs], seconds)[0]


def times_of_rows(rows: Sequence[Runs], seconds: float) -> list[tuple[DeviceTimes, str]]:
    """Return the device times of the sides of each row, and what they are in words.

    One profile serves all rows, since it takes longer to start than a row. Where it is not clear,
    each row gets its own, and wall times if that is not clear either.

    Parameters
    ----------
    rows
        Functions by side that make one call each; compiled and warm.
    seconds
        Time to spend on each row.
    """
    sides = [_sides(row, seconds) for row in rows]
    order = [f"{i} {name}" for i, row in enumerate(sides) for name in _order(row)]
    flat = {f"{i} {name}": side for i, row in enumerate(sides) for name, side in row.items()}
    calls = {name: side.calls for name, side in flat.items()}
    try:
        blocks = run_blocks({name: side.run for name, side in flat.items()}, calls, order)
    # The sides have run before, so an error is the profiler's.
    except RuntimeError as error:
        if len(rows) > 1:
            return [times for row in rows for times in times_of_rows([row], seconds)]
        return [(_wall_times(sides[0]), f"wall time of a call in a row of calls ({error})")]
    method = "device time by the profiler"
    if len(rows) > 1:
        method += ", one profile for several rows"
    found = of_blocks(blocks, calls)
    return [
        (DeviceTimes(*(_of_row(times, i) for times in vars(found).values())), method)
        for i in range(len(rows))
    ]


def rows_of_a_profile(rows: Iterable[_Row], needed: Callable[[_Row], int]) -> Iterator[list[_Row]]:
    """Yield groups of rows whose operands the GPU holds at the same time.

    Parameters
    ----------
    rows
        What is measured.
    needed
        Returns the bytes of a row's operands.
    """
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


def _of_row(times: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return what is found of one row, by the names of its sides."""
    named = ((name.partition(" "), value) for name, value in times.items())
    return {side: value for (number, _, side), value in named if number == str(row)}


def _sides(row: Runs, seconds: float) -> dict[str, Side]:
    """Return sides whose blocks take an equal share of the time."""
    share = seconds / (_ROUNDS * len(row))
    result = {}
    for name, run in row.items():
        ready(run())
        call = wall_seconds(partial(repeated, run, 4)) / 4
        result[name] = Side(run, min(_MOST_CALLS, max(1, int(share / call))), _ROUNDS)
    return result


def _wall_times(sides: Mapping[str, Side]) -> DeviceTimes:
    times: dict[str, list[float]] = {name: [] for name in sides}
    for name in _order(sides):
        side = sides[name]
        times[name].append(wall_seconds(partial(repeated, side.run, side.calls)) / side.calls)
    found = {name: tuple(values) for name, values in times.items()}
    return DeviceTimes(found, found, {name: [] for name in sides})
