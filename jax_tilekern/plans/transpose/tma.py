"""Plans for transposes through the copy engine: ``transpose/tma.cuh``."""

from __future__ import annotations

from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Compiled, Kernel
from jax_tilekern.plans.cxx import cxx_config
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Launch, Scalars, TensorMap, TensorMapDtype
from jax_tilekern.plans.transpose.candidate import TransposeCandidate
from jax_tilekern.plans.transpose.shape import DIVISOR, LINE_BYTES, Matrices, TileGrid, divisor

MAX_OUTER_DIMS = 3
ITEM_BYTES = (1, 2)

_ROWS = 128
_TILE_BYTES = _ROWS * LINE_BYTES
_STAGES = 4
_OUTPUTS = 2


@dataclass(frozen=True)
class BoxTranspose(TransposeCandidate):
    """Tiles through the copy engine, by blocks that stay; see ``transpose/tma.cuh``.

    Attributes
    ----------
    matrices
        Of items of 1 or 2 bytes, with rows and columns of 128 bytes at least that are multiples of
        16 bytes, and at most three outer dimensions.
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
        return f"{self.blocks} tiles of {_ROWS}x{self._cell} by the copy engine"

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
        # As in BoxConfig.
        return 64 * self.matrices.itemsize

    def launch(self, compiled: Compiled, gpu: Gpu) -> Launch:
        """Return the launch, given what ``kernel`` was compiled to."""
        matrices, entry = self.matrices, compiled.entry(self.kernel.name)
        outer = matrices.outer
        unused = (1,) * (MAX_OUTER_DIMS - len(outer.sizes))
        shape = Scalars.pack(
            f"{TileGrid.LAYOUT}I" + MAX_OUTER_DIMS * DIVISOR,
            *self._grid.values,
            self.blocks,
            *(field for size in (*unused, *outer.sizes) for field in divisor(size)),
        )
        shared = (_STAGES + _OUTPUTS) * _TILE_BYTES + 8 * _STAGES
        # Each block takes 1 KiB of its own.
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
        box_lines: int,
    ) -> TensorMap:
        unused = MAX_OUTER_DIMS - len(outer_strides)
        dtype: TensorMapDtype = "uint8" if self.matrices.itemsize == 1 else "uint16"
        return TensorMap(
            buffer=buffer,
            dtype=dtype,
            sizes=(inner, second, *(1,) * unused, *self.matrices.outer.sizes),
            strides_bytes=(stride, *(stride,) * unused, *outer_strides),
            box=(self._cell, box_lines, 1, 1, 1),
            swizzle=128,
        )
