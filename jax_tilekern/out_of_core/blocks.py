"""The division of a product into blocks for the available memory: a function of sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

# The extents of blocks are multiples of this, except at the edges.
_GRANULE = 128
# Products of narrow blocks are slow, and with shallow ones reading and writing the accumulators
# takes longer. So wider blocks, up to this minimal extent, precede fewer bytes read.
_WIDE = 2048
# While a product runs, the device receives at most this much of the next operands. Page-locked
# memory of the same size is on the host.
_AHEAD_BYTES = 1 << 30

Place = tuple[slice, slice]


class WholeProduct(NamedTuple):
    """A product of ``m`` by ``k`` and ``k`` by ``n``, its types, and that of the accumulators."""

    m: int
    n: int
    k: int
    lhs: np.dtype[Any]
    rhs: np.dtype[Any]
    out: np.dtype[Any]
    sums: np.dtype[Any]


@dataclass(frozen=True)
class Plan:
    """The blocks of a product, and their traffic.

    ``rows``, ``columns`` and ``depth`` are the maximal extents of blocks: of the result, and of
    what is contracted at once. Inside ``jit`` that is all of the depth.
    """

    problem: WholeProduct
    rows: int
    columns: int
    depth: int
    inside_jit: bool = False

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of rows, of columns and of depth."""
        m, n, k, *_ = self.problem
        return math.ceil(m / self.rows), math.ceil(n / self.columns), math.ceil(k / self.depth)

    def steps(self) -> Iterator[tuple[Place, Mapping[str, Place], bool]]:
        """Yield products of blocks: place in the result, reads, and whether it is the last there.

        Those of a place are in the order of ``k``. Rows alternate in direction, so that consecutive
        blocks share an operand's block, which is not read again.
        """
        held: Mapping[str, Place] = {}
        rows, columns, depths = self.grid
        for i, j, d in itertools.product(range(rows), range(columns), range(depths)):
            row = _slice(i, self.rows, self.problem.m)
            column = _slice(columns - 1 - j if i % 2 else j, self.columns, self.problem.n)
            depth = _slice(d, self.depth, self.problem.k)
            needed = {"lhs": (row, depth), "rhs": (depth, column)}
            reads = {name: part for name, part in needed.items() if held.get(name) != part}
            yield (row, column), reads, d == depths - 1
            held = needed

    @property
    def read_bytes(self) -> int:
        """Bytes of the operands that are read."""
        m, n, k, lhs, rhs, *_ = self.problem
        rows, columns, depths = self.grid
        if depths > 1:
            return k * (columns * m * lhs.itemsize + rows * n * rhs.itemsize)
        # Where a row of blocks ends, the next one starts with the same block of columns: the last
        # one, and then the first one.
        last = n - (columns - 1) * self.columns
        kept = 0 if self.inside_jit else rows // 2 * last + (rows - 1) // 2 * self.columns
        return k * (m * lhs.itemsize + (rows * n - kept) * rhs.itemsize)

    @property
    def _step_bytes(self) -> int:
        lhs, rhs = self.problem.lhs.itemsize, self.problem.rhs.itemsize
        return self.depth * (self.rows * lhs + self.columns * rhs)

    @property
    def ahead_bytes(self) -> int:
        """Bytes of operands that the device receives while a product runs."""
        return min(_AHEAD_BYTES, self._step_bytes)

    @property
    def memory_bytes(self) -> int:
        """The memory that the device needs, but for the workspaces of a product's kernel."""
        out, sums = self.problem.out.itemsize, self.problem.sums.itemsize
        block = self.rows * self.columns
        if self.inside_jit:
            # Rows of the result are collected, those before are kept, and a copy is under way.
            strips = 3 * self.rows * self.problem.n * out
            return 2 * self._step_bytes + block * (sums + out) + strips
        # The accumulators, the preceding result on its way to the host, and either the rounded
        # result or, where the depth is split, a product to be added.
        other = max(sums, out) if self.depth < self.problem.k else out
        return block * (sums + out + other) + self._step_bytes + self.ahead_bytes

    @property
    def _order(self) -> tuple[int, ...]:
        """The better one of two plans for a product has the smaller value."""
        m, n, k, *_ = self.problem
        extents = zip((self.rows, self.columns, self.depth), (m, n, k), strict=True)
        least = min([_WIDE, *(extent for extent, size in extents if extent < size)])
        # Among equal reads, less memory means more blocks, and so more overlap.
        return -least.bit_length(), self.read_bytes, self.memory_bytes


def choose_plan(problem: WholeProduct, memory_limit: int, *, inside_jit: bool = False) -> Plan:
    """Return the plan that reads the fewest bytes within a limit of bytes on the device."""
    m, n, k, *_ = problem
    plans: list[Plan] = []
    for rows, columns in itertools.product(_extents(m), _extents(n)):
        depths = [k] if inside_jit else _extents(k)
        found = (Plan(problem, rows, columns, depth, inside_jit) for depth in depths)
        plans += itertools.islice((x for x in found if x.memory_bytes <= memory_limit), 1)
    if plans:
        return min(plans, key=lambda plan: plan._order)
    # The last ones are the smallest.
    smallest = Plan(problem, rows, columns, depths[-1], inside_jit)
    raise ValueError(
        f"a memory_limit of {memory_limit} bytes is too small: blocks of {rows}x{columns}, "
        f"{smallest.depth} deep, need {smallest.memory_bytes} bytes"
    )


def _extents(size: int) -> list[int]:
    """Return extents of blocks that divide a size into equal parts, from the largest."""
    counts = (*range(1, 17), *(2**i for i in range(5, 31)))
    extents = (math.ceil(size / (count * _GRANULE)) * _GRANULE for count in counts)
    return sorted({min(size, extent) for extent in extents}, reverse=True)


def _slice(index: int, extent: int, size: int) -> slice:
    return slice(index * extent, min((index + 1) * extent, size))
