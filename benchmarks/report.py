"""``report``: a record as a markdown table, and what its rows say together."""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import Record, joined, outdated, read
from benchmarks.rows import OPERATIONS, Row
from jax_tilekern.cli.console import duration, rate, size

HELP = "print a record as a markdown table"

# The share of ratios below this is reported.
SLOWER = 0.97
# The relative error from which the peer's result is wrong.
WRONG = 0.5
# Shorter calls leave a GPU waiting for the host, which only the host's clock sees.
_LONG_CALL = 0.5e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE",
        help="what --json wrote; several of the parts of one sample",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    first, *parts = map(read, reversed(arguments.files))
    print(markdown(functools.reduce(joined, parts, first)))
    return 0


def table(heads: Sequence[str], lines: Iterable[Sequence[str]], text: int = 1) -> Iterator[str]:
    """Yield the lines of a markdown table, whose first columns are texts."""
    marks = ["---"] * text + ["---:"] * (len(heads) - text)
    for cells in (heads, marks, *lines):
        yield f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def markdown(record: Record) -> str:
    """Return a record as a table, a summary, and what it was measured on and by."""
    ceilings, rows = Ceilings(record), record["rows"]
    columns = [_cells(row, ceilings) for row in rows]
    heads = list(dict.fromkeys(name for cells in columns for name in cells))
    lines = ([cells.get(name, "") for name in heads] for cells in columns)
    return "\n".join([*table(heads, lines, 2), "", *summary(record), *_provenance(record)])


def _cells(row: Record, ceilings: Ceilings) -> dict[str, str]:
    """Return a row's entries by their headings."""
    kernel = row.get("kernel") or "; ".join(row.get("kernels", ()))
    cells = {"row": row["name"], "kernel": row.get("failure") or kernel}
    seconds, temporaries = row.get("seconds", {}), row.get("temporaries", {})
    for side, time in seconds.items():
        memory = temporaries.get(side)
        cells[side] = duration(time) + (f", {size(memory)}" if memory else "")
    for side, why in row.get("failures", {}).items():
        cells[side] = why
    for peer, ratio in row.get("ratio", {}).items():
        below = _below(ratio, row.get("target", {}).get(peer, 0))
        cells[f"{peer} / ours"] = f"{ratio:#.3g}{below}"
        if "spread" in row and peer in row["spread"]:
            cells.setdefault("p10 - p90", "{:.2f} - {:.2f}".format(*row["spread"][peer]))
    call = ceilings.call(row)
    if seconds and call is not None:
        share, ours = ceilings.share(row), seconds["ours"]
        if ceilings.rates:
            cells["ours does"] = rate(call.flops / ours, "OP")
        cells["ours moves"] = rate(call.bytes / ours, "B")
        cells["of ceiling"] = f"{share:.0%}" + (
            f" (below {row['share']:.0%})" if share < row.get("share", 0) else ""
        )
    if row.get("error"):
        cells["errors"] = ", ".join(f"{x:.1e}" for x in row["error"].values() if x is not None)
    return cells


def _below(ratio: float, target: float) -> str:
    return f" (below {target:g})" if ratio < target else ""


class Ceilings:
    """What bounds a row: the memory and the arithmetic of the device, as far as measured.

    Attributes
    ----------
    bytes_per_second
        Of a long read, a long copy, or the better of both, as the operation asks for.
    rates
        By arithmetic, the most operations per second that either side reached in any row with it.
        Empty for an operation that only the memory bounds.
    """

    def __init__(self, record: Record) -> None:
        self._operation = record.get("operation")
        operation = OPERATIONS.get(record.get("operation", ""))
        bandwidths = operation.bandwidths if operation else ()
        found = (record.get(f"{x}_bytes_per_second", math.inf) for x in bandwidths)
        # The first records have no bandwidth of a copy.
        self.bytes_per_second = max((x for x in found if x < math.inf), default=math.inf)
        self.rates: dict[str, float] = {}
        for row in record["rows"] if operation and operation.arithmetic else ():
            if "seconds" in row and (call := self.call(row)):
                fastest = min(row["seconds"].values())
                kind = self._arithmetic(call)
                self.rates[kind] = max(call.flops / fastest, self.rates.get(kind, 0.0))

    def call(self, row: Record) -> Row | None:
        """Return the call of a row of an operation."""
        if not self._operation:
            return None
        return Row.of(row.get("call") or row["name"].rpartition(": ")[2], self._operation)

    def share(self, row: Record) -> float:
        """Return the least time that the ceilings allow a timed row, over ours."""
        call = self.call(row)
        assert call is not None
        of_arithmetic = call.flops / self.rates.get(self._arithmetic(call), math.inf)
        least = max(call.bytes / self.bytes_per_second, of_arithmetic)
        return float(least / row["seconds"]["ours"])

    @staticmethod
    def _arithmetic(call: Row) -> str:
        return " ".join(filter(None, (call.type, call.rhs_type, call.precision)))


def loses(row: Record, ceilings: Ceilings) -> bool:
    """Say whether a timed row is slower than its targets, or takes more memory than its limit."""
    slower = any(ratio < row["target"].get(peer, 0) for peer, ratio in row["ratio"].items())
    memory = row.get("temporaries", {}).get("ours", 0) > row.get("temporary", math.inf)
    return slower or memory or bool(row.get("share") and ceilings.share(row) < row["share"])


def row_line(row: Record) -> str:
    """Return a row in a line, as it is shown while others are measured."""
    if "failure" in row:
        return f"{row['name']}  {row['failure']}"
    times = ", ".join(f"{side} {duration(time)}" for side, time in row["seconds"].items())
    found = row.get("ratio", {}).items()
    ratios = ", ".join(
        f"{peer} / ours {x:#.3g}{_below(x, row.get('target', {}).get(peer, 0))}"
        for peer, x in found
    )
    return f"{row['name']}: {times}; {ratios}"


def distribution(ratios: Sequence[float]) -> str:
    """Return the distribution of ratios in words."""
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    slower = sum(ratio < SLOWER for ratio in ratios) / len(ratios)
    return (
        f"geometric mean {mean:.3f}, 10th percentile {np.percentile(ratios, 10):.2f}, "
        f"worst {min(ratios):.2f}, {slower:.0%} below {SLOWER}"
    )


def summary(record: Record) -> Iterator[str]:
    """Yield what the rows say together, how they were measured, and what failed."""
    timed = [row for row in record["rows"] if row.get("ratio")]
    right = [row for row in timed if _peer_error(row) < WRONG]
    ceilings = Ceilings(record)
    if "target" in record or any("target" in row for row in timed):
        lost = sum(loses(row, ceilings) for row in timed)
        yield f"{lost} of {len(timed)} rows below their target."
    for peer in dict.fromkeys(name for row in right for name in row["ratio"]):
        ratios = [(row.get("group", ""), row["ratio"][peer]) for row in right
                  if peer in row["ratio"]]  # fmt: skip
        yield f"{peer} / ours, {len(ratios)} calls: {distribution([x for _, x in ratios])}."
        groups = dict.fromkeys(group for group, _ in ratios)
        for group in groups if len(groups) > 1 else ():
            found = [x for name, x in ratios if name == group]
            mean = record.get("means", {}).get(group, 0)
            below = _below(math.exp(statistics.fmean(map(math.log, found))), mean)
            yield f"- {group}, {len(found)} calls: {distribution(found)}{below}."
    if len(right) < len(timed):
        names = ", ".join(row["name"] for row in timed if row not in right)
        yield f"The peer's result is wrong, so these do not count: {names}."
    failures = Counter(why for row in timed for why in row.get("failures", {}).items())
    for (side, why), count in failures.items():
        yield f"{side} computes {count} fewer: {why}."
    rates = [f"{name} {rate(most, 'OP')}" for name, most in ceilings.rates.items()]
    if ceilings.bytes_per_second < math.inf:
        memory = f"memory {rate(ceilings.bytes_per_second, 'B')}"
        yield f"Ceilings, as measured: {', '.join([memory, *rates])}."
    yield from _host_clock(timed)
    if clocks := [row["sm_mhz"] for row in timed if "sm_mhz" in row]:
        yield f"SMs at {min(clocks)} to {max(clocks)} MHz."
    methods = Counter(row.get("method") for row in timed)
    yield from (f"{count} rows: {method}." for method, count in methods.items() if method)
    if old := outdated(record):
        yield f"Of an earlier run, with other kernels or another JAX: {', '.join(old)}."
    if failed := [row["name"] for row in record["rows"] if "failure" in row]:
        yield f"FAILED: {', '.join(failed)}."


def _peer_error(row: Record) -> float:
    return float(row.get("error", {}).get(next(iter(row["ratio"])), 0.0) or 0.0)


def _host_clock(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Say how far the host's clock and the profiler agree on calls that keep the GPU busy."""
    agreement = {
        f"{row['name']} {side}": wall / row["seconds"][side]
        for row in rows
        if row.get("method", "").startswith("device")
        for side, wall in row.get("wall_seconds", {}).items()
        if row["seconds"][side] >= _LONG_CALL
    }
    if agreement:
        most = max(agreement, key=agreement.__getitem__)
        yield (
            f"The host's clock over the profiler, of {len(agreement)} calls longer than "
            f"{duration(_LONG_CALL)}: median {statistics.median(agreement.values()):.3f}, "
            f"at most {agreement[most]:.3f} ({most})."
        )


def _provenance(record: Record) -> Iterator[str]:
    """Say where, when and by which command rows were measured."""
    for run_of in (*record.get("runs", ()), record):
        versions = run_of.get("versions", {})
        where = [record["device"], f"jax {versions['jax']}", f"Python {versions['python']}"]
        driver = [f"driver {versions['driver']}"] if "driver" in versions else []
        yield f"{', '.join(where + driver)}; {run_of['date'][:10]}; `{run_of['command']}`."
