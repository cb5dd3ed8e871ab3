"""Times of several sides as an SVG: a bar for each."""

from __future__ import annotations

from collections.abc import Mapping
from xml.sax.saxutils import escape

from benchmarks.records.ratio_plot import WIDTH
from jax_tilekern.cli.console import duration

_LABELS, _NUMBERS, _LINE = 168, 90, 24
_STYLE = """
.times { --ink: #1f2328; --ours: #1a7f37; --other: #818b98; }
@media (prefers-color-scheme: dark) {
  .times { --ink: #d1d7e0; --ours: #57ab5a; --other: #656c76; }
}
.times text { fill: var(--ink); font: 13px system-ui, sans-serif; }
.times .heading { font-weight: 600; }
.times .ours { fill: var(--ours); }
.times .other { fill: var(--other); }
"""


def time_bars(title: str, sections: Mapping[str, Mapping[str, float]], other: str) -> str:
    """Draw bars.

    Parameters
    ----------
    title
        What the drawing shows, for those who do not see it.
    sections
        Under each heading the seconds of each side.
    other
        The side that is not ours.

    Returns
    -------
    str
        An SVG element without empty lines.
    """
    height = _LINE * sum(1 + len(times) for times in sections.values())
    longest = max(seconds for times in sections.values() for seconds in times.values())
    shapes = [
        f'<svg class="times" xmlns="http://www.w3.org/2000/svg" role="img" width="{WIDTH}" '
        f'height="{height}" viewBox="0 0 {WIDTH} {height}">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
    ]
    y = 0
    for heading, times in sections.items():
        shapes.append(f'<text class="heading" x="0" y="{y + 17}">{escape(heading)}</text>')
        for side, seconds in times.items():
            y += _LINE
            width = (WIDTH - _LABELS - _NUMBERS) * seconds / longest
            style = "other" if side == other else "ours"
            shapes += [
                f'<text x="{_LABELS}" y="{y + 17}" text-anchor="end">{escape(side)}</text>',
                f'<rect class="{style}" x="{_LABELS + 10}" y="{y + 4}" width="{width:.1f}" '
                f'height="{_LINE - 8}"/>',
                f'<text x="{_LABELS + 18 + width:.1f}" y="{y + 17}">{duration(seconds)}</text>',
            ]
        y += _LINE
    return "\n".join([*shapes, "</svg>"]) + "\n"
