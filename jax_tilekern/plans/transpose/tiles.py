"""Plans for transposes by tiles of any alignment: ``transpose/tiles.cuh``."""

from __future__ import annotations

from jax_tilekern.compilation.compiler import Kernel
from jax_tilekern.plans.cxx import cxx_config
from jax_tilekern.plans.transpose.candidate import TransposeCandidate
from jax_tilekern.plans.transpose.shape import (
    SECTOR_BYTES,
    VECTOR_BYTES,
    Matrices,
    OuterDims,
    TileGrid,
)

# By element size: the edge of a tile, in elements.
_EDGES = {1: 128, 2: 128, 4: 64, 8: 32, 16: 16}


def tile_transpose(matrices: Matrices) -> TransposeCandidate:
    """Return what moves tiles through shared memory."""
    rows, columns = _tile(matrices)
    # Where rows of the result start anywhere, tiles shift to a sector, and read so many rows more.
    halo = 0 if matrices.result_aligned else SECTOR_BYTES // matrices.itemsize - 1
    grid = TileGrid(-(-(matrices.rows + halo) // rows), -(-matrices.columns // columns))
    tiles = grid.count * matrices.outer.count
    # Rows that start anywhere are as far beyond a multiple of 16 bytes as in the source.
    pitch = columns * matrices.itemsize + VECTOR_BYTES + matrices.row_stride % VECTOR_BYTES
    if matrices.source_aligned:
        vector = VECTOR_BYTES // matrices.itemsize
        chunks = columns * matrices.itemsize // VECTOR_BYTES
        chunks += chunks % 2 if vector == 1 else 0
        shared_bytes = VECTOR_BYTES * ((rows + halo) * chunks + (rows + halo) // vector + 1)
    else:
        shared_bytes = (rows + halo) * pitch + VECTOR_BYTES
    config = cxx_config(
        "TileConfig",
        item_bytes=matrices.itemsize,
        rows=rows,
        columns=columns,
        source_aligned=matrices.source_aligned,
        result_aligned=matrices.result_aligned,
    )
    return TransposeCandidate(
        kernel=Kernel("transpose/tiles.cuh", f"tilekern::transpose_tiles<{config}>"),
        form=f"tiles {rows}x{columns}",
        reason=f"{tiles} tiles of {rows}x{columns}",
        count=tiles,
        counts_per_block=1,
        layout=f"{TileGrid.LAYOUT}I5q{OuterDims.LAYOUT}",
        values=(
            *grid.values,
            pitch,
            matrices.rows,
            matrices.columns,
            matrices.row_stride,
            matrices.column_stride,
            matrices.source_bytes,
            *matrices.outer.values,
        ),
        shared_memory_bytes=shared_bytes,
    )


def _tile(matrices: Matrices) -> tuple[int, int]:
    """Return the tile's rows and columns."""
    vector = VECTOR_BYTES // matrices.itemsize
    edge = _EDGES[matrices.itemsize]
    wide = matrices.itemsize == 1 and not matrices.result_aligned
    rows = 2 * edge if wide else edge
    # A short dimension takes less of the tile, and leaves the other more.
    columns = max(4, vector, min(edge, _power_of_two(matrices.columns)))
    rows = min(rows * edge // columns, 256, _power_of_two(matrices.rows))
    return max(8 * vector, rows), columns


def _power_of_two(size: int) -> int:
    return int(1 << (size - 1).bit_length())
