"""A record as two plots: a roofline or shares of the bandwidth, and the ratio of each row.

A sample is a histogram instead (``sample_plot.py``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.calls.operations import OPERATIONS
from benchmarks.errors import BenchmarkError
from benchmarks.records.ceilings import Ceilings, arithmetic
from benchmarks.records.record import Record, timed
from benchmarks.records.report import loses
from benchmarks.records.sample_plot import histogram


class NoMatplotlib(BenchmarkError):
    """There is no matplotlib; the message has the command that installs it."""


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
    """Draw how near each row comes to the ceilings, and peer / ours of each by name.

    The ceilings are a roofline over operations per byte or, of an operation that only the memory
    bounds, one bandwidth, of which each row has its share.
    """
    if "sample" in record:
        histogram(record, path)
        return
    # The object interface needs no display and leaves no global state.
    from matplotlib.figure import Figure

    rows, ceilings = timed(record), Ceilings.of(record)
    figure = Figure(figsize=(17, max(7, 0.19 * len(rows))), layout="constrained")
    bounds, ratios = figure.subplots(1, 2, width_ratios=(3, 2))
    operation = OPERATIONS[record["operation"]]
    draw = _draw_roofline if operation.bound_by_arithmetic else _draw_shares
    draw(bounds, rows, ceilings, operation.peer.name)
    _draw_ratios(ratios, rows, ceilings, operation.peer.name)
    figure.suptitle(f"{record['suite']} on {record['device']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_roofline(axes: Any, rows: Sequence[Record], ceilings: Ceilings, peer_name: str) -> None:
    """Draw ours filled and the peer hollow under the ceilings, a color for each arithmetic."""
    from matplotlib import colormaps

    intensities = [row["flops"] / row["bytes"] for row in rows] or [1.0]
    left, right = min(intensities) / 1.5, max(intensities) * 1.5
    bandwidth = ceilings.bytes_per_second
    for number, (name, most) in enumerate(ceilings.operations_per_second.items()):
        color = colormaps["tab20"](number % 20)
        ridge = most / bandwidth
        axes.plot(
            [left, min(ridge, right), right],
            [left * bandwidth / 1e12, min(most, right * bandwidth) / 1e12, most / 1e12],
            color=color, linewidth=0.8, linestyle="--", zorder=1,
        )  # fmt: skip
        of_arithmetic = [row for row in rows if arithmetic(row) == name]
        x = [row["flops"] / row["bytes"] for row in of_arithmetic]
        ours, peer = (
            [row["flops"] / row["seconds"][side]["median"] / 1e12 for row in of_arithmetic]
            for side in ("ours", "peer")
        )
        axes.vlines(x, ours, peer, color=color, linewidth=0.8)
        axes.scatter(x, peer, s=22, facecolors="none", edgecolors=[color])
        axes.scatter(x, ours, s=22, color=[color], label=name)
    axes.set(
        xscale="log", yscale="log",
        xlabel="operations per byte", ylabel="Tera-operations per second",
        title=f"Ours filled, {peer_name} hollow; memory {bandwidth / 1e9:.0f} GB/s",
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _draw_shares(axes: Any, rows: Sequence[Record], ceilings: Ceilings, peer_name: str) -> None:
    """Draw the share of the bandwidth of each side of each row, ours filled, the peer hollow."""
    ours, peer = ([100 * ceilings.share(row, side) for row in rows] for side in ("ours", "peer"))
    numbers = range(len(rows))
    axes.hlines(numbers, ours, peer, color="C0", linewidth=0.8)
    axes.scatter(peer, numbers, s=22, facecolors="none", edgecolors="C0")
    axes.scatter(ours, numbers, s=22, color="C0")
    for number, row in enumerate(rows):
        if row["share"]:
            axes.plot(100 * row["share"], number, "|", color="black", markersize=8)
    axes.axvline(100, color="black", linewidth=0.7)
    bandwidth = f"{ceilings.bytes_per_second / 1e9:.0f} GB/s"
    axes.set(
        xlabel="% of the bandwidth measured", xlim=(0, None),
        title=f"Ours filled, {peer_name} hollow; 100 % is {bandwidth}; a tick is the row's target",
    )  # fmt: skip
    _name_rows(axes, rows)


def _draw_ratios(axes: Any, rows: Sequence[Record], ceilings: Ceilings, peer_name: str) -> None:
    """Draw median, 10th and 90th percentile of each row's ratio, and its target as a tick."""
    for number, row in enumerate(rows):
        ratio, color = row["seconds"]["ratio"], "C3" if loses(row, ceilings) else "C0"
        axes.plot([ratio["p10"], ratio["p90"]], [number, number], color=color, linewidth=1)
        axes.plot(ratio["median"], number, "o", color=color, markersize=4)
        axes.plot(row["target"], number, "|", color="black", markersize=8)
    axes.axvline(1, color="black", linewidth=0.7)
    axes.set(
        xscale="log", xlabel=f"{peer_name} / ours",
        title="Above 1 ours is faster; a tick is the row's target",
    )  # fmt: skip
    _name_rows(axes, rows)


def _name_rows(axes: Any, rows: Sequence[Record]) -> None:
    """Name the rows on the vertical axis, the first at the top."""
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=7)
    axes.grid(alpha=0.3)
