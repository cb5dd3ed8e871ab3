"""Plans for permutations that keep the innermost dimension: ``transpose/rows.cuh``."""

from __future__ import annotations

from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Compiled, Kernel
from jax_tilekern.plans.cxx import cxx_config
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, Scalars
from jax_tilekern.plans.transpose.candidate import TransposeCandidate
from jax_tilekern.plans.transpose.shape import DIVISOR, VECTOR_BYTES, OuterDims, divisor

_THREADS = 256


@dataclass(frozen=True)
class RowTranspose(TransposeCandidate):
    """Copies rows to other places; see ``transpose/rows.cuh``.

    Attributes
    ----------
    row_bytes
        Bytes of a row.
    outer
        The dimensions that number the rows.
    unit_bytes
        Rows start at multiples of it, and their length is one.
    vector_bytes
        Copied at a time: a unit, or 16 bytes of rows that start anywhere.
    """

    row_bytes: int
    outer: OuterDims
    unit_bytes: int
    vector_bytes: int

    @property
    def key(self) -> str:
        """See :class:`TransposeCandidate`."""
        return f"rows by {self.vector_bytes}"

    @property
    def kernel(self) -> Kernel:
        """What the compiler is asked for."""
        config = cxx_config(
            "RowTransposeConfig",
            unit_bytes=self.unit_bytes,
            vector_bytes=self.vector_bytes,
            copies=self._copies,
        )
        return Kernel("transpose/rows.cuh", f"tilekern::transpose_rows<{config}>")

    @property
    def reason(self) -> str:
        """See :class:`TransposeCandidate`."""
        return f"{self.outer.count} rows of {self.row_bytes} bytes, {self.vector_bytes} at a time"

    @property
    def vectors(self) -> int:
        """Vectors of all rows."""
        return self.outer.count * self._row_vectors

    @property
    def blocks(self) -> int:
        """See :class:`TransposeCandidate`."""
        return -(-self.vectors // (_THREADS * self._copies))

    @property
    def _direct(self) -> bool:
        return self.vector_bytes == self.unit_bytes

    @property
    def _copies(self) -> int:
        # The copies of a thread, which are all in flight at once.
        return 2 if self._direct and self.vector_bytes == VECTOR_BYTES else 4

    @property
    def _row_vectors(self) -> int:
        # A row that starts off the vectors' grid may touch one vector more.
        spare = 0 if self._direct else VECTOR_BYTES - self.unit_bytes
        return -(-(self.row_bytes + spare) // self.vector_bytes)

    def launch(self, compiled: Compiled, gpu: Gpu) -> Launch:
        """Return the launch, given what ``kernel`` was compiled to."""
        shape = Scalars.pack(
            f"{DIVISOR}Iq{OuterDims.LAYOUT}",
            *divisor(self._row_vectors),
            self.vectors,
            self.row_bytes,
            *self.outer.values,
        )
        return Launch(
            entry=compiled.entry(self.kernel.name),
            grid=(self.blocks, 1, 1),
            block=(_THREADS, 1, 1),
            parameters=(Buffer(0), Buffer(1), shape),
        )
