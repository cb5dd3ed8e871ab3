"""The plan of an inverse by Gauss-Jordan elimination, on the kernels of ``gauss_jordan_*.cuh``.

A block of columns is eliminated in panels, each by one cluster of CTAs. Then it holds the matrix
that eliminates it elsewhere, and one product updates all other columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jax_tilekern.compilation.compiler import Compiled, Kernel, compile_kernels
from jax_tilekern.plans.gemm.epilogue import Epilogue, EpilogueArray
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.select import plan_matmul
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, NoKernel, Scalars

PANEL = 32
BLOCK = 256

_F32 = np.dtype(np.float32)
_FILE = "linalg/gauss_jordan_update.cuh"

# Threads of a CTA, rows of a thread, and CTAs of the cluster that eliminates a panel.
PanelShape = tuple[int, int, int]
_PANELS: tuple[PanelShape, ...] = (
    (128, 1, 2),
    (256, 1, 2),
    (256, 1, 4),
    (256, 1, 8),
    (512, 1, 8),
    (512, 2, 8),
)


def panel_shape(rows: int) -> PanelShape | None:
    """Return the shape for panels of so many rows, or ``None`` if they are too tall."""
    return next((shape for shape in _PANELS if math.prod(shape) >= rows), None)


@dataclass(frozen=True)
class Elimination:
    """The kernels of the elimination of a block, but for the product.

    Attributes
    ----------
    size
        Rows and columns of the matrix, a multiple of ``BLOCK``.
    shape
        How a panel is divided.
    gpu
        The GPU to plan for.
    """

    size: int
    shape: PanelShape
    gpu: Gpu
    ahead: str = ""

    @property
    def _update_warps(self) -> int:
        # As many CTAs as SMs, at least.
        return 8 if self.size >= 32 * self.gpu.sm_count else 4

    @property
    def panel(self) -> Kernel:
        """Eliminates a panel."""
        arguments = ", ".join(map(str, self.shape))
        return Kernel(
            f"linalg/gauss_jordan_panel{self.ahead}.cuh",
            f"tilekern::gauss_jordan_panel{self.ahead}<{arguments}>",
        )

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
        threads, _, ctas = self.shape
        columns = Buffer(matrix.index, matrix.offset_bytes + first * _F32.itemsize)
        for column in range(0, BLOCK, PANEL):
            scalars = _ints(size, size, first + column, column)
            yield Launch(
                entry=compiled.entry(self.panel.name),
                grid=(ctas, 1, 1),
                block=(threads, 1, 1),
                cluster=(ctas, 1, 1),
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


def plan_inverse(
    size: int, gpu: Gpu, shape: PanelShape | None = None, ahead: str = ""
) -> LaunchPlan | NoKernel:
    """Plan the inverse of a matrix: the operand, the result, and a copy that is worked on.

    The copy is a result that takes the operand's memory.
    """
    shape = shape or panel_shape(size)
    if shape is None:
        return NoKernel(f"{size} rows exceed the registers of a cluster")
    product = _update(size, gpu)
    if isinstance(product, NoKernel):
        return product
    elimination = Elimination(size, shape, gpu, ahead)
    order_kernel = Kernel(_FILE, "tilekern::gauss_jordan_order")
    compiled = compile_kernels(
        elimination.panel, elimination.update, elimination.exchange, order_kernel, arch=gpu.arch
    )
    result, matrix, steps, order, block, pivot_rows, panel_rows = map(Buffer, range(1, 8))
    product_workspaces = [Buffer(8 + i) for i in range(len(product.workspace_bytes))]
    placed = [
        launch.placed([block, pivot_rows, matrix, matrix, *product_workspaces])
        for launch in product.launches
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
            PANEL * BLOCK * _F32.itemsize,
            *product.workspace_bytes,
        ),
        reason=f"panels of {PANEL} columns on {shape[2]} CTAs, {size // BLOCK} products of "
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
