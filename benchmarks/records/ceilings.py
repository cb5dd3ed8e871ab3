"""What bounds a row: the memory and the arithmetic of the device, as far as measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.calls.operations import OPERATIONS
from benchmarks.records.record import Record, timed


@dataclass(frozen=True)
class Ceilings:
    """The most that was measured.

    Attributes
    ----------
    bytes_per_second
        Of a long read, a long copy, or the better of both, as the operation asks for.
    operations_per_second
        Of each arithmetic: the most that either side reached in any row with it. Empty for an
        operation that only the memory bounds.
    """

    bytes_per_second: float
    operations_per_second: Mapping[str, float]

    @classmethod
    def of(cls, record: Record) -> Ceilings:
        """Return the ceilings of a record."""
        operation = OPERATIONS[record["operation"]]
        # The first records have no bandwidth of a copy.
        bandwidth = max(record.get(f"{b}_bytes_per_second", 0.0) for b in operation.bandwidths)
        rates: dict[str, float] = {}
        for row in timed(record) if operation.bound_by_arithmetic else ():
            fastest = min(row["seconds"][side]["median"] for side in ("ours", "peer"))
            rate = row["flops"] / fastest
            rates[arithmetic(row)] = max(rate, rates.get(arithmetic(row), 0.0))
        return cls(bandwidth, rates)

    def share(self, row: Mapping[str, Any], side: str = "ours") -> float:
        """Return the least time that the ceilings allow a timed row, over that of a side."""
        least = max(
            row["bytes"] / self.bytes_per_second,
            row["flops"] / self.operations_per_second.get(arithmetic(row), math.inf),
        )
        return float(least / row["seconds"][side]["median"])

    def bound(self, row: Mapping[str, Any]) -> float:
        """Return the longer of the peer's time and of the memory's, over ours.

        The peer of a grouped GEMM is one dense product, which may read and write less.
        """
        least = max(row["bytes"] / self.bytes_per_second, row["seconds"]["peer"]["median"])
        return float(least / row["seconds"]["ours"]["median"])


def has_bound(record: Record) -> bool:
    """Say whether a record is a sample of grouped GEMMs, whose peer is a bound."""
    return "sample" in record and OPERATIONS[record["operation"]].peer.name == "dense"


def arithmetic(row: Mapping[str, Any]) -> str:
    """Return the types and the precision of a row."""
    types = dict.fromkeys((row["type"], row["rhs_type"] or row["type"]))
    return " ".join([" x ".join(types), *([row["precision"]] if row["precision"] else [])])
