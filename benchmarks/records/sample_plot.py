"""A sample as a histogram of the ratios of its rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.calls.operations import OPERATIONS
from benchmarks.records.record import Record, timed
from benchmarks.records.sample_report import (
    SLOWER,
    Distribution,
    ratio_to_jax,
    with_right_peer,
)

# Bins have equal widths on the logarithmic axis, and SLOWER is an edge of one.
_BINS_BELOW, _BINS_ABOVE, _FACTOR = 24, 72, 1.03


def histogram(record: Record, path: Path) -> None:
    """Draw how often each ratio of the peer's time to ours occurs.

    Ratios beyond the outermost bins count in these.

    Parameters
    ----------
    record
        A record of a sample, at least one row of which has times.
    path
        The file to write.
    """
    # The object interface needs no display and leaves no global state.
    from matplotlib.figure import Figure

    ratios = [ratio_to_jax(row) for row in with_right_peer(timed(record))]
    edges = SLOWER * _FACTOR ** np.arange(-_BINS_BELOW, _BINS_ABOVE + 1)
    counts, _ = np.histogram(np.clip(ratios, edges[0], edges[-1]), edges)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    colors = ["C3" if edge < 0.999 * SLOWER else "C0" for edge in edges[:-1]]
    axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color=colors)
    axes.axvline(1, color="black", linewidth=0.7)
    ticks = [0.5, 0.7, SLOWER, 1.2, 1.5, 2, 3, 5, 8]
    axes.set(
        xscale="log", xlim=(edges[0], edges[-1]),
        xlabel=f"{OPERATIONS[record['operation']].peer.name} / ours, above 1 ours is faster",
        ylabel="calls",
        title=f"{len(ratios)} calls of seed {record['sample']['seed']} on {record['device']}\n"
        f"{Distribution.of(ratios)}",
    )  # fmt: skip
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
