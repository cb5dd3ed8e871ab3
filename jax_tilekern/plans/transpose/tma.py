"""Plans for transposes by TMA: ``transpose/tma.cuh``."""

from __future__ import annotations

from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Compiled, Kernel
from jax_tilekern.plans.cxx import cxx_config
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Launch, Scalars, TensorMap, TensorMapDtype
from jax_tilekern.plans.transpose.candidate import TransposeCandidate
from jax_tilekern.plans.transpose.shape import DIVISOR, LINE_BYTES, Matrices, TileGrid, divisor

MAX_TMA_OUTER_DIMS = 3
ITEM_BYTES = (1, 2)

_ROWS = 128
_TILE_BYTES = _ROWS * LINE_BYTES
_STAGES = 4
_OUTPUTS = 2


@dataclass(frozen=True)
class TmaTranspose(TransposeCandidate):
    """Tiles by TMA, in persistent CTAs; see ``transpose/tma.cuh``.

    Attributes
    ----------
    matrices
        Matrices of elements of 1 or 2 bytes. Rows and columns have at least 128 bytes, and are
        multiples of 16 bytes; there are at most three outer dimensions.
    """

    matrices: Matrices

    @property
    def key(self) -> str:
        """See :class:`TransposeCandidate`."""
        return f"boxes {_ROWS}x{self._cell}"

    @property
    def kernel(self) -> Kernel:
        """What the compiler is asked for."""
        config = cxx_config("BoxConfig", item_bytes=self.matrices.itemsize)
        return Kernel("transpose/tma.cuh", f"tilekern::transpose_boxes<{config}>")

    @property
    def reason(self) -> str:
        """See :class:`TransposeCandidate`."""
        return f"{self.blocks} tiles of {_ROWS}x{self._cell} by TMA"

    @property
    def blocks(self) -> int:
        """See :class:`TransposeCandidate`."""
        return self._grid.count * self.matrices.outer.count

    @property
    def _cell(self) -> int:
        return LINE_BYTES // self.matrices.itemsize

    @property
    def _grid(self) -> TileGrid:
        return TileGrid(-(-self.matrices.rows // _ROWS), -(-self.matrices.columns // self._cell))

    @property
    def _threads(self) -> int:
        # As BoxConfig has it.
        return 64 * self.matrices.itemsize

    def launch(self, compiled: Compiled, gpu: Gpu) -> Launch:
        """Return the launch, given what ``kernel`` was compiled to."""
        matrices, entry = self.matrices, compiled.entry(self.kernel.name)
        outer = matrices.outer
        unused = (1,) * (MAX_TMA_OUTER_DIMS - len(outer.sizes))
        shape = Scalars.pack(
            f"{TileGrid.LAYOUT}I" + MAX_TMA_OUTER_DIMS * DIVISOR,
            *self._grid.values,
            self.blocks,
            *(field for size in (*unused, *outer.sizes) for field in divisor(size)),
        )
        shared = (_STAGES + _OUTPUTS) * _TILE_BYTES + 8 * _STAGES
        # The system takes 1 KiB of each CTA.
        resident = min(
            (gpu.shared_memory_bytes + 1024) // (shared + 1024),
            65536 // (-(-entry.registers // 8) * 8 * self._threads),
        )
        return Launch(
            entry=entry,
            grid=(min(self.blocks, max(1, resident) * gpu.sm_count), 1, 1),
            block=(self._threads, 1, 1),
            parameters=(
                self._map(0, matrices.columns, matrices.rows, matrices.row_stride,
                          outer.source_strides, _ROWS),
                self._map(1, matrices.rows, matrices.columns, matrices.column_stride,
                          outer.result_strides, self._cell),
                shape,
            ),
            shared_memory_bytes=shared,
        )  # fmt: skip

    def _map(
        self,
        buffer: int,
        inner: int,
        second: int,
        stride: int,
        outer_strides: tuple[int, ...],
        tile_rows: int,
    ) -> TensorMap:
        unused = MAX_TMA_OUTER_DIMS - len(outer_strides)
        dtype: TensorMapDtype = "uint8" if self.matrices.itemsize == 1 else "uint16"
        return TensorMap(
            buffer=buffer,
            dtype=dtype,
            sizes=(inner, second, *(1,) * unused, *self.matrices.outer.sizes),
            strides_bytes=(stride, *(stride,) * unused, *outer_strides),
            box=(self._cell, tile_rows, 1, 1, 1),
            swizzle=128,
        )
