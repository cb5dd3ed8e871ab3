"""Device time on a GPU, from JAX's profiler.

A block of calls of one side begins with a kernel that only waits, until the host has enqueued the
calls, so that no gap is a wait for the host. The host waits for the results before the next block,
so that a block's device activities are those between its kernel that waits and the next one. The
time of a call is the span from the start of its first activity to the end of its last. Gaps between
the kernels of a call count, and overlapping kernels count once. Gaps between calls do not count.
"""

from __future__ import annotations

import functools
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.profiler import ProfileData

from jax_tilekern.ops.cuda_kernel.cuda_kernel import cuda_kernel
from jax_tilekern.tuning.wall_time import ready, repeated

# XLA's CUPTI collector attaches one of these to each event that occupies the device; other events
# of a stream (allocations, overhead) have none.
_ACTIVITIES = {"kernel_details", "memcpy_details", "memset_details", "cuda_graph_exec_id"}
# The kernel that waits, and how many cycles for each call that the host enqueues meanwhile.
DELAY = "tilekern_delay"
_CYCLES_TO_ENQUEUE = 500_000


class Unattributed(RuntimeError):
    """A profile does not say which side the GPU worked for; the message says why."""


class Activity(NamedTuple):
    """A device activity, with its start and end in nanoseconds."""

    start: float
    end: float
    name: str


class CallBlock(NamedTuple):
    """A block of calls: its time by the host's clock, to the last result, and what the GPU did."""

    side: str
    host_seconds: float
    activities: list[Activity]

    def device_seconds(self, calls: int) -> float:
        """Time of a call on the device: from its first activity's start to its last one's end."""
        count = len(self.activities) // calls
        spans = (self.activities[i : i + count] for i in range(0, len(self.activities), count))
        return sum(max(x.end for x in span) - span[0].start for span in spans) * 1e-9 / calls


@functools.cache
def _delay() -> Callable[[Any], Any]:
    """Return a function that keeps the GPU waiting for so many cycles of its clock."""
    kernel = cuda_kernel(
        f"""
        extern "C" __global__ void {DELAY}(const int* cycles, int* out) {{
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
    """Run blocks of calls under the profiler; return them in order.

    A side makes one call, and is compiled and warm. ``calls`` are those of a block of each side,
    and ``order`` has the sides of the blocks. Errors are those of :func:`activities_of_blocks`.
    """
    delay = _delay()
    # On the device already, since a copy would be an activity.
    cycles = {
        side: jax.device_put(np.int32(_CYCLES_TO_ENQUEUE * (1 + count)))
        for side, count in calls.items()
    }
    options = jax.profiler.ProfileOptions()
    # Higher levels record, and slow, every call on the host.
    options.python_tracer_level, options.host_tracer_level = 0, 1
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for side in order:
                start = time.perf_counter()
                delay(cycles[side])
                ready(repeated(sides[side], calls[side]))
                seconds.append(time.perf_counter() - start)
        files = list(Path(folder).rglob("*.xplane.pb"))
        if len(files) != 1:
            raise Unattributed(f"the profiler wrote {len(files)} profiles")
        found = activities_of_blocks(ProfileData.from_file(str(files[0])), calls, order)
    return [CallBlock(*block) for block in zip(order, seconds, found, strict=True)]


def activities_of_blocks(
    profile: ProfileData, calls: Mapping[str, int], order: Sequence[str]
) -> list[list[Activity]]:
    """Return the activities of each block of a profile.

    Raises
    ------
    Unattributed
        If the GPU was active before the first block, or the blocks of a side do not have the same
        whole number of activities per call, because the profiler dropped some.
    """
    with warnings.catch_warnings():
        # On Python 3.12 and later, jaxlib's type of an event's stats is deprecated for having no
        # module; where warnings are errors that aborts the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        in_order = sorted(_activities(profile))
    starts = [i for i, activity in enumerate(in_order) if activity.name == DELAY]
    if len(starts) != len(order):
        raise Unattributed(f"the profile shows {len(starts)} of {len(order)} blocks")
    if starts and starts[0]:
        raise Unattributed(f"{in_order[0].name} ran outside of every block")
    ends = [*starts[1:], len(in_order)]
    found = [in_order[start + 1 : end] for start, end in zip(starts, ends, strict=True)]
    for side in dict.fromkeys(order):
        counts = {len(x) for own, x in zip(order, found, strict=True) if own == side}
        if len(counts) != 1 or 0 in counts or any(count % calls[side] for count in counts):
            raise Unattributed(
                f"blocks of {calls[side]} calls of {side} have {sorted(counts)} device activities"
            )
    return found


def _activities(profile: ProfileData) -> Iterator[Activity]:
    for plane in profile.planes:
        if plane.name.startswith("/device:GPU:"):
            for event in (event for line in plane.lines for event in line.events):
                if not _ACTIVITIES.isdisjoint(name for name, _ in event.stats):
                    start = event.start_ns
                    yield Activity(start, start + event.duration_ns, event.name)
