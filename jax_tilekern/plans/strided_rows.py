"""Arrays as passes over memory see them: their rows, and how threads share these.

Strides are in elements, except those of :class:`StridedRows`, which are in the unit of its kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from jax_tilekern.plans.gemm.geometry import MAX_BATCH_DIMS, StridedOperand

# Rows that a pass writes are padded to multiples of this.
ROW_BYTES = 128
# The maximum number of rows, and of CTAs, of a launch.
MAX_ROWS = 2**31 - 1


@dataclass(frozen=True)
class StridedRows:
    """``StridedRows`` of ``strided_rows.cuh``."""

    strides: tuple[int, ...]
    sizes: tuple[int, ...]

    LAYOUT = f"{MAX_BATCH_DIMS + 1}q{MAX_BATCH_DIMS + 2}I"

    @classmethod
    def of(cls, dims: Iterable[tuple[int, int]]) -> StridedRows:
        """Return the rows that dimensions number, given as sizes and strides, outermost first."""
        merged = merged_dims(dims)
        padded = [(1, 0)] * (MAX_BATCH_DIMS + 1 - len(merged)) + merged
        rows = cls(tuple(stride for _, stride in padded), tuple(size for size, _ in padded))
        check_rows(rows.count)
        return rows

    @property
    def count(self) -> int:
        """Number of rows."""
        return math.prod(self.sizes)

    @property
    def values(self) -> tuple[int, ...]:
        """The fields, as ``LAYOUT`` packs them."""
        return (*self.strides, *self.sizes, self.count)


@dataclass(frozen=True)
class RowTiling:
    """``RowTiling`` of ``strided_rows.cuh``, and the number of CTAs."""

    segments: int
    log2_lanes: int
    blocks: int

    @classmethod
    def of(cls, rows: int, units: int, max_per_lane: int, threads: int) -> RowTiling:
        """Choose the lanes of a row: a warp first, and more before a lane takes several units."""
        log2_lanes = min((units - 1).bit_length(), 5)
        while 1 << log2_lanes < threads and units > max_per_lane << log2_lanes:
            log2_lanes += 1
        segments = -(-units // (max_per_lane << log2_lanes))
        return cls(segments, log2_lanes, segments * -(-rows // (threads >> log2_lanes)))

    @property
    def values(self) -> tuple[int, int]:
        """The fields that the kernel takes."""
        return self.segments, self.log2_lanes


def source_rows(operand: StridedOperand, itemsize: int) -> StridedRows:
    """Return the rows of a k-major operand, or its matrices, with strides in bytes."""
    dims = [*operand.copied_batch]
    if operand.k_major:
        dims.append((operand.mn, operand.mn_stride))
    return StridedRows.of((size, stride * itemsize) for size, stride in dims)


def merged_dims(dims: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return sizes and strides of dimensions, after merging contiguous neighbours."""
    merged: list[tuple[int, int]] = []
    for size, stride in dims:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = merged[-1][0] * size, stride
        else:
            merged.append((size, stride))
    return merged


def check_rows(rows: int) -> None:
    """Raise ValueError if a launch cannot have so many rows."""
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows are more than {MAX_ROWS}")
