"""Operands and results in shared memory, of lanes that are threads (``lane_rows.cuh``).

Where lanes lie one behind the other, a thread that walks along its own row loads a sector for each
element. So the threads of a CTA copy their rows together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jax_tilekern.ops.kernel.work import IN_REGISTERS
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.lane_cost import LaneWork
from jax_tilekern.plans.lanes import LANES_WITH_ROWS

# Rows of a CTA's lanes have at most so many bytes, of which an SM has room for three.
_MAX_BYTES = 64 << 10
# Lanes that do more for each element of a row hide the latency of loads, or need more threads than
# shared memory has room for.
_MAX_INSTRUCTIONS = 100


@dataclass(frozen=True)
class Row:
    """A lane's part of an array, in shared memory."""

    array: str
    dtype: np.dtype
    size: int
    start: int  # bytes of a thread's rows before this one

    @property
    def end(self) -> int:
        # As lax::row_stride.
        return self.start + (self.size | 1) * self.dtype.itemsize

    def pointers(self) -> list[str]:
        """Return statements that declare pointers to the first thread's row, and to the own one."""
        kind = CXX_TYPES[self.dtype]
        place = f"reinterpret_cast<{kind}*>(shared + {self.start * LANES_WITH_ROWS})"
        own = f"r{self.array} + threadIdx.x * lax::row_stride({self.size})"
        return [
            f"{kind}* const r{self.array} = {place};",
            f"{kind}* const p{self.array} = {own};",
        ]

    def load(self) -> str:
        return self._copied("load", f"r{self.array}", _cta_rows(self.array, self.size))

    def store_to(self, array: str) -> str:
        return self._copied("store", _cta_rows(array, self.size), f"r{self.array}")

    def _copied(self, verb: str, target: str, source: str) -> str:
        return f"lax::{verb}_rows<kThreads, {self.size}>({target}, {source}, lanes_of_cta);"


def _cta_rows(array: str, size: int) -> str:
    return f"{array} + first_lane * {size}"


def shared_rows(
    arrays: Iterable[tuple[str, np.dtype, int | None]], work: LaneWork
) -> dict[str, Row]:
    """Return the rows of arrays, of which some have sizes, by the names of pointers to them."""
    rows: list[Row] = []
    for array, dtype, size in arrays:
        if size is not None and size > IN_REGISTERS and dtype.itemsize in (4, 8):
            row = Row(array, dtype, size, rows[-1].end if rows else 0)
            if row.end * LANES_WITH_ROWS <= _MAX_BYTES:
                rows.append(row)
    elements = math.fsum(row.size for row in rows)
    if work.instructions > _MAX_INSTRUCTIONS * elements:
        return {}
    return {f"p{row.array}": row for row in rows}
