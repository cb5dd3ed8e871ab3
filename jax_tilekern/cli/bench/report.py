"""A record as tables: for the terminal, and in markdown for the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax_tilekern.cli.bench.record import Record, geometric_means
from jax_tilekern.cli.console import duration, rate

if TYPE_CHECKING:
    from rich.console import RenderableType

HEADINGS = (
    "row", "kernel", "ours", "XLA", "XLA / ours", "p10 - p90", "ours does", "ours moves",
    "error ours, XLA",
)  # fmt: skip
# From here on a side is slower by more than measurements of one thing differ.
_LOSS = 0.97


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a row's entries under :data:`HEADINGS`; a row without times has only the first two."""
    if "seconds" not in row:
        return (row["name"], row["failure"])
    ours, peer, ratio = (row["seconds"][key] for key in ("ours", "peer", "ratio"))
    operations = "OP" if row["type"].startswith("int") else "FLOP"
    errors = row["error"]
    return (
        row["name"],
        row["kernel"] + (f" ({row['failure']})" if row["failure"] else ""),
        duration(ours["median"]),
        duration(peer["median"]),
        f"{ratio['median']:.2f}" + (" (slower)" if loses(row) else ""),
        f"{ratio['p10']:.2f} - {ratio['p90']:.2f}",
        rate(row["flops"] / ours["median"], operations),
        rate(row["bytes"] / ours["median"], "B"),
        f"{errors['ours']:.1e}, {errors['peer']:.1e}",
    )


def loses(row: Mapping[str, Any]) -> bool:
    """Say whether a timed row is slower than the peer."""
    return bool(row["seconds"]["ratio"]["median"] < _LOSS)


def table(record: Record) -> RenderableType:
    """Return a record as a table for a terminal."""
    from rich.table import Table

    result = Table(title=f"{record['suite']} on {record['device']}", title_justify="left")
    for heading in HEADINGS:
        text = heading in ("row", "kernel")
        result.add_column(
            heading, justify="left" if text else "right", overflow="fold", no_wrap=heading == "row"
        )
    for row in record["rows"]:
        bad = row["failure"] is not None
        style = "bold red" if bad else "yellow" if loses(row) else None
        result.add_row(*cells(row), style=style)
    return result


def summary(record: Record) -> str:
    """Return the geometric means, how rows were measured, and what failed."""
    rows = record["rows"]
    means = geometric_means(rows)
    lines = ["Geometric means of XLA / ours (above 1, ours is faster): " + _means(means)]
    wall = [row["name"] for row in rows if "seconds" in row and row["method"].startswith("wall")]
    if record["backend"] != "cpu" and wall:
        lines.append(f"By wall time, since the profile was not clear: {', '.join(wall)}.")
    failed = [row["name"] for row in rows if row["failure"]]
    if failed:
        lines.append(f"FAILED: {', '.join(failed)}.")
    return "\n".join(lines)


def _means(means: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {value:.2f}" for key, value in means.items()) or "none"


def markdown(record: Record) -> str:
    """Return a record as a markdown table, with what it was measured on and by."""
    versions, rows = record["versions"], record["rows"]
    gpu = record["nvidia_smi"][0] if record.get("nvidia_smi") else None
    where = [record["device"], f"jax {versions['jax']}", f"Python {versions['python']}"]
    if gpu is not None:
        where.append(f"driver {gpu['driver_version']}")
    return "\n".join(
        [
            _line(HEADINGS),
            _line(["---"] * 2 + ["---:"] * (len(HEADINGS) - 2)),
            *(_line(_padded(cells(row))) for row in rows),
            "",
            f"Geometric mean of XLA / ours: {_means(geometric_means(rows))}.",
            f"{', '.join(where)}; {record['date'][:10]}; `{record['command']}`.",
        ]
    )


def _padded(row: Sequence[str]) -> list[str]:
    return [*row, *[""] * (len(HEADINGS) - len(row))]


def _line(row: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
