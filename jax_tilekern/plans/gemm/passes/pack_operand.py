"""The pass that copies an operand into a layout that tensor maps can describe."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Compiled, Kernel
from jax_tilekern.plans.cxx import cxx_config
from jax_tilekern.plans.gemm.geometry import StridedOperand
from jax_tilekern.plans.gpu import VECTOR_BYTES
from jax_tilekern.plans.launch import Buffer, Launch, Scalars
from jax_tilekern.plans.strided_rows import (
    MAX_ROWS,
    ROW_BYTES,
    RowTiling,
    StridedRows,
    source_rows,
)

_THREADS = 256


@dataclass(frozen=True)
class PackPass:
    """Copies an operand to ``[batch][mn][k_padded]`` with unit stride along ``k``.

    Rows start at multiples of 128 bytes, so each row of a tile lies in one cache line, and are
    padded with zeros. Batch dimensions that are broadcast are left out.

    Attributes
    ----------
    operand
        What to copy, at any address and with any strides.
    itemsize
        Bytes of an element: 1, 2, 4 or 8.
    """

    operand: StridedOperand
    itemsize: int

    @property
    def kernel(self) -> Kernel:
        """The kernel to compile."""
        config = cxx_config("PackConfig", item_bytes=self.itemsize, k_major=self.operand.k_major)
        return Kernel("gemm/passes/pack_operand.cuh", f"tilekern::pack_operand<{config}>")

    @property
    def k_padded(self) -> int:
        """Elements of a packed row."""
        return self._vectors * VECTOR_BYTES // self.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the packed operand: of the batch dimensions, M or N, and ``k``."""
        matrix = self.operand.mn * self.k_padded
        return (*self.operand.dense_batch_strides(matrix), self.k_padded, 1)

    @property
    def workspace_bytes(self) -> int:
        """Size of the packed operand."""
        return self.operand.copied_rows * self.k_padded * self.itemsize

    @property
    def fits(self) -> bool:
        """Whether a launch can have that many rows and CTAs."""
        return max(self.operand.copied_rows, self._blocks) <= MAX_ROWS

    @property
    def _vectors(self) -> int:
        return -(-self.operand.k * self.itemsize // ROW_BYTES) * (ROW_BYTES // VECTOR_BYTES)

    @property
    def _row_tiling(self) -> RowTiling:
        """How threads share the rows of a k-major operand."""
        return RowTiling.of(self.operand.copied_rows, self._vectors, 4, _THREADS)

    @property
    def _tiles(self) -> tuple[int, int]:
        """Tiles of a matrix along M or N and along ``k``, unless it is k-major."""
        # TilePacker reads 16 bytes (8 of 1-byte elements) at a time, 64 bytes in a row.
        tile_mn, tile_vectors = 256 // self.itemsize, 8 if self.itemsize == 1 else 16
        return -(-self.operand.mn // tile_mn), -(-self._vectors // tile_vectors)

    @property
    def _blocks(self) -> int:
        if self.operand.k_major:
            return self._row_tiling.blocks
        return self.operand.matrices * math.prod(self._tiles)

    def launch(self, compiled: Compiled, source: Buffer, packed: Buffer) -> Launch:
        """Return the launch, given what ``kernel`` was compiled to and the buffers.

        Raises
        ------
        ValueError
            If it does not fit.
        """
        operand, k_major = self.operand, self.operand.k_major
        shape = Scalars.pack(
            f"{StridedRows.LAYOUT}q7I",
            *source_rows(operand, self.itemsize).values,
            0 if k_major else operand.k_stride * self.itemsize,
            *(self._row_tiling.values if k_major else (0, 0)),
            operand.mn,
            operand.k,
            self._vectors,
            *((0, 0) if k_major else self._tiles),
        )
        return Launch(
            entry=compiled.entry(self.kernel.name),
            grid=(self._blocks, 1, 1),
            block=(_THREADS, 1, 1),
            parameters=(source, packed, shape),
        )
