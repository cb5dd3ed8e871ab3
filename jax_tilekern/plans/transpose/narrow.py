"""Plans for matrices of a few long rows or columns: ``transpose/narrow.cuh``."""

from __future__ import annotations

from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Compiled, Kernel
from jax_tilekern.plans.cxx import cxx_config
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, Scalars
from jax_tilekern.plans.transpose.candidate import TransposeCandidate
from jax_tilekern.plans.transpose.shape import DIVISOR, Matrices, OuterDims, divisor

# The 32-bit words of a thread, if a group of records has no more.
_THREAD_WORDS = 16


@dataclass(frozen=True)
class NarrowTranspose(TransposeCandidate):
    """Splits or interleaves records of a few elements; see ``transpose/narrow.cuh``.

    Attributes
    ----------
    matrices
        With rows (``split``) or columns that are multiples of 16 bytes.
    split
        Whether the records are the source's.
    """

    matrices: Matrices
    split: bool

    @property
    def narrow(self) -> int:
        """Items of a record."""
        return self.matrices.columns if self.split else self.matrices.rows

    @property
    def length(self) -> int:
        """Records of a matrix."""
        return self.matrices.rows if self.split else self.matrices.columns

    @property
    def key(self) -> str:
        """See :class:`TransposeCandidate`."""
        return "split" if self.split else "interleave"

    @property
    def kernel(self) -> Kernel:
        """What the compiler is asked for."""
        config = cxx_config(
            "NarrowConfig",
            item_bytes=self.matrices.itemsize,
            narrow=self.narrow,
            groups=self._groups,
            split=self.split,
        )
        return Kernel("transpose/narrow.cuh", f"tilekern::transpose_narrow<{config}>")

    @property
    def reason(self) -> str:
        """See :class:`TransposeCandidate`."""
        what = "split" if self.split else "interleaved"
        return f"records of {self.narrow} elements are {what}, {self._tile_records} per CTA"

    @property
    def blocks(self) -> int:
        """See :class:`TransposeCandidate`."""
        return self._tiles * self.matrices.outer.count

    # As in NarrowConfig: 32-bit words of a group of records, and its records.

    @property
    def _group_words(self) -> int:
        return self.narrow * max(1, self.matrices.itemsize // 4)

    @property
    def _groups(self) -> int:
        return max(1, _THREAD_WORDS // self._group_words)

    @property
    def _tile_records(self) -> int:
        return 256 * self._groups * max(1, 4 // self.matrices.itemsize)

    @property
    def _tiles(self) -> int:
        return -(-self.length // self._tile_records)

    def launch(self, compiled: Compiled, gpu: Gpu) -> Launch:
        """Return the launch, given what ``kernel`` was compiled to."""
        matrices = self.matrices
        shape = Scalars.pack(
            f"{OuterDims.LAYOUT}2q{DIVISOR}",
            *matrices.outer.values,
            self.length,
            matrices.column_stride if self.split else matrices.row_stride,
            *divisor(self._tiles),
        )
        records_bytes = 256 * self._groups * 4 * self._group_words
        return Launch(
            entry=compiled.entry(self.kernel.name),
            grid=(self.blocks, 1, 1),
            block=(256, 1, 1),
            parameters=(Buffer(0), Buffer(1), shape),
            # 16 bytes of padding follow every 128.
            shared_memory_bytes=records_bytes // 128 * 144,
        )
