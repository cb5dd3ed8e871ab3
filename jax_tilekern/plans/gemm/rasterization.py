"""The order in which a matmul kernel takes the tiles of its output; see ``rasterization.cuh``."""

from __future__ import annotations

import math


def band_height(running: int, tiles_m: int, block_m: int, block_n: int) -> int:
    """Return the rows of tiles in a band: what makes the least of the lines that blocks share.

    Parameters
    ----------
    running
        Blocks, or clusters of them, that run at a time.
    tiles_m
        Rows of tiles.
    block_m, block_n
        What each of the running computes.
    """

    def lines(band: int) -> int:
        return band * block_m + math.ceil(running / band) * block_n

    return min((band for band in (1, 2, 4, 8, 16, 32) if band <= tiles_m), key=lines)
