"""Plans for transposes on CUDA: which kernel moves a permutation's elements, and by which tile.

In the kernels, the dimension that is innermost in the source numbers *columns*, the one that is
innermost in the result numbers *rows*, and all others are *outer*. The first that fits is used:

1. A permutation that keeps the innermost dimension copies rows (``transpose/rows.cuh``).
2. One short dimension beside a long one, adjacent where they are interleaved: records that are
   split or interleaved (``transpose/narrow.cuh``).
3. Arrays of 1- or 2-byte elements about as large as L2, with rows of 128 bytes and more, all
   multiples of 16 bytes, from sm_90 on: TMA (``transpose/tma.cuh``).
4. Rows of 32 bytes and more: tiles of any alignment (``transpose/tiles.cuh``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel
from jax_tilekern.plans.policy import plan_choice, workload
from jax_tilekern.plans.transpose.candidate import TransposeCandidate
from jax_tilekern.plans.transpose.narrow import NarrowTranspose
from jax_tilekern.plans.transpose.permutation import Permutation
from jax_tilekern.plans.transpose.rows import RowTranspose
from jax_tilekern.plans.transpose.shape import (
    LINE_BYTES,
    MAX_OUTER_DIMS,
    SECTOR_BYTES,
    VECTOR_BYTES,
    Matrices,
    OuterDims,
)
from jax_tilekern.plans.transpose.tiles import TileTranspose
from jax_tilekern.plans.transpose.tma import ITEM_BYTES, MAX_TMA_OUTER_DIMS, TmaTranspose

# Smaller matrices leave threads of a CTA without work.
_MIN_MATRIX_BYTES = 2048
# The maximum number of CTAs, and of what kernels divide.
_MAX_CTAS = 2**31 - 1
# Arrays whose latency TMA in persistent CTAs hides better than CTAs of one tile do.
_MIN_TMA_BYTES, _MAX_TMA_BYTES = 2**24, 2**26
# By element size: tiles where all rows of the result start at a sector, and where they do not.
_ALIGNED_TILES = {1: (128, 128), 2: (128, 128), 4: (64, 64), 8: (32, 32), 16: (16, 16)}
_TILES = {1: (256, 128), 2: (128, 128), 4: (64, 64), 8: (32, 32), 16: (16, 16)}


def plan_transpose(permutation: Permutation, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Compile the first of the candidates, if the policy chooses it.

    Parameters
    ----------
    permutation
        Reduced, of at least two dimensions.
    gpu
        The one to plan for.

    Raises
    ------
    NvrtcNotFound
        If there is no NVRTC to compile the kernel with.
    """
    found = candidates(permutation, gpu)
    if isinstance(found, NoKernel):
        return found
    return plan_choice(workload.of_transpose(permutation), found[:1], gpu)


def candidates(permutation: Permutation, gpu: Gpu) -> list[TransposeCandidate] | NoKernel:
    """Return the ways to compute a reduced permutation, best first, or why there is none."""
    permutation = permutation.widened
    dims = len(permutation.sizes)
    if dims - (1 if permutation.keeps_innermost else 2) > MAX_OUTER_DIMS:
        return NoKernel(f"{dims} dimensions are moved, more than kernels take")
    too_many = NoKernel(f"{permutation.size_bytes} bytes take more blocks than a launch has")
    if permutation.keeps_innermost:
        if permutation.row_bytes < SECTOR_BYTES:
            return NoKernel(
                f"rows of {permutation.row_bytes} bytes are too short to be copied each"
            )
        return [*_row_copies(permutation)] or too_many
    matrices = Matrices.of(permutation)
    narrow = list(_narrow(permutation, matrices))
    rows, columns = matrices.rows * matrices.itemsize, matrices.columns * matrices.itemsize
    if rows * matrices.columns < _MIN_MATRIX_BYTES:
        return NoKernel(f"matrices of {rows * matrices.columns} bytes are too small for tiles")
    if not narrow and min(rows, columns) < SECTOR_BYTES:
        return NoKernel(f"rows of {min(rows, columns)} bytes are too short for tiles")
    found: list[TransposeCandidate] = [*narrow, _tiles(matrices), *_tma(matrices, gpu)]
    if _MIN_TMA_BYTES <= permutation.size_bytes <= _MAX_TMA_BYTES:
        found[len(narrow) :] = reversed(found[len(narrow) :])
    return [candidate for candidate in found if candidate.blocks <= _MAX_CTAS] or too_many


def _row_copies(permutation: Permutation) -> list[RowTranspose]:
    row_bytes = permutation.row_bytes
    outer = OuterDims.of(permutation, (len(permutation.sizes) - 1,))
    unit = math.gcd(row_bytes, VECTOR_BYTES)
    found = [RowTranspose(row_bytes, outer, unit, unit)]
    if unit < VECTOR_BYTES:
        found.insert(0, RowTranspose(row_bytes, outer, min(unit, 4), VECTOR_BYTES))
    return [copies for copies in found if copies.vectors <= _MAX_CTAS]


def _narrow(permutation: Permutation, matrices: Matrices) -> Iterator[NarrowTranspose]:
    order = permutation.order
    innermost = len(order) - 1
    # Interleaving takes the short dimension innermost. Vectors read or write the long rows.
    vectors = {
        True: (order[-1] == innermost - 1, matrices.rows),
        False: (order[-2] == innermost, matrices.columns),
    }
    for split, (adjacent, length) in vectors.items():
        found = NarrowTranspose(matrices, split)
        words = found.narrow * max(1, matrices.itemsize // 4)
        short = words <= 32 and found.narrow * matrices.itemsize < LINE_BYTES
        aligned = length * matrices.itemsize % VECTOR_BYTES == 0
        if adjacent and aligned and short and found.narrow < found.length:
            yield found


def _tma(matrices: Matrices, gpu: Gpu) -> Iterator[TmaTranspose]:
    rows, columns = matrices.rows * matrices.itemsize, matrices.columns * matrices.itemsize
    if (
        gpu.compute_capability >= (9, 0)
        and matrices.itemsize in ITEM_BYTES
        and rows % VECTOR_BYTES == columns % VECTOR_BYTES == 0
        and min(rows, columns) >= LINE_BYTES
        and len(matrices.outer.sizes) <= MAX_TMA_OUTER_DIMS
        # Coordinates of TMA are signed.
        and max(matrices.rows, matrices.columns, *matrices.outer.sizes) < 2**31
        and matrices.source_bytes < 2**40
    ):
        yield TmaTranspose(matrices)


def _tiles(matrices: Matrices) -> TileTranspose:
    vector = VECTOR_BYTES // matrices.itemsize
    tiles = _ALIGNED_TILES if matrices.result_aligned else _TILES
    rows, columns = tiles[matrices.itemsize]
    # A short dimension takes less of the tile, and leaves the other more.
    min_rows, min_columns = 8 * vector, max(4, vector)
    fitting = max(min_columns, min(columns, _power_of_two(matrices.columns)))
    rows = max(min_rows, min(rows * columns // fitting, 256, _power_of_two(matrices.rows)))
    return TileTranspose(matrices, rows, fitting)


def _power_of_two(size: int) -> int:
    return int(1 << (size - 1).bit_length())
