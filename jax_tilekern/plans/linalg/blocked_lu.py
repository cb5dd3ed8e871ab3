"""The elimination of a matrix in blocks, and substitution, on ``blocked_lu_*.cuh``."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.compilation.compiler import Compiled, Kernel, compile_kernels
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, Parameter, Scalars
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
_UPDATE = "linalg/blocked_lu_update.cuh"
_SUBSTITUTION = "linalg/block_substitution.cuh"
_FILES = {
    "blocked_lu_pivots": "linalg/blocked_lu_pivots.cuh",
    "blocked_lu_update": _UPDATE,
    "blocked_lu_exchange": _UPDATE,
    "blocked_lu_multiples": _UPDATE,
    "block_substitution": _SUBSTITUTION,
    "copy_and_extend": _SUBSTITUTION,
    "copy_unit_lower": _SUBSTITUTION,
    "permute_columns": _SUBSTITUTION,
}
_BEGIN = Kernel(_UPDATE, "tilekern::blocked_lu_begin")


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
class Elimination:
    """The elimination of a matrix, for its inverse or a solution, and the back substitution."""

    size: int
    dtype: np.dtype[Any]
    gpu: Gpu
    products: Products
    inverse: bool

    def _kernel(self, name: str, *choices: int | str) -> Kernel:
        arguments = ", ".join([CXX_TYPES[self.dtype], *map(str, choices)])
        return Kernel(_FILES[name], f"tilekern::{name}<{arguments}>")

    def _pivots(self, rows: int) -> tuple[Kernel, int]:
        """Return the kernel that finds the pivots of a panel, and its CTAs."""
        own = next(n for n in _ROWS_OF_GROUP if rows <= n * _PIVOTS_GROUPS * _PIVOTS_CTAS)
        ctas = math.ceil(rows / (own * _PIVOTS_GROUPS))
        final = next(n for n in _ROWS_OF_GROUP if ctas * PANEL <= n * _PIVOTS_GROUPS)
        return self._kernel("blocked_lu_pivots", own, final), ctas

    def _update(self, rows: int) -> tuple[Kernel, int]:
        """Return the kernel that applies a panel to the rest of its block, and its warps."""
        # As many CTAs as SMs, if there are as many rows.
        warps = 8 if rows >= 32 * self.gpu.sm_count else 4
        return self._kernel("blocked_lu_update", warps), warps

    @functools.cached_property
    def _compiled(self) -> Compiled:
        """All kernels but those of products."""
        rows = range(BLOCK, self.size + 1, BLOCK)
        kernels = [kernel for n in rows for kernel in (self._pivots(n)[0], self._update(n)[0])]
        kernels += [_BEGIN, *(self._kernel("block_substitution", x) for x in ("true", "false"))]
        kernels += [self._kernel(name) for name in ("blocked_lu_exchange", "copy_and_extend")]
        if self.inverse:
            names = ("blocked_lu_multiples", "copy_unit_lower", "permute_columns")
            kernels += map(self._kernel, names)
        return compile_kernels(*dict.fromkeys(kernels), arch=self.gpu.arch)

    def launch(
        self,
        kernel: Kernel | str,
        ctas: int,
        *parameters: Parameter,
        threads: int = 256,
        **more: Any,
    ) -> Launch:
        """Return the launch of a kernel, or of the only one of a name for the element type."""
        kernel = self._kernel(kernel) if isinstance(kernel, str) else kernel
        return Launch(
            entry=self._compiled.entry(kernel.name),
            grid=(ctas, 1, 1),
            block=(threads, 1, 1),
            parameters=parameters,
            **more,
        )

    def _substitution(
        self,
        forward: str,
        triangle: Buffer,
        solutions: Buffer,
        columns: int,
        strides: tuple[int, int],
        copies: Buffer | None = None,
        skipped: int = -BLOCK,
    ) -> Launch:
        """Return the launch that solves with a triangle of a block, see ``block_substitution``."""
        # The solutions, and of two parts of the triangle the diagonal and what waits for it.
        rows = SUBSTITUTED_COLUMNS + 2 * PANEL
        return self.launch(
            self._kernel("block_substitution", forward),
            columns // SUBSTITUTED_COLUMNS,
            triangle,
            solutions,
            copies or Scalars.int64(0),
            *ints(*strides, skipped),
            shared_memory_bytes=rows * BLOCK * self.dtype.itemsize,
        )

    def eliminate(self, matrix: Matrix, spaces: Workspaces) -> Iterator[Launch]:
        """Yield the launches that leave the upper factor, and eliminate what is right of it.

        For an inverse, that of the unit lower factor is below the upper one.
        """
        ctas = math.ceil(self.size / 256)
        yield self.launch(_BEGIN, ctas, spaces.arrived, spaces.permutation, *ints(self.size))
        yield from self._factor_block(matrix, spaces, 0)
        for first in range(0, self.size, BLOCK):
            yield from self._eliminate_block(matrix, spaces, first)

    def _eliminate_block(self, matrix: Matrix, spaces: Workspaces, first: int) -> Iterator[Launch]:
        """Yield the launches that eliminate a block, which is factored, from the rows below it."""
        stride, itemsize = matrix.stride, matrix.itemsize
        rows = self.size - first
        block = matrix.at(first, first)
        begin = 0 if self.inverse else first
        # It needs the pivots, and moves rows in all columns.
        yield self.launch(
            "blocked_lu_exchange",
            (stride - begin) * itemsize // _EXCHANGED_BYTES,
            matrix.buffer,
            spaces.steps,
            spaces.order,
            spaces.permutation,
            spaces.pivot_rows,
            *ints(stride, first, begin),
            joins=True,
        )
        changed = 0 if self.inverse else first + BLOCK
        pivot_rows = Matrix(spaces.pivot_rows, stride, itemsize)
        yield self._substitution(
            "true",
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
            yield from self._factor_block(matrix, spaces, following)
        if spaces.multiples is not None:
            yield self.launch(
                "blocked_lu_multiples",
                min(rows // 4, 4 * self.gpu.sm_count),
                block,
                pivot_rows.at(0, first),
                spaces.multiples,
                *ints(rows, stride),
            )
            below, below_stride = spaces.multiples, BLOCK
        if rows > BLOCK:
            others = self.products.reserving(math.ceil(_FACTORING_SMS * self.gpu.sm_count))
            for begin, end in ((changed, following), (following + BLOCK, stride)):
                if begin < end:
                    yield from update(others, below, below_stride, begin, end)

    def _factor_block(self, matrix: Matrix, spaces: Workspaces, first: int) -> Iterator[Launch]:
        """Yield the launches that find the pivots of a block's columns and eliminate below them.

        After the first block, they run beside the launches that follow them.
        """
        rows = self.size - first
        block = matrix.at(first, first)
        (pivots, ctas), (update, warps) = self._pivots(rows), self._update(rows)
        # `UpdateTile` has the pivots' rows, the multiples, and the panel's steps.
        tile = PANEL * BLOCK + PANEL * (8 * warps + 4) + _STEPS_ELEMENTS
        for column in range(0, BLOCK, PANEL):
            scalars = ints(rows, matrix.stride, column)
            yield self.launch(
                pivots,
                ctas,
                block,
                spaces.steps,
                spaces.order,
                spaces.arrived,
                spaces.candidates,
                spaces.panel_steps,
                spaces.panel_rows,
                *scalars,
                threads=_PIVOTS_THREADS,
                branches=first > 0,
                overlaps=column > 0,
            )
            yield self.launch(
                update,
                math.ceil(rows / (8 * warps)),
                block,
                spaces.steps,
                spaces.panel_steps,
                spaces.panel_rows,
                *scalars,
                threads=32 * warps,
                branches=first > 0,
                overlaps=True,
                shared_memory_bytes=matrix.itemsize * tile,
            )

    def substitute(
        self,
        matrix: Matrix,
        solutions: Matrix,
        columns: int,
        first: int = 0,
        rows: int | None = None,
    ) -> Iterator[Launch]:
        """Yield the launches that solve for rows with the upper factor, by default for all.

        The solutions below have been added to them. Rows are halved recursively, so that most of
        the arithmetic is in products of a long ``k``, which access their results less often.
        """
        rows = self.size if rows is None else rows
        if rows == BLOCK:
            yield self._substitution(
                "false",
                matrix.at(first, first),
                solutions.at(first, 0),
                columns,
                (matrix.stride, solutions.stride),
            )
            return
        half = rows // BLOCK // 2 * BLOCK
        middle = first + half
        yield from self.substitute(matrix, solutions, columns, middle, rows - half)
        yield from self.products.launches(
            (half, columns, rows - half),
            matrix.at(first, middle),
            solutions.at(middle, 0),
            solutions.at(first, 0),
            (matrix.stride, solutions.stride, solutions.stride),
            "x1 - x0",
        )
        yield from self.substitute(matrix, solutions, columns, first, half)
