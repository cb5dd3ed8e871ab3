"""Plans of Cholesky factors in blocks, on ``blocked_cholesky.cuh``.

A block of columns takes one launch. Columns are halved recursively (Toledo, SIAM J. Matrix Anal.
Appl. 18, 1997): when the left half is factored, products update the right half, which is factored
then. So most of the arithmetic is in few, large products.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.compilation.compiler import Compiled, Kernel, compile_kernels
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gemm.epilogue import Epilogue, EpilogueArray
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.passes.split_float32 import PARTS
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.sm90.emulated import launch_of_parts
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import MAX_GRID, Buffer, Launch, LaunchPlan, NoKernel
from jax_tilekern.plans.linalg.block_products import Matrix, NoProduct, ints

# Rows of the matrices. Smaller ones have kernels of their own, and a batch has at most as many
# elements as the largest matrix.
MIN_ROWS, MAX_ROWS = 65, 32768
# A CTA factors 128 rows. With fewer ones XLA's kernel of a large batch is as fast: 0.94 and 0.97 of
# its speed for 1000 and 5000 matrices of 65 rows on an H100, and 1.9 for 300 of 100 rows.
_MANY, _ROWS_OF_MANY = 512, 96
# The matrices that have a plan, in words.
COVERED = (
    f"float32 matrices of {MIN_ROWS} to {MAX_ROWS} rows (from {_ROWS_OF_MANY} rows on if there are "
    f"more than {_MANY}, and at most as many elements as {MAX_ROWS} squared)"
)

_BLOCK = 128
_PANEL = 32
# Rows of a CTA below those on the diagonal.
_ROWS = 32
# Maximum columns of a product. A product computes the elements above the diagonal as well.
_PRODUCT_COLUMNS = 1024
_COPIED = 32

_F32 = np.dtype(np.float32)
_FILE = "linalg/blocked_cholesky.cuh"
_BLOCK_KERNEL = Kernel(_FILE, "tilekern::blocked_cholesky")
_COMPUTE_CAPABILITY = (9, 0)


def covers(count: int, size: int, dtype: np.dtype[Any]) -> bool:
    """Return whether matrices have a plan on a GPU that has the kernels."""
    fits = 1 <= count <= MAX_GRID[1] and count * _extended(size) ** 2 <= MAX_ROWS**2
    least = _ROWS_OF_MANY if count > _MANY else MIN_ROWS
    return fits and dtype == _F32 and size >= least


def plan_cholesky(count: int, size: int, symmetrize: bool, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan the factors of float32 matrices: the operand and the result."""
    if gpu.compute_capability != _COMPUTE_CAPABILITY:
        return NoKernel(f"Cholesky factors in blocks are for sm_90a, and this is {gpu.arch}")
    extended = _extended(size)
    operand, result, matrix, parts, exponents = map(Buffer, range(5))
    begin = Kernel(_FILE, f"tilekern::cholesky_begin<{int(symmetrize)}>")
    end = Kernel(_FILE, "tilekern::cholesky_end")
    compiled = compile_kernels(begin, _BLOCK_KERNEL, end, arch=gpu.arch)
    tiles = extended // _COPIED
    factorization = _Factorization(
        count, size, result, Matrix(matrix, extended, 4), parts, exponents, compiled, gpu
    )
    try:
        launches = (
            _launch(
                compiled,
                begin,
                (tiles * (tiles + 1) // 2, count),
                operand,
                matrix,
                result,
                exponents,
                *ints(size, extended),
            ),
            *factorization.columns(0, extended),
            _launch(
                compiled,
                end,
                (max(1, gpu.sm_count // count), count),
                result,
                *ints(size),
                overlaps=True,
            ),
        )
    except NoProduct as error:
        return NoKernel(str(error))
    elements = count * extended**2
    several = "" if count == 1 else f"{count} matrices "
    return LaunchPlan(
        name=f"blocked_cholesky float32 {several}{size}x{size}",
        gpu=gpu,
        launches=launches,
        alignments=(4, 16 if size % 4 == 0 else 4),
        workspace_bytes=(4 * elements, 2 * PARTS * elements, 4 * count * extended),
        reason=f"blocks of {_BLOCK} columns, and products of at most {_PRODUCT_COLUMNS}",
    )


@dataclass(frozen=True)
class _Factorization:
    """The launches between the first and the last."""

    count: int
    size: int
    factor: Buffer  # the result
    # The rows left to factor, extended to whole blocks. The matrices of a batch follow one another.
    matrix: Matrix
    # The hi and lo parts of each row of the factors, and its exponent.
    parts: Buffer
    exponents: Buffer
    compiled: Compiled
    gpu: Gpu

    def columns(self, first: int, count: int) -> Iterator[Launch]:
        """Yield the launches that factor columns, in all rows from the diagonal down."""
        if count == _BLOCK:
            yield self._block(first)
            return
        half = count // _BLOCK // 2 * _BLOCK
        middle, end = first + half, first + count
        yield from self.columns(first, half)
        for column in range(middle, end, _PRODUCT_COLUMNS):
            yield self._product(first, half, column, min(_PRODUCT_COLUMNS, end - column))
        yield from self.columns(middle, count - half)

    def _block(self, first: int) -> Launch:
        rows = self.matrix.stride
        below = rows - first - _BLOCK
        return _launch(
            self.compiled,
            _BLOCK_KERNEL,
            (max(below // _ROWS, 1), self.count),
            self.matrix.buffer,
            self.factor,
            self.parts,
            self.exponents,
            *ints(first, self.size, rows),
            shared_memory_bytes=4 * (_BLOCK * (_BLOCK + _ROWS) + _PANEL),
            overlaps=True,
        )

    def _product(self, first: int, k: int, column: int, columns: int) -> Launch:
        """Return the launch that subtracts the product of columns of the factors from others."""
        rows = self.matrix.stride
        line = PARTS * rows
        batch = () if self.count == 1 else (self.count,)
        out_strides = (*(rows * rows for _ in batch), rows, 1)
        parts_stride = tuple(rows * line for _ in batch)
        subtracted = Epilogue(
            statements=(),
            results=("x1 - x0",),
            operands=(EpilogueArray(_F32, CXX_TYPES[_F32], out_strides),),
            outputs=(),
            batch=batch,
            instructions=1,
        )
        geometry = MatmulGeometry(
            batch,
            rows - column,
            columns,
            k,
            (*parts_stride, line, 1),
            (*parts_stride, 1, line),
            out_strides,
        )
        product = Product(geometry, _F32, _F32, _F32, "f32_normwise", subtracted)
        launch = launch_of_parts(product, rows, tuple(rows for _ in batch), self.gpu)
        if isinstance(launch, NoKernel):
            raise NoProduct(launch.reason)
        parts = Matrix(self.parts, line, 2).at(column, first)
        exponents = Matrix(self.exponents, 1, 4).at(column, 0)
        out = self.matrix.at(column, column)
        placed = launch.placed([parts, parts, out, out, exponents, exponents])
        return dataclasses.replace(placed, overlaps=True)


def _extended(size: int) -> int:
    return math.ceil(size / _BLOCK) * _BLOCK


def _launch(
    compiled: Compiled, kernel: Kernel, ctas: tuple[int, int], *parameters: Any, **more: Any
) -> Launch:
    entry = compiled.entry(kernel.name)
    return Launch(entry=entry, grid=(*ctas, 1), block=(256, 1, 1), parameters=parameters, **more)
