"""What bounds a row: the memory and the arithmetic of the device, as far as measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax_tilekern.cli.bench.record import Record, timed


@dataclass(frozen=True)
class Ceilings:
    """The most that was measured.

    Attributes
    ----------
    bytes_per_second
        The better of a long read and a long copy.
    operations_per_second
        Of each arithmetic: the most that either side reached in any row with it.
    """

    bytes_per_second: float
    operations_per_second: Mapping[str, float]

    @classmethod
    def of(cls, record: Record) -> Ceilings:
        """Return the ceilings of a record."""
        bandwidth = max(record["read_bytes_per_second"], record.get("copy_bytes_per_second", 0.0))
        rates: dict[str, float] = {}
        for row in timed(record):
            fastest = min(row["seconds"][side]["median"] for side in ("ours", "peer"))
            rate = row["flops"] / fastest
            rates[arithmetic(row)] = max(rate, rates.get(arithmetic(row), 0.0))
        return cls(bandwidth, rates)

    def share(self, row: Mapping[str, Any]) -> float:
        """Return the least time that the ceilings allow a timed row, over our time."""
        least = max(
            row["bytes"] / self.bytes_per_second,
            row["flops"] / self.operations_per_second[arithmetic(row)],
        )
        return float(least / row["seconds"]["ours"]["median"])


def arithmetic(row: Mapping[str, Any]) -> str:
    """Return the types and the precision of a row."""
    types = dict.fromkeys((row["type"], row["rhs_type"] or row["type"]))
    return " ".join([" x ".join(types), *([row["precision"]] if row["precision"] else [])])
