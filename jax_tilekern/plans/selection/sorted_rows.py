"""What a sort of rows computes, as a value, and the costs of a pass over a digit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jax_tilekern.plans.policy.workload import Workload, sort_workload

# ``reversed`` is the reverse of ``ascending``; in both and in ``descending`` the order is stable
# before it is reversed, and in ``descending`` after.
Order = Literal["ascending", "reversed", "descending"]
COLUMN_BYTES = 4
DIGIT_BITS = 8
# Measured on an H200, where a CTA waits for itself: cycles for an element of each lane of a warp in
# a pass, and for the counts of a pass.
ITEM_LATENCY, PASS_LATENCY = 190, 700


@dataclass(frozen=True)
class SortedRows:
    """A sort of each row of a matrix."""

    rows: int
    columns: int
    dtype: np.dtype[Any]
    order: Order
    values: bool  # whether the elements are results
    indices: bool  # whether their columns are

    @property
    def passes(self) -> int:
        """The most digits that elements differ in."""
        return self.dtype.itemsize * 8 // DIGIT_BITS

    @property
    def workload(self) -> Workload:
        return sort_workload(self.rows, self.columns, self.dtype, self.indices)

    @property
    def bytes(self) -> int:
        """Bytes of the elements and of the results."""
        written = self.dtype.itemsize * self.values + COLUMN_BYTES * self.indices
        return self.rows * self.columns * (self.dtype.itemsize + written)

    @property
    def alignments(self) -> tuple[int, ...]:
        """Alignments of the elements and of the results."""
        size = self.dtype.itemsize
        return size, *[size] * self.values, *[COLUMN_BYTES] * self.indices
