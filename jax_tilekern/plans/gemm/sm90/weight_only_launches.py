"""Plans of ``gemm/sm90/weight_only_matmul.cuh``."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.compilation.cubin import Entry
from jax_tilekern.plans.cxx import CXX_TYPES, cxx_config
from jax_tilekern.plans.gemm.arithmetic import F32
from jax_tilekern.plans.gemm.epilogue_text import kernel_with_epilogue
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.passes.reduce_splits import SumPass
from jax_tilekern.plans.gemm.sm90.weight_only import (
    CHUNK,
    ROW_BYTES,
    TENSOR_MAP_DTYPES,
    WeightOnlyProduct,
    refusal,
)
from jax_tilekern.plans.gemm.sm90.weight_only_cost import fastest
from jax_tilekern.plans.gemm.sm90.weight_only_few_rows import plan_few_rows
from jax_tilekern.plans.gemm.sm90.weight_only_tiles import Tile, split_k, tile_of
from jax_tilekern.plans.gpu import VECTOR_BYTES, Gpu
from jax_tilekern.plans.grouped_gemm.problem import max_tiles, pack_groups
from jax_tilekern.plans.launch import (
    MAX_GRID,
    Buffer,
    Launch,
    LaunchPlan,
    NoKernel,
    Scalars,
    TensorMap,
    overlapping,
)

_ORDER_THREADS = 128


def plan_weight_only(problem: WeightOnlyProduct, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan ``out`` of ``weights``, ``x``, ``scales``, ``zeros`` if there are any, and an epilogue.

    Bounds of ragged rows come before what the epilogue reads. ``weights`` are bytes of shape
    ``(batch, n, k * bits / 8)``.
    """
    if why := refusal(problem, gpu):
        return NoKernel(why)
    found, _ = fastest(problem, gpu)
    return plan_few_rows(problem, found, gpu) if found else plan_tiles(problem, gpu)


def plan_tiles(problem: WeightOnlyProduct, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan the kernel of tiles, of a product that is not refused.

    A first launch orders ``x`` along ``k`` as fragments of weights are, while weights are loaded.
    """
    tile = tile_of(problem, gpu)
    tiles = math.ceil(problem.n / tile.rows), math.ceil(problem.m / tile.tokens)
    splits, split_k_tiles = split_k(problem, math.prod(tiles) * problem.batch, tile, gpu)
    grid = *tiles, problem.batch * splits
    if problem.ragged:
        most = (1 + problem.pair) * tiles[0] * max_tiles(problem.geometry_of_groups, tile.tokens)
        grid = min(most, gpu.available_sms * tile.ctas), 1, 1
    if grid[1] > MAX_GRID[1] or grid[2] > MAX_GRID[2]:
        return NoKernel(f"{problem.m} rows of {problem.batch} products exceed a grid")
    has_zeros = problem.zero_dtype is not None
    epilogue = problem.epilogue
    read, outputs = (epilogue.operands, epilogue.outputs) if epilogue else ((), ())
    bounds = (2 + has_zeros) * (1 + problem.pair) + 1
    out = bounds + problem.ragged + len(read)
    ordered = out + 1 + len(outputs)
    partial = splits > 1
    if partial:
        kernel = kernel_of(dataclasses.replace(problem, epilogue=None), tile, F32)
    else:
        kernel = kernel_of(problem, tile, problem.out_dtype)
    order = Kernel("gemm/sm90/fragment_order.cuh", f"tilekern::order_as_fragments<{problem.bits}>")
    kernels = [order, kernel]
    sums = None
    if partial:
        m, n = problem.m, problem.n
        geometry = MatmulGeometry(
            batch=(problem.batch,), m=m, n=n, k=problem.k,
            lhs_strides=(m * problem.k, problem.k, 1), rhs_strides=(n * problem.k, 1, problem.k),
            out_strides=(m * n, n, 1),
        )  # fmt: skip
        sums = SumPass(geometry, splits, F32, problem.out_dtype, epilogue)
        kernels.append(sums.kernel)
    compiled = compile_kernels(*kernels, arch=gpu.arch)
    shape = problem.shape_scalars(split_k_tiles)
    weights, x = _maps(problem, tile, ordered)
    second = 3 + has_zeros if problem.pair else 0
    launches = [
        _order_launch(problem, compiled.entry(order.name), ordered),
        Launch(
            entry=compiled.entry(kernel.name),
            grid=grid,
            block=(tile.threads, 1, 1),
            parameters=(
                weights,
                x,
                *_scales(2, has_zeros),
                *(
                    (
                        dataclasses.replace(weights, buffer=second),
                        *_scales(second + 1 if second else 2, has_zeros),
                        Buffer(bounds),
                    )
                    if problem.ragged
                    else ()
                ),
                Buffer(ordered + 1 if partial else out),
                shape,
                *([pack_groups(problem.geometry_of_groups)] if problem.ragged else []),
                *(epilogue.parameters(out) if epilogue and not partial else ()),
            ),
            shared_memory_bytes=tile.stages * tile.stage_bytes(problem) + tile.other_bytes(problem),
        ),
    ]
    if sums is not None:
        launches.append(sums.launch(compiled, Buffer(ordered + 1), Buffer(out)))
    text = f"{tile.rows}x{tile.tokens} tiles of the transpose{' by groups' * problem.ragged}"
    return LaunchPlan(
        name=f"weight_only_matmul {problem.weights_name} {problem.dtype}",
        gpu=gpu,
        launches=overlapping(gpu, *launches),
        alignments=(
            *(VECTOR_BYTES,) * 2,
            *(4,) * (1 + has_zeros),
            *((VECTOR_BYTES, *(4,) * (1 + has_zeros)) if problem.pair else ()),
            *(4,) * problem.ragged,
            *(x.alignment for x in read),
            VECTOR_BYTES,
            *(x.alignment for x in outputs),
        ),
        workspace_bytes=(
            _rows_of_x(problem) * problem.chunks * ROW_BYTES,
            *((sums.workspace_bytes,) if sums else ()),
        ),
        reason=f"{text}, {problem.bits}-bit weights by registers"
        + (f", k in {splits} parts" if partial else ""),
    )


def _scales(buffer: int, has_zeros: bool) -> tuple[Buffer, Buffer]:
    """Return scales, and zero points that come next if there are any."""
    return Buffer(buffer), Buffer(buffer + has_zeros)


def kernel_of(problem: WeightOnlyProduct, tile: Tile, out: np.dtype[Any]) -> Kernel:
    """Return the kernel with a type of the result, which is float32 for parts of k."""
    config = cxx_config(
        "WgmmaConfig",
        block_m=tile.rows,
        block_n=tile.tokens,
        block_k=problem.block_k,
        stages=tile.stages,
        consumers=tile.consumers,
        cooperative=tile.cooperative,
        cluster=1,
        lhs_k_major=True,
        rhs_k_major=True,
        out_m_major=True,
        tma_store=False,
        promote=True,
        parts=1,
        pair=False,
        lhs_pair=False,
    )
    zero_dtype = problem.zero_dtype or problem.scale_dtype
    types = ", ".join(CXX_TYPES[x] for x in (problem.dtype, problem.scale_dtype, zero_dtype, out))
    group = min(problem.group, problem.block_k) if problem.group < problem.k else problem.block_k
    zeros = "true" if problem.zero_dtype else "false"
    folder, name = ("grouped_", "ragged_") if problem.ragged else ("", "")
    plain = Kernel(
        f"{folder}gemm/sm90/weight_only_matmul.cuh",
        f"tilekern::weight_only_{name}matmul<{types}, {problem.weights_type}, {config}, {group}, "
        f"{zeros}, {tile.ctas}>",
    )
    if problem.epilogue is None:
        return plain
    return kernel_with_epilogue(
        plain,
        problem.epilogue,
        columns=problem.n,
        within_rows=problem.m % tile.tokens == 0,
        within_columns=problem.n % tile.rows == 0,
        tile_columns=tile.rows,
    )


def _rows_of_x(problem: WeightOnlyProduct) -> int:
    return problem.m * (problem.batch if problem.x_batched else 1)


def _order_launch(problem: WeightOnlyProduct, entry: Entry, ordered: int) -> Launch:
    span = 8 * VECTOR_BYTES // problem.bits
    padded = problem.chunks * CHUNK // span
    spans = _rows_of_x(problem) * padded
    return Launch(
        entry=entry,
        grid=(math.ceil(spans / _ORDER_THREADS), 1, 1),
        block=(_ORDER_THREADS, 1, 1),
        parameters=(
            Buffer(1),
            Buffer(ordered),
            Scalars.pack("q2i", spans, problem.k // span, padded),
        ),
    )


def _maps(problem: WeightOnlyProduct, tile: Tile, ordered: int) -> tuple[TensorMap, TensorMap]:
    row = problem.k * problem.bits // 8
    weights = TensorMap(
        buffer=0,
        dtype="uint8",
        sizes=(row, problem.n, problem.batch if problem.weights_batched else 1, 1, 1),
        strides_bytes=(row, *[problem.n * row] * 3),
        box=(ROW_BYTES, tile.rows, 1, 1, 1),
        swizzle=128,
    )
    row = problem.chunks * ROW_BYTES
    x = TensorMap(
        buffer=ordered,
        dtype=TENSOR_MAP_DTYPES[problem.dtype],
        sizes=(CHUNK, problem.m, problem.chunks, problem.batch if problem.x_batched else 1, 1),
        strides_bytes=(row, ROW_BYTES, *[problem.m * row] * 2),
        box=(CHUNK, tile.tokens, problem.block_k // CHUNK, 1, 1),
        swizzle=128,
    )
    return weights, x
