"""Tables as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def columns(rows: Iterable[Sequence[str]]) -> str:
    """Return one line per row, with aligned columns; a column without text is left out."""
    kept = [column for column in zip(*rows, strict=True) if any(column)]
    padded = ([cell.ljust(max(map(len, column))) for cell in column] for column in kept)
    return "\n".join("  ".join(row).rstrip() for row in zip(*padded, strict=True))
