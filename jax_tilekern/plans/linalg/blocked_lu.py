"""The elimination of a matrix in blocks, and substitution, on ``blocked_lu_*.cuh``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.compilation.compiler import Compiled, Kernel, compile_kernels
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, Scalars
from jax_tilekern.plans.linalg.block_products import BLOCK, Matrix, Products, ints

PANEL = 32
# A CTA of the kernel that finds pivots has groups of lanes with a few rows each. The candidates of
# all CTAs are the rows of one.
_PIVOTS_THREADS = 256
_PIVOTS_GROUPS = 64
_ROWS_OF_GROUP = (4, 8)
_PIVOTS_CTAS = 16
# Elements of the rows and reciprocals of a panel's steps (`PanelSteps`).
_STEPS_ELEMENTS = (PANEL + 1) * PANEL
# The share of the SMs that factor a block while persistent CTAs update the matrix on the others.
_FACTORING_SMS = 1 / 3
# Bytes of a row of a CTA of the kernel that exchanges rows, and columns of one that substitutes.
_EXCHANGED_BYTES = 128
SUBSTITUTED_COLUMNS = 32

_I32 = np.dtype(np.int32)
_PIVOTS = "linalg/blocked_lu_pivots.cuh"
_UPDATE = "linalg/blocked_lu_update.cuh"
_SUBSTITUTION = "linalg/block_substitution.cuh"


@dataclass(frozen=True)
class Workspaces:
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
        numbers = (size, BLOCK, size, 1, _PIVOTS_CTAS * PANEL)
        elements = [_STEPS_ELEMENTS, PANEL * BLOCK, BLOCK * stride]
        if inverse:
            elements.append(size * BLOCK)
        return (*(n * _I32.itemsize for n in numbers), *(n * itemsize for n in elements))


@dataclass(frozen=True)
class _UpdateKernel:
    """The kernel that applies a panel to the rest of its block, with so many warps."""

    kernel: Kernel
    warps: int

    @property
    def rows(self) -> int:
        return 8 * self.warps

    @property
    def shared_elements(self) -> int:
        """Elements of `UpdateTile`: the pivots' rows, the multiples, and the panel's steps."""
        return PANEL * BLOCK + PANEL * (self.rows + 4) + _STEPS_ELEMENTS


@dataclass(frozen=True)
class Elimination:
    """The elimination of a matrix and the back substitution, on compiled kernels."""

    size: int
    dtype: np.dtype[Any]
    gpu: Gpu
    products: Products

    def kernel(self, file: str, name: str, *choices: int | str) -> Kernel:
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
        final = next(n for n in _ROWS_OF_GROUP if ctas * PANEL <= n * _PIVOTS_GROUPS)
        return self.kernel(_PIVOTS, "blocked_lu_pivots", own, final), ctas

    def update(self, rows: int) -> _UpdateKernel:
        """Return the kernel that applies a panel to the rest of its block."""
        # As many CTAs as SMs, if there are as many rows.
        warps = 8 if rows >= 32 * self.gpu.sm_count else 4
        return _UpdateKernel(self.kernel(_UPDATE, "blocked_lu_update", warps), warps)

    def compiled(self, *, inverse: bool) -> Compiled:
        """Compile all kernels but those of products."""
        rows = range(BLOCK, self.size + 1, BLOCK)
        own = (kernel for n in rows for kernel in (self.pivots(n)[0], self.update(n).kernel))
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
        skipped: int = -BLOCK,
    ) -> Launch:
        """Return the launch that solves with a triangle of a block, see ``block_substitution``."""
        return Launch(
            entry=compiled.entry(kernel.name),
            grid=(columns // SUBSTITUTED_COLUMNS, 1, 1),
            block=(256, 1, 1),
            parameters=(
                triangle, solutions, copies or Scalars.int64(0), *ints(*strides, skipped)
            ),
            # The solutions, and of two parts of the triangle the diagonal and what waits for it.
            shared_memory_bytes=(SUBSTITUTED_COLUMNS + 2 * PANEL)
            * BLOCK
            * self.dtype.itemsize,
        )  # fmt: skip

    def eliminate(self, compiled: Compiled, matrix: Matrix, spaces: Workspaces) -> Iterator[Launch]:
        """Yield the launches that leave the upper factor, and eliminate what is right of it.

        With a workspace for multiples, the inverse of the unit lower factor is below the upper one.
        """
        yield Launch(
            entry=compiled.entry(self.begin.name),
            grid=(math.ceil(self.size / 256), 1, 1),
            block=(256, 1, 1),
            parameters=(spaces.arrived, spaces.permutation, *ints(self.size)),
        )
        yield from self._factor_block(compiled, matrix, spaces, 0)
        for first in range(0, self.size, BLOCK):
            yield from self._eliminate_block(compiled, matrix, spaces, first)

    def _eliminate_block(
        self, compiled: Compiled, matrix: Matrix, spaces: Workspaces, first: int
    ) -> Iterator[Launch]:
        """Yield the launches that eliminate a block, which is factored, from the rows below it."""
        stride, itemsize = matrix.stride, matrix.itemsize
        inverse = spaces.multiples is not None
        rows = self.size - first
        block = matrix.at(first, first)
        begin = 0 if inverse else first
        # It needs the pivots, and moves rows in all columns.
        yield Launch(
            entry=compiled.entry(self.exchange.name),
            grid=((stride - begin) * itemsize // _EXCHANGED_BYTES, 1, 1),
            block=(256, 1, 1),
            joins=True,
            parameters=(
                matrix.buffer,
                spaces.steps,
                spaces.order,
                spaces.permutation,
                spaces.pivot_rows,
                *ints(stride, first, begin),
            ),
        )
        changed = 0 if inverse else first + BLOCK
        pivot_rows = Matrix(spaces.pivot_rows, stride, itemsize)
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
        following = first + BLOCK

        def update(
            products: Products, multiples: Buffer, multiples_stride: int, begin: int, end: int
        ) -> Iterable[Launch]:
            return products.launches(
                (rows - BLOCK, end - begin, BLOCK),
                multiples,
                pivot_rows.at(0, begin),
                matrix.at(following, begin),
                (multiples_stride, stride, stride),
                "x0 + x1",
            )

        below, below_stride = matrix.at(following, first), stride
        if rows > BLOCK:
            # Look-ahead: the next block is factored beside the update of the columns around it.
            end = following + BLOCK
            yield from update(self.products, below, below_stride, following, end)
            yield from self._factor_block(compiled, matrix, spaces, following)
        if spaces.multiples is not None:
            yield Launch(
                entry=compiled.entry(self.multiples.name),
                grid=(min(rows // 4, 4 * self.gpu.sm_count), 1, 1),
                block=(256, 1, 1),
                parameters=(
                    block, pivot_rows.at(0, first), spaces.multiples, *ints(rows, stride)
                ),
            )  # fmt: skip
            below, below_stride = spaces.multiples, BLOCK
        if rows > BLOCK:
            others = self.products.reserving(math.ceil(_FACTORING_SMS * self.gpu.sm_count))
            for begin, end in ((changed, following), (following + BLOCK, stride)):
                if begin < end:
                    yield from update(others, below, below_stride, begin, end)

    def _factor_block(
        self, compiled: Compiled, matrix: Matrix, spaces: Workspaces, first: int
    ) -> Iterator[Launch]:
        """Yield the launches that find the pivots of a block's columns and eliminate below them.

        Those after the first block run beside what follows them.
        """
        rows = self.size - first
        block = matrix.at(first, first)
        (pivots, ctas), update = self.pivots(rows), self.update(rows)
        for column in range(0, BLOCK, PANEL):
            scalars = ints(rows, matrix.stride, column)
            yield Launch(
                entry=compiled.entry(pivots.name),
                grid=(ctas, 1, 1),
                block=(_PIVOTS_THREADS, 1, 1),
                branches=first > 0,
                overlaps=column > 0,
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
                entry=compiled.entry(update.kernel.name),
                grid=(math.ceil(rows / update.rows), 1, 1),
                block=(32 * update.warps, 1, 1),
                branches=first > 0,
                overlaps=True,
                parameters=(
                    block, spaces.steps, spaces.panel_steps, spaces.panel_rows, *scalars
                ),
                shared_memory_bytes=matrix.itemsize * update.shared_elements,
            )  # fmt: skip

    def substitute(
        self, compiled: Compiled, matrix: Matrix, solutions: Matrix, columns: int
    ) -> Iterator[Launch]:
        """Yield the launches that solve with the upper factor."""
        yield from self._substitute(compiled, matrix, solutions, columns, 0, self.size)

    def _substitute(
        self,
        compiled: Compiled,
        matrix: Matrix,
        solutions: Matrix,
        columns: int,
        first: int,
        rows: int,
    ) -> Iterator[Launch]:
        """Yield the launches that solve for rows, to which the solutions below have been added.

        Rows are halved recursively, so that most of the arithmetic is in products of a long ``k``,
        which read and write their results less often.
        """
        if rows == BLOCK:
            yield self.substitution(
                compiled,
                self.back_substitution,
                matrix.at(first, first),
                solutions.at(first, 0),
                columns,
                (matrix.stride, solutions.stride),
            )
            return
        half = rows // BLOCK // 2 * BLOCK
        middle = first + half
        yield from self._substitute(compiled, matrix, solutions, columns, middle, rows - half)
        yield from self.products.launches(
            (half, columns, rows - half),
            matrix.at(first, middle),
            solutions.at(middle, 0),
            solutions.at(first, 0),
            (matrix.stride, solutions.stride, solutions.stride),
            "x1 - x0",
        )
        yield from self._substitute(compiled, matrix, solutions, columns, first, half)
