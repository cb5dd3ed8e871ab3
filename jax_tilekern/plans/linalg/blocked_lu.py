"""Plans of an inverse and of a solution by LU factors in blocks, on ``blocked_lu_*.cuh``.

A block of columns is eliminated in panels, whose pivots are found by a tournament. Then a kernel
solves with the unit lower factor of the pivots for their rows of the other columns, among them the
right-hand sides, and one product updates the rows below. Back substitution takes one kernel and one
product for each block too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_tilekern.compilation.compiler import Compiled, Kernel, compile_kernels
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gemm.epilogue import Epilogue, EpilogueArray
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.select import plan_matmul
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, NoKernel, Scalars

# Rows of the matrices, in the range that is measured.
MIN_ROWS, MAX_ROWS = 512, 8192
# A workspace has the right-hand sides.
MAX_COLUMNS = 1 << 16

_BLOCK = 256
_PANEL = 32
# A CTA of the kernel that finds pivots has groups of lanes with a few rows each. The candidates of
# all CTAs are the rows of one.
_PIVOTS_THREADS = 256
_PIVOTS_GROUPS = 64
_ROWS_OF_GROUP = (4, 8)
_PIVOTS_CTAS = 16
# Elements of the rows and reciprocals of a panel's steps (`PanelSteps`).
_STEPS_ELEMENTS = (_PANEL + 1) * _PANEL
# Bytes of a row of a CTA of the kernel that exchanges rows, and columns of one that substitutes.
_EXCHANGED_BYTES = 128
_SUBSTITUTED_COLUMNS = 32
_COMPUTE_CAPABILITY = (9, 0)

_I32 = np.dtype(np.int32)
# The arithmetic of the products.
_ARITHMETICS = {np.dtype(np.float32): "f32_normwise", np.dtype(np.float64): "f64"}
_PIVOTS = "linalg/blocked_lu_pivots.cuh"
_UPDATE = "linalg/blocked_lu_update.cuh"
_SUBSTITUTION = "linalg/block_substitution.cuh"


def covers(count: int, size: int, dtype: np.dtype[Any]) -> bool:
    """Return whether matrices have a plan on a GPU that has the kernels."""
    return count == 1 and dtype in _ARITHMETICS and MIN_ROWS <= size <= MAX_ROWS


@dataclass(frozen=True)
class _Matrix:
    """A row-major matrix in a buffer."""

    buffer: Buffer
    stride: int
    itemsize: int

    def at(self, row: int, column: int) -> Buffer:
        """Return the part of the buffer from an element."""
        offset = (row * self.stride + column) * self.itemsize
        return dataclasses.replace(self.buffer, offset_bytes=self.buffer.offset_bytes + offset)


@dataclass
class _Products:
    """Products that are added to a matrix, or subtracted, and share workspaces."""

    dtype: np.dtype[Any]
    gpu: Gpu
    first_workspace: int
    workspace_bytes: list[int] = field(default_factory=list)

    def launches(
        self,
        sizes: tuple[int, int],
        lhs: Buffer,
        rhs: Buffer,
        out: Buffer,
        strides: tuple[int, int, int],
        result: str,
    ) -> Iterable[Launch]:
        """Return the launches of a product of a block's extent."""
        dtype = self.dtype
        lhs_strides, rhs_strides, out_strides = ((stride, 1) for stride in strides)
        added = Epilogue(
            statements=(),
            results=(result,),
            operands=(EpilogueArray(dtype, CXX_TYPES[dtype], out_strides),),
            outputs=(),
            batch=(),
            instructions=1,
        )
        geometry = MatmulGeometry((), *sizes, _BLOCK, lhs_strides, rhs_strides, out_strides)
        product = Product(geometry, dtype, dtype, dtype, _ARITHMETICS[dtype], added)
        plan = plan_matmul(product, self.gpu)
        if isinstance(plan, NoKernel):
            raise _NoProduct(plan.reason)
        for i, size in enumerate(plan.workspace_bytes):
            if i == len(self.workspace_bytes):
                self.workspace_bytes.append(0)
            self.workspace_bytes[i] = max(self.workspace_bytes[i], size)
        own = [Buffer(self.first_workspace + i) for i in range(len(plan.workspace_bytes))]
        buffers = [lhs, rhs, out, out, *own]
        return [launch.placed(buffers) for launch in plan.launches]


class _NoProduct(Exception):
    """No kernel computes a product of the plan."""


@dataclass(frozen=True)
class _Workspaces:
    """Buffers of the elimination besides the matrix; their sizes are ``bytes_of``."""

    steps: Buffer
    order: Buffer
    permutation: Buffer
    arrived: Buffer
    candidates: Buffer
    panel_steps: Buffer
    panel_rows: Buffer
    pivot_rows: Buffer
    # An inverse has it, a solution does not.
    multiples: Buffer | None = None

    @staticmethod
    def bytes_of(size: int, stride: int, itemsize: int, *, inverse: bool) -> tuple[int, ...]:
        """Return the size of each, in their order."""
        numbers = (size, _BLOCK, size, 1, _PIVOTS_CTAS * _PANEL)
        elements = [_STEPS_ELEMENTS, _PANEL * _BLOCK, _BLOCK * stride]
        if inverse:
            elements.append(size * _BLOCK)
        return (*(n * _I32.itemsize for n in numbers), *(n * itemsize for n in elements))


@dataclass(frozen=True)
class _Elimination:
    """The elimination of a matrix and the back substitution, on compiled kernels."""

    size: int
    dtype: np.dtype[Any]
    gpu: Gpu
    products: _Products

    def kernel(self, file: str, name: str, *choices: int | str) -> Kernel:
        """Return a kernel for the element type."""
        arguments = ", ".join([CXX_TYPES[self.dtype], *map(str, choices)])
        return Kernel(file, f"tilekern::{name}<{arguments}>")

    @property
    def begin(self) -> Kernel:
        """Sets what the first panel expects."""
        return Kernel(_UPDATE, "tilekern::blocked_lu_begin")

    @property
    def exchange(self) -> Kernel:
        """Moves the pivots' rows of a block to its top."""
        return self.kernel(_UPDATE, "blocked_lu_exchange")

    @property
    def multiples(self) -> Kernel:
        """Copies what the product for a block reads."""
        return self.kernel(_UPDATE, "blocked_lu_multiples")

    @property
    def forward_substitution(self) -> Kernel:
        """Solves with the unit lower factor of a block's pivots."""
        return self.kernel(_SUBSTITUTION, "block_substitution", "true")

    @property
    def back_substitution(self) -> Kernel:
        """Solves with the upper factor of a block's pivots."""
        return self.kernel(_SUBSTITUTION, "block_substitution", "false")

    @property
    def copy_and_extend(self) -> Kernel:
        """Copies a matrix into a larger one."""
        return self.kernel(_SUBSTITUTION, "copy_and_extend")

    @property
    def copy_unit_lower(self) -> Kernel:
        """Copies the inverse of the lower factor."""
        return self.kernel(_SUBSTITUTION, "copy_unit_lower")

    @property
    def permute_columns(self) -> Kernel:
        """Moves columns to where the rows of the matrix were."""
        return self.kernel(_SUBSTITUTION, "permute_columns")

    def pivots(self, rows: int) -> tuple[Kernel, int]:
        """Return the kernel that finds the pivots of a panel, and its CTAs."""
        own = next(n for n in _ROWS_OF_GROUP if rows <= n * _PIVOTS_GROUPS * _PIVOTS_CTAS)
        ctas = math.ceil(rows / (own * _PIVOTS_GROUPS))
        final = next(n for n in _ROWS_OF_GROUP if ctas * _PANEL <= n * _PIVOTS_GROUPS)
        return self.kernel(_PIVOTS, "blocked_lu_pivots", own, final), ctas

    def update(self, rows: int) -> tuple[Kernel, int]:
        """Return the kernel that applies a panel to the rest of its block, and its warps."""
        # As many CTAs as SMs, if there are as many rows.
        warps = 8 if rows >= 32 * self.gpu.sm_count else 4
        return self.kernel(_UPDATE, "blocked_lu_update", warps), warps

    def compiled(self, *, inverse: bool) -> Compiled:
        """Compile all kernels but those of products."""
        rows = range(_BLOCK, self.size + 1, _BLOCK)
        own = (kernel(n)[0] for n in rows for kernel in (self.pivots, self.update))
        others = [
            self.begin,
            self.exchange,
            self.forward_substitution,
            self.back_substitution,
            self.copy_and_extend,
        ]
        if inverse:
            others += self.multiples, self.copy_unit_lower, self.permute_columns
        return compile_kernels(*dict.fromkeys((*own, *others)), arch=self.gpu.arch)

    def substitution(
        self,
        compiled: Compiled,
        kernel: Kernel,
        triangle: Buffer,
        solutions: Buffer,
        columns: int,
        strides: tuple[int, int],
        copies: Buffer | None = None,
        skipped: int = -_BLOCK,
    ) -> Launch:
        """Return the launch that solves with a triangle of a block, see ``block_substitution``."""
        return Launch(
            entry=compiled.entry(kernel.name),
            grid=(columns // _SUBSTITUTED_COLUMNS, 1, 1),
            block=(256, 1, 1),
            parameters=(
                triangle, solutions, copies or Scalars.int64(0), *_ints(*strides, skipped)
            ),
            # The solutions, and of two parts of the triangle the diagonal and what waits for it.
            shared_memory_bytes=(_SUBSTITUTED_COLUMNS + 2 * _PANEL)
            * _BLOCK
            * self.dtype.itemsize,
        )  # fmt: skip

    def eliminate(
        self, compiled: Compiled, matrix: _Matrix, spaces: _Workspaces
    ) -> Iterator[Launch]:
        """Yield the launches that leave the upper factor, and what is right of it eliminated.

        With a workspace for multiples, the inverse of the unit lower factor is below the upper one.
        """
        stride, itemsize = matrix.stride, matrix.itemsize
        inverse = spaces.multiples is not None
        yield Launch(
            entry=compiled.entry(self.begin.name),
            grid=(math.ceil(self.size / 256), 1, 1),
            block=(256, 1, 1),
            parameters=(spaces.arrived, spaces.permutation, *_ints(self.size)),
        )
        for first in range(0, self.size, _BLOCK):
            rows = self.size - first
            block = matrix.at(first, first)
            (pivots, ctas), (update, warps) = self.pivots(rows), self.update(rows)
            for column in range(0, _BLOCK, _PANEL):
                scalars = _ints(rows, stride, column)
                yield Launch(
                    entry=compiled.entry(pivots.name),
                    grid=(ctas, 1, 1),
                    block=(_PIVOTS_THREADS, 1, 1),
                    parameters=(
                        block,
                        spaces.steps,
                        spaces.order,
                        spaces.arrived,
                        spaces.candidates,
                        spaces.panel_steps,
                        spaces.panel_rows,
                        *scalars,
                    ),
                )
                yield Launch(
                    entry=compiled.entry(update.name),
                    grid=(math.ceil(rows / (8 * warps)), 1, 1),
                    block=(32 * warps, 1, 1),
                    parameters=(
                        block, spaces.steps, spaces.panel_steps, spaces.panel_rows, *scalars
                    ),
                    shared_memory_bytes=itemsize
                    * (_PANEL * _BLOCK + _PANEL * (8 * warps + 4) + _STEPS_ELEMENTS),
                )  # fmt: skip
            begin = 0 if inverse else first
            yield Launch(
                entry=compiled.entry(self.exchange.name),
                grid=((stride - begin) * itemsize // _EXCHANGED_BYTES, 1, 1),
                block=(256, 1, 1),
                parameters=(
                    matrix.buffer,
                    spaces.steps,
                    spaces.order,
                    spaces.permutation,
                    spaces.pivot_rows,
                    *_ints(stride, first, begin),
                ),
            )
            changed = 0 if inverse else first + _BLOCK
            pivot_rows = _Matrix(spaces.pivot_rows, stride, itemsize)
            yield self.substitution(
                compiled,
                self.forward_substitution,
                block,
                pivot_rows.at(0, changed),
                stride - changed,
                (stride, stride),
                copies=matrix.at(first, changed),
                skipped=first - changed,
            )
            below, multiples_stride = matrix.at(first + _BLOCK, first), stride
            if spaces.multiples is not None:
                yield Launch(
                    entry=compiled.entry(self.multiples.name),
                    grid=(min(rows // 4, 4 * self.gpu.sm_count), 1, 1),
                    block=(256, 1, 1),
                    parameters=(
                        block, pivot_rows.at(0, first), spaces.multiples, *_ints(rows, stride)
                    ),
                )  # fmt: skip
                below, multiples_stride = spaces.multiples, _BLOCK
            if rows > _BLOCK:
                yield from self.products.launches(
                    (rows - _BLOCK, stride - changed),
                    below,
                    pivot_rows.at(0, changed),
                    matrix.at(first + _BLOCK, changed),
                    (multiples_stride, stride, stride),
                    "x0 + x1",
                )

    def substitute(
        self, compiled: Compiled, matrix: _Matrix, solutions: _Matrix, columns: int
    ) -> Iterator[Launch]:
        """Yield the launches that solve with the upper factor."""
        for first in reversed(range(0, self.size, _BLOCK)):
            own = solutions.at(first, 0)
            yield self.substitution(
                compiled,
                self.back_substitution,
                matrix.at(first, first),
                own,
                columns,
                (matrix.stride, solutions.stride),
            )
            if first > 0:
                yield from self.products.launches(
                    (first, columns),
                    matrix.at(0, first),
                    own,
                    solutions.buffer,
                    (matrix.stride, solutions.stride, solutions.stride),
                    "x1 - x0",
                )


def plan_inverse(size: int, dtype: np.dtype[Any], gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan the inverse of a matrix: the operand and the result."""
    if gpu.compute_capability != _COMPUTE_CAPABILITY:
        return _other_gpu(gpu)
    extended, itemsize = _rounded_up(size, _BLOCK), dtype.itemsize
    operand, result, matrix, solutions, *spaces = map(Buffer, range(13))
    elimination = _Elimination(extended, dtype, gpu, _Products(dtype, gpu, 13))
    compiled = elimination.compiled(inverse=True)
    own, x = (_Matrix(buffer, extended, itemsize) for buffer in (matrix, solutions))
    workspaces = _Workspaces(*spaces)
    try:
        launches = [
            _copy(elimination, compiled, (operand, size, size), own, (extended, extended), 1),
            *elimination.eliminate(compiled, own, workspaces),
            _rows_of(
                compiled,
                elimination.copy_unit_lower,
                extended,
                (matrix, solutions, *_ints(extended)),
            ),
            *elimination.substitute(compiled, own, x, extended),
        ]
    except _NoProduct as error:
        return NoKernel(str(error))
    permuted = (solutions, workspaces.permutation, result, *_ints(extended, size))
    launches.append(
        dataclasses.replace(
            _rows_of(compiled, elimination.permute_columns, size, permuted, threads=512),
            shared_memory_bytes=extended * itemsize,
        )
    )
    square = extended * extended * itemsize
    return _plan(
        f"blocked_lu inverse {dtype} {size}x{size}",
        elimination,
        launches,
        2,
        (square, square, *_Workspaces.bytes_of(extended, extended, itemsize, inverse=True)),
    )


def plan_solution(size: int, columns: int, dtype: np.dtype[Any], gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan the solution of a system: the matrix, right-hand sides, and the solutions."""
    if gpu.compute_capability != _COMPUTE_CAPABILITY:
        return _other_gpu(gpu)
    extended, sides = _rounded_up(size, _BLOCK), _rounded_up(columns, _SUBSTITUTED_COLUMNS)
    stride, itemsize = extended + sides, dtype.itemsize
    a, b, result, matrix, *spaces = map(Buffer, range(12))
    elimination = _Elimination(extended, dtype, gpu, _Products(dtype, gpu, 12))
    compiled = elimination.compiled(inverse=False)
    own = _Matrix(matrix, stride, itemsize)
    x = _Matrix(own.at(0, extended), stride, itemsize)
    to = _Matrix(result, columns, itemsize)
    try:
        launches = [
            _copy(elimination, compiled, (a, size, size), own, (extended, extended), 1),
            _copy(elimination, compiled, (b, size, columns), x, (extended, sides)),
            *elimination.eliminate(compiled, own, _Workspaces(*spaces)),
            *elimination.substitute(compiled, own, x, sides),
            _copy(
                elimination, compiled, (x.buffer, size, columns), to, (size, columns), stride=stride
            ),
        ]
    except _NoProduct as error:
        return NoKernel(str(error))
    return _plan(
        f"blocked_lu solution {dtype} {size}x{size}, {columns} columns",
        elimination,
        launches,
        3,
        (
            extended * stride * itemsize,
            *_Workspaces.bytes_of(extended, stride, itemsize, inverse=False),
        ),
    )


def _plan(
    name: str,
    elimination: _Elimination,
    launches: Sequence[Launch],
    arrays: int,
    workspaces: tuple[int, ...],
) -> LaunchPlan:
    blocks = elimination.size // _BLOCK
    return LaunchPlan(
        name=name,
        gpu=elimination.gpu,
        launches=tuple(launches),
        alignments=(elimination.dtype.itemsize,) * arrays,
        workspace_bytes=(*workspaces, *elimination.products.workspace_bytes),
        reason=f"panels of {_PANEL} columns, and {2 * blocks - 1} products of {_BLOCK} columns",
    )


def _copy(
    elimination: _Elimination,
    compiled: Compiled,
    source: tuple[Buffer, int, int],
    to: _Matrix,
    extents: tuple[int, int],
    diagonal: int = 0,
    *,
    stride: int | None = None,
) -> Launch:
    """Copy rows and columns of a buffer, which are contiguous unless there is a stride."""
    buffer, rows, columns = source
    extended_rows, extended_columns = extents
    parameters = (
        buffer,
        to.buffer,
        *_ints(rows, columns, extended_columns, stride or columns, to.stride),
        Scalars.pack("f" if to.itemsize == 4 else "d", diagonal),
    )
    return _rows_of(compiled, elimination.copy_and_extend, extended_rows, parameters)


def _rows_of(
    compiled: Compiled, kernel: Kernel, rows: int, parameters: tuple[Any, ...], threads: int = 256
) -> Launch:
    """Return a launch with a CTA for each row."""
    return Launch(
        entry=compiled.entry(kernel.name),
        grid=(rows, 1, 1),
        block=(threads, 1, 1),
        parameters=parameters,
    )


def _rounded_up(size: int, unit: int) -> int:
    return math.ceil(size / unit) * unit


def _other_gpu(gpu: Gpu) -> NoKernel:
    return NoKernel(f"large matrices have LU factors in blocks on sm_90a, and this is {gpu.arch}")


def _ints(*values: int) -> tuple[Scalars, ...]:
    return tuple(Scalars.pack("i", value) for value in values)
