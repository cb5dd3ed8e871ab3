"""Wall time of two sides, side by side.

What is compared is measured in pairs, one run of each side directly after the other, and the
order within a pair alternates: a clock that drifts or a neighbour that wakes up then meets both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.tuning.wall_time import wall_seconds


@dataclass(frozen=True)
class Spread:
    """Median and the 10th and 90th percentile of a measurement."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of ``values``."""
        p10, median, p90 = np.percentile(np.asarray(values, float), (10, 50, 90))
        return cls(float(median), float(p10), float(p90))


@dataclass(frozen=True)
class Pairs:
    """Measurements of two sides; the entries of one index were taken together.

    Attributes
    ----------
    ours, peer
        Seconds.
    """

    ours: tuple[float, ...]
    peer: tuple[float, ...]

    @property
    def ratio(self) -> Spread:
        """How many times as long the peer takes, over the pairs."""
        return Spread.of([peer / ours for ours, peer in zip(self.ours, self.peer, strict=True)])

    def divided(self, by: int) -> Pairs:
        """Return the times of one of ``by`` equal parts."""
        return Pairs(tuple(t / by for t in self.ours), tuple(t / by for t in self.peer))


def interleaved(
    ours: Callable[[], Any],
    peer: Callable[[], Any],
    *,
    seconds: float,
    least: int = 5,
    most: int = 400,
) -> Pairs:
    """Time two sides in pairs; both should be compiled and warm.

    Parameters
    ----------
    ours, peer
        What to run; results are waited for.
    seconds
        Time for all of it together.
    least, most
        Number of pairs, whatever ``seconds`` says.
    """
    times: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(times) < least or (len(times) < most and time.perf_counter() < end):
        if len(times) % 2:
            peer_time, our_time = wall_seconds(peer), wall_seconds(ours)
        else:
            our_time, peer_time = wall_seconds(ours), wall_seconds(peer)
        times.append((our_time, peer_time))
    return Pairs(tuple(t for t, _ in times), tuple(t for _, t in times))
