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
# While a product runs, a device receives at most this much of the next operands. Page-locked memory
# of the same size is on the host.
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

    @property
    def types(self) -> dict[str, np.dtype[Any]]:
        """Types of the operands, which are ``a`` and ``b``."""
        return {"a": self.lhs, "b": self.rhs}


class Step(NamedTuple):
    """A product of two blocks: its place in the result, and the blocks that are read for it."""

    place: Place
    reads: Mapping[str, Place]
    is_last: bool


@dataclass(frozen=True)
class Plan:
    """The blocks of a product, and their traffic.

    Attributes
    ----------
    problem
        The sizes and types of the product.
    rows, columns, depth
        The maximal extents of blocks: of the result, and of what is contracted at once.
    devices
        The number of devices that compute the blocks of the result.
    inside_jit
        Whether loops inside ``jit`` compute them, over all of the depth at once.
    seconds
        An estimate of the time, or ``None`` if no rates were measured.
    """

    problem: WholeProduct
    rows: int
    columns: int
    depth: int
    devices: int = 1
    inside_jit: bool = False
    seconds: float | None = None

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of rows, of columns and of depth."""
        m, n, k, *_ = self.problem
        return math.ceil(m / self.rows), math.ceil(n / self.columns), math.ceil(k / self.depth)

    def steps(self, device: int) -> Iterator[Step]:
        """Yield a device's products, those of a block of the result in the order of ``k``.

        Rows alternate in direction, so that consecutive blocks share an operand's block, which is
        not read again.
        """
        rows, columns, depths = self.grid
        held: Mapping[str, Place] = {}
        first, end = (rows * columns * i // self.devices for i in (device, device + 1))
        for tile, d in itertools.product(range(first, end), range(depths)):
            i, j = divmod(tile, columns)
            row = _slice(i, self.rows, self.problem.m)
            column = _slice(columns - 1 - j if i % 2 else j, self.columns, self.problem.n)
            depth = _slice(d, self.depth, self.problem.k)
            needed = {"a": (row, depth), "b": (depth, column)}
            reads = {name: part for name, part in needed.items() if held.get(name) != part}
            yield Step((row, column), reads, d == depths - 1)
            held = needed

    @property
    def read_bytes(self) -> int:
        """Bytes of the operands that all devices read together."""
        steps = itertools.chain.from_iterable(map(self.steps, range(self.devices)))
        return sum(
            self.problem.types[name].itemsize * math.prod(x.stop - x.start for x in part)
            for step in steps
            for name, part in step.reads.items()
        )

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
        lhs, rhs = self.problem.lhs.itemsize, self.problem.rhs.itemsize
        return self.depth * (self.rows * lhs + self.columns * rhs)

    @property
    def ahead_bytes(self) -> int:
        """Bytes of operands that a device receives while a product runs."""
        return min(_AHEAD_BYTES, self._step_bytes)

    @property
    def memory_bytes(self) -> int:
        """The memory that each device needs, but for the workspaces of a product's kernel."""
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
        m, n, k, lhs, rhs, *_ = self.problem
        rows, columns, depths = self.grid
        extents = zip((self.rows, self.columns, self.depth), (m, n, k), strict=True)
        least = min([_WIDE, *(extent for extent, size in extents if extent < size)])
        if depths == 1:
            # Where a row of blocks ends, the next one starts with the same block of columns.
            kept = 0 if self.inside_jit else (rows - 1) * self.columns
            reads = k * (m * lhs.itemsize + (rows * n - kept) * rhs.itemsize)
        else:
            reads = k * (columns * m * lhs.itemsize + rows * n * rhs.itemsize)
        # Among equal reads, less memory means more blocks, and so more overlap.
        return -self.devices, -least.bit_length(), reads, self.memory_bytes

    def __str__(self) -> str:
        m, n, k, *_ = self.problem
        rows, columns, deep = self.grid
        sizes = self.read_bytes, self.write_bytes, self.memory_bytes
        read, written, memory = (x / 2**30 for x in sizes)
        text = (
            f"{m}x{k} by {k}x{n}: {rows}x{columns} blocks of {self.rows}x{self.columns}, each over "
            f"{deep} of depth {self.depth}; reads {read:.4g} GiB, writes {written:.4g} GiB, in "
            f"{memory:.4g} GiB on each of {self.devices} device{'s' * (self.devices > 1)}"
        )
        return text if self.seconds is None else f"{text}; about {self.seconds:.3g} s"


def choose_plan(
    problem: WholeProduct, memory_limit: int, devices: int = 1, *, inside_jit: bool = False
) -> Plan:
    """Return the plan that reads the fewest bytes within a limit of bytes on each device."""
    m, n, k, *_ = problem
    plans: list[Plan] = []
    for rows, columns in itertools.product(_extents(m), _extents(n)):
        used = min(devices, math.ceil(m / rows) * math.ceil(n / columns))
        depths = [k] if inside_jit else _extents(k)
        found = (Plan(problem, rows, columns, depth, used, inside_jit) for depth in depths)
        plans += itertools.islice((x for x in found if x.memory_bytes <= memory_limit), 1)
    if plans:
        return min(plans, key=lambda plan: plan._order)
    # The last ones are the smallest.
    smallest = Plan(problem, rows, columns, depths[-1], 1, inside_jit)
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
