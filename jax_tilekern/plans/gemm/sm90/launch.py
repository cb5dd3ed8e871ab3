"""The launch of ``gemm/sm90/matmul.cuh``: its tensor maps and its rasterization."""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import numpy as np

from jax_tilekern.compilation.compiler import Compiled, Kernel
from jax_tilekern.plans.gemm.epilogue import EpilogueArray
from jax_tilekern.plans.gemm.rasterization import raster_height
from jax_tilekern.plans.gemm.sm90.config import (
    MAX_TMA_BATCH_DIMS,
    TILE_ROW_BYTES,
    TMA_STRIDE_BYTES,
    View,
    WgmmaInstance,
    WgmmaTile,
)
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, Parameter, Scalars, TensorMap, TensorMapDtype
from jax_tilekern.plans.strided_rows import StridedOperand


def launch_tiles(
    compiled: Compiled,
    tile: WgmmaTile,
    instance: WgmmaInstance,
    view: View,
    splits: int,
    gpu: Gpu,
    *,
    kernel: Kernel | None = None,
    work_tiles: int | None = None,
    more: tuple[tuple[Parameter, ...], tuple[Parameter, ...]] = ((), ()),
    stores: bool = True,
) -> Launch:
    """Return the launch of a kernel, given what ``instance.kernel`` was compiled to.

    Parameters
    ----------
    kernel
        The kernel, if it is not ``instance.kernel``.
    work_tiles
        The maximum number of work tiles, if they are not those of a dense product.
    more
        Parameters before and after the shape, of a kernel that has more of them.
    stores
        Whether the kernel stores elements of the output.
    """
    tiles_m, tiles_n = tile.grid(view.lhs.mn, view.rhs.mn)
    k_tiles = math.ceil(view.k / instance.block_k)
    split_k_tiles = math.ceil(k_tiles / splits)
    if work_tiles is None:
        work_tiles = math.ceil(k_tiles / split_k_tiles) * math.prod(view.batch) * tiles_m * tiles_n
    clusters = min(work_tiles, gpu.sm_count // instance.cluster)

    missing = (0,) * (MAX_TMA_BATCH_DIMS - len(view.batch))
    out_missing = (0,) * (MAX_TMA_BATCH_DIMS - len(view.out_batch))
    shape = Scalars.pack(
        f"{MAX_TMA_BATCH_DIMS + 1}q{3 * MAX_TMA_BATCH_DIMS + 10}i",
        *out_missing,
        *(stride for _, stride in view.out_batch),
        view.out_n_stride if instance.out_m_major else view.out_m_stride,
        *(1 for _ in missing),
        *view.batch,
        *missing,
        *(int(stride != 0) for stride in view.lhs.batch_strides),
        *missing,
        *(int(stride != 0) for stride in view.rhs.batch_strides),
        math.prod(view.batch),
        view.lhs.mn,
        view.rhs.mn,
        k_tiles,
        split_k_tiles,
        view.part_step,
        tiles_m,
        tiles_n,
        raster_height(
            gpu.sm_count // tile.cluster,
            tiles_m,
            tile.block_m * tile.cluster,
            tile.block_n,
        ),
        work_tiles,
    )
    lhs = _operand_map(
        view.lhs, view.lhs_dtype, view.lhs_buffer, instance.lhs_k_major, instance.block_m
    )
    rhs = rhs_map(view, instance, instance.rhs_tma_rows)
    return Launch(
        entry=compiled.entry((kernel or instance.kernel).name),
        grid=(clusters * instance.cluster, 1, 1),
        block=(instance.threads, 1, 1),
        # A kernel that stores single elements, or none, does not read the map of the output.
        parameters=(
            lhs,
            rhs,
            _out_map(view, instance) if instance.tma_store and stores else lhs,
            Buffer(view.out_buffer),
            *more[0],
            shape,
            *more[1],
        ),
        shared_memory_bytes=instance.shared_memory_bytes,
        cluster=(instance.cluster, 1, 1),
    )


def rhs_map(view: View, instance: WgmmaInstance, rows: int) -> TensorMap:
    """Return the map of ``rhs`` in TMA tiles of so many rows of N."""
    return _operand_map(view.rhs, view.rhs_dtype, view.rhs_buffer, instance.rhs_k_major, rows)


# TMA copies 8-bit types as bytes, and rounds float32 to TF32.
_MAP_DTYPES = {
    "int8": "uint8",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "float32": "tfloat32",
}


def _operand_map(
    operand: StridedOperand, dtype: np.dtype[Any], buffer: int, k_major: bool, tile_rows: int
) -> TensorMap:
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


def _out_map(view: View, instance: WgmmaInstance) -> TensorMap:
    m, n = (view.lhs.mn, view.out_m_stride), (view.rhs.mn, view.out_n_stride)
    row = TILE_ROW_BYTES // view.out_dtype.itemsize
    # An epilogue subtile is 64 rows of n, or as many rows of m as it has columns.
    return _map(
        view.out_buffer,
        view.out_dtype.name,
        view.out_dtype.itemsize,
        (m, n) if instance.out_m_major else (n, m),
        [*view.out_batch],
        (row, math.gcd(instance.block_n, row) if instance.out_m_major else 64),
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
