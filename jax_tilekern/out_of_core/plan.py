"""The division of a product into blocks for the available memory: a function of sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

# The extents of blocks are multiples of this, except at the edges.
_GRANULE = 128
# Minimal extents of blocks. Smaller ones are tried only where larger ones do not fit: products of
# narrow blocks are slow, and with shallow ones reading and writing the accumulators takes longer.
LEAST = (2048, 1024, 512, 256, 128)
# Numbers of equal parts of a dimension to try.
_PARTS = (*range(1, 17), *(2**i for i in range(5, 31)))
# While a product runs, a device receives at most this much of the next operands. Page-locked memory
# of the same size is on the host.
_AHEAD_BYTES = 1 << 30


class WholeProduct(NamedTuple):
    """A product of ``m`` by ``k`` and ``k`` by ``n`` matrices.

    Attributes
    ----------
    m, n, k
        Extents.
    lhs, rhs, out
        Types on a device.
    sums
        Type of the accumulators.
    """

    m: int
    n: int
    k: int
    lhs: np.dtype[Any]
    rhs: np.dtype[Any]
    out: np.dtype[Any]
    sums: np.dtype[Any]


class Tile(NamedTuple):
    """A block of the result, by its place in the grid of them."""

    row: int
    column: int


class Block(NamedTuple):
    """A block of an operand, by its place in the grid of them."""

    operand: str
    outer: int
    depth: int


class BlockProduct(NamedTuple):
    """A product of two blocks, and those of them that are read for it.

    A block that the preceding step has is not read again.
    """

    tile: Tile
    depth: int
    reads: tuple[Block, ...]


@dataclass(frozen=True)
class Plan:
    """The blocks of a product, and their traffic.

    A device accumulates a block of ``rows`` by ``columns`` of the result over blocks of the
    operands that are ``depth`` deep, so that each element that it reads takes part in ``2 / (1 /
    rows + 1 / columns)`` operations. It does not read a block again that it still has.

    Attributes
    ----------
    problem
        The sizes and types of the product.
    rows, columns, depth
        The maximal extents of blocks.
    devices
        The number of devices that compute the blocks of the result.
    seconds
        An estimate of the time, or ``None`` if no rates were measured.
    """

    problem: WholeProduct
    rows: int
    columns: int
    depth: int
    devices: int
    seconds: float | None = None

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of rows, of columns and of depth."""
        m, n, k, *_ = self.problem
        return math.ceil(m / self.rows), math.ceil(n / self.columns), math.ceil(k / self.depth)

    @property
    def tiles(self) -> list[Tile]:
        """Blocks of the result in order.

        Rows alternate in direction, so that consecutive blocks share an operand's block.
        """
        rows, columns, _ = self.grid
        return [
            Tile(row, column if row % 2 == 0 else columns - 1 - column)
            for row, column in itertools.product(range(rows), range(columns))
        ]

    def tiles_of(self, device: int) -> list[Tile]:
        """Return the blocks of one device, which are consecutive."""
        return self.tiles[self._first(device) : self._first(device + 1)]

    def _first(self, device: int) -> int:
        rows, columns, _ = self.grid
        return rows * columns * device // self.devices

    def steps(self, tiles: Iterable[Tile]) -> list[BlockProduct]:
        """Return the products that make up some tiles, in the order of a device."""
        found: list[BlockProduct] = []
        held: set[Block] = set()
        for tile, depth in itertools.product(tiles, range(self.grid[2])):
            blocks = Block("lhs", tile.row, depth), Block("rhs", tile.column, depth)
            found.append(BlockProduct(tile, depth, tuple(x for x in blocks if x not in held)))
            held = set(blocks)
        return found

    def place(self, tile: Tile) -> tuple[slice, slice]:
        """Return where a block of the result is."""
        return _slice(tile.row, self.rows), _slice(tile.column, self.columns)

    def part(self, block: Block) -> tuple[slice, slice]:
        """Return where a block of an operand is."""
        depth = _slice(block.depth, self.depth)
        if block.operand == "lhs":
            return _slice(block.outer, self.rows), depth
        return depth, _slice(block.outer, self.columns)

    @property
    def read_bytes(self) -> int:
        """Bytes of the operands that all devices read together."""
        m, n, k, lhs, rhs, *_ = self.problem
        row_bytes, column_bytes = k * lhs.itemsize, k * rhs.itemsize
        rows, columns, depths = self.grid
        if depths > 1:
            return columns * m * row_bytes + rows * n * column_bytes
        # Where a row of blocks ends, the next one starts with the same block of columns: the last
        # one after even rows, and the first one after odd rows.
        last = n - (columns - 1) * self.columns
        kept = rows // 2 * last + (rows - 1) // 2 * self.columns
        total = m * row_bytes + (rows * n - kept) * column_bytes
        for device in range(1, self.devices):
            # This device has neither of the blocks that the one before ends with.
            row, column = divmod(self._first(device), columns)
            if column > 0:
                total += min(self.rows, m - row * self.rows) * row_bytes
            else:
                total += (last if row % 2 else self.columns) * column_bytes
        return total

    @property
    def write_bytes(self) -> int:
        """Bytes of the result."""
        return self.problem.m * self.problem.n * self.problem.out.itemsize

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.problem.m * self.problem.n * self.problem.k

    @property
    def _step_bytes(self) -> int:
        """Bytes of the operands of one product."""
        lhs, rhs = self.problem.lhs.itemsize, self.problem.rhs.itemsize
        return self.depth * (self.rows * lhs + self.columns * rhs)

    @property
    def ahead_bytes(self) -> int:
        """Bytes of operands that a device receives while a product runs."""
        return min(_AHEAD_BYTES, self._step_bytes)

    @property
    def memory_bytes(self) -> int:
        """The memory that each device needs."""
        out, sums = self.problem.out.itemsize, self.problem.sums.itemsize
        # The accumulators, the preceding result on its way to the host, and either the rounded
        # result or, where the depth is split, a product to be added.
        other = max(sums, out) if self.depth < self.problem.k else out
        return self.rows * self.columns * (sums + out + other) + self._step_bytes + self.ahead_bytes

    def __str__(self) -> str:
        m, n, k, *_ = self.problem
        rows, columns, deep = self.grid
        text = (
            f"{m}x{k} by {k}x{n}: {rows}x{columns} blocks of {self.rows}x{self.columns}, each over "
            f"{deep} of depth {self.depth}; reads {_readable(self.read_bytes)}, writes "
            f"{_readable(self.write_bytes)}, in {_readable(self.memory_bytes)} on each of "
            f"{self.devices} device{'s' * (self.devices > 1)}"
        )
        return text if self.seconds is None else f"{text}; about {self.seconds:.3g} s"


def choose_plan(problem: WholeProduct, memory_limit: int, devices: int = 1) -> Plan:
    """Return the plan that reads the fewest bytes within a memory limit.

    It depends on these arguments alone, so that an interrupted product can resume.

    Parameters
    ----------
    problem
        The product; no extent is 0.
    memory_limit
        Bytes on each device.
    devices
        The number of devices.

    Raises
    ------
    ValueError
        If not even the smallest blocks fit; the message states their memory.
    """
    best: list[Plan] = []
    for least in LEAST:
        plans: list[Plan] = []
        rows_columns = itertools.product(extents(problem.m, least), extents(problem.n, least))
        for rows, columns in rows_columns:
            used = min(devices, math.ceil(problem.m / rows) * math.ceil(problem.n / columns))
            deepest = (
                plan
                for depth in extents(problem.k, least)
                if (plan := Plan(problem, rows, columns, depth, used)).memory_bytes <= memory_limit
            )
            plans += itertools.islice(deepest, 1)
        # Among equal reads, less memory means more blocks, and so more overlap.
        best += sorted(plans, key=lambda p: (-p.devices, p.read_bytes, p.memory_bytes))[:1]
        if best and best[-1].devices == devices:
            break
    if best:
        return max(best, key=lambda plan: plan.devices)
    smallest = [min(_GRANULE, extent) for extent in problem[:3]]
    rows, columns, deep = smallest
    raise ValueError(
        f"a memory_limit of {memory_limit} bytes is too small: blocks of {rows}x{columns}, "
        f"{deep} deep, need {Plan(problem, rows, columns, deep, 1).memory_bytes} bytes"
    )


def extents(size: int, least: int) -> list[int]:
    """Return extents of blocks that divide a size into equal parts, from the largest.

    None is below the minimum.
    """
    parts = (math.ceil(size / (count * _GRANULE)) * _GRANULE for count in _PARTS)
    found = {min(size, extent) for extent in parts}
    return sorted((extent for extent in found if extent >= min(least, size)), reverse=True)


def _slice(index: int, extent: int) -> slice:
    return slice(index * extent, (index + 1) * extent)


def _readable(size: int) -> str:
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
