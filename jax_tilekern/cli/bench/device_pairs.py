"""Device times of two sides, in pairs of blocks of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax_tilekern.cli.timing import Pairs
from jax_tilekern.device_time import Block, run_blocks


@dataclass(frozen=True)
class DeviceTimes:
    """What a profile says of two sides, a pair of blocks an entry.

    Attributes
    ----------
    busy
        Device time of a call.
    host
        Time of a call in the same blocks by the host's clock, which includes what the GPU waits.
    kernels
        Names of what each side, ``ours`` and ``peer``, ran on the GPU.
    """

    busy: Pairs
    host: Pairs
    kernels: dict[str, list[str]]


def device_times(
    ours: Callable[[], Any], peer: Callable[[], Any], *, calls: int, pairs: int
) -> DeviceTimes:
    """Return the device time of a call of each side.

    Parameters
    ----------
    ours, peer
        Make one call; both should be compiled and warm.
    calls
        Calls in a block.
    pairs
        How many blocks of each side, interleaved.

    Raises
    ------
    Unattributed
        If the profile lacks what it takes.
    """
    sides = {"ours": ours, "peer": peer}
    # Each side goes first in every other pair.
    order = (["ours", "peer", "peer", "ours"] * pairs)[: 2 * pairs]
    return paired(run_blocks(sides, dict.fromkeys(sides, calls), order), calls)


def paired(found: Sequence[Block], calls: int) -> DeviceTimes:
    """Return the times of a call in each pair of blocks."""
    sides = [[block for block in found if block.side == side] for side in ("ours", "peer")]
    busy = Pairs(*(tuple(block.busy_seconds / calls for block in blocks) for blocks in sides))
    host = Pairs(*(tuple(block.host_seconds / calls for block in blocks) for blocks in sides))
    kernels = [
        list(dict.fromkeys(activity.name for block in blocks for activity in block.activities))
        for blocks in sides
    ]
    return DeviceTimes(busy, host, dict(zip(("ours", "peer"), kernels, strict=True)))
