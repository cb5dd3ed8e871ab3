"""Plans for the steps of a blocked Gauss-Jordan inversion, on the kernels of ``gauss_jordan_*.cuh``."""

from __future__ import annotations

import math

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, NoKernel, Scalars

PANEL = 32
BLOCK = 256

# Threads of a CTA, rows of a thread, and CTAs of the cluster that factors a panel.
_PANELS = (
    (128, 1, 1),
    (256, 1, 1),
    (256, 1, 2),
    (256, 1, 4),
    (256, 1, 8),
    (512, 1, 8),
    (512, 2, 8),
)


def panel_shape(rows: int) -> tuple[int, int, int] | None:
    """Return the threads, rows of a thread and CTAs for a panel, or ``None`` if it is too tall."""
    return next((shape for shape in _PANELS if math.prod(shape) >= rows), None)


def plan_block(
    size: int, first: int, gpu: Gpu, shape: tuple[int, int, int] | None = None, ahead: str = ""
) -> LaunchPlan | NoKernel:
    """Plan the elimination of a block of columns, without the product with its pivots' rows.

    Operands are the matrix, the column whose pivot each row is, or -1, and the rows that are the
    columns' pivots. Results are these three in place, the block's columns and its pivots' rows.
    """
    shape = shape or panel_shape(size)
    if shape is None:
        return NoKernel(f"{size} rows exceed the registers of a cluster")
    threads, _, ctas = shape
    file = "linalg/gauss_jordan_update.cuh"
    panel = Kernel(f"linalg/gauss_jordan_panel{ahead}.cuh", f"tilekern::gauss_jordan_panel{ahead}<{', '.join(map(str, shape))}>")
    warps = 8 if size >= 64 * gpu.sm_count // 2 else 4
    update = Kernel(file, f"tilekern::gauss_jordan_update<{warps}>")
    exchange = Kernel(file, "tilekern::gauss_jordan_exchange")
    compiled = compile_kernels(panel, update, exchange, arch=gpu.arch)
    matrix, steps, order, block, rows, panel_rows = map(Buffer, range(3, 9))
    columns = Buffer(3, offset_bytes=4 * first)
    launches = []
    for column in range(0, BLOCK, PANEL):
        scalars = [Scalars.pack("i", x) for x in (size, size, first + column, column)]
        launches.append(
            Launch(
                entry=compiled.entry(panel.name),
                grid=(ctas, 1, 1),
                block=(threads, 1, 1),
                cluster=(ctas, 1, 1),
                parameters=(columns, steps, order, panel_rows, *scalars),
            )
        )
        launches.append(
            Launch(
                entry=compiled.entry(update.name),
                grid=(math.ceil(size / (8 * warps)), 1, 1),
                block=(32 * warps, 1, 1),
                parameters=(columns, steps, panel_rows, *scalars),
            )
        )
    launches.append(
        Launch(
            entry=compiled.entry(exchange.name),
            grid=(4 * gpu.sm_count, 1, 1),
            block=(256, 1, 1),
            parameters=(matrix, order, block, rows, Scalars.pack("i", size), Scalars.pack("i", first)),
        )
    )
    return LaunchPlan(
        name=f"gauss_jordan float32 {size}",
        gpu=gpu,
        launches=tuple(launches),
        alignments=(16,) * 8,
        workspace_bytes=(4 * PANEL * BLOCK,),
        reason=f"panels of {PANEL} columns on {ctas} CTAs",
    )


def plan_order(size: int, gpu: Gpu) -> LaunchPlan:
    """Plan the order of the result's rows and columns."""
    kernel = Kernel("linalg/gauss_jordan_update.cuh", "tilekern::gauss_jordan_order")
    compiled = compile_kernels(kernel, arch=gpu.arch)
    launch = Launch(
        entry=compiled.entry(kernel.name),
        grid=(size, 1, 1),
        block=(512, 1, 1),
        parameters=(*map(Buffer, range(3)), Scalars.pack("i", size)),
        shared_memory_bytes=4 * size,
    )
    return LaunchPlan(
        name=f"gauss_jordan_order float32 {size}",
        gpu=gpu,
        launches=(launch,),
        alignments=(16,) * 3,
    )
