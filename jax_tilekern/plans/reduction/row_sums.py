"""Passes of ``reduction/row_sums.cuh``: products of rows and a vector, and their partial sums."""

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
class RowPass(Pass):
    """Adds up rows, whose ``k`` has unit stride.

    Attributes
    ----------
    rows
        Rows of a thread.
    """

    rows: int = 1

    @property
    def key(self) -> str:
        """Rows of a thread, and lanes."""
        return f"rows {self.rows}x{self.lanes}"

    @property
    def kernel(self) -> Kernel:
        """What the compiler is asked for."""
        fields = {"vector_bytes": self.vector_bytes, "rows": self.rows, "unroll": self._unroll}
        return self._kernel("row", cxx_config("RowConfig", **fields))

    @property
    def k_step(self) -> int:
        """Elements of ``k`` that the lanes take with a load each."""
        return self.vector * self.lanes

    @property
    def _unroll(self) -> int:
        # Eight loads are in flight, half of which are the vector's if there is one row.
        halved = self.rows == 1 and self.reduction.rhs_strides is not None
        return 4 if halved else 8 // self.rows

    @property
    def _whole_blocks(self) -> int:
        return math.ceil(self._groups / (THREADS // self.lanes))

    @property
    def resident_ctas(self) -> int:
        """CTAs that an SM holds, by ``RowConfig``."""
        return 4 if self.rows == 1 else 2

    @property
    def _busy(self) -> float:
        threads = self.blocks * THREADS * self.rows
        outputs = math.prod(self.reduction.batch) * self.reduction.outputs
        vectors = max(1.0, self.split_k / self.vector)
        return min(1.0, vectors / self.lanes) * outputs * self.splits * self.lanes / threads

    @property
    def _loads(self) -> float:
        each = max(1.0, min(self._unroll, self.split_k / self.k_step))
        return each * (self.rows + 1 / self.rows if self.reduction.rhs_strides else self.rows)

    @property
    def _row_bytes(self) -> int:
        dense = self.reduction.lhs_strides[-2] == self.reduction.k
        short = self.split_k <= self.k_step * self._unroll
        return self.vector_bytes * (THREADS if dense and short else self.lanes)

    @property
    def _row_groups(self) -> int:
        return math.ceil(self.reduction.outputs / self.rows)

    @property
    def _groups(self) -> int:
        return math.prod(self.reduction.batch) * self._row_groups

    def _shape(self) -> Scalars:
        reduction = self.reduction
        return Scalars.pack(
            f"{BATCH_LAYOUT}5q5I",
            *reduction.pack_batch(),
            reduction.lhs_strides[-2],
            reduction.out_strides[-1],
            self.split_stride,
            reduction.k,
            self.split_k,
            reduction.outputs,
            self._row_groups,
            self._groups,
            self.splits,
            self.lanes.bit_length() - 1,
        )


def row_passes(reduction: Reduction) -> Iterator[RowPass]:
    """Yield the passes for a reduction, ``k`` not split."""
    *lhs_batch, line, k = reduction.lhs_strides
    *rhs_batch, rhs_k = reduction.rhs_strides or (1,)
    if reduction.k > 1 and not k == rhs_k == 1:
        return
    if math.prod(reduction.batch) * reduction.outputs > MAX_INDICES:
        return
    steps = [*lhs_batch, *rhs_batch, line if reduction.outputs > 1 else 0]
    vector_bytes = load_bytes(steps, reduction.dtype)
    vectors = max(1, reduction.k * reduction.dtype.itemsize // vector_bytes)
    enough = 1 << (vectors - 1).bit_length()
    for lanes in sorted({min(lanes, enough) for lanes in (8, 32, THREADS)}):
        for rows in (1, 4):
            groups = math.prod(reduction.batch) * reduction.outputs // rows
            # More threads share a row before any is idle.
            idle = lanes < min(enough, THREADS) and groups * lanes < THREADS
            # A row of a whole CTA has enough loads in flight, unless they are narrow.
            alone = lanes == THREADS and vector_bytes == VECTOR_BYTES
            if rows <= (1 if alone else reduction.outputs) and not idle:
                yield RowPass(reduction, vector_bytes, lanes, rows=rows)
