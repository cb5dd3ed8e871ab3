"""Plans for transposes on CUDA: which kernel moves a permutation's elements, and by which tile.

In the kernels, the dimension that is innermost in the source numbers *columns*, the one that is
innermost in the result numbers *rows*, and all others are *outer*. The first that fits is used:

1. A permutation that keeps the innermost dimension copies rows (``transpose/rows.cuh``).
2. One short dimension beside a long one, adjacent where they are interleaved: records that are
   split or interleaved (``transpose/narrow.cuh``).
3. Arrays of 1- or 2-byte elements about as large as L2, with rows of 128 bytes and more, all
   multiples of 16 bytes, from sm_90 on: TMA (``transpose/tma.cuh``).
4. Rows of 32 bytes and more: tiles of any alignment (``transpose/tiles.cuh``).

What XLA was measured to do faster is left to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel
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
# Below these bytes, by element size, XLA's transposes take 2 to 15 % less time on an H100. Where
# the result's rows start anywhere, XLA's take half as much time again from 16 MiB on.
_MIN_BYTES = {1: 2**24, 2: 2**24, 4: 2**26, 8: 2**28, 16: 2**28}
_MIN_UNALIGNED_BYTES = 2**24
_MIN_NARROW_BYTES = 2**26
# Narrow transposes of 1.2 MB took twice XLA's time, and those of 3 MB the same.
_SMALL_NARROW_BYTES = 2**21
# The share of a narrow kernel's threads that have no record of a short matrix.
_IDLE_THREADS = 0.6
# Rows of a result that are shorter and not aligned share cache lines with their neighbours.
_LINE_BYTES = 128
# Smaller arrays are bound by their launch.
_LAUNCH_BYTES = 2**20


def plan_transpose(permutation: Permutation, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Compile the first of the candidates, unless XLA is known to be faster.

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
    reason = left_to_xla(permutation, gpu) or small_left_to_xla(permutation, gpu)
    return NoKernel(reason) if reason else found[0].plan(gpu)


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


def left_to_xla(permutation: Permutation, gpu: Gpu) -> str | None:
    """Return why a permutation that has candidates is XLA's, or ``None``.

    Figures are XLA's time over ours on an H100 (``docs/tuning-log.md``).
    """
    if gpu.compute_capability != (9, 0):
        return None
    permutation = permutation.widened
    size = permutation.size_bytes
    if permutation.keeps_innermost:
        if math.gcd(permutation.row_bytes, VECTOR_BYTES) in (2, 4, 8):
            return "XLA's copies of unaligned rows are faster (0.53 to 0.95)"
        return None
    matrices = Matrices.of(permutation)
    narrow = next(_narrow(permutation, matrices), None)
    if narrow is not None:
        if size < _SMALL_NARROW_BYTES:
            return f"XLA's transposes of {size} bytes are faster (0.5)"
        if narrow.idle_threads > _IDLE_THREADS:
            return f"XLA's transposes of {narrow.length} short records are faster (0.49 to 0.73)"
        few_rows = matrices.rows < matrices.columns
        if few_rows and matrices.itemsize >= 4 and size < _MIN_NARROW_BYTES:
            return "XLA's transposes of a few short rows are faster (0.91)"
        return None
    row_bytes = matrices.rows * matrices.itemsize
    if matrices.itemsize <= 2 and row_bytes < _LINE_BYTES and not matrices.result_aligned:
        return f"XLA's transposes to unaligned rows of {row_bytes} bytes are faster (0.46 to 0.7)"
    least = _MIN_BYTES[matrices.itemsize]
    if not matrices.result_aligned:
        least = min(least, _MIN_UNALIGNED_BYTES)
    return f"XLA's transposes of {size} bytes are faster (0.84 to 0.98)" if size < least else None


def small_left_to_xla(permutation: Permutation, gpu: Gpu) -> str | None:
    """Return why a small permutation is XLA's, or ``None``."""
    size = permutation.size_bytes
    if gpu.compute_capability == (9, 0) and size < _LAUNCH_BYTES:
        return f"XLA's transposes of only {size} bytes are faster (0.69 to 0.88)"
    return None


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
