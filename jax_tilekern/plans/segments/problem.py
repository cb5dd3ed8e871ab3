"""What is reduced to segments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import VECTOR_BYTES, WARP

Combiner = Literal["sum", "prod", "max", "min"]


# The classes of `ffi/cuda/segments/segments.cuh`.
CXX_REDUCTIONS: dict[Combiner, str] = {
    "sum": "tilekern::Sum",
    "prod": "tilekern::Product",
    "max": "tilekern::Maximum",
    "min": "tilekern::Minimum",
}


@dataclass(frozen=True)
class MapOperand:
    """An array that has a row for each edge, or from which edges gather rows.

    Attributes
    ----------
    dtype
        Its type.
    rows
        Number of its rows.
    index
        Which of the index arrays says what row an edge reads; ``None`` if it is the edge's own.
    broadcast
        Whether it has one column, which is that of all columns.
    """

    dtype: np.dtype[Any]
    rows: int
    index: int | None = None
    broadcast: bool = False


@dataclass(frozen=True)
class MapText:
    """A function of one element of each operand in CUDA: ``x0``, ``x1``, and so on.

    Attributes
    ----------
    computed
        The C++ types of the operands in the function.
    statements
        C++ statements.
    result
        The C++ expression of its value.
    """

    computed: tuple[str, ...]
    statements: tuple[str, ...]
    result: str


@dataclass(frozen=True)
class SegmentReduction:
    """A reduction of the values of edges to segments.

    Attributes
    ----------
    reduction
        How values are combined.
    edges
        Number of edges, at least one.
    segments
        Segments of a batch, at least one.
    batch
        Number of batches, whose edges and segments follow one another.
    columns
        Values of an edge, at least one.
    operands
        The arrays that the values are computed of.
    indices
        Number of index arrays.
    text
        The function that computes them; ``None`` if they are the one operand itself.
    value
        The type that is reduced in.
    out_dtype
        Type of the result.
    ordered
        Whether edges are read in an order, because they are not sorted by their keys.
    """

    reduction: Combiner
    edges: int
    segments: int
    batch: int
    columns: int
    operands: tuple[MapOperand, ...]
    indices: int
    text: MapText | None
    value: np.dtype[Any]
    out_dtype: np.dtype[Any]
    ordered: bool

    @property
    def period(self) -> int:
        """Bins of a batch: its segments, and what lies before and behind them."""
        return self.segments + 2

    @property
    def bins(self) -> int:
        """Bins of all batches."""
        return self.batch * self.period

    @property
    def cxx_value(self) -> str:
        """The type that is reduced in, in C++."""
        return CXX_TYPES[self.value]

    @property
    def vector(self) -> int:
        """Adjacent columns of a thread, which it loads at once."""
        widest = max(
            self.value.itemsize, *(x.dtype.itemsize for x in self.operands if not x.broadcast), 1
        )
        narrowest = min((x.dtype.itemsize for x in self.operands if not x.broadcast), default=4)
        # Accumulators of 16-bit floats are twice as wide as their elements.
        most = VECTOR_BYTES // max(narrowest, widest // 2)
        return math.gcd(most, self.columns)

    @property
    def lanes(self) -> int:
        """Threads of a warp that are side by side on a row."""
        vectors = self.columns // self.vector
        return min(WARP, 1 << (vectors - 1).bit_length())

    @property
    def tiles(self) -> int:
        """Tiles of columns, as wide as these threads."""
        return math.ceil(self.columns / (self.lanes * self.vector))
