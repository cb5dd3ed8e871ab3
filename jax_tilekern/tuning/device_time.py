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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

from jax_tilekern.tuning.wall_time import ready, repeated

# Of every block; the profile has them in order.
ANNOTATION = "jax_tilekern_block"
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


def run_blocks(
    sides: Mapping[str, Callable[[], Any]], calls: Mapping[str, int], order: Sequence[str]
) -> list[Block]:
    """Run blocks of calls under the profiler; return what the GPU did for each, in order.

    Parameters
    ----------
    sides
        Make one call each; compiled and warm.
    calls
        Calls in a block of each side.
    order
        The sides of the blocks.

    Raises
    ------
    Unattributed
        If the profile lacks what it takes.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # It would record every Python call and slow them all.
    options.host_tracer_level = 1  # The least that records annotations.
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for side in order:
                time.sleep(_PAUSE)
                with jax.profiler.TraceAnnotation(ANNOTATION):
                    ready(repeated(sides[side], calls[side]))
        files = list(Path(folder).rglob("*.xplane.pb"))
        if len(files) != 1:
            raise Unattributed(f"the profiler wrote {len(files)} profiles")
        return blocks(ProfileData.from_file(str(files[0])), calls, order)


def blocks(profile: ProfileData, calls: Mapping[str, int], order: Sequence[str]) -> list[Block]:
    """Return the blocks of a profile, in order.

    Raises
    ------
    Unattributed
        If they are not those that were run, if the GPU did something outside of every block, or if
        the blocks of a side do not hold the same whole number of activities for every call, as when
        the profiler dropped some or gave them to a neighbour.
    """
    with warnings.catch_warnings():
        # On Python 3.12 and later, jaxlib's type of an event's stats is deprecated for having no
        # module; where warnings are errors that aborts the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        found = _blocks(profile, order)
    for side in dict.fromkeys(order):
        counts = {len(block.activities) for block in found if block.side == side}
        if len(counts) != 1 or 0 in counts or any(count % calls[side] for count in counts):
            raise Unattributed(
                f"blocks of {calls[side]} calls of {side} have {sorted(counts)} device activities"
            )
    return found


def _blocks(profile: ProfileData, order: Sequence[str]) -> list[Block]:
    spans = sorted(
        Interval(event.start_ns, event.start_ns + event.duration_ns)
        for event in _events(profile, "/host:CPU")
        if event.name == ANNOTATION
    )
    if len(spans) != len(order):
        raise Unattributed(f"the profile shows {len(spans)} of {len(order)} blocks")
    found = [Block(side, span, []) for side, span in zip(order, spans, strict=True)]
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
