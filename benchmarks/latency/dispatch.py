"""What a call of a compiled product costs the host, until it returns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
from jax import Array

from benchmarks.calls.case import Case
from benchmarks.records.record import Record, spreads
from jax_tilekern.cli.timing import Pairs, Spread, interleaved
from jax_tilekern.tuning.wall_time import ready, repeated

# Where a device keeps up, its last result is there soon after the last call has returned. Where
# waiting takes this much longer than calling, calls had queued up.
_QUEUED = 0.1


class _Batch:
    """Calls in a row, and how long each such row took until the last call returned."""

    def __init__(self, side: Callable[[Array, Array], Array], operands: Any, calls: int) -> None:
        self._call = partial(side, *operands)
        self._calls = calls
        self.seconds: list[float] = []

    def __call__(self) -> Any:
        start = time.perf_counter()
        result = repeated(self._call, self._calls)
        self.seconds.append(time.perf_counter() - start)
        return result


def dispatch_cost(case: Case, *, calls: int, seconds: float) -> Record:
    """Return what the record of a row has of the time until a call returns.

    Parameters
    ----------
    case
        The product, short enough that the device keeps up with the calls.
    calls
        Calls in a batch. Results are waited for at its end, so each batch meets an idle device.
    seconds
        Time to spend on timing.
    """
    operands = case.operands()
    kernel = case.kernel(operands)
    ours, peer = (_Batch(side, operands, calls) for side in (case.ours, case.peer))
    for warm_up in (ours, peer):
        ready(warm_up())
        warm_up.seconds.clear()
    # Its times have the wait for the results in them, the batches' own have not.
    whole = interleaved(ours, peer, seconds=seconds).divided(calls)
    returned = Pairs(tuple(ours.seconds), tuple(peer.seconds)).divided(calls)
    computed = ", the product included" if jax.default_backend() == "cpu" else ""
    return {
        "kernel": kernel,
        "failure": None,
        "method": f"time until a call returns{computed}, batches of {calls} calls",
        "calls": calls,
        "pairs": len(returned.ours),
        "seconds": spreads(returned),
        "added_seconds": asdict(added(returned)),
        "waited_seconds": spreads(whole),
        "device_behind": device_behind(returned, whole),
    }


def added(pairs: Pairs) -> Spread:
    """Return how much longer ours takes than the peer, over the pairs."""
    return Spread.of([ours - peer for ours, peer in zip(pairs.ours, pairs.peer, strict=True)])


def device_behind(returned: Pairs, whole: Pairs) -> list[str]:
    """Name the sides whose device does not keep up with calls, so that calls may wait for it.

    Parameters
    ----------
    returned, whole
        Times of a call in a batch without and with the wait for the results at its end.
    """
    return [
        side
        for side, calling, waiting in (
            ("ours", returned.ours, whole.ours),
            ("XLA", returned.peer, whole.peer),
        )
        if Spread.of(waiting).median > (1 + _QUEUED) * Spread.of(calling).median
    ]
