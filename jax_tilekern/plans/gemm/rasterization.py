"""The order in which CTAs take the tiles of the output; see ``rasterization.cuh``."""

from __future__ import annotations

import math


def raster_height(running: int, tiles_m: int, block_m: int, block_n: int) -> int:
    """Return the height of a rasterization group in tiles.

    Tiles that run at the same time are chosen to touch as few rows of ``lhs`` and columns of
    ``rhs`` as possible, which L2 then serves to all of them.

    Parameters
    ----------
    running
        CTAs, or clusters of them, that run at a time.
    tiles_m
        Rows of tiles.
    block_m, block_n
        The tile that each of them computes.
    """

    def rows_and_columns(height: int) -> int:
        return height * block_m + math.ceil(running / height) * block_n

    heights = (height for height in (1, 2, 4, 8, 16, 32) if height <= tiles_m)
    return min(heights, key=rows_and_columns)
