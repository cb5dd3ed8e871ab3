"""Plans for transposes by tiles of any alignment: ``transpose/tiles.cuh``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from jax_tilekern.compilation.compiler import Compiled, Kernel
from jax_tilekern.plans.cxx import cxx_config
from jax_tilekern.plans.launch import Buffer, Launch, Scalars
from jax_tilekern.plans.transpose.candidate import TransposeCandidate
from jax_tilekern.plans.transpose.shape import (
    SECTOR_BYTES,
    VECTOR_BYTES,
    Matrices,
    OuterDims,
    TileGrid,
)

_THREADS = 256
# By element size: the edge of a tile, in elements.
_EDGES = {1: 128, 2: 128, 4: 64, 8: 32, 16: 16}


@dataclass(frozen=True)
class TileTranspose(TransposeCandidate):
    """Tiles through shared memory, at any alignment; see ``transpose/tiles.cuh``.

    Attributes
    ----------
    matrices
        What to transpose.
    tile_rows, tile_columns
        The tile, in elements.
    """

    matrices: Matrices
    tile_rows: int
    tile_columns: int

    @classmethod
    def of(cls, matrices: Matrices) -> Self:
        """Choose the tile."""
        vector = VECTOR_BYTES // matrices.itemsize
        edge = _EDGES[matrices.itemsize]
        wide = matrices.itemsize == 1 and not matrices.result_aligned
        rows = 2 * edge if wide else edge
        # A short dimension takes less of the tile, and leaves the other more.
        columns = max(4, vector, min(edge, _power_of_two(matrices.columns)))
        rows = min(rows * edge // columns, 256, _power_of_two(matrices.rows))
        return cls(matrices, max(8 * vector, rows), columns)

    @property
    def key(self) -> str:
        """See :class:`TransposeCandidate`."""
        return f"tiles {self.tile_rows}x{self.tile_columns}"

    @property
    def kernel(self) -> Kernel:
        """What the compiler is asked for."""
        config = cxx_config(
            "TileConfig",
            item_bytes=self.matrices.itemsize,
            rows=self.tile_rows,
            columns=self.tile_columns,
            source_aligned=self.matrices.source_aligned,
            result_aligned=self.matrices.result_aligned,
        )
        return Kernel("transpose/tiles.cuh", f"tilekern::transpose_tiles<{config}>")

    @property
    def reason(self) -> str:
        """See :class:`TransposeCandidate`."""
        return f"{self.count} tiles of {self.tile_rows}x{self.tile_columns}"

    @property
    def count(self) -> int:
        """See :class:`TransposeCandidate`."""
        return self._grid.count * self.matrices.outer.count

    @property
    def _halo(self) -> int:
        return 0 if self.matrices.result_aligned else SECTOR_BYTES // self.matrices.itemsize - 1

    @property
    def _grid(self) -> TileGrid:
        rows = -(-(self.matrices.rows + self._halo) // self.tile_rows)
        return TileGrid(rows, -(-self.matrices.columns // self.tile_columns))

    @property
    def _pitch(self) -> int:
        # Rows that start anywhere are as far beyond a multiple of 16 bytes as in the source.
        matrices = self.matrices
        row_bytes = self.tile_columns * matrices.itemsize + VECTOR_BYTES
        return row_bytes + matrices.row_stride % VECTOR_BYTES

    @property
    def _shared_bytes(self) -> int:
        matrices, vector = self.matrices, VECTOR_BYTES // self.matrices.itemsize
        rows = self.tile_rows + self._halo
        if not matrices.source_aligned:
            return rows * self._pitch + VECTOR_BYTES
        chunks = self.tile_columns * matrices.itemsize // VECTOR_BYTES
        chunks += chunks % 2 if vector == 1 else 0
        return VECTOR_BYTES * (rows * chunks + rows // vector + 1)

    def launch(self, compiled: Compiled) -> Launch:
        """Return the launch, given what ``kernel`` was compiled to."""
        matrices = self.matrices
        shape = Scalars.pack(
            f"{TileGrid.LAYOUT}I5q{OuterDims.LAYOUT}",
            *self._grid.values,
            self._pitch,
            matrices.rows,
            matrices.columns,
            matrices.row_stride,
            matrices.column_stride,
            matrices.source_bytes,
            *matrices.outer.values,
        )
        return Launch(
            entry=compiled.entry(self.kernel.name),
            grid=(self.count, 1, 1),
            block=(_THREADS, 1, 1),
            parameters=(Buffer(0), Buffer(1), shape),
            shared_memory_bytes=self._shared_bytes,
        )


def _power_of_two(size: int) -> int:
    return int(1 << (size - 1).bit_length())
