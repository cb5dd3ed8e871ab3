"""The pass that completes a reduction of a product's rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Compiled, Kernel
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gemm.epilogue import RowReductionText
from jax_tilekern.plans.launch import Buffer, Launch, Scalars
from jax_tilekern.plans.strided_rows import StridedRows

# The constants of the kernel.
_ROWS_PER_BLOCK = 32
_THREADS = 256


@dataclass(frozen=True)
class RowTilesPass:
    """Combines the partial results of all tiles of a row, in a fixed order.

    Attributes
    ----------
    reduction
        The reduction, along the kernel's rows.
    batch
        Sizes of the product's batch dimensions.
    rows
        Rows of a matrix, as the kernel computes it.
    tiles
        Tiles of a row.
    """

    reduction: RowReductionText
    batch: tuple[int, ...]
    rows: int
    tiles: int

    @property
    def kernel(self) -> Kernel:
        """The kernel to compile."""
        types = f"{self.reduction.cxx_class}, {CXX_TYPES[self.reduction.dtype]}"
        return Kernel("gemm/passes/reduce_row_tiles.cuh", f"tilekern::reduce_row_tiles<{types}>")

    @property
    def workspace_bytes(self) -> int:
        """Size of the partial results ``[batch][tile][row]``."""
        return math.prod(self.batch) * self.tiles * self.rows * self.reduction.partial_bytes

    def launch(self, compiled: Compiled, partials: Buffer, out: Buffer) -> Launch:
        """Return the launch, given what ``kernel`` was compiled to and the buffers."""
        *batch, row, _ = self.reduction.strides
        rows = StridedRows.of(zip((*self.batch, self.rows), (*batch, row), strict=True))
        shape = Scalars.pack(f"{StridedRows.LAYOUT}2I", *rows.values, self.rows, self.tiles)
        return Launch(
            entry=compiled.entry(self.kernel.name),
            grid=(math.ceil(rows.count / _ROWS_PER_BLOCK), 1, 1),
            block=(_THREADS, 1, 1),
            parameters=(partials, out, shape),
        )
