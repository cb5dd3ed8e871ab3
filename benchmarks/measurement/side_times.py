"""Device times of several sides, in rounds of blocks of calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_tilekern.cli.timing import Pairs
from jax_tilekern.tuning.device_time import Block, run_blocks


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


def of_blocks(found: Sequence[Block], calls: Mapping[str, int]) -> DeviceTimes:
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
