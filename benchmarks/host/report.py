"""A record of what the package costs the host as tables: for the terminal, and in markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.host.model import STEPS
from benchmarks.records.record import Record
from benchmarks.records.report import markdown_table, provenance, terminal_table
from jax_tilekern.cli.console import duration, size

if TYPE_CHECKING:
    from rich.console import RenderableType

# Which record this is, as its field ``kind`` has it.
KIND = "host"
# Groups of its rows.
CALLS, PROGRAMS = "calls", "programs"
# How many times as much as JAX's own each may take.
LIMITS = {"eager": 3.0, "trace": 2.0, "hlo": 1.5, "total": 1.3}
_TITLES = {CALLS: "A call that is not compiled", PROGRAMS: "Making the program of a model"}
_HEADINGS = {
    CALLS: (
        "row", "eager, ours", "eager, JAX", "ours / JAX", "traced, ours", "traced, JAX",
        "ours / JAX",
    ),
    PROGRAMS: (
        "row", "platform", "HLO, ours", "HLO, JAX", "ours / JAX",
        *(f"{step}, {side}" for step in STEPS for side in ("ours", "JAX")), "all, ours / JAX",
    ),
}  # fmt: skip


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a row's entries under its group's headings."""
    if row["group"] == CALLS:
        return (
            row["name"],
            *_times(row["eager"]),
            _ratio(row["eager"]["ratio"]["median"], "eager"),
            *_times(row["trace"]),
            _ratio(row["trace"]["ratio"]["median"], "trace"),
        )
    ours, peer = row["hlo_bytes"]["ours"], row["hlo_bytes"]["peer"]
    steps = (row["steps"].get(step) for step in STEPS)
    return (
        row["name"],
        row["platform"],
        size(ours),
        size(peer),
        _ratio(ours / peer, "hlo"),
        *(cell for step in steps for cell in (("", "") if step is None else _times(step))),
        # Without a compilation it is no total.
        _ratio(row["total"]["ratio"]["median"], "total") if "compile" in row["steps"] else "",
    )


def _times(compared: Mapping[str, Any]) -> tuple[str, str]:
    return duration(compared["ours"]["median"]), duration(compared["peer"]["median"])


def _ratio(ratio: float, limit: str) -> str:
    above = f" (above {LIMITS[limit]:g})" if ratio > LIMITS[limit] else ""
    return f"{ratio:#.3g}{above}"


def tables(record: Record) -> Iterator[RenderableType]:
    """Return a table for a terminal for each group of a record."""
    for group, rows in _groups(record):
        yield terminal_table(_TITLES[group], _HEADINGS[group], [(cells(row), None) for row in rows])


def markdown(record: Record) -> str:
    """Return a record as markdown tables, with what it was measured on and by."""
    lines: list[str] = []
    for group, rows in _groups(record):
        table = markdown_table(_HEADINGS[group], map(cells, rows))
        lines += [f"{_TITLES[group]}:", "", *table, ""]
    return "\n".join([*lines, summary(), *provenance(record)])


def summary() -> str:
    """Return what the columns are."""
    return (
        "Medians. Eager calls are of operands that take no time, and the computation is in their "
        "time. Compiled kernels are in the cache. Limits, as ours / JAX: "
        + ", ".join(f"{name} {limit:g}" for name, limit in LIMITS.items())
        + "."
    )


def _groups(record: Record) -> Iterator[tuple[str, list[Record]]]:
    for group in _HEADINGS:
        if rows := [row for row in record["rows"] if row["group"] == group]:
            yield group, rows
