"""Passes over memory that a matrix product's kernel may need before it or after it.

:class:`PackPass` copies an operand to where tensor maps can read it, :class:`SplitPass` makes
pieces for tensor cores of float32, with :func:`decide_launch` to tell whether their product is good
enough, and :class:`SumPass` adds up partial sums. Each one knows its kernel, which the planner
compiles together with its own, how it leaves its workspace, and how it is launched. Strides are in
elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

from jax_tilekern.compiler import Compiled, Kernel
from jax_tilekern.plans.geometry import MAX_BATCH_DIMS, MatmulGeometry
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, Scalars

_VECTOR_BYTES = 16
# Of which rows that a pass makes are multiples.
_ROW_BYTES = 128
_MOST_ROWS = 2**31 - 1


@dataclass(frozen=True)
class StridedOperand:
    """An operand as the passes see it: lines of ``k``, rows of ``lhs`` or columns of ``rhs``.

    Attributes
    ----------
    batch
        Sizes of the batch dimensions, outermost first.
    lines, k
        Sizes of the matrices.
    batch_strides
        A stride for each batch dimension; 0 broadcasts.
    line_stride, k_stride
        Of which one is 1, or its size is.
    """

    batch: tuple[int, ...]
    lines: int
    k: int
    batch_strides: tuple[int, ...]
    line_stride: int
    k_stride: int

    def __post_init__(self) -> None:
        unit_k = self.k_stride == 1 or self.k == 1
        if not unit_k and self.line_stride != 1 and self.lines > 1:
            raise ValueError(f"{self} has a unit stride along neither its lines nor k")

    @classmethod
    def lhs(cls, geometry: MatmulGeometry) -> StridedOperand:
        """Return ``lhs``, whose lines are its rows."""
        *batch, m, k = geometry.lhs_strides
        return cls(geometry.batch, geometry.m, geometry.k, tuple(batch), m, k)

    @classmethod
    def rhs(cls, geometry: MatmulGeometry) -> StridedOperand:
        """Return ``rhs``, whose lines are its columns."""
        *batch, k, n = geometry.rhs_strides
        return cls(geometry.batch, geometry.n, geometry.k, tuple(batch), n, k)

    @property
    def k_major(self) -> bool:
        """Whether the unit stride is along ``k``."""
        return self.k_stride == 1 if self.k > 1 else self.line_stride != 1 and self.lines > 1

    @property
    def copied_batch(self) -> tuple[tuple[int, int], ...]:
        """Sizes and strides of the batch dimensions that a pass walks: those not broadcast."""
        dims = zip(self.batch, self.batch_strides, strict=True)
        return tuple((size, stride) for size, stride in dims if _is_copied(size, stride))

    @property
    def matrices(self) -> int:
        """Number of matrices that a pass makes."""
        return math.prod(size for size, _ in self.copied_batch)

    def dense_batch_strides(self, matrix: int) -> tuple[int, ...]:
        """Return the batch strides of a pass's result, whose matrices are ``matrix`` apart."""
        strides: list[int] = []
        for size, stride in reversed([*zip(self.batch, self.batch_strides, strict=True)]):
            strides.insert(0, matrix if _is_copied(size, stride) else 0)
            matrix *= size if _is_copied(size, stride) else 1
        return tuple(strides)


@dataclass(frozen=True)
class PackPass:
    """Copies an operand to ``[batch][lines][k_padded]`` with unit stride along ``k``.

    Rows start on 128 bytes, so that no row of a tile lies across two lines of a cache, and zeros
    follow on ``k``. Batch dimensions that are broadcast are left
    out.

    Attributes
    ----------
    operand
        What to copy, at any address and with any strides.
    itemsize
        Bytes of an element: 1, 2, 4 or 8.
    """

    operand: StridedOperand
    itemsize: int

    @property
    def kernel(self) -> Kernel:
        """What the compiler is asked for."""
        config = _config("PackConfig", item_bytes=self.itemsize, k_major=self.operand.k_major)
        return Kernel("pack_operand.cuh", f"tilekern::pack_operand<{config}>")

    @property
    def k_padded(self) -> int:
        """Elements of a packed row."""
        return self._vectors * _VECTOR_BYTES // self.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the packed operand: of the batch dimensions, lines, and ``k``."""
        matrix = self.operand.lines * self.k_padded
        return (*self.operand.dense_batch_strides(matrix), self.k_padded, 1)

    @property
    def workspace_bytes(self) -> int:
        """Size of the packed operand."""
        operand = self.operand
        return operand.matrices * operand.lines * self.k_padded * self.itemsize

    @property
    def _vectors(self) -> int:
        return -(-self.operand.k * self.itemsize // _ROW_BYTES) * (_ROW_BYTES // _VECTOR_BYTES)

    def launch(self, compiled: Compiled, source: Buffer, packed: Buffer) -> Launch:
        """Return the launch, given what ``kernel`` was compiled to and the buffers.

        Raises
        ------
        ValueError
            If the operand has more rows, or takes more blocks, than a launch can have.
        """
        operand, threads = self.operand, 256
        if operand.k_major:
            rows = _source_rows(operand, self.itemsize)
            tiling = _RowTiling.of(rows.count, self._vectors, most_per_lane=4, threads=threads)
            blocks, tiles = tiling.blocks, (0, 0)
        else:
            # As in TilePacker: reads of 16 bytes (8 of 1-byte elements) fill 64 in a row.
            rows, tiling = _source_rows(operand, self.itemsize), _RowTiling(1, 0, 0)
            tile_lines, tile_vectors = 256 // self.itemsize, 8 if self.itemsize == 1 else 16
            tiles = (-(-operand.lines // tile_lines), -(-self._vectors // tile_vectors))
            blocks = rows.count * math.prod(tiles)
        shape = Scalars.pack(
            f"{_StridedRows.LAYOUT}q7I",
            *rows.values,
            0 if operand.k_major else operand.k_stride * self.itemsize,
            *tiling.values,
            operand.lines,
            operand.k,
            self._vectors,
            *tiles,
        )
        return Launch(
            entry=compiled.entry(self.kernel.name),
            grid=(blocks, 1, 1),
            block=(threads, 1, 1),
            parameters=(source, packed, shape),
        )


Pieces = Literal["bf16", "tf32", "f16"]
# C++ type, bytes, and the numbers of parts that there are kernels for.
_PIECES: dict[str, tuple[str, int, tuple[int, ...]]] = {
    "bf16": ("tilekern::bfloat16", 2, (2, 3)),
    "tf32": ("tilekern::tfloat32", 4, (2,)),
    "f16": ("tilekern::float16", 2, (2,)),
}
# A warp walks shorter lines, and a block longer ones.
_LONG_LINE = 2048


@dataclass(frozen=True)
class SplitPass:
    """Splits float32 into pieces whose sum it is, ``[batch][lines][parts][k_padded]``.

    Rows are whole multiples of 128 bytes, and zeros follow on ``k``. ``"f16"`` pieces are those of
    the line divided by a power of two. A second workspace, ``int32[3][batch][lines]``, holds each
    line's exponent of that power, how many of its elements the pieces miss, and how many are near
    its largest; see ``split_float32.cuh``. Batch dimensions that are broadcast are left out.

    Attributes
    ----------
    operand
        What to split, at any address of whole elements and with any strides.
    pieces
        Their type.
    parts
        How many there are for each element.
    gpu
        What to plan for.
    """

    operand: StridedOperand
    pieces: Pieces
    parts: int
    gpu: Gpu

    def __post_init__(self) -> None:
        if self.parts not in _PIECES[self.pieces][2]:
            raise ValueError(f"no kernel splits float32 into {self.parts} {self.pieces}")

    @property
    def kernel(self) -> Kernel:
        """What the compiler is asked for."""
        config = _config(
            "SplitConfig",
            parts=self.parts,
            k_major=self.operand.k_major,
            threads=self._threads,
            line_lanes=self._line_lanes,
            min_blocks=3 if self.operand.k_major else 1,
        )
        name = f"tilekern::split_float32<{_PIECES[self.pieces][0]}, {config}>"
        return Kernel("split_float32.cuh", name)

    @property
    def k_padded(self) -> int:
        """Elements of a row of pieces, and the stride between the parts of a line."""
        unit = _ROW_BYTES // _PIECES[self.pieces][1]
        return -(-self.operand.k // unit) * unit

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the pieces: of the batch dimensions, lines, parts, and ``k``."""
        line = self.parts * self.k_padded
        batch = self.operand.dense_batch_strides(self.operand.lines * line)
        return (*batch, line, self.k_padded, 1)

    @property
    def pieces_bytes(self) -> int:
        """Size of the pieces."""
        return self.lines * self.parts * self.k_padded * _PIECES[self.pieces][1]

    @property
    def fact_strides(self) -> tuple[int, ...]:
        """Strides of each of the three arrays of facts: of the batch dimensions, and lines."""
        return (*self.operand.dense_batch_strides(self.operand.lines), 1)

    @property
    def facts_bytes(self) -> int:
        """Size of the facts: exponents, lost and dense elements, each an int32 for every line."""
        return 3 * 4 * self.lines

    @property
    def lines(self) -> int:
        """Lines of all matrices."""
        return self.operand.matrices * self.operand.lines

    @property
    def _threads(self) -> int:
        return 256 if self.operand.k_major else 512

    @property
    def _line_lanes(self) -> int:
        operand = self.operand
        if operand.k_major:
            return 1 if operand.k > _LONG_LINE else 8
        # 16 lines a block, or 8, which are the least that whole sectors hold, to have more blocks.
        return 4 if operand.matrices * operand.lines >= 16 * self.gpu.multiprocessors else 2

    def launch(self, compiled: Compiled, source: Buffer, pieces: Buffer, facts: Buffer) -> Launch:
        """Return the launch, given what ``kernel`` was compiled to and the buffers.

        Raises
        ------
        ValueError
            If the operand has more lines, or takes more blocks, than a launch can have.
        """
        operand = self.operand
        rows = _source_rows(operand, 4)
        block_lines = self._line_lanes * (1 if operand.k_major else 4)
        if operand.k_major:
            blocks = -(-rows.count // block_lines)
        else:
            blocks = rows.count * -(-operand.lines // block_lines)
        _check_rows(self.lines)
        shape = Scalars.pack(
            f"{_StridedRows.LAYOUT}q4I",
            *rows.values,
            0 if operand.k_major else operand.k_stride * 4,
            operand.lines,
            operand.k,
            self.k_padded,
            self.lines,
        )
        return Launch(
            entry=compiled.entry(self.kernel.name),
            grid=(blocks, 1, 1),
            block=(self._threads, 1, 1),
            parameters=(source, pieces, facts, shape),
        )


DECIDE_KERNEL = Kernel("split_float32.cuh", "tilekern::decide_float32")


def decide_launch(
    compiled: Compiled,
    lhs: SplitPass,
    rhs: SplitPass,
    lhs_facts: Buffer,
    rhs_facts: Buffer,
    flag: Buffer,
) -> Launch:
    """Return the launch of ``DECIDE_KERNEL``, which writes one int32.

    It is 0 if the sum of the products of all pieces but the last of both operands is as accurate as
    float32's own arithmetic, and 1 if it may not be.

    Parameters
    ----------
    compiled
        What ``DECIDE_KERNEL`` was compiled to.
    lhs, rhs
        How the operands were split.
    lhs_facts, rhs_facts
        What that found out.
    flag
        Where to write.
    """
    shape = Scalars.pack("3I", lhs.lines, rhs.lines, lhs.operand.k)
    return Launch(
        entry=compiled.entry(DECIDE_KERNEL.name),
        grid=(1, 1, 1),
        block=(1024, 1, 1),
        parameters=(lhs_facts, rhs_facts, flag, shape),
    )


_SUM_TYPES: dict[np.dtype[Any], str] = {
    np.dtype(np.float32): "float",
    np.dtype(np.float64): "double",
    np.dtype(np.int32): "tilekern::int32",
    np.dtype(ml_dtypes.bfloat16): "tilekern::bfloat16",
    np.dtype(np.float16): "tilekern::float16",
}


@dataclass(frozen=True)
class SumPass:
    """Adds up partial sums ``[splits][batch][m][n]`` in order, and rounds to the output.

    Attributes
    ----------
    geometry
        Sizes, and the output's strides.
    splits
        Number of partial sums of each element.
    sum_dtype
        Their type: float32, float64 or int32.
    out_dtype
        The same, or bfloat16 or float16 of float32.
    """

    geometry: MatmulGeometry
    splits: int
    sum_dtype: np.dtype[Any]
    out_dtype: np.dtype[Any]

    @property
    def kernel(self) -> Kernel:
        """What the compiler is asked for."""
        types = ", ".join(_SUM_TYPES[dtype] for dtype in (self.sum_dtype, self.out_dtype))
        config = _config("SumConfig", vector=self._vector)
        return Kernel("sum_splits.cuh", f"tilekern::sum_splits<{types}, {config}>")

    @property
    def split_stride(self) -> int:
        """Elements between the partial sums of one element."""
        return math.prod(self.geometry.batch) * self.geometry.m * self.geometry.n

    @property
    def workspace_bytes(self) -> int:
        """Size of the partial sums."""
        return self.splits * self.split_stride * self.sum_dtype.itemsize

    @property
    def out_alignment(self) -> int:
        """Bytes that the output's address is to be a multiple of."""
        return self._vector * self.out_dtype.itemsize

    @property
    def _rows(self) -> tuple[list[tuple[int, int]], int]:
        """Sizes and strides of what numbers the output's rows, and the elements of a row."""
        geometry = self.geometry
        sizes = (*geometry.batch, geometry.m)
        *outer, (columns, stride) = _merged(
            [*zip(sizes, geometry.out_strides[:-1], strict=True), (geometry.n, 1)]
        ) or [(1, 1)]
        # A dimension of size 1 is dropped, even n.
        return (outer, columns) if stride == 1 else ([*outer, (columns, stride)], 1)

    @property
    def _vector(self) -> int:
        rows, columns = self._rows
        vector = _VECTOR_BYTES // self.sum_dtype.itemsize
        whole = all(step % vector == 0 for step in (columns, *(stride for _, stride in rows)))
        return vector if whole and self.split_stride % vector == 0 else 1

    def launch(self, compiled: Compiled, partials: Buffer, out: Buffer) -> Launch:
        """Return the launch, given what ``kernel`` was compiled to and the buffers.

        Raises
        ------
        ValueError
            If the output has more rows, or takes more blocks, than a launch can have.
        """
        dims, columns = self._rows
        rows, threads = _StridedRows.of(dims), 256
        tiling = _RowTiling.of(rows.count, columns // self._vector, 1, threads)
        shape = Scalars.pack(
            f"{_StridedRows.LAYOUT}2q2Ii",
            *rows.values,
            columns,
            self.split_stride,
            *tiling.values,
            self.splits,
        )
        return Launch(
            entry=compiled.entry(self.kernel.name),
            grid=(tiling.blocks, 1, 1),
            block=(threads, 1, 1),
            parameters=(partials, out, shape),
        )


@dataclass(frozen=True)
class _StridedRows:
    """``StridedRows`` of ``strided_rows.cuh``."""

    strides: tuple[int, ...]
    sizes: tuple[int, ...]

    LAYOUT = f"{MAX_BATCH_DIMS + 1}q{MAX_BATCH_DIMS + 2}I"

    @classmethod
    def of(cls, dims: Iterable[tuple[int, int]]) -> _StridedRows:
        """Return the rows that dimensions number, given as sizes and strides, outermost first."""
        merged = _merged(dims)
        padded = [(1, 0)] * (MAX_BATCH_DIMS + 1 - len(merged)) + merged
        rows = cls(tuple(stride for _, stride in padded), tuple(size for size, _ in padded))
        _check_rows(rows.count)
        return rows

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    @property
    def values(self) -> tuple[int, ...]:
        return (*self.strides, *self.sizes, self.count)


@dataclass(frozen=True)
class _RowTiling:
    """``RowTiling`` of ``strided_rows.cuh``, and the blocks that it takes."""

    segments: int
    log2_lanes: int
    blocks: int

    @classmethod
    def of(cls, rows: int, units: int, most_per_lane: int, threads: int) -> _RowTiling:
        """Choose lanes for rows of so many units: a warp in a row, before a lane takes several."""
        log2_lanes = min((units - 1).bit_length(), 5)
        while 1 << log2_lanes < threads and units > most_per_lane << log2_lanes:
            log2_lanes += 1
        segments = -(-units // (most_per_lane << log2_lanes))
        return cls(segments, log2_lanes, segments * -(-rows // (threads >> log2_lanes)))

    @property
    def values(self) -> tuple[int, int]:
        return self.segments, self.log2_lanes


def _source_rows(operand: StridedOperand, itemsize: int) -> _StridedRows:
    """Return the rows of a k-major operand, or its matrices, with strides in bytes."""
    dims = [*operand.copied_batch]
    if operand.k_major:
        dims.append((operand.lines, operand.line_stride))
    return _StridedRows.of((size, stride * itemsize) for size, stride in dims)


def _merged(dims: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return sizes and strides of dimensions with those made one that lie like one."""
    merged: list[tuple[int, int]] = []
    for size, stride in dims:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = merged[-1][0] * size, stride
        else:
            merged.append((size, stride))
    return merged


def _is_copied(size: int, stride: int) -> bool:
    return size > 1 and stride != 0


def _check_rows(rows: int) -> None:
    if rows > _MOST_ROWS:
        raise ValueError(f"{rows} rows are more than {_MOST_ROWS}")


def _config(name: str, **fields: int) -> str:
    # int() turns flags into 0 and 1, which C++ takes for bool.
    values = ", ".join(f".{field} = {int(value)}" for field, value in fields.items())
    return f"tilekern::{name}{{{values}}}"
