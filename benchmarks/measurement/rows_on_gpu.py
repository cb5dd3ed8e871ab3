"""Device times of several rows under one profile, which takes longer to start than a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.measurement.side_times import DeviceTimes, Side, of_blocks
from jax_tilekern.tuning.device_time import run_blocks
from jax_tilekern.tuning.wall_time import ready, repeated, wall_seconds

_ROUNDS = 5
_MOST_CALLS = 20

Runs = Mapping[str, Callable[[], Any]]


def times_of_rows(rows: Sequence[Runs], seconds: float) -> list[tuple[DeviceTimes, str]]:
    """Return the times of the sides of each row, and what they are in words.

    Where one profile of all rows is not clear, each row gets its own, and wall times if that is
    not clear either.

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
        found = run_blocks({name: side.run for name, side in flat.items()}, calls, order)
    # The sides have run before, so an error is the profiler's.
    except RuntimeError as error:
        if len(rows) > 1:
            return [times for row in rows for times in times_of_rows([row], seconds)]
        return [(_wall_times(sides[0]), f"wall time of a call in a row of calls ({error})")]
    result = []
    for i, row in enumerate(sides):
        blocks = [
            block._replace(side=block.side.partition(" ")[2])
            for block in found
            if block.side.partition(" ")[0] == str(i)
        ]
        of_row = of_blocks(blocks, {name: side.calls for name, side in row.items()})
        result.append((of_row, "device time by the profiler, one profile for several rows"))
    return result


def _sides(row: Runs, seconds: float) -> dict[str, Side]:
    """Return sides whose blocks take an equal share of the time."""
    share = seconds / (_ROUNDS * len(row))
    result = {}
    for name, run in row.items():
        ready(run())
        call = wall_seconds(partial(repeated, run, 4)) / 4
        result[name] = Side(run, min(_MOST_CALLS, max(1, int(share / call))), _ROUNDS)
    return result


def _order(sides: Mapping[str, Side]) -> list[str]:
    """Return whose each block is: every other round is in the opposite order."""
    names = list(sides)
    return [name for i in range(_ROUNDS) for name in (reversed(names) if i % 2 else names)]


def _wall_times(sides: Mapping[str, Side]) -> DeviceTimes:
    times: dict[str, list[float]] = {name: [] for name in sides}
    for name in _order(sides):
        side = sides[name]
        times[name].append(wall_seconds(partial(repeated, side.run, side.calls)) / side.calls)
    found = {name: tuple(values) for name, values in times.items()}
    return DeviceTimes(found, found, {name: [] for name in sides})
