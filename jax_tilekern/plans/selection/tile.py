"""A part of a row that a CTA holds in registers, and the types of its elements."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import ml_dtypes
import numpy as np

# Types whose order kernels know.
ORDERED_DTYPES = tuple(
    np.dtype(t)
    for t in (
        np.float64, np.float32, ml_dtypes.bfloat16, np.float16,
        np.int64, np.int32, np.int16, np.int8, np.uint64, np.uint32, np.uint16, np.uint8,
    )
)  # fmt: skip


class Tile(NamedTuple):
    """Elements of a row."""

    threads: int
    items: int  # of a thread

    @property
    def columns(self) -> int:
        return self.threads * self.items


# Tiles whose elements stay in registers while their digits are counted.
COUNTED_TILES = (Tile(128, 8), Tile(256, 8), Tile(256, 16), Tile(256, 32), Tile(512, 32))


def smallest_tile(tiles: Iterable[Tile], columns: int) -> Tile | None:
    """Return the first tile, of tiles that become larger, that has all columns of a row."""
    return next((tile for tile in tiles if columns <= tile.columns), None)
