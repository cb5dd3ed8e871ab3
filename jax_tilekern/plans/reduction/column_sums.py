"""Passes of ``reduction/column_sums.cuh``: sums across the dimension of unit stride."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Kernel
from jax_tilekern.plans.cxx import cxx_config
from jax_tilekern.plans.gpu import VECTOR_BYTES
from jax_tilekern.plans.launch import Scalars
from jax_tilekern.plans.reduction.problem import (
    BATCH_LAYOUT,
    MAX_INDICES,
    THREADS,
    Pass,
    Reduction,
    load_bytes,
)


@dataclass(frozen=True)
class ColumnPass(Pass):
    """Adds up columns, which have unit stride."""

    @property
    def key(self) -> str:
        """Lanes."""
        return f"columns {self.lanes}"

    @property
    def kernel(self) -> Kernel:
        """What the compiler is asked for."""
        fields = {"vector_bytes": self.vector_bytes, "unroll": self._unroll}
        return self._kernel("column", cxx_config("ColumnConfig", **fields))

    @property
    def _unroll(self) -> int:
        # A float64 takes two registers, and products load a vector too.
        wide = self.reduction.sum_dtype.itemsize == 8 and self.reduction.rhs_strides is not None
        return 4 if wide else 8

    @property
    def k_step(self) -> int:
        """Rows of a CTA."""
        return THREADS // self.lanes

    @property
    def _whole_blocks(self) -> int:
        return math.prod(self.reduction.batch) * self._tiles

    @property
    def resident_ctas(self) -> int:
        """CTAs that an SM holds, by ``ColumnConfig``."""
        return 3 if self.vector_bytes == VECTOR_BYTES else 4

    @property
    def _busy(self) -> float:
        rows = min(1.0, self.split_k / self.k_step)
        return rows * self._vectors / (self._tiles * self.lanes)

    @property
    def _loads(self) -> float:
        return max(1.0, min(self._unroll, self.split_k / self.k_step))

    @property
    def _row_bytes(self) -> int:
        return self.vector_bytes * (THREADS if self._tiles == 1 else self.lanes)

    @property
    def _vectors(self) -> int:
        return self.reduction.outputs // self.vector

    @property
    def _tiles(self) -> int:
        return math.ceil(self._vectors / self.lanes)

    def _shape(self) -> Scalars:
        reduction = self.reduction
        return Scalars.pack(
            f"{BATCH_LAYOUT}6q4I",
            *reduction.pack_batch(),
            reduction.lhs_strides[-1],
            reduction.rhs_strides[-1] if reduction.rhs_strides else 0,
            reduction.out_strides[-1],
            self.split_stride,
            reduction.k,
            self.split_k,
            self._vectors,
            self._tiles,
            self.splits,
            self.lanes.bit_length() - 1,
        )


def column_passes(reduction: Reduction) -> Iterator[ColumnPass]:
    """Yield the passes for a reduction, ``k`` not split."""
    *lhs_batch, line, k = reduction.lhs_strides
    if reduction.outputs == 1 or line != 1:
        return
    if math.prod(reduction.batch) > MAX_INDICES or reduction.k > MAX_INDICES:
        return
    vector_bytes = load_bytes([*lhs_batch, reduction.outputs, k], reduction.dtype)
    vectors = reduction.outputs * reduction.dtype.itemsize // vector_bytes
    if vectors > MAX_INDICES:
        return
    enough = 1 << (vectors - 1).bit_length()
    for lanes in sorted({min(lanes, enough) for lanes in (2, 8, 16, 32, 128)}):
        yield ColumnPass(reduction, vector_bytes, lanes)
