"""Device time on a GPU, from JAX's profiler.

The host makes a block of calls of one side inside an annotation, and waits for their results before
the annotation ends. Device activities inside the annotation's time belong to that block. The time
of a call is the span from the start of its first activity to the end of its last. Gaps between the
kernels of a call count, and overlapping kernels count once. Gaps between calls do not count. A
block begins with a kernel that only waits, until the host has enqueued the calls, so that no gap is
a wait for the host.
"""

from __future__ import annotations

import bisect
import functools
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.profiler import ProfileData

from jax_tilekern.ops.cuda_kernel import cuda_kernel
from jax_tilekern.tuning.wall_time import ready, repeated

# The name of every block's annotation; the profile has the annotations in order.
ANNOTATION = "jax_tilekern_block"
# XLA's CUPTI collector attaches one of these to each event that occupies the device; other events
# of a stream (allocations, overhead) have none.
_ACTIVITIES = {"kernel_details", "memcpy_details", "memset_details", "cuda_graph_exec_id"}
# Seconds between blocks. Host and GPU clocks may differ by half of it before an activity is
# attributed to the wrong block.
_PAUSE = 2e-3
# The kernel that waits, and how many cycles for each call that the host enqueues meanwhile.
_DELAY = "tilekern_delay"
_CYCLES_TO_ENQUEUE = 500_000


class Unattributed(RuntimeError):
    """A profile does not say which side the GPU worked for; the message says why."""


class Interval(NamedTuple):
    """A span of time in nanoseconds."""

    start: float
    end: float


class Activity(NamedTuple):
    """A device activity, with its start and end in nanoseconds."""

    start: float
    end: float
    name: str


class CallBlock(NamedTuple):
    """The device activities of one block of calls, and its annotation's interval on the host."""

    side: str
    host: Interval
    activities: list[Activity]

    @property
    def host_seconds(self) -> float:
        """Time from the first call to the last result, by the host's clock."""
        return (self.host.end - self.host.start) * 1e-9

    def device_seconds(self, calls: int) -> float:
        """Time of a call on the device: from its first activity's start to its last one's end."""
        activities = sorted(self.activities)
        count = len(activities) // calls
        spans = (activities[i : i + count] for i in range(0, len(activities), count))
        return sum(max(x.end for x in span) - span[0].start for span in spans) * 1e-9 / calls


@functools.cache
def _delay() -> Callable[[Any], Any]:
    """Return a function that keeps the GPU waiting for so many cycles of its clock."""
    kernel = cuda_kernel(
        f"""
        extern "C" __global__ void {_DELAY}(const int* cycles, int* out) {{
          for (long long start = clock64(); clock64() - start < *cycles;) {{}}
          *out = 0;
        }}
        """,
        out=lambda cycles: cycles,
        grid=1,
        block=1,
        reference=lambda cycles: cycles,
    )
    compiled: Callable[[Any], Any] = jax.jit(kernel)
    ready(compiled(jax.device_put(np.int32(1))))
    return compiled


def run_blocks(
    sides: Mapping[str, Callable[[], Any]], calls: Mapping[str, int], order: Sequence[str]
) -> list[CallBlock]:
    """Run blocks of calls under the profiler; return the device activities of each, in order.

    Parameters
    ----------
    sides
        Functions that make one call each; compiled and warm.
    calls
        Number of calls in a block of each side.
    order
        The sides of the blocks.

    Raises
    ------
    Unattributed
        If the profile does not attribute the activities, see :func:`blocks`.
    """
    delay = _delay()
    # On the device already, since a copy would be an activity.
    cycles = {
        side: jax.device_put(np.int32(_CYCLES_TO_ENQUEUE * (1 + count)))
        for side, count in calls.items()
    }
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # A higher level records, and slows, every Python call.
    options.host_tracer_level = 1  # The lowest level that records annotations.
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for side in order:
                time.sleep(_PAUSE)
                with jax.profiler.TraceAnnotation(ANNOTATION):
                    delay(cycles[side])
                    ready(repeated(sides[side], calls[side]))
        files = list(Path(folder).rglob("*.xplane.pb"))
        if len(files) != 1:
            raise Unattributed(f"the profiler wrote {len(files)} profiles")
        return blocks(ProfileData.from_file(str(files[0])), calls, order)


def blocks(profile: ProfileData, calls: Mapping[str, int], order: Sequence[str]) -> list[CallBlock]:
    """Return the blocks of a profile, in order.

    Raises
    ------
    Unattributed
        If they are not the blocks that were run, if the GPU was active outside of every block, or
        if the blocks of a side do not have the same whole number of activities per call, because
        the profiler dropped some or attributed them to a neighbour.
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


def _blocks(profile: ProfileData, order: Sequence[str]) -> list[CallBlock]:
    spans = sorted(
        Interval(event.start_ns, event.start_ns + event.duration_ns)
        for event in _events(profile, "/host:CPU")
        if event.name == ANNOTATION
    )
    if len(spans) != len(order):
        raise Unattributed(f"the profile shows {len(spans)} of {len(order)} blocks")
    found = [CallBlock(side, span, []) for side, span in zip(order, spans, strict=True)]
    starts = [span.start for span in spans]
    for event in _events(profile, "/device:GPU:"):
        if event.name == _DELAY or _ACTIVITIES.isdisjoint(name for name, _ in event.stats):
            continue
        activity = Activity(event.start_ns, event.start_ns + event.duration_ns, event.name)
        middle = (activity.start + activity.end) / 2
        # Blocks do not overlap, so the nearest one begins last before that moment, or first after.
        after = bisect.bisect(starts, middle)
        neighbours = found[max(0, after - 1) : after + 1]
        nearest = min(neighbours, key=lambda block: _distance(middle, block.host), default=None)
        if nearest is None or _distance(middle, nearest.host) > _PAUSE / 2 * 1e9:
            raise Unattributed(f"{event.name} ran outside of every block")
        nearest.activities.append(activity)
    return found


def _distance(moment: float, span: Interval) -> float:
    return max(0.0, span.start - moment, moment - span.end)


def _events(profile: ProfileData, plane_prefix: str) -> Iterable[Any]:
    for plane in profile.planes:
        if plane.name.startswith(plane_prefix):
            for line in plane.lines:
                yield from line.events
