"""The division of a product into blocks for the available memory: a function of sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# The extents of blocks are multiples of this, except at the edges.
_GRANULE = 128
# Minimal extents of blocks. Smaller ones are tried only where larger ones do not fit: products of
# narrow blocks are slow, and with shallow ones reading and writing the accumulators takes longer.
LEAST = (2048, 1024, 512, 256, 128)
# Numbers of parts of rows and columns to try.
_PARTS = (*range(1, 17), *(2**i for i in range(5, 31)))
# While a product runs, a device receives at most this much of the next operands. Page-locked memory
# of the same size is on the host.
_AHEAD_BYTES = 1 << 30


class Sizes(NamedTuple):
    """The sizes of a product of ``m`` by ``k`` and ``k`` by ``n`` matrices, and of their elements.

    Attributes
    ----------
    m, n, k
        Extents.
    lhs_bytes, rhs_bytes, out_bytes
        Bytes per element.
    sum_bytes
        Bytes per accumulator on a device.
    """

    m: int
    n: int
    k: int
    lhs_bytes: int
    rhs_bytes: int
    out_bytes: int
    sum_bytes: int


class Tile(NamedTuple):
    """A block of the result, by its place in the grid of them."""

    row: int
    column: int


class Block(NamedTuple):
    """A block of an operand, by its place in the grid of them."""

    operand: str
    outer: int
    depth: int


def blocks(tile: Tile, depth: int) -> tuple[Block, Block]:
    """Return the operands of a product."""
    return Block("lhs", tile.row, depth), Block("rhs", tile.column, depth)


@dataclass(frozen=True)
class Plan:
    """The blocks of a product, and their traffic.

    A device accumulates a block of ``rows`` by ``columns`` of the result over blocks of the
    operands that are ``depth`` deep, so that each element that it reads takes part in ``2 / (1 /
    rows + 1 / columns)`` operations. It does not read a block again that it still has.

    Attributes
    ----------
    sizes
        The sizes of the product.
    rows, columns, depth
        The maximal extents of blocks.
    devices
        The number of devices that compute the blocks of the result.
    memory_bytes
        The memory that each of them needs.
    seconds
        An estimate of the time, or ``None`` if no rates were measured.
    """

    sizes: Sizes
    rows: int
    columns: int
    depth: int
    devices: int
    memory_bytes: int
    seconds: float | None = None

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of rows, of columns and of depth."""
        m, n, k, *_ = self.sizes
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
        count = len(self.tiles)
        bounds = [count * i // self.devices for i in (device, device + 1)]
        return self.tiles[slice(*bounds)]

    def depths(self, tile: Tile) -> Sequence[int]:
        """Return the blocks of depth, in the order in which they are added."""
        return range(self.grid[2])

    @property
    def read_bytes(self) -> int:
        """Bytes of the operands that all devices read together."""
        if self.grid[2] > 1:
            return self._bytes_of_every_block
        return sum(
            self.block_bytes(block)
            for device in range(self.devices)
            for block in self.reads(self.steps(self.tiles_of(device)))
        )

    @property
    def _bytes_of_every_block(self) -> int:
        """Bytes of the operands if every block of the result reads its own."""
        rows, columns, _ = self.grid
        m, n, k, *_ = self.sizes
        return k * (columns * m * self.sizes.lhs_bytes + rows * n * self.sizes.rhs_bytes)

    @property
    def reads_alone(self) -> int:
        """The approximate bytes that a single device reads, without counting block by block."""
        if self.grid[2] > 1:
            return self._bytes_of_every_block
        m, n, k, *_ = self.sizes
        reversals = self.grid[0] - 1
        rhs = n + reversals * (n - self.columns)
        return k * (m * self.sizes.lhs_bytes + rhs * self.sizes.rhs_bytes)

    @property
    def write_bytes(self) -> int:
        """Bytes of the result."""
        return self.sizes.m * self.sizes.n * self.sizes.out_bytes

    @property
    def ahead_bytes(self) -> int:
        """Bytes of operands that a device receives while a product runs."""
        return _ahead_bytes(self.sizes, self.rows, self.columns, self.depth)

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.sizes.m * self.sizes.n * self.sizes.k

    def block_bytes(self, block: Block) -> int:
        """Return the size of a block of an operand."""
        deep = _extent(block.depth, self.depth, self.sizes.k)
        if block.operand == "lhs":
            return _extent(block.outer, self.rows, self.sizes.m) * deep * self.sizes.lhs_bytes
        return _extent(block.outer, self.columns, self.sizes.n) * deep * self.sizes.rhs_bytes

    def steps(self, tiles: Sequence[Tile]) -> list[tuple[Tile, int]]:
        """Return the products that make up some tiles: each is a tile and a block of depth."""
        return [(tile, depth) for tile in tiles for depth in self.depths(tile)]

    def reads(self, steps: Sequence[tuple[Tile, int]]) -> Iterator[Block]:
        """Yield the blocks that a device reads for some products."""
        held: dict[str, Block] = {}
        for tile, depth in steps:
            for block in blocks(tile, depth):
                if held.get(block.operand) != block:
                    held[block.operand] = block
                    yield block

    def __str__(self) -> str:
        m, n, k, *_ = self.sizes
        rows, columns, deep = self.grid
        text = (
            f"{m}x{k} by {k}x{n}: {rows}x{columns} blocks of {self.rows}x{self.columns}, each over "
            f"{deep} of depth {self.depth}; reads {_readable(self.read_bytes)}, writes "
            f"{_readable(self.write_bytes)}, in {_readable(self.memory_bytes)} on each of "
            f"{self.devices} device{'s' * (self.devices > 1)}"
        )
        return text if self.seconds is None else f"{text}; about {self.seconds:.3g} s"


def choose_plan(sizes: Sizes, memory_limit: int, devices: int = 1) -> Plan:
    """Return the plan that reads the fewest bytes within a memory limit.

    It depends on these arguments alone, so that an interrupted product can resume.

    Parameters
    ----------
    sizes
        The sizes of the product; none is 0.
    memory_limit
        Bytes on each device.
    devices
        The number of devices.

    Raises
    ------
    ValueError
        If not even the smallest blocks fit; the message states their memory.
    """
    found: list[Plan] = []
    for least in LEAST:
        plans = [
            plan
            for rows, columns in itertools.product(extents(sizes.m, least), extents(sizes.n, least))
            if (plan := _deepest(sizes, rows, columns, least, memory_limit, devices))
        ]
        if plans:
            # Among equal reads, less memory means more blocks, and so more overlap.
            found.append(min(plans, key=lambda p: (-p.devices, p.reads_alone, p.memory_bytes)))
        if found and found[-1].devices == devices:
            break
    if found:
        return max(found, key=lambda plan: plan.devices)
    smallest = [min(_GRANULE, size) for size in (sizes.m, sizes.n, sizes.k)]
    least = _memory_bytes(sizes, *smallest)
    rows, columns, deep = smallest
    raise ValueError(
        f"a memory_limit of {memory_limit} bytes is too small: blocks of {rows}x{columns}, "
        f"{deep} deep, need {least} bytes"
    )


def _deepest(
    sizes: Sizes, rows: int, columns: int, least: int, limit: int, devices: int
) -> Plan | None:
    """Return the plan with the deepest blocks of an extent, if blocks of minimal depth fit."""
    depth = sizes.k
    if _memory_bytes(sizes, rows, columns, depth) > limit:
        free = limit - _tile_bytes(sizes, rows, columns, split=True)
        each = _step_bytes(sizes, rows, columns, 1)
        depth = min(depth - 1, max(free // (2 * each), (free - _AHEAD_BYTES) // each))
        if depth < min(least, sizes.k):
            return None
        # The parts are as even as granules allow.
        parts = math.ceil(sizes.k / (depth // _GRANULE * _GRANULE))
        depth = _rounded_up(math.ceil(sizes.k / parts))
    used = min(devices, math.ceil(sizes.m / rows) * math.ceil(sizes.n / columns))
    memory = _memory_bytes(sizes, rows, columns, depth)
    return Plan(sizes, rows, columns, depth, used, memory)


def _memory_bytes(sizes: Sizes, rows: int, columns: int, depth: int) -> int:
    """Return the memory of the blocks on a device, with what it receives while it multiplies."""
    tile = _tile_bytes(sizes, rows, columns, split=depth < sizes.k)
    ahead = _ahead_bytes(sizes, rows, columns, depth)
    return tile + _step_bytes(sizes, rows, columns, depth) + ahead


def _tile_bytes(sizes: Sizes, rows: int, columns: int, *, split: bool) -> int:
    """Return the memory of a block of the result.

    It holds the accumulators, the preceding result on its way to the host, and either the rounded
    result or, where the depth is split, a product to be added.
    """
    other = max(sizes.sum_bytes, sizes.out_bytes) if split else sizes.out_bytes
    return rows * columns * (sizes.sum_bytes + sizes.out_bytes + other)


def _step_bytes(sizes: Sizes, rows: int, columns: int, depth: int) -> int:
    """Return the memory of the operands of one product."""
    return depth * (rows * sizes.lhs_bytes + columns * sizes.rhs_bytes)


def _ahead_bytes(sizes: Sizes, rows: int, columns: int, depth: int) -> int:
    return min(_AHEAD_BYTES, _step_bytes(sizes, rows, columns, depth))


def extents(size: int, least: int) -> list[int]:
    """Return extents of blocks, none below the minimum, that divide a size into equal parts."""
    found = {min(size, _rounded_up(math.ceil(size / parts))) for parts in _PARTS}
    return [extent for extent in found if extent >= min(least, size)]


def _extent(index: int, block: int, size: int) -> int:
    return min(block, size - index * block)


def _rounded_up(size: int) -> int:
    return math.ceil(size / _GRANULE) * _GRANULE


def _readable(size: int) -> str:
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
