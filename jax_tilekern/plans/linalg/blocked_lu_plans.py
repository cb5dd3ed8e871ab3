"""Plans of an inverse and of a solution by LU factors in blocks.

A block of columns is eliminated in panels, whose pivots are found by a tournament. Then a kernel
solves with the unit lower factor of the pivots for their rows of the other columns, among them the
right-hand sides. Products update the rows below: in the next block's columns first, and in the
others while the next block is eliminated. Back substitution takes one kernel for each block too,
and the products of a recursion.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, NoKernel, Scalars
from jax_tilekern.plans.linalg.block_products import (
    BLOCK,
    BLOCK_ARITHMETICS,
    Matrix,
    NoProduct,
    Products,
    ints,
)
from jax_tilekern.plans.linalg.blocked_lu import (
    PANEL,
    SUBSTITUTED_COLUMNS,
    Elimination,
    Workspaces,
)

# Rows of the matrices, in the range that is measured.
MIN_ROWS, MAX_ROWS = 512, 8192
# A workspace has the right-hand sides.
MAX_COLUMNS = 1 << 16

_COMPUTE_CAPABILITY = (9, 0)


def covers(count: int, size: int, dtype: np.dtype[Any]) -> bool:
    """Return whether matrices have a plan on a GPU that has the kernels."""
    return count == 1 and dtype in BLOCK_ARITHMETICS and MIN_ROWS <= size <= MAX_ROWS


def plan_inverse(size: int, dtype: np.dtype[Any], gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan the inverse of a matrix: the operand and the result."""
    if gpu.compute_capability != _COMPUTE_CAPABILITY:
        return _other_gpu(gpu)
    extended, itemsize = _rounded_up(size, BLOCK), dtype.itemsize
    operand, result, matrix, solutions, *spaces = map(Buffer, range(13))
    elimination = Elimination(extended, dtype, gpu, Products(dtype, gpu, 13), inverse=True)
    own, x = (Matrix(buffer, extended, itemsize) for buffer in (matrix, solutions))
    workspaces = Workspaces(*spaces)
    try:
        launches = [
            _copy(elimination, (operand, size, size), own, (extended, extended), 1),
            *elimination.eliminate(own, workspaces),
            elimination.launch("copy_unit_lower", extended, matrix, solutions, *ints(extended)),
            *elimination.substitute(own, x, extended),
            elimination.launch(
                "permute_columns",
                size,
                solutions,
                workspaces.permutation,
                result,
                *ints(extended, size),
                threads=512,
                shared_memory_bytes=extended * itemsize,
            ),
        ]
    except NoProduct as error:
        return NoKernel(str(error))
    square = extended * extended * itemsize
    return _plan(
        f"blocked_lu inverse {dtype} {size}x{size}",
        elimination,
        launches,
        2,
        (square, square, *Workspaces.bytes_of(extended, extended, itemsize, inverse=True)),
    )


def plan_solution(size: int, columns: int, dtype: np.dtype[Any], gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan the solution of a system: the matrix, right-hand sides, and the solutions."""
    if gpu.compute_capability != _COMPUTE_CAPABILITY:
        return _other_gpu(gpu)
    extended, sides = _rounded_up(size, BLOCK), _rounded_up(columns, SUBSTITUTED_COLUMNS)
    stride, itemsize = extended + sides, dtype.itemsize
    a, b, result, matrix, *spaces = map(Buffer, range(12))
    elimination = Elimination(extended, dtype, gpu, Products(dtype, gpu, 12), inverse=False)
    own = Matrix(matrix, stride, itemsize)
    x = Matrix(own.at(0, extended), stride, itemsize)
    to = Matrix(result, columns, itemsize)
    try:
        launches = [
            _copy(elimination, (a, size, size), own, (extended, extended), 1),
            _copy(elimination, (b, size, columns), x, (extended, sides)),
            *elimination.eliminate(own, Workspaces(*spaces)),
            *elimination.substitute(own, x, sides),
            _copy(elimination, (x.buffer, size, columns), to, (size, columns), stride=stride),
        ]
    except NoProduct as error:
        return NoKernel(str(error))
    return _plan(
        f"blocked_lu solution {dtype} {size}x{size}, {columns} columns",
        elimination,
        launches,
        3,
        (
            extended * stride * itemsize,
            *Workspaces.bytes_of(extended, stride, itemsize, inverse=False),
        ),
    )


def _plan(
    name: str,
    elimination: Elimination,
    launches: Sequence[Launch],
    arrays: int,
    workspaces: tuple[int, ...],
) -> LaunchPlan:
    products = sum("matmul" in launch.entry.name for launch in launches)
    return LaunchPlan(
        name=name,
        gpu=elimination.gpu,
        launches=tuple(launches),
        alignments=(elimination.dtype.itemsize,) * arrays,
        workspace_bytes=(*workspaces, *elimination.products.workspace_bytes),
        reason=f"panels of {PANEL} columns, blocks of {BLOCK}, and {products} products",
    )


def _copy(
    elimination: Elimination,
    source: tuple[Buffer, int, int],
    to: Matrix,
    extents: tuple[int, int],
    diagonal: int = 0,
    *,
    stride: int | None = None,
) -> Launch:
    """Copy rows and columns of a buffer, which are contiguous unless there is a stride."""
    buffer, rows, columns = source
    extended_rows, extended_columns = extents
    return elimination.launch(
        "copy_and_extend",
        extended_rows,
        buffer,
        to.buffer,
        *ints(rows, columns, extended_columns, stride or columns, to.stride),
        Scalars.pack("f" if to.itemsize == 4 else "d", diagonal),
    )


def _rounded_up(size: int, unit: int) -> int:
    return math.ceil(size / unit) * unit


def _other_gpu(gpu: Gpu) -> NoKernel:
    return NoKernel(f"large matrices have LU factors in blocks on sm_90a, and this is {gpu.arch}")
