"""A record of latencies as tables: for the terminal, and in markdown for the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.latency.first_result import KINDS
from benchmarks.latency.limits import (
    DISPATCH,
    FIRST_RESULT,
    MOST_DISPATCH,
    MOST_FIRST,
    losses,
    measured,
)
from benchmarks.records.record import Record
from benchmarks.records.report import (
    leftovers,
    markdown_table,
    provenance,
    style,
    terminal_table,
)
from jax_tilekern.cli.console import duration

if TYPE_CHECKING:
    from rich.console import RenderableType

HEADINGS = {
    DISPATCH: ("row", "kernel", "ours", "XLA", "ours - XLA", "p10 - p90", "device behind"),
    FIRST_RESULT: (
        "row", "kernel", "ours, cold", "ours, warm", "XLA", "XLA / cold", "p10 - p90",
        "cold adds", "warm adds", "XLA adds",
    ),
}  # fmt: skip
_TITLES = {DISPATCH: "Time until a call returns", FIRST_RESULT: "First call to first result"}


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a row's entries under its group's headings; without times only the first two."""
    if not measured(row):
        return (row["name"], row["failure"])
    lost, added = set(losses(row)), row["added_seconds"]
    if row["group"] == DISPATCH:
        ours, peer = (duration(row["seconds"][side]["median"]) for side in ("ours", "peer"))
        above = f" (above {duration(MOST_DISPATCH)})" if lost else ""
        return (
            row["name"],
            row["kernel"],
            ours,
            peer,
            difference(added["median"]) + above,
            f"{difference(added['p10'])} to {difference(added['p90'])}",
            ", ".join(row["device_behind"]),
        )
    ratio = row["ratio"]
    below = f" (below {row['target']:g})" if "XLA" in lost else ""
    return (
        row["name"],
        row["kernel"],
        *(duration(row["first_seconds"][kind]["median"]) for kind in KINDS),
        f"{ratio['median']:#.3g}{below}",
        f"{ratio['p10']:.2f} - {ratio['p90']:.2f}",
        *(
            difference(added[kind]["median"])
            + (f" (above {duration(MOST_FIRST[kind])})" if kind in lost & set(MOST_FIRST) else "")
            for kind in KINDS
        ),
    )


def difference(seconds: float) -> str:
    """Return a difference of times, which may be negative, with its unit."""
    return ("-" if seconds < 0 else "") + duration(abs(seconds))


def tables(record: Record) -> Iterator[RenderableType]:
    """Return a table for a terminal for each group of a record."""
    for group, rows in _groups(record):
        yield terminal_table(
            f"{_TITLES[group]}: {record['device']}",
            HEADINGS[group],
            [(cells(row), style(row, measured(row) and any(losses(row)))) for row in rows],
        )


def markdown(record: Record) -> str:
    """Return a record as markdown tables, with what it was measured on and by."""
    lines: list[str] = []
    for group, rows in _groups(record):
        lines += [f"{_TITLES[group]}:", "", *markdown_table(HEADINGS[group], map(cells, rows)), ""]
    return "\n".join([*lines, summary(record), *provenance(record)])


def summary(record: Record) -> str:
    """Return what was measured, what the limits are, and which rows do not keep them."""
    return "\n".join(_summary(record))


def _summary(record: Record) -> Iterator[str]:
    groups = {group: [row for row in rows if measured(row)] for group, rows in _groups(record)}
    if rows := groups.get(DISPATCH):
        batches = "; ".join(sorted({row["method"] for row in rows}))
        yield f"Returns: {batches}, medians; at most {duration(MOST_DISPATCH)} above XLA."
        if any(row["device_behind"] for row in rows):
            yield "Where the device is behind, calls wait for it, and times are no host's alone."
    if rows := groups.get(FIRST_RESULT):
        rounds = sorted({row["rounds"] for row in rows})
        cold, warm = (duration(MOST_FIRST[kind]) for kind in ("cold", "warm"))
        yield (
            f"First results: medians of {' or '.join(map(str, rounds))} fresh processes, cold with "
            f"no kernel in our cache and warm with all; what is added is the time less that of "
            f"copying an operand in a program of its own, in the same process before: at most "
            f"{cold} cold and {warm} warm, and cold no later than XLA."
        )
    rows = [row for rows in groups.values() for row in rows]
    if rows:
        lost = [row["name"] for row in rows if any(losses(row))]
        beyond = f"{len(lost)} of {len(rows)} rows beyond their limits: {', '.join(lost)}."
        yield beyond if lost else "No row beyond its limits."
    yield from leftovers(record)


def _groups(record: Record) -> Iterator[tuple[str, list[Record]]]:
    for group in HEADINGS:
        if rows := [row for row in record["rows"] if row["group"] == group]:
            yield group, rows
