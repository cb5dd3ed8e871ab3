"""Figures of the documentation, as SVG by matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator

from jax_tilekern.cli.console import duration

_WIN, _EVEN, _LOSS = "#1a7f37", "#59636e", "#cf5c00"
_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "jax_tilekern", "font.size": 9, "axes.titlesize": 9,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.grid": True,
    "grid.color": "#d1d9e0", "axes.spines.top": False, "axes.spines.right": False,
    "font.family": "sans-serif", "xtick.major.size": 0, "ytick.major.size": 0,
}  # fmt: skip


def _svg(figure: Any) -> str:
    """Return a figure as text that is the same each time."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", file.getvalue())
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def _color(ratio: float) -> str:
    return _WIN if ratio > 1.02 else _LOSS if ratio < 0.98 else _EVEN


@mpl.rc_context(_STYLE)
def ratios(axis: str, sections: Mapping[str, pd.Series[float]]) -> str:
    """Draw ratios on a logarithmic axis, a panel for each section and a line for each label.

    A small dot is a ratio and the large one the geometric mean: green above 1.02, orange below
    0.98.
    """
    lines = {title: dict(iter(x.groupby(level=0, sort=False))) for title, x in sections.items()}
    heights = [len(groups) + 0.5 for groups in lines.values()]
    figure, panels = plt.subplots(
        len(heights), sharex=True, layout="constrained", height_ratios=heights,
        figsize=(8, 0.8 + 0.26 * sum(x + 0.5 for x in heights)),
    )  # fmt: skip
    for panel, (title, groups) in zip(panels, lines.items(), strict=True):
        panel.set(title=title, xscale="log", yticks=range(len(groups)), yticklabels=groups)
        panel.invert_yaxis()
        panel.grid(axis="y", visible=False)
        panel.axvline(1, color="black", linewidth=0.8)
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.minorticks_off()
        for y, found in enumerate(groups.values()):
            least, mean, most = found.min(), np.exp(np.log(found).mean()), found.max()
            panel.plot([least, most], [y, y], color=_color(mean), linewidth=0.8)
            panel.scatter(found, [y] * len(found), 9, [*map(_color, found)], alpha=0.45, lw=0)
            panel.scatter(mean, y, 28, _color(mean), zorder=3)
            spread = f" ({_number(least)} to {_number(most)})" if len(found) > 1 else ""
            panel.text(1.01, y, _number(mean) + spread, transform=panel.get_yaxis_transform(),
                       va="center", fontsize=8)  # fmt: skip
    panels[-1].set_xlabel(axis)
    return _svg(figure)


def _number(ratio: float) -> str:
    return f"{ratio:.{2 if ratio < 10 else 0}f}"


@mpl.rc_context(_STYLE)
def curves(training: pd.DataFrame) -> str:
    """Draw losses over steps, a panel for each model and a curve for each product."""
    models = dict(iter(training.groupby("model", sort=False)))
    figure, panels = plt.subplots(1, len(models), figsize=(8, 3), layout="constrained")
    for panel, (model, rows) in zip(panels, models.items(), strict=True):
        panel.set(title=f"{model}, loss by step", yscale="log")
        panel.yaxis.set_major_formatter("{x:g}")
        styles = zip(("-", "--", ":"), (_EVEN, _WIN, _LOSS), strict=True)
        for row, (style, color) in zip(rows.itertuples(), styles, strict=True):
            steps = row.steps * (np.arange(len(row.losses)) + 0.5) / len(row.losses)
            panel.plot(steps, row.losses, style, color=color, label=row.product)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=3)
    return _svg(figure)


@mpl.rc_context(_STYLE)
def times(axis: str, panels: Mapping[str, Mapping[str, Mapping[int, float]]]) -> str:
    """Draw seconds over counts, a panel for each title and a curve for each side; ours is last."""
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4 * len(panels), 3), layout="constrained", squeeze=False
    )
    for panel, (title, sides) in zip(axes[0], panels.items(), strict=True):
        for color, (side, found) in zip((_EVEN, _WIN), sides.items(), strict=True):
            panel.plot([*found], [*found.values()], "o-", color=color, label=side)
        panel.set(title=title, xlabel=axis, xscale="log", yscale="log", xticks=[*found])
        panel.xaxis.set_major_formatter("{x:,g}")
        panel.yaxis.set_major_formatter(lambda x, _: duration(x))
        panel.minorticks_off()
    axes[0][0].legend()
    return _svg(figure)
