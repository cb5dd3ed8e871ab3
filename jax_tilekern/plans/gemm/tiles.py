"""The order of tiles, and TMA's view of a product, for kernels of several architectures.

A tile of an operand in shared memory has rows of 128 bytes, along ``k`` or along M or N.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np

from jax_tilekern.plans.gemm.epilogue import EpilogueArray
from jax_tilekern.plans.gemm.geometry import StridedOperand
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.launch import TMA_STRIDE_BYTES, TensorMap, TensorMapDtype

# A row of an operand's or of an output's tile in shared memory.
TILE_ROW_BYTES = 128
# A tensor map has 5 dimensions.
MAX_TMA_BATCH_DIMS = 3


def raster_height(running: int, tiles_m: int, block_m: int, block_n: int) -> int:
    """Return the height of a rasterization group in tiles.

    Tiles that run at the same time are chosen to touch as few rows of ``lhs`` and columns of
    ``rhs`` as possible, which L2 then serves to all of them.

    Parameters
    ----------
    running
        CTAs, or clusters of them, that run at a time.
    tiles_m
        Rows of tiles.
    block_m, block_n
        The tile that each of them computes.
    """

    def rows_and_columns(height: int) -> int:
        return height * block_m + math.ceil(running / height) * block_n

    heights = (height for height in (1, 2, 4, 8, 16, 32) if height <= tiles_m)
    return min(heights, key=rows_and_columns)


@dataclass(frozen=True)
class OrientedProduct:
    """A product as the kernel computes it: operands in buffers, swapped or not."""

    batch: tuple[int, ...]
    # The extent of the product; rows of hi/lo parts are longer.
    k: int
    lhs: StridedOperand
    rhs: StridedOperand
    lhs_dtype: np.dtype[Any]
    rhs_dtype: np.dtype[Any]
    lhs_buffer: int
    rhs_buffer: int
    # The output: sizes and strides of its batch dimensions, and strides of the kernel's m and n.
    out_dtype: np.dtype[Any]
    out_buffer: int
    out_batch: tuple[tuple[int, int], ...]
    out_m_stride: int
    out_n_stride: int
    # Whether the output's unit stride is along the kernel's m.
    out_m_major: bool = False
    # The distance between an operand's hi and lo parts, in elements of k.
    part_step: int = 0

    @classmethod
    def of(cls, product: Product) -> OrientedProduct:
        """Return a product with its operands in their order."""
        geometry = product.geometry
        *out_batch, out_m, out_n = geometry.out_strides
        return cls(
            batch=geometry.batch,
            k=geometry.k,
            lhs=StridedOperand.lhs(geometry),
            rhs=StridedOperand.rhs(geometry),
            lhs_dtype=product.lhs_dtype,
            rhs_dtype=product.rhs_dtype,
            lhs_buffer=0,
            rhs_buffer=1,
            out_dtype=product.out_dtype,
            out_buffer=product.out_buffer,
            out_batch=tuple(zip(geometry.batch, out_batch, strict=True)),
            out_m_stride=out_m,
            out_n_stride=out_n,
        )

    def swapped(self) -> OrientedProduct:
        """Return the transposed product, with swapped operands."""
        return dataclasses.replace(
            self,
            lhs=self.rhs,
            rhs=self.lhs,
            lhs_dtype=self.rhs_dtype,
            rhs_dtype=self.lhs_dtype,
            lhs_buffer=self.rhs_buffer,
            rhs_buffer=self.lhs_buffer,
            out_m_stride=self.out_n_stride,
            out_n_stride=self.out_m_stride,
            out_m_major=True,
        )


def fits_tma(operand: StridedOperand, dtype: np.dtype[Any]) -> bool:
    """Whether a tensor map can describe an operand."""
    outer = (operand.mn, operand.mn_stride) if operand.k_major else (operand.k, operand.k_stride)
    dims = [outer, *zip(operand.batch, operand.batch_strides, strict=True)]
    return all(stride * dtype.itemsize % TMA_STRIDE_BYTES == 0 for size, stride in dims if size > 1)


# TMA copies 8-bit types as bytes, and rounds float32 to TF32.
_MAP_DTYPES = {
    "int8": "uint8",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "float32": "tfloat32",
}


def operand_map(
    operand: StridedOperand, dtype: np.dtype[Any], buffer: int, k_major: bool, tile_rows: int
) -> TensorMap:
    """Return the map of an operand in TMA tiles of so many rows of M or N."""
    mn, k = (operand.mn, operand.mn_stride), (operand.k, operand.k_stride)
    row = TILE_ROW_BYTES // dtype.itemsize
    # A TMA tile is a row of k for each m or n, or a row of m or n for each k.
    return _map(
        buffer,
        _MAP_DTYPES.get(dtype.name, dtype.name),
        dtype.itemsize,
        (k, mn) if k_major else (mn, k),
        [*zip(operand.batch, operand.batch_strides, strict=True)],
        (row, tile_rows if k_major else row),
    )


def out_map(product: OrientedProduct, columns: int, rows: int) -> TensorMap:
    """Return the map of the output in TMA tiles.

    Parameters
    ----------
    product
        The product as the kernel computes it.
    columns
        Elements of a tile along the output's unit stride: 64 or 128 bytes.
    rows
        Elements of a tile along the output's other dimension.
    """
    itemsize = product.out_dtype.itemsize
    m, n = (product.lhs.mn, product.out_m_stride), (product.rhs.mn, product.out_n_stride)
    return _map(
        product.out_buffer,
        product.out_dtype.name,
        itemsize,
        (m, n) if product.out_m_major else (n, m),
        [*product.out_batch],
        (columns, rows),
        swizzle=cast("Literal[64, 128]", columns * itemsize),
    )


def staged_map(
    array: EpilogueArray, buffer: int, sizes: tuple[int, ...], tile_columns: int, tile_rows: int
) -> TensorMap:
    """Return the map of an epilogue's operand, see ``gemm/sm90/staged_operands.cuh``.

    Parameters
    ----------
    array
        The operand.
    buffer
        Its buffer.
    sizes
        Sizes of the batch dimensions, then rows and columns.
    tile_columns, tile_rows
        Columns that a stage has, and rows of the output tile.
    """
    *batch_strides, row_stride, _ = array.strides
    *batch, rows, columns = sizes
    itemsize = array.dtype.itemsize
    box, swizzle = (tile_columns, 1), 0
    if row_stride:
        box = (min(tile_columns, TILE_ROW_BYTES // itemsize), tile_rows)
        swizzle = box[0] * itemsize
    return _map(
        buffer,
        f"uint{8 * itemsize}",
        itemsize,
        ((columns, 1), (rows if row_stride else 1, row_stride)),
        [*zip(batch, batch_strides, strict=True)],
        box,
        swizzle=cast("Literal[0, 32, 64, 128]", swizzle),
    )


def _map(
    buffer: int,
    dtype: str,
    itemsize: int,
    matrix: tuple[tuple[int, int], tuple[int, int]],
    batch: list[tuple[int, int]],
    box: tuple[int, int],
    swizzle: Literal[0, 32, 64, 128] = 128,
) -> TensorMap:
    """Return the map of a matrix, given sizes and strides innermost first, and of its batch."""
    # The coordinate stays 0 in dimensions over which an operand is broadcast.
    outer = [(size if stride else 1, stride) for size, stride in reversed(batch)]
    outer += [(1, 0)] * (MAX_TMA_BATCH_DIMS - len(batch))
    (inner, _), *rest = *matrix, *outer
    return TensorMap(
        buffer,
        cast("TensorMapDtype", dtype),
        (inner, *(size for size, _ in rest)),
        # A dimension of size 1 may have any stride.
        tuple(stride * itemsize if size > 1 else TMA_STRIDE_BYTES for size, stride in rest),
        (*box, *(1,) * MAX_TMA_BATCH_DIMS),
        swizzle=swizzle,
    )
