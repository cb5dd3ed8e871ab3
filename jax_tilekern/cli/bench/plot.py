"""A record as a roofline plot."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from jax_tilekern.cli.bench.record import Record


class NoMatplotlib(RuntimeError):
    """There is no matplotlib; the message has the command that mends it."""


def require_matplotlib() -> None:
    """Check that :func:`plot` can draw.

    Raises
    ------
    NoMatplotlib
        If it cannot.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise NoMatplotlib("--plot needs matplotlib: pip install 'jax_tilekern[bench]'")


def plot(record: Record, path: Path) -> None:
    """Draw the rate of each row over its operations per byte, ours and the peer's.

    The slanted line is what reading memory allows, as measured in the same run; a horizontal one
    is the best rate that either side reached with that type.

    """
    # The object interface needs no display and leaves no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    rows = [row for row in record["rows"] if "seconds" in row]
    for number, kind in enumerate(dict.fromkeys(row["type"] for row in rows)):
        _draw_type(axes, [row for row in rows if row["type"] == kind], kind, f"C{number}")
    intensities = sorted(row["flops"] / row["bytes"] for row in rows)
    bandwidth = record["read_bytes_per_second"]
    axes.plot(
        intensities, [x * bandwidth / 1e12 for x in intensities], color="black", linewidth=1,
        label=f"memory, {bandwidth / 1e9:.0f} GB/s",
    )  # fmt: skip
    axes.set(
        xscale="log", yscale="log",
        xlabel="operations per byte", ylabel="Tera-operations per second",
        title=f"{record['suite']} on {record['device']}: ours filled, XLA hollow",
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_type(axes: Any, rows: list[dict[str, Any]], kind: str, color: str) -> None:
    best = 0.0
    for number, row in enumerate(rows):
        x = row["flops"] / row["bytes"]
        ours, peer = (row["flops"] / row["seconds"][s]["median"] / 1e12 for s in ("ours", "peer"))
        axes.plot([x, x], [peer, ours], color=color, linewidth=1)
        axes.plot(x, peer, "o", color=color, fillstyle="none")
        axes.plot(x, ours, "o", color=color, label=None if number else kind)
        best = max(best, ours, peer)
    axes.axhline(best, color=color, linewidth=0.7, linestyle="--")
