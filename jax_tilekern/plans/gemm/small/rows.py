"""Rows of a tile: how they lie in memory, and how a kernel of ``gemm/small`` copies them.

A row is what is contiguous in memory. It is copied by vectors of 16 bytes whatever its alignment,
so it starts in shared memory at the same distance from a multiple of 16 bytes as in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.plans.gemm.geometry import MAX_BATCH_DIMS
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gpu import VECTOR_BYTES, power_of_two

# Rows at multiples of this many bytes put the same element of all of them on few banks of shared
# memory; and those across k of which a lane reads groups of 8.
_CONFLICTING_PITCH, _CONFLICTING_PITCH_OF_GROUPS = 32, 16
# The most bytes that a lane reads at once across k, and `kGroupPadding` of the kernel.
_WIDEST_ACROSS_K, _GROUP_PADDING = 4, 32


@dataclass(frozen=True)
class Rows:
    """The rows of a tile.

    Attributes
    ----------
    k_major
        Whether rows run along ``k``.
    batch_strides
        Bytes between matrices, outermost dimension first.
    stride
        Bytes between rows in memory.
    count
        The largest number of rows that a tile has.
    row_bytes
        Bytes of the longest row that a tile has.
    read_rows, read_row_bytes
        What lanes read of them, which may be beyond the last row and the ends of rows.
    flat
        Whether the rows follow each other in memory, and are copied as one.
    group_rows
        Rows of a group, after which shared memory has padding, or 0 without groups.
    load_bytes
        Bytes of a row that a lane reads from shared memory at once.
    tile_step
        Bytes from one tile to the next along rows, or 0 if a row has one tile.
    threads
        Threads of a CTA.
    """

    k_major: bool
    batch_strides: tuple[int, ...]
    stride: int
    count: int
    row_bytes: int
    read_rows: int
    read_row_bytes: int
    flat: bool
    group_rows: int
    load_bytes: int
    tile_step: int
    threads: int

    @property
    def uniform(self) -> bool:
        """Whether all rows start at the same distance from a multiple of 16 bytes."""
        return self.flat or self.count == 1 or self.stride % VECTOR_BYTES == 0

    @property
    def aligned(self) -> bool:
        """Whether rows of tiles start at multiples of 16 bytes."""
        steps = (self.stride, self.tile_step, *self.batch_strides)
        return all(step % VECTOR_BYTES == 0 for step in steps)

    @property
    def vectors(self) -> int:
        """Vectors of 16 bytes that hold a row."""
        before = 0 if self.aligned else VECTOR_BYTES - 1
        return math.ceil((self.row_bytes + before) / VECTOR_BYTES)

    @property
    def pitch(self) -> int:
        """Bytes between rows in shared memory."""
        if self.flat:
            return self.stride
        if self.group_rows:
            return self.vectors * VECTOR_BYTES
        # Odd, so that the same element of eight rows is on eight different banks.
        return (self.vectors | 1) * VECTOR_BYTES

    @property
    def tile_bytes(self) -> int:
        """Shared memory of the tile."""
        return self._bytes(self.count, self.row_bytes)

    @property
    def read_bytes(self) -> int:
        """Shared memory from the start of the tile to the end of what lanes read."""
        return self._bytes(self.read_rows, self.read_row_bytes)

    def _bytes(self, rows: int, last_row_bytes: int) -> int:
        """Return the shared memory of rows, of which the last is perhaps longer."""
        size = rows * self.pitch + last_row_bytes - self.row_bytes
        if self.flat:
            size += VECTOR_BYTES - 1
        if self.group_rows:
            size += (rows - 1) // self.group_rows * _GROUP_PADDING
        return math.ceil(size / VECTOR_BYTES) * VECTOR_BYTES

    @property
    def threads_per_row(self) -> int:
        """The threads that copy a row, a power of two."""
        if self.flat or self.count == 1:
            return self.threads
        return min(power_of_two(self.vectors), self.threads)

    @property
    def cxx_config(self) -> str:
        """The operand's ``SmallOperandConfig``."""
        return f"{{{int(self.k_major)}, {int(self.uniform)}, {self.load_bytes}}}"

    @property
    def cxx_shape(self) -> str:
        """The array's ``SmallArrayShape``."""
        missing = MAX_BATCH_DIMS - len(self.batch_strides)
        batch = ", ".join(map(str, (*self.batch_strides, *(0,) * missing)))
        values = (
            self.stride,
            self.pitch,
            self.group_rows,
            int(self.flat),
            int(self.aligned),
            self.threads_per_row,
        )
        return f"{{{{{batch}}}, {', '.join(map(str, values))}}}"


def lane_bytes(product: Product) -> int:
    """Return the bytes of a row or column that a lane holds in a step."""
    return 16 if product.arithmetic in ("f32", "f64") else 8


def k_step(product: Product) -> int:
    """Return the ``k`` of a step."""
    lanes = 1 if product.arithmetic == "f32" else 4
    return lanes * lane_bytes(product) // product.lhs_dtype.itemsize


def lhs_rows(product: Product, block_m: int, chunk_k: int, threads: int) -> Rows:
    """Return the rows of a tile of ``lhs``."""
    geometry = product.geometry
    *batch, m_stride, k_stride = geometry.lhs_strides
    return _operand_rows(
        product, product.lhs_dtype.itemsize, geometry.m, m_stride, k_stride, batch,
        block_m, chunk_k, threads,
    )  # fmt: skip


def rhs_rows(product: Product, block_n: int, chunk_k: int, threads: int) -> Rows:
    """Return the rows of a tile of ``rhs``."""
    geometry = product.geometry
    *batch, k_stride, n_stride = geometry.rhs_strides
    return _operand_rows(
        product, product.rhs_dtype.itemsize, geometry.n, n_stride, k_stride, batch,
        block_n, chunk_k, threads,
    )  # fmt: skip


def _operand_rows(
    product: Product,
    itemsize: int,
    size: int,
    stride: int,
    k_stride: int,
    batch: list[int],
    block: int,
    chunk_k: int,
    threads: int,
) -> Rows:
    """Return the rows of an operand of `size` rows or columns, ``stride`` elements apart."""
    k, batch_sizes = product.geometry.k, product.geometry.batch
    lines = min(block, size)
    k_major = k_stride == 1 and (stride != 1 or k > 1)
    row_stride = (stride if k_major else k_stride) * itemsize
    row_bytes = (chunk_k if k_major else lines) * itemsize
    whole = chunk_k == k if k_major else lines == size
    batch_strides = tuple(x * itemsize for x in batch)
    tile_step = 0 if k_major or lines == size else row_bytes
    # Words across k are packed to words along it.
    packed = not k_major and itemsize < _WIDEST_ACROSS_K
    lane = lane_bytes(product)
    conflicting = _CONFLICTING_PITCH_OF_GROUPS if packed and itemsize == 1 else _CONFLICTING_PITCH
    flat = row_stride == row_bytes and whole and row_stride % conflicting != 0
    # Loads of a lane are aligned to the steps between matrices, as to those between rows.
    steps = [s for n, s in zip(batch_sizes, batch_strides, strict=True) if n > 1]
    load_bytes = itemsize
    if packed:
        load_bytes = math.gcd(_WIDEST_ACROSS_K, row_stride, tile_step, *steps)
    elif k_major:
        common = math.gcd(lane, row_stride if size > 1 else 0, k * itemsize, *steps)
        load_bytes = common if common >= max(itemsize, 4) else itemsize
    step = k_step(product)
    return Rows(
        k_major=k_major,
        batch_strides=batch_strides,
        stride=row_stride,
        count=lines if k_major else chunk_k,
        row_bytes=row_bytes,
        read_rows=lines if k_major else math.ceil(chunk_k / step) * step,
        read_row_bytes=row_bytes if k_major else block * itemsize,
        flat=flat,
        group_rows=lane // itemsize if packed and not flat else 0,
        load_bytes=load_bytes,
        tile_step=tile_step,
        threads=threads,
    )


def out_rows(product: Product, block_m: int, block_n: int, threads: int) -> Rows:
    """Return the rows of a tile of the output."""
    geometry, itemsize = product.geometry, product.out_dtype.itemsize
    *batch, m_stride, _ = geometry.out_strides
    columns = min(block_n, geometry.n)
    rows, row_bytes, stride = min(block_m, geometry.m), columns * itemsize, m_stride * itemsize
    return Rows(
        k_major=False,
        batch_strides=tuple(x * itemsize for x in batch),
        stride=stride,
        count=rows,
        row_bytes=row_bytes,
        read_rows=rows,
        read_row_bytes=row_bytes,
        flat=columns == geometry.n == m_stride and stride % _CONFLICTING_PITCH != 0,
        group_rows=0,
        load_bytes=itemsize,
        tile_step=0 if columns == geometry.n else row_bytes,
        threads=threads,
    )
