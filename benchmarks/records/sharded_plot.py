"""A record of programs of several devices as a plot: times of each program over a reference."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# From the top down, in the order of their bars.
_SIDES = {
    "ours": ("tab:blue", "jax_tilekern"),
    "alone": ("tab:green", "the local product alone"),
    "all-reduce": ("tab:gray", "the all-reduce alone"),
}
_BAR = 0.25


def plot(record: Mapping[str, Any], path: Path) -> None:
    """Draw the times of each program over that of ``jnp``, or over a device's share of one's."""
    from matplotlib.figure import Figure

    rows = [row for row in record["rows"] if not row.get("error")]
    figure = Figure(figsize=(12, 0.45 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    for number, row in enumerate(rows):
        times = row["microseconds"]
        reference = times["jnp"] if "jnp" in times else times["one device"] / record["devices"]
        for bar, side in enumerate(side for side in _SIDES if side in times):
            color, _ = _SIDES[side]
            axes.barh(number + _BAR * (bar - 0.5), times[side] / reference, 0.9 * _BAR, color=color)
    axes.set_yticks(range(len(rows)), [f"{row['group']}: {row['name']}" for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("time / time of jnp, or of one device divided by the number of devices")
    for color, label in _SIDES.values():
        axes.bar(0, 0, color=color, label=label)
    axes.legend(loc="upper right")
    axes.set_title(f"{record['devices']} x {record['device']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
