"""The plan of an inverse by Gauss-Jordan elimination, on the kernels of ``gauss_jordan_*.cuh``.

A block of columns is eliminated in panels, each by one cluster of CTAs. Then it holds the matrix
that eliminates it elsewhere, and one product updates all other columns.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.compilation.compiler import Compiled, Kernel, compile_kernels
from jax_tilekern.plans.gemm.epilogue import Epilogue, EpilogueArray
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.select import plan_matmul
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, NoKernel, Scalars

# Rows and columns of the matrices: multiples of a block's columns in the range that is measured.
BLOCK = 256
FEWEST, MOST = 4096, 8192

_PANEL = 32
_PANEL_THREADS = 256
_PANEL_CTAS = 8
_COMPUTE_CAPABILITY = (9, 0)

_F32 = np.dtype(np.float32)
_FILE = "linalg/gauss_jordan_update.cuh"


@dataclass(frozen=True)
class Elimination:
    """The kernels of the elimination of a block, but for the product.

    Attributes
    ----------
    size
        Rows and columns of the matrix.
    gpu
        The GPU to plan for.
    """

    size: int
    gpu: Gpu

    @property
    def _update_warps(self) -> int:
        # As many CTAs as SMs, at least.
        return 8 if self.size >= 32 * self.gpu.sm_count else 4

    @property
    def panel(self) -> Kernel:
        """Eliminates a panel, whose rows are in the registers of a cluster."""
        rows = math.ceil(self.size / (_PANEL_THREADS * _PANEL_CTAS))
        return Kernel("linalg/gauss_jordan_panel.cuh", f"tilekern::gauss_jordan_panel<{rows}>")

    @property
    def update(self) -> Kernel:
        """Applies a panel to the other columns of its block."""
        return Kernel(_FILE, f"tilekern::gauss_jordan_update<{self._update_warps}>")

    @property
    def exchange(self) -> Kernel:
        """Moves the pivots' rows out of the matrix."""
        return Kernel(_FILE, "tilekern::gauss_jordan_exchange")

    def launches(
        self,
        compiled: Compiled,
        first: int,
        matrix: Buffer,
        steps: Buffer,
        order: Buffer,
        block: Buffer,
        pivot_rows: Buffer,
        panel_rows: Buffer,
    ) -> Iterable[Launch]:
        """Return the launches for the block from a column."""
        size, warps = self.size, self._update_warps
        columns = Buffer(matrix.index, matrix.offset_bytes + first * _F32.itemsize)
        for column in range(0, BLOCK, _PANEL):
            scalars = _ints(size, size, first + column, column)
            yield Launch(
                entry=compiled.entry(self.panel.name),
                grid=(_PANEL_CTAS, 1, 1),
                block=(_PANEL_THREADS, 1, 1),
                cluster=(_PANEL_CTAS, 1, 1),
                parameters=(columns, steps, order, panel_rows, *scalars),
            )
            yield Launch(
                entry=compiled.entry(self.update.name),
                grid=(math.ceil(size / (8 * warps)), 1, 1),
                block=(32 * warps, 1, 1),
                parameters=(columns, steps, panel_rows, *scalars),
            )
        yield Launch(
            entry=compiled.entry(self.exchange.name),
            grid=(4 * self.gpu.sm_count, 1, 1),
            block=(256, 1, 1),
            parameters=(matrix, order, block, pivot_rows, *_ints(size, first)),
        )


def covers(count: int, size: int, dtype: np.dtype[Any]) -> bool:
    """Return whether matrices have a plan on a GPU that has the kernels."""
    return count == 1 and dtype == _F32 and FEWEST <= size <= MOST and size % BLOCK == 0


def plan_inverse(size: int, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan the inverse of a matrix: the operand, the result, and a copy that is worked on.

    The copy is a result that takes the operand's memory.
    """
    if gpu.compute_capability != _COMPUTE_CAPABILITY:
        return NoKernel(f"large matrices are inverted on sm_90a, and this is {gpu.arch}")
    product = _update(size, gpu)
    if isinstance(product, NoKernel):
        return product
    elimination = Elimination(size, gpu)
    order_kernel = Kernel(_FILE, "tilekern::gauss_jordan_order")
    compiled = compile_kernels(
        elimination.panel, elimination.update, elimination.exchange, order_kernel, arch=gpu.arch
    )
    result, matrix, steps, order, block, pivot_rows, panel_rows = map(Buffer, range(1, 8))
    product_workspaces = [Buffer(8 + i) for i in range(len(product.workspace_bytes))]
    buffers = [block, pivot_rows, matrix, matrix, *product_workspaces]
    # The plan was measured with launches that do not overlap.
    placed = [
        dataclasses.replace(launch.placed(buffers), overlaps=False) for launch in product.launches
    ]
    of_blocks = (
        (
            *elimination.launches(
                compiled, first, matrix, steps, order, block, pivot_rows, panel_rows
            ),
            *placed,
        )
        for first in range(0, size, BLOCK)
    )
    ordered = Launch(
        entry=compiled.entry(order_kernel.name),
        grid=(size, 1, 1),
        block=(512, 1, 1),
        parameters=(matrix, order, result, *_ints(size)),
        shared_memory_bytes=size * _F32.itemsize,
    )
    of_columns = BLOCK * size * _F32.itemsize
    return LaunchPlan(
        name=f"gauss_jordan float32 {size}x{size}",
        gpu=gpu,
        launches=(*itertools.chain.from_iterable(of_blocks), ordered),
        alignments=(16, 16, 16),
        workspace_bytes=(
            4 * size,
            4 * size,
            of_columns,
            of_columns,
            _PANEL * BLOCK * _F32.itemsize,
            *product.workspace_bytes,
        ),
        reason=f"panels of {_PANEL} columns on {_PANEL_CTAS} CTAs, and {size // BLOCK} products of "
        f"{BLOCK} columns",
    )


def _update(size: int, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan ``matrix + block @ pivot_rows``, in place."""
    strides = (size, 1)
    added = Epilogue(
        statements=(),
        results=("x0 + x1",),
        operands=(EpilogueArray(_F32, "float", strides),),
        outputs=(),
        batch=(),
        instructions=1,
    )
    geometry = MatmulGeometry((), size, size, BLOCK, (BLOCK, 1), strides, strides)
    return plan_matmul(Product(geometry, _F32, _F32, _F32, "f32", added), gpu)


def _ints(*values: int) -> tuple[Scalars, ...]:
    return tuple(Scalars.pack("i", value) for value in values)
