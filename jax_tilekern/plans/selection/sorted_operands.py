"""Predicted times of sorts of several arrays, by kernels that sort rows, and by XLA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import PredictedUs
from jax_tilekern.plans.policy.xla_sorts import network_sort_us, xla_sort_us
from jax_tilekern.plans.selection.sorted_rows import COLUMN_BYTES

# Bytes of memory that are read for an element at a random place.
_SECTOR_BYTES = 64


@dataclass(frozen=True)
class SortedOperands:
    """Rows of several arrays that are sorted by the first ones."""

    rows: int
    columns: int
    keys: tuple[int, ...]  # bytes of an element of each
    payloads: tuple[int, ...]
    gathered: tuple[int, ...]  # of the payloads, those that are no positions

    def predicted(self, sorts: Sequence[PredictedUs], gpu: Gpu) -> PredictedUs:
        """Return the times of sorts of each key with gathers, and of XLA's sort of all.

        A sort takes the time of XLA's where that is less, because then it is XLA's.
        """
        found = [min(x.ours, x.xla) for x in sorts if x.ours is not None and x.xla is not None]
        if len(found) < len(sorts):
            return PredictedUs()
        # A key is gathered before its sort and, but for the first one, behind all. So is the order.
        first, *others = self.keys
        moved = (*(others * 2), *[COLUMN_BYTES] * len(others), *self.gathered)
        rates, elements = gpu.rates, self.rows * self.columns
        gathers = sum(
            rates.next_launch_cycles
            + elements * (COLUMN_BYTES + _SECTOR_BYTES + size) / rates.memory_bandwidth
            for size in moved
        )
        xla = network_sort_us(self.rows, self.columns, sum(self.keys) + sum(self.payloads))
        if not others and len(self.payloads) <= 1:
            xla = min(xla, xla_sort_us(self.rows, self.columns, first, bool(self.payloads)))
        return PredictedUs(sum(found) + gathers / rates.cycles_per_microsecond, xla)
