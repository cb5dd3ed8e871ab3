"""What the rows of a sample say together: the distribution of ratios."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.records.ceilings import Ceilings, has_bound
from benchmarks.records.record import Record, timed

# The share of rows below this is reported.
SLOWER = 0.97


@dataclass(frozen=True)
class Distribution:
    """Ratios of the peer's time to ours.

    Attributes
    ----------
    geometric_mean, tenth_percentile, worst
        Of the ratios.
    slower
        The share of them below 0.97.
    """

    geometric_mean: float
    tenth_percentile: float
    worst: float
    slower: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Distribution:
        """Return the distribution of at least one ratio."""
        return cls(
            geometric_mean=math.exp(statistics.fmean(map(math.log, ratios))),
            tenth_percentile=float(np.percentile(ratios, 10)),
            worst=min(ratios),
            slower=sum(ratio < SLOWER for ratio in ratios) / len(ratios),
        )

    def __str__(self) -> str:
        """Return it in words."""
        return (
            f"geometric mean {self.geometric_mean:.3f}, 10th percentile "
            f"{self.tenth_percentile:.2f}, worst {self.worst:.2f}, "
            f"{self.slower:.0%} below {SLOWER}"
        )


def sample_summary(record: Record) -> Iterator[str]:
    """Describe the ratios of a sample and those of each group.

    Grouped GEMMs are compared with ``lax.ragged_dot_general``, which is what users have instead.
    Calls that it cannot compute do not count, nor do those that the peer gets wrong. The bound is
    the longer time of one dense product of as many operations and of the memory.
    """
    of_all = timed(record)
    right = with_right_peer(of_all)
    rows = [row for row in right if "seconds" in row["others"].get(_JAX, row)]
    sample = record["sample"]
    if rows:
        yield (
            f"{len(rows)} calls drawn with seed {sample['seed']} ({_PURPOSES[sample['purpose']]}): "
            f"{Distribution.of(list(map(ratio_to_jax, rows)))}."
        )
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(ratio_to_jax(row))
    if len(groups) > 1:
        for group, ratios in groups.items():
            yield f"{group}, {len(ratios)} calls: {Distribution.of(ratios)}."
    if len(right) < len(of_all):
        names = ", ".join(row["name"] for row in of_all if row not in right)
        yield f"The peer's result is wrong, so these do not count: {names}."
    if failures := Counter(row["others"][_JAX]["failure"] for row in right if row not in rows):
        reasons = ", ".join(f"{reason} {count}" for reason, count in failures.items())
        yield f"{_JAX} does not compute {failures.total()} more calls: {reasons}."
    others: dict[str, list[float]] = {}
    if of_all and has_bound(record):
        ceilings = Ceilings.of(record)
        others["bound"] = [ceilings.bound(row) for row in of_all]
    for row in of_all:
        for name, other in row["others"].items():
            if "seconds" in other and name != _JAX:
                others.setdefault(name, []).append(_ratio(other))
    for name, ratios in others.items():
        yield f"{name} / ours, {len(ratios)} calls: {Distribution.of(ratios)}."


# The relative error from which the peer's result is wrong.
_WRONG = 0.5
_PURPOSES = {"fit": "a seed for fitting", "report": "a seed for reporting"}


# The name of JAX's own function among the others that a row is compared with.
_JAX = "lax"


def with_right_peer(rows: Iterable[Record]) -> list[Record]:
    """Return the timed rows whose peer computes the same, so that its time is worth comparing."""
    return [row for row in rows if row["error"]["peer"] < _WRONG]


def ratio_to_jax(row: Mapping[str, Any]) -> float:
    """Return the time of JAX's own function, or of the peer if a row names no other, over ours."""
    return _ratio(row["others"].get(_JAX, row))


def _ratio(row: Mapping[str, Any]) -> float:
    return float(row["seconds"]["ratio"]["median"])
