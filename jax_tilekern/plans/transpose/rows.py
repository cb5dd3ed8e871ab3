"""Plans for permutations that keep the innermost dimension: ``transpose/rows.cuh``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from jax_tilekern.compilation.compiler import Compiled, Kernel
from jax_tilekern.plans.cxx import cxx_config
from jax_tilekern.plans.launch import Buffer, Launch, Scalars
from jax_tilekern.plans.transpose.candidate import TransposeCandidate
from jax_tilekern.plans.transpose.permutation import Permutation
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
        Rows start at multiples of it, and their length is one. Below 16 bytes, vectors are
        assembled from rows that start anywhere.
    """

    row_bytes: int
    outer: OuterDims
    unit_bytes: int

    @classmethod
    def of(cls, permutation: Permutation) -> Self:
        """Return the copies for a permutation that keeps the innermost dimension."""
        outer = OuterDims.of(permutation, (len(permutation.sizes) - 1,))
        unit = math.gcd(permutation.row_bytes, VECTOR_BYTES)
        return cls(permutation.row_bytes, outer, unit if unit == VECTOR_BYTES else min(unit, 4))

    @property
    def key(self) -> str:
        """See :class:`TransposeCandidate`."""
        return "rows"

    @property
    def kernel(self) -> Kernel:
        """What the compiler is asked for."""
        fields = {"unit_bytes": self.unit_bytes, "copies": self._copies}
        config = cxx_config("RowTransposeConfig", **fields)
        return Kernel("transpose/rows.cuh", f"tilekern::transpose_rows<{config}>")

    @property
    def reason(self) -> str:
        """See :class:`TransposeCandidate`."""
        return f"{self.outer.count} rows of {self.row_bytes} bytes"

    @property
    def count(self) -> int:
        """See :class:`TransposeCandidate`."""
        return self.outer.count * self._row_vectors

    @property
    def _copies(self) -> int:
        # The copies of a thread, which are all in flight at once.
        return 2 if self.unit_bytes == VECTOR_BYTES else 4

    @property
    def _row_vectors(self) -> int:
        # A row that starts off the vectors' grid may touch one vector more.
        return -(-(self.row_bytes + VECTOR_BYTES - self.unit_bytes) // VECTOR_BYTES)

    def launch(self, compiled: Compiled) -> Launch:
        """Return the launch, given what ``kernel`` was compiled to."""
        shape = Scalars.pack(
            f"{DIVISOR}Iq{OuterDims.LAYOUT}",
            *divisor(self._row_vectors),
            self.count,
            self.row_bytes,
            *self.outer.values,
        )
        return Launch(
            entry=compiled.entry(self.kernel.name),
            grid=(-(-self.count // (_THREADS * self._copies)), 1, 1),
            block=(_THREADS, 1, 1),
            parameters=(Buffer(0), Buffer(1), shape),
        )
