"""Curves over training steps as an SVG: one panel for each model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _GAP = 720, 260, 44, 30, 58, 60
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_DASHES = ("", "7 3", "2 3")
_STYLE = """
.curves { --ink: #1f2328; --grid: #d1d9e0; --c0: #59636e; --c1: #1a7f37; --c2: #cf5c00; }
@media (prefers-color-scheme: dark) {
  .curves { --ink: #d1d7e0; --grid: #3d444d; --c0: #9198a1; --c1: #57ab5a; --c2: #f0883e; }
}
.curves text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.curves .heading { font-weight: 600; }
.curves .grid { stroke: var(--grid); }
.curves polyline, .curves .key { fill: none; stroke-width: 1.8; }
.curves .c0 { stroke: var(--c0); }
.curves .c1 { stroke: var(--c1); }
.curves .c2 { stroke: var(--c2); }
"""

# The points of each curve, by its name.
Curves = Mapping[str, Sequence[float]]


def curve_plot(title: str, panels: Mapping[str, tuple[int, Curves]]) -> str:
    """Draw curves on logarithmic axes.

    Parameters
    ----------
    title
        What the drawing shows, for those who do not see it.
    panels
        By heading, the number of steps and the curves. All panels have the same names, up to three.

    Returns
    -------
    str
        An SVG element without empty lines.
    """
    shapes = [
        f'<svg class="curves" xmlns="http://www.w3.org/2000/svg" role="img" width="{_WIDTH}" '
        f'height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
    ]
    width = (_WIDTH - _LEFT - _GAP * (len(panels) - 1)) / len(panels) - 8
    for i, (heading, (steps, curves)) in enumerate(panels.items()):
        shapes += _panel(_LEFT + i * (width + _GAP + 8), width, heading, steps, curves)
    x = float(_LEFT)
    for i, name in enumerate(next(iter(panels.values()))[1]):
        y = _HEIGHT - 10
        ends = f'x1="{x:g}" x2="{x + 28:g}" y1="{y - 4}" y2="{y - 4}"'
        shapes.append(f'<line class="key c{i}" {ends} stroke-dasharray="{_DASHES[i]}"/>')
        shapes.append(_text(x + 34, y, name))
        x += 60 + 7 * len(name)
    return "\n".join([*shapes, "</svg>"]) + "\n"


def _panel(left: float, width: float, heading: str, steps: int, curves: Curves) -> Iterator[str]:
    values = [value for points in curves.values() for value in points]
    low = max((tick for tick in _TICKS if tick <= min(values)), default=_TICKS[0])
    high = min((tick for tick in _TICKS if tick >= max(values)), default=_TICKS[-1])
    bottom = _HEIGHT - _BOTTOM

    def place(value: float) -> float:
        part = math.log(value / low) / math.log(high / low)
        return bottom - part * (bottom - _TOP)

    yield _text(left, _TOP - 12, heading, style="heading")
    for tick in _TICKS:
        if low <= tick <= high:
            y = place(tick)
            ends = f'x1="{left:g}" x2="{left + width:g}" y1="{y:.1f}" y2="{y:.1f}"'
            yield f'<line class="grid" {ends}/>'
            yield _text(left - 6, y + 4, f"{tick:g}", "end")
    for step in (0, steps // 2, steps):
        yield _text(left + width * step / steps, bottom + 18, str(step), "middle")
    for i, points in enumerate(curves.values()):
        places = " ".join(
            f"{left + width * (j + 0.5) / len(points):.1f},{place(value):.1f}"
            for j, value in enumerate(points)
        )
        yield f'<polyline class="c{i}" points="{places}" stroke-dasharray="{_DASHES[i]}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", style: str = "") -> str:
    style = f' class="{style}"' if style else ""
    return f'<text{style} x="{x:.1f}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
