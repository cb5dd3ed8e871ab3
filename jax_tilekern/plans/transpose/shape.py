"""A permutation as the kernels of a transpose take it; see ``transpose/shape.cuh``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from jax_tilekern.plans.gpu import VECTOR_BYTES
from jax_tilekern.plans.transpose.permutation import Permutation

MAX_OUTER_DIMS = 6
# A sector of memory.
SECTOR_BYTES = 32

DIVISOR = "3I"


def divisor(value: int) -> tuple[int, int, int]:
    """Return the fields of ``Divisor`` of ``transpose/shape.cuh``, by which its numbers divide."""
    shift = 31 + (value - 1).bit_length()
    return value, -(-(1 << shift) // value), shift


@dataclass(frozen=True)
class OuterDims:
    """``OuterDims`` of ``transpose/shape.cuh``: sizes, and strides in bytes, outermost first."""

    sizes: tuple[int, ...]
    source_strides: tuple[int, ...]
    result_strides: tuple[int, ...]

    LAYOUT: ClassVar = f"{2 * MAX_OUTER_DIMS}q" + MAX_OUTER_DIMS * DIVISOR

    @classmethod
    def of(cls, permutation: Permutation, without: tuple[int, ...]) -> OuterDims:
        """Return a permutation's dimensions but some, in the result's order."""
        dims = [dim for dim in permutation.order if dim not in without]
        source, result = permutation.source_strides, permutation.result_strides
        return cls(
            tuple(permutation.sizes[dim] for dim in dims),
            tuple(source[dim] for dim in dims),
            tuple(result[dim] for dim in dims),
        )

    @property
    def count(self) -> int:
        """Product of the sizes."""
        return math.prod(self.sizes)

    @property
    def values(self) -> tuple[int, ...]:
        """What a launch passes, as ``LAYOUT`` packs it."""
        unused = MAX_OUTER_DIMS - len(self.sizes)
        zeros = (0,) * unused
        sizes = [field for size in (*(1,) * unused, *self.sizes) for field in divisor(size)]
        return (*zeros, *self.source_strides, *zeros, *self.result_strides, *sizes)


@dataclass(frozen=True)
class TileGrid:
    """``TileGrid`` of ``transpose/shape.cuh``: rows and columns of the tiles of a matrix."""

    rows: int
    columns: int

    LAYOUT: ClassVar = "I" + 4 * DIVISOR

    @property
    def count(self) -> int:
        """Tiles of a matrix."""
        return self.rows * self.columns

    @property
    def values(self) -> tuple[int, ...]:
        """What a launch passes, as ``LAYOUT`` packs it."""
        # Columns that are too long for L2 to keep their neighbours are walked side by side.
        width = min(self.columns, max(2, self.rows // 128))
        divisors = (self.count, self.rows * width, width, self.columns % width or width)
        return (self.columns, *(field for value in divisors for field in divisor(value)))


@dataclass(frozen=True)
class Matrices:
    """A permutation as rows, columns and outer dimensions; strides are in bytes.

    Attributes
    ----------
    rows, columns
        Sizes of the result's and of the source's innermost dimension.
    row_stride
        Between rows, in the source.
    column_stride
        Between columns, in the result.
    outer
        The other dimensions, in the result's order.
    itemsize
        Bytes of an item.
    """

    rows: int
    columns: int
    row_stride: int
    column_stride: int
    outer: OuterDims
    itemsize: int

    @classmethod
    def of(cls, permutation: Permutation) -> Matrices:
        """Return the matrices of a permutation that does not keep the innermost dimension."""
        sizes, order = permutation.sizes, permutation.order
        source, result = permutation.source_strides, permutation.result_strides
        row, column = order[-1], len(order) - 1
        return cls(
            sizes[row],
            sizes[column],
            source[row],
            result[column],
            OuterDims.of(permutation, (row, column)),
            permutation.itemsize,
        )

    @property
    def source_bytes(self) -> int:
        """Bytes of the whole array."""
        return self.rows * self.columns * self.outer.count * self.itemsize

    @property
    def source_aligned(self) -> bool:
        """Whether all rows of the source start at multiples of 16 bytes."""
        return self.columns * self.itemsize % VECTOR_BYTES == 0

    @property
    def result_aligned(self) -> bool:
        """Whether all rows of the result start at a sector."""
        return self.rows * self.itemsize % SECTOR_BYTES == 0
