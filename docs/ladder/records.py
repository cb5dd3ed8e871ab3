"""The ladder's records, as the page asks for them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.ladder import report
from benchmarks.ladder.counters import longest_kernel

REPOSITORY = Path(__file__).parent.parent.parent
FOLDER = REPOSITORY / "benchmarks" / "results" / "h100" / "ladder"
LADDERS = ("transpose", "dot", "matmul", "matvec", "add")


class NotMeasured(LookupError):
    """The records lack a rung, its time or its counters."""


@dataclass(frozen=True)
class Measured:
    """A rung of a record, with what was measured of it."""

    record: Mapping[str, Any]
    problem: Mapping[str, Any]
    rung: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The rung's name."""
        return str(self.rung["name"])

    @property
    def seconds(self) -> float:
        """The time of a call."""
        if "seconds" not in self.rung:
            raise NotMeasured(self.name)
        return float(self.rung["seconds"])

    @property
    def speed(self) -> float:
        """Bytes or operations per second."""
        self.seconds  # noqa: B018  # Raises where there is none.
        return report.speed(self.problem, self.rung)

    @property
    def share(self) -> float:
        """What part of the ceiling it reaches."""
        return self.speed / report.ceiling(self.record, self.problem, self.rung)

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a product's tile."""
        if not self.rung.get("tile"):
            raise NotMeasured(f"the tile of {self.name}")
        height, width = self.rung["tile"]
        return height, width

    @cached_property
    def kernel(self) -> Mapping[str, Any]:
        """Counters of the kernel that takes most of the time."""
        if "counters" not in self.rung:
            raise NotMeasured(f"counters of {self.name}")
        return longest_kernel(self.rung["counters"])

    def counter(self, name: str) -> float:
        """Return a counter of the longest kernel."""
        value = self.kernel[name]
        if value is None:
            raise NotMeasured(f"{name} of {self.name}")
        return float(value)

    def total(self, name: str) -> float:
        """Return the sum of a counter over all kernels of the rung."""
        self.kernel  # noqa: B018  # Raises where there are none.
        return float(sum(kernel[name] or 0 for kernel in self.rung["counters"]["kernels"]))

    def stall(self, reason: str) -> float:
        """Return the cycles per instruction that warps of the longest kernel wait for a reason."""
        return float(self.kernel["stalls"].get(reason, 0.0))


class Records:
    """What was recorded of every ladder.

    Parameters
    ----------
    folder
        Has ``<ladder>.json`` of each.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        self._records = {
            name: json.loads((folder / f"{name}.json").read_text()) for name in LADDERS
        }

    def __getitem__(self, ladder: str) -> Mapping[str, Any]:
        record: Mapping[str, Any] = self._records[ladder]
        return record

    def problems(self, ladder: str) -> list[Mapping[str, Any]]:
        """Return the problems of a ladder, in the record's order."""
        return list(self._records[ladder]["problems"])

    def rungs(self, ladder: str, problem: Mapping[str, Any]) -> Iterator[Measured]:
        """Yield the rungs of a problem."""
        for rung in problem["rungs"]:
            yield Measured(self._records[ladder], problem, rung)

    def rung(self, ladder: str, size: str, name: str, dtype: str = "") -> Measured:
        """Return a rung by its name, of the problem of a size and, where there are several, a type.

        Raises
        ------
        NotMeasured
            If the record has none.
        """
        for problem in self.problems(ladder):
            if problem["size"] == size and dtype in problem["title"]:
                for measured in self.rungs(ladder, problem):
                    if measured.name == name:
                        return measured
        raise NotMeasured(f"{name} of {ladder} at {size} {dtype}".rstrip())
