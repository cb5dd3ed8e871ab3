"""Device time on a GPU, from JAX's profiler.

Calls are made in blocks of one side, each inside an annotation that the profile shows, and waited
for before the annotation ends. What the GPU did inside an annotation's time is that block's, and
the time of a call is the time the GPU was busy in it, divided by the number of calls. Gaps
between kernels, where the GPU waits for the host, do not count; overlapping kernels count once.
"""

from __future__ import annotations

import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

from jax_tilekern.cli.timing import Pairs, ready, repeated

_OURS, _PEER = "jax_tilekern_bench_ours", "jax_tilekern_bench_peer"
# What XLA's CUPTI collector attaches to events that occupy the device; other events of a stream
# (allocations, overhead) have none of these.
_ACTIVITIES = {"kernel_details", "memcpy_details", "memset_details", "cuda_graph_exec_id"}
# Seconds between blocks. The clocks of the host and of the GPU may be apart by half of it before an
# activity is taken for the wrong block's.
_PAUSE = 2e-3


class Unattributed(RuntimeError):
    """A profile does not say which side the GPU worked for; the message says why."""


class Interval(NamedTuple):
    """A span of time in nanoseconds."""

    start: float
    end: float


class Activity(NamedTuple):
    """What the GPU did in a span of time in nanoseconds."""

    start: float
    end: float
    name: str


class Block(NamedTuple):
    """What the GPU did for one block of calls, and when the host made and awaited them."""

    side: str
    host: Interval
    activities: list[Activity]

    @property
    def host_seconds(self) -> float:
        """Time from the first call to the last result, by the host's clock."""
        return (self.host.end - self.host.start) * 1e-9

    @property
    def busy_seconds(self) -> float:
        """Time in which the GPU did anything."""
        busy, until = 0.0, 0.0
        for start, end, _ in sorted(self.activities):
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
        return busy * 1e-9


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
    sides = {_OURS: ours, _PEER: peer}
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # It would record every Python call and slow them all.
    options.host_tracer_level = 1  # The least that records annotations.
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for pair in range(pairs):
                # Each side goes first in every other pair.
                for name in (_OURS, _PEER) if pair % 2 == 0 else (_PEER, _OURS):
                    time.sleep(_PAUSE)
                    with jax.profiler.TraceAnnotation(name):
                        ready(repeated(sides[name], calls))
        files = list(Path(folder).rglob("*.xplane.pb"))
        if len(files) != 1:
            raise Unattributed(f"the profiler wrote {len(files)} profiles")
        profile = ProfileData.from_file(str(files[0]))
    found = blocks(profile)
    if len(found) != 2 * pairs:
        raise Unattributed(f"the profile shows {len(found)} of {2 * pairs} blocks")
    return paired(found, calls)


def blocks(profile: ProfileData) -> list[Block]:
    """Return the blocks of a profile, in order.

    Raises
    ------
    Unattributed
        If the GPU did something outside of every block.
    """
    with warnings.catch_warnings():
        # On Python 3.12 and later, jaxlib's type of an event's stats is deprecated for having no
        # module; where warnings are errors that aborts the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        return _blocks(profile)


def _blocks(profile: ProfileData) -> list[Block]:
    annotations = sorted(
        (event.start_ns, event.start_ns + event.duration_ns, event.name)
        for event in _events(profile, "/host:CPU")
        if event.name in (_OURS, _PEER)
    )
    found = [Block(name, Interval(start, end), []) for start, end, name in annotations]
    for event in _events(profile, "/device:GPU:"):
        if _ACTIVITIES.isdisjoint(name for name, _ in event.stats):
            continue
        activity = Activity(event.start_ns, event.start_ns + event.duration_ns, event.name)
        middle = (activity.start + activity.end) / 2
        distance, nearest = min(
            ((_distance(middle, block.host), index) for index, block in enumerate(found)),
            default=(math.inf, 0),
        )
        if distance > _PAUSE / 2 * 1e9:
            raise Unattributed(f"{event.name} ran outside of every block")
        found[nearest].activities.append(activity)
    return found


def _distance(moment: float, span: Interval) -> float:
    return max(0.0, span.start - moment, moment - span.end)


def _events(profile: ProfileData, plane_prefix: str) -> Iterable[Any]:
    for plane in profile.planes:
        if plane.name.startswith(plane_prefix):
            for line in plane.lines:
                yield from line.events


def paired(found: Sequence[Block], calls: int) -> DeviceTimes:
    """Return the times of a call in each pair of blocks.

    Raises
    ------
    Unattributed
        If the blocks of a side do not hold the same whole number of activities for every call,
        as when the profiler dropped some or gave them to a neighbour.
    """
    for side in (_OURS, _PEER):
        counts = {len(block.activities) for block in found if block.side == side}
        if len(counts) != 1 or 0 in counts or any(count % calls for count in counts):
            raise Unattributed(f"blocks of {calls} calls have {sorted(counts)} device activities")
    sides = [[block for block in found if block.side == side] for side in (_OURS, _PEER)]
    busy = Pairs(*(tuple(block.busy_seconds / calls for block in blocks) for blocks in sides))
    host = Pairs(*(tuple(block.host_seconds / calls for block in blocks) for blocks in sides))
    kernels = [
        list(dict.fromkeys(activity.name for block in blocks for activity in block.activities))
        for blocks in sides
    ]
    return DeviceTimes(busy, host, dict(zip(("ours", "peer"), kernels, strict=True)))
