"""``report``: a record as a markdown table, and what its rows say together."""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.record import Record, joined, outdated, read
from benchmarks.rows import OPERATIONS, Row
from jax_tilekern.cli.console import duration, rate, size

HELP = "print a record as a markdown table"

# The share of ratios below this is reported.
SLOWER = 0.97
# The relative error from which the peer's result is wrong.
WRONG = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "what --json wrote; several of the parts of one sample"
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help=what)


def run(arguments: argparse.Namespace) -> int:
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
    ceilings = Ceilings(record)
    columns = [_cells(row, ceilings) for row in record["rows"]]
    heads = list(dict.fromkeys(name for cells in columns for name in cells))
    lines = ([cells.get(name, "") for name in heads] for cells in columns)
    return "\n".join([*table(heads, lines, 2), "", *_summary(record, ceilings)])


def _cells(row: Record, ceilings: Ceilings) -> dict[str, str]:
    """Return a row's entries by their headings."""
    kernel = row.get("kernel") or "; ".join(row.get("kernels", ()))
    cells = {"row": row["name"], "kernel": row.get("failure") or kernel}
    for side, time in row.get("seconds", {}).items():
        memory = row.get("temporaries", {}).get(side)
        cells[side] = duration(time) + (f", {size(memory)}" if memory else "")
    cells |= row.get("failures", {})
    for peer, ratio in row.get("ratio", {}).items():
        cells[f"{peer} / ours"] = _ratio(row, peer, ratio)
        if peer in row.get("spread", {}):
            cells.setdefault("p10 - p90", "{:.2f} - {:.2f}".format(*row["spread"][peer]))
    errors = (f"{x:.1e}" for x in (row.get("error") or {}).values() if x is not None)
    return cells | ceilings.cells(row) | {"errors": ", ".join(errors)}


def _ratio(row: Record, peer: str, ratio: float) -> str:
    return f"{ratio:#.3g}{_below(ratio, row.get('target', {}).get(peer, 0))}"


def _below(value: float, target: float, form: str = "g") -> str:
    return f" (below {target:{form}})" if value < target else ""


class Ceilings:
    """What bounds the rows of an operation: the memory and the arithmetic, as far as measured.

    Memory is a long read, a long copy, or the better of both, as the operation asks for; and
    arithmetic the most operations per second that either side reached in any row of the same types
    and precision.
    """

    def __init__(self, record: Record) -> None:
        self.operation = record.get("operation", "")
        operation = OPERATIONS.get(self.operation)
        bandwidths = operation.bandwidths if operation else ()
        found = (record.get(f"{x}_bytes_per_second") for x in bandwidths)
        self.memory = max(filter(None, found), default=math.inf)
        self.rates: dict[str, float] = {}
        for row in record["rows"] if operation and operation.arithmetic else ():
            if "seconds" in row:
                call, kind = self._call(row)
                reached = call.flops / min(row["seconds"].values())
                self.rates[kind] = max(reached, self.rates.get(kind, 0.0))

    def _call(self, row: Record) -> tuple[Row, str]:
        """Return the call of a row, and its arithmetic."""
        call = Row.of(row.get("call") or row["name"].rpartition(": ")[2], self.operation)
        return call, " ".join(filter(None, (call.type, call.rhs_type, call.precision)))

    def share(self, row: Record) -> float:
        """Return the least time that the ceilings allow a timed row, over ours."""
        call, kind = self._call(row)
        least = max(call.bytes / self.memory, call.flops / self.rates.get(kind, math.inf))
        return float(least / row["seconds"]["ours"])

    def cells(self, row: Record) -> dict[str, str]:
        """Return a row's entries by their headings."""
        if not self.operation or "seconds" not in row:
            return {}
        (call, _), ours, share = self._call(row), row["seconds"]["ours"], self.share(row)
        return {
            **({"ours does": rate(call.flops / ours, "OP")} if self.rates else {}),
            "ours moves": rate(call.bytes / ours, "B"),
            "of ceiling": f"{share:.0%}{_below(share, row.get('share', 0), '.0%')}",
        }

    def loses(self, row: Record) -> bool:
        """Say whether a row is slower than its targets, or takes more memory than its limit."""
        slower = any(
            ratio < row.get("target", {}).get(peer, 0) for peer, ratio in row["ratio"].items()
        )
        memory = row.get("temporaries", {}).get("ours", 0) > row.get("temporary", math.inf)
        return slower or memory or bool(row.get("share") and self.share(row) < row["share"])


def row_line(row: Record) -> str:
    """Return a row in a line, as it is shown while others are measured."""
    if "failure" in row:
        return f"{row['name']}  {row['failure']}"
    times = (f"{side} {duration(time)}" for side, time in row.get("seconds", {}).items())
    ratios = (f"{peer} / ours {_ratio(row, peer, x)}" for peer, x in row.get("ratio", {}).items())
    return f"{row['name']}: {'; '.join(filter(None, map(', '.join, (times, ratios))))}"


def _distribution(ratios: Sequence[float], target: float = 0.0) -> str:
    mean = float(np.exp(np.mean(np.log(ratios))))
    return (
        f"{len(ratios)} calls: geometric mean {mean:.3f}, 10th percentile "
        f"{np.percentile(ratios, 10):.2f}, worst {min(ratios):.2f}, "
        f"{np.mean(np.array(ratios) < SLOWER):.0%} below {SLOWER}{_below(mean, target)}"
    )


def _summary(record: Record, ceilings: Ceilings) -> Iterator[str]:
    """Yield what the rows say together, how they were measured, and what failed."""
    timed = [row for row in record["rows"] if row.get("ratio")]
    if any("target" in row for row in timed):
        yield f"{sum(map(ceilings.loses, timed))} of {len(timed)} rows below their target."
    wrong = [row["name"] for row in timed if not error_of(row, next(iter(row["ratio"]))) < WRONG]
    ratios: dict[str, dict[str, list[float]]] = {}
    for row in timed:
        for peer, ratio in row["ratio"].items() if row["name"] not in wrong else ():
            groups = ratios.setdefault(peer, {})
            groups.setdefault(row.get("group", ""), []).append(ratio)
    for peer, groups in ratios.items():
        yield f"{peer} / ours, {_distribution([*itertools.chain(*groups.values())])}."
        for group, found in groups.items() if len(groups) > 1 else ():
            yield f"- {group}, {_distribution(found, record.get('means', {}).get(group, 0))}."
    failures = Counter(why for row in timed for why in row.get("failures", {}).items())
    yield from (f"{side}, {count} calls: {why}." for (side, why), count in failures.items())
    if ceilings.memory < math.inf:
        most = [f"memory {rate(ceilings.memory, 'B')}"]
        most += (f"{name} {rate(x, 'OP')}" for name, x in ceilings.rates.items())
        yield f"Ceilings, as measured: {', '.join(most)}."
    if mhz := [row["sm_mhz"] for row in timed if "sm_mhz" in row]:
        yield f"SMs at {min(mhz)} to {max(mhz)} MHz."
    methods = Counter(row["method"] for row in timed if "method" in row)
    yield from (f"{count} rows: {method}." for method, count in methods.items())
    listed = {
        "The peer's result is wrong, so these do not count": wrong,
        "Of an earlier run, with other kernels or another JAX": outdated(record),
        "FAILED": [row["name"] for row in record["rows"] if "failure" in row],
    }
    yield from (f"{what}: {', '.join(names)}." for what, names in listed.items() if names)
    for run_of in (*record.get("runs", ()), record):
        versions = run_of.get("versions", {})
        software = (f"{x} {versions[x]}" for x in ("jax", "python", "driver") if x in versions)
        where = ", ".join([record["device"], *software])
        yield f"{where}; {run_of['date'][:10]}; `{run_of['command']}`."


def error_of(row: Record, peer: str) -> float:
    """Return the error of a peer, if any is known."""
    return (row.get("error") or {}).get(peer) or 0.0
