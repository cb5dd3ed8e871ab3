"""Reductions to segments, as their planners see them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import VECTOR_BYTES, WARP, power_of_two

Combiner = Literal["sum", "prod", "max", "min"]
# What has the same bits in any type that holds the values.
EXTREMA: tuple[Combiner, ...] = ("max", "min")

# The classes of `ffi/cuda/segments/segments.cuh`.
CXX_REDUCTIONS: dict[Combiner, str] = {
    "sum": "tilekern::Sum",
    "prod": "tilekern::Product",
    "max": "tilekern::Maximum",
    "min": "tilekern::Minimum",
}


@dataclass(frozen=True)
class MapOperand:
    """An array that has a row for each edge, or from which edges gather rows."""

    dtype: np.dtype[Any]
    rows: int
    index: int | None = None  # the index array with the row that an edge reads; None for its own
    broadcast: bool = False  # whether it has one column, which is that of all columns


@dataclass(frozen=True)
class MapText:
    """A function of one element of each operand in CUDA: ``x0``, ``x1``, and so on."""

    computed: tuple[str, ...]  # the C++ types that operands are computed in
    statements: tuple[str, ...]
    result: str


@dataclass(frozen=True)
class SegmentReduction:
    """A reduction of the values of edges to segments."""

    reduction: Combiner
    edges: int  # at least one
    segments: int  # of a batch, at least one
    batch: int  # batches, whose edges and segments follow one another
    columns: int  # values of an edge, at least one
    operands: tuple[MapOperand, ...]
    indices: int  # number of index arrays
    text: MapText | None  # the function of the values; None for the one operand itself
    value: np.dtype[Any]  # the type that is reduced in
    out_dtype: np.dtype[Any]
    ordered: bool  # whether edges are read in an order, because they are not sorted by key

    def of_rows(self, columns: int, dtype: np.dtype[Any]) -> SegmentReduction:
        """Return the reduction of stored rows of floats to the same segments."""
        if dtype.kind == "c":
            columns, dtype = 2 * columns, np.dtype(f"f{dtype.itemsize // 2}")
        return dataclasses.replace(
            self,
            columns=columns,
            operands=(MapOperand(dtype, self.edges),),
            value=dtype,
            out_dtype=dtype,
        )

    @property
    def period(self) -> int:
        """Bins of a batch: its segments, and what lies before and behind them."""
        return self.segments + 2

    @property
    def bins(self) -> int:
        """Bins of all batches."""
        return self.batch * self.period

    @property
    def results(self) -> int:
        """Elements of the result."""
        return self.batch * self.segments * self.columns

    @property
    def cxx_value(self) -> str:
        return CXX_TYPES[self.value]

    @property
    def vector(self) -> int:
        """Adjacent columns of a thread, which it loads at once."""
        sizes = [x.dtype.itemsize for x in self.operands if not x.broadcast]
        widest = max(self.value.itemsize, *sizes, 1)
        narrowest = min(sizes, default=4)
        # Accumulators of 16-bit floats are twice as wide as their elements.
        most = VECTOR_BYTES // max(narrowest, widest // 2)
        return math.gcd(most, self.columns)

    @property
    def lanes(self) -> int:
        """Threads of a warp that are side by side on a row."""
        vectors = self.columns // self.vector
        return min(WARP, power_of_two(vectors))

    @property
    def tiles(self) -> int:
        """Tiles of columns, as wide as these threads."""
        return math.ceil(self.columns / (self.lanes * self.vector))
