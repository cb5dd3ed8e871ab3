"""Speed relative to another implementation as an SVG: one line for each group of measured rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH = 720
_LABELS, _NUMBERS, _LINE, _TOP, _BOTTOM = 168, 125, 22, 26, 40
_TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
# A page that has the drawing within it may set the variables to colors of its own.
_STYLE = """
.ratios { --ink: #1f2328; --grid: #d1d9e0; --win: #1a7f37; --even: #59636e; --loss: #cf5c00; }
@media (prefers-color-scheme: dark) {
  .ratios { --ink: #d1d7e0; --grid: #3d444d; --win: #57ab5a; --even: #9198a1; --loss: #f0883e; }
}
.ratios text { fill: var(--ink); font: 13px system-ui, sans-serif; }
.ratios .small { font-size: 12px; }
.ratios .heading { font-weight: 600; }
.ratios .grid { stroke: var(--grid); }
.ratios .one { stroke: var(--ink); }
.ratios .win { fill: var(--win); stroke: var(--win); }
.ratios .even { fill: var(--even); stroke: var(--even); }
.ratios .loss { fill: var(--loss); stroke: var(--loss); }
.ratios .row { fill-opacity: 0.45; stroke: none; }
"""


class Group(NamedTuple):
    """Ratios that one line shows: each, their range and their geometric mean."""

    label: str
    ratios: Sequence[float]


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive values."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def ratio_plot(title: str, axis: str, sections: Sequence[tuple[str, Sequence[Group]]]) -> str:
    """Draw groups of ratios on a logarithmic axis.

    Parameters
    ----------
    title
        What the drawing shows, for those who do not see it.
    axis
        What the ratio is.
    sections
        Headings, each with its groups. An empty heading takes no space.

    Returns
    -------
    str
        An SVG element without empty lines. A small dot is a row, the large one the geometric mean:
        green above 1.02, orange below 0.98.
    """
    ratios = [ratio for _, groups in sections for group in groups for ratio in group.ratios]
    ticks = _ticks(min(ratios), max(ratios))
    lines = sum(bool(heading) + len(groups) for heading, groups in sections)
    height = _TOP + _LINE * lines + _BOTTOM
    shapes = [
        f'<svg class="ratios" xmlns="http://www.w3.org/2000/svg" role="img" width="{WIDTH}" '
        f'height="{height}" viewBox="0 0 {WIDTH} {height}">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        _text(WIDTH, _TOP - 10, "mean (min to max)", "end", "small"),
    ]
    y = _TOP
    for heading, groups in sections:
        if heading:
            shapes.append(_text(0, y + 16, heading, "start", "heading"))
            y += _LINE
        shapes += _grid(ticks, y, y + _LINE * len(groups))
        for group in groups:
            shapes += _group(group, y + _LINE / 2, ticks)
            y += _LINE
    shapes += [_text(_x(tick, ticks), y + 16, f"{tick:g}", "middle", "small") for tick in ticks]
    shapes.append(_text(_x(1, ticks), y + 34, axis, "start", "small"))
    return "\n".join([*shapes, "</svg>"]) + "\n"


def _ticks(low: float, high: float) -> Sequence[float]:
    """Return the marks that enclose all values, and 1."""
    first = max(tick for tick in _TICKS if tick <= min(low, 0.9))
    last = min(tick for tick in _TICKS if tick >= max(high, 1.1))
    return [tick for tick in _TICKS if first <= tick <= last]


def _x(ratio: float, ticks: Sequence[float]) -> float:
    start, width = _LABELS + 12, WIDTH - _LABELS - _NUMBERS - 36
    return start + width * math.log(ratio / ticks[0]) / math.log(ticks[-1] / ticks[0])


def _grid(ticks: Sequence[float], top: float, bottom: float) -> Iterator[str]:
    for tick in ticks:
        x, style = f"{_x(tick, ticks):.1f}", "one" if tick == 1 else "grid"
        yield f'<line class="{style}" x1="{x}" x2="{x}" y1="{top:g}" y2="{bottom:g}"/>'


def _group(group: Group, y: float, ticks: Sequence[float]) -> Iterator[str]:
    mean = geometric_mean(group.ratios)
    low, high = min(group.ratios), max(group.ratios)
    ends = f'x1="{_x(low, ticks):.1f}" x2="{_x(high, ticks):.1f}" y1="{y:g}" y2="{y:g}"'
    yield _text(_LABELS, y + 4.5, group.label, "end")
    yield f'<line class="{_side(mean)}" {ends} stroke-opacity="0.6"/>'
    for ratio in group.ratios:
        yield _dot("row " + _side(ratio), _x(ratio, ticks), y, 3)
    yield _dot(_side(mean), _x(mean, ticks), y, 5)
    spread = f" ({_number(low)} to {_number(high)})" if len(group.ratios) > 1 else ""
    yield _text(WIDTH, y + 4.5, _number(mean) + spread, "end", "small")


def _side(ratio: float) -> str:
    return "win" if ratio > 1.02 else "loss" if ratio < 0.98 else "even"


def _number(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"


def _dot(style: str, x: float, y: float, radius: float) -> str:
    return f'<circle class="{style}" cx="{x:.1f}" cy="{y:g}" r="{radius:g}"/>'


def _text(x: float, y: float, text: str, anchor: str, style: str = "") -> str:
    style = f' class="{style}"' if style else ""
    return f'<text{style} x="{x:.1f}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
