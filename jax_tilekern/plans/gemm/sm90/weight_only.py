"""Plans of ``gemm/sm90/weight_only_matmul.cuh``: products with weights of 4 or 8 bits."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.compilation.cubin import Entry
from jax_tilekern.plans.candidate import CostedCandidate
from jax_tilekern.plans.cxx import CXX_TYPES, cxx_config
from jax_tilekern.plans.gemm.arithmetic import BF16, F16, F32
from jax_tilekern.plans.gemm.epilogue import Epilogue
from jax_tilekern.plans.gemm.epilogue_text import kernel_with_epilogue
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.passes.reduce_splits import SumPass
from jax_tilekern.plans.gpu import RESERVED_SHARED_BYTES, VECTOR_BYTES, WARP, Gpu
from jax_tilekern.plans.grouped_gemm.problem import GroupedGeometry, max_tiles, pack_groups
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
from jax_tilekern.plans.policy.choice import PolicyChoice, choose
from jax_tilekern.plans.policy.workload import weight_workload

_ROW_BYTES = 128  # of weights in a k-tile, and of x in a chunk
_CONSUMER_ROWS = 64
_CHUNK = 64  # elements of a row of x in a chunk
_ORDER_THREADS = 128
_TOKENS = (8, 16, 32, 64, 128)
_ITEM_BYTES = 2
_MAX_STAGES = 12
# Measured on an H200: more stages make products slower, by one matrix and of ragged rows.
_STAGES, _RAGGED_STAGES = 4, 3
_MOST_SPANS_BYTES = 16384
_BARRIERS_BYTES = 2 * 8 * _MAX_STAGES
# A part of k has so many k-tiles at least, so that its partial sums are few beside its operands.
_SPLIT_K_TILES = 4
# Fitted to times on an H200: millions of weights that a microsecond multiplies, by bits and rows of
# x in a tile; microseconds of launches, and of one that adds parts of k or applies a function.
_WEIGHTS_IN_A_MICROSECOND = {
    4: dict(zip(_TOKENS, (6.6, 5.85, 4.8, 3.7, 2.1), strict=True)),
    8: dict(zip(_TOKENS, (4.0, 3.7, 3.45, 2.85, 1.85), strict=True)),
}
_LAUNCH, _NEXT_LAUNCH = 4.5, 1.2
# The same of XLA: millions of weights that it dequantises and that a product of few rows reads, and
# of multiply-adds; microseconds of launches, of which small products have one.
_DEQUANTISED, _READ, _MULTIPLIED, _LAUNCHES = 0.75, 2.0, 330.0, 4.0
_WRITTEN_BYTES = 4e6  # that a microsecond reads or writes
_MOST_ELEMENTS = 2**31 - 1024  # sizes and coordinates are 32-bit integers
_GROUPS = (32, 64, 128)
_TENSOR_MAP_DTYPES: dict[np.dtype[Any], Any] = {BF16: "bfloat16", F16: "float16"}


@dataclass(frozen=True)
class WeightOnlyProduct:
    """A product of ``x`` and weights of integers: ``[batch, m, k]`` and ``[batch, n, k]``.

    Attributes
    ----------
    m, n, k
        Sizes.
    bits
        Of a weight, 4 or 8. Two weights of 4 bits are a byte, the first one in its low half.
    group
        Adjacent elements along ``k`` that have a scale; the last group may have fewer.
    dtype, out_dtype
        Types of ``x`` and of the result, which is the same or float32.
    scale_dtype, zero_dtype
        Types of scales and zero points ``[batch, n / row_block, groups]``: 16-bit floats or
        float32. There are no zero points without ``zero_dtype``.
    row_block
        Rows of weights that share scales and zero points.
    batch
        Number of products.
    x_batched, weights_batched
        Whether operands have the batch dimension.
    epilogue
        What is done to the sums; ``None`` for nothing. It has results of elements alone.
    ragged
        Whether ``x`` is ``[m, k]``, and consecutive rows of it have a matrix of the batch each.
    pair
        Whether ragged rows are multiplied by two arrays of weights. Results lie side by side.
    """

    m: int
    n: int
    k: int
    bits: int
    group: int
    dtype: np.dtype[Any]
    out_dtype: np.dtype[Any]
    scale_dtype: np.dtype[Any] = F32
    zero_dtype: np.dtype[Any] | None = None
    row_block: int = 1
    batch: int = 1
    x_batched: bool = True
    weights_batched: bool = True
    epilogue: Epilogue | None = None
    ragged: bool = False
    pair: bool = False

    @property
    def columns(self) -> int:
        """Those of the output."""
        return self.n * (1 + self.pair)

    @property
    def multiply_adds(self) -> int:
        """Those of the product."""
        return self.m * self.columns * self.k * (1 if self.ragged else self.batch)

    @property
    def rows_of_matrix(self) -> int:
        """Rows of ``x`` that a matrix has, of ragged ones twice the average."""
        return min(self.m, 2 * math.ceil(self.m / self.batch)) if self.ragged else self.m

    @property
    def geometry_of_groups(self) -> GroupedGeometry:
        """The product of ragged rows."""
        return GroupedGeometry(
            batch=(self.batch,), m=self.m, n=self.n, k=self.k,
            lhs_strides=(0, self.k, 1), rhs_strides=(self.n * self.k, 1, self.k),
            out_strides=(0, self.n, 1), ragged="m", bounds_strides=(),
        )  # fmt: skip

    @property
    def spans_bytes(self) -> int:
        """Shared memory of the tiles that ragged rows have."""
        return 2 * 4 * (self.geometry_of_groups.spans + 1) if self.ragged else 0

    @property
    def block_k(self) -> int:
        """Elements along ``k`` of a k-tile."""
        return 8 * _ROW_BYTES // self.bits

    @property
    def groups(self) -> int:
        return math.ceil(self.k / self.group)

    @property
    def k_tiles(self) -> int:
        return math.ceil(self.k / self.block_k)

    @property
    def chunks(self) -> int:
        """Chunks of a row of ``x``, of which the last one is filled up with zeros."""
        return math.ceil(self.k / _CHUNK)


@dataclass(frozen=True)
class Tile:
    """Sizes of a CTA's tile, and how many CTAs an SM is to hold."""

    tokens: int
    consumers: int
    cooperative: bool
    stages: int
    ctas: int

    @property
    def rows(self) -> int:
        return _CONSUMER_ROWS * (self.consumers if self.cooperative else 1)

    @property
    def threads(self) -> int:
        """Those of consumers, and of a warp or, for its registers, a warpgroup that loads."""
        return 128 * self.consumers + (128 if self.tokens > 32 else WARP)

    @property
    def result_bytes(self) -> int:
        """Results of consumers that the first one adds to its own."""
        if self.cooperative:
            return 0
        return 4 * _CONSUMER_ROWS * self.tokens * (self.consumers - 1)


def refusal(problem: WeightOnlyProduct, gpu: Gpu) -> str:
    """Return why no kernel covers a product, or nothing."""
    if gpu.compute_capability[0] != 9:
        return f"kernels of 4- and 8-bit weights are for Hopper, and {gpu.name} has {gpu.arch}"
    if problem.dtype not in _TENSOR_MAP_DTYPES:
        return f"kernels of 4- and 8-bit weights take bfloat16 and float16, not {problem.dtype}"
    if problem.k * problem.bits % (8 * VECTOR_BYTES) or problem.k * _ITEM_BYTES % VECTOR_BYTES:
        return f"rows of {problem.k} elements are no multiple of {VECTOR_BYTES} bytes"
    whole = problem.group >= problem.k or problem.group % problem.block_k == 0
    if problem.group not in _GROUPS and not whole:
        return f"kernels of 4- and 8-bit weights have groups of 32, 64 and 128, not {problem.group}"
    if problem.out_dtype not in (problem.dtype, F32):
        return f"kernels of 4- and 8-bit weights have no {problem.out_dtype} of {problem.dtype}"
    if problem.zero_dtype is not None and problem.dtype == F16:
        return "differences to zero points are rounded to the type of x, which float16 keeps exact"
    if max(problem.m, problem.n, problem.k) > _MOST_ELEMENTS:
        return f"a size of {max(problem.m, problem.n, problem.k)} exceeds {_MOST_ELEMENTS}"
    if min(problem.m, problem.n, problem.k, problem.batch) == 0:
        return "there is nothing to multiply"
    if problem.spans_bytes > _MOST_SPANS_BYTES:
        return f"tiles of {problem.batch} groups have no room in shared memory"
    return ""


@dataclass(frozen=True)
class WeightOnlyCandidate(CostedCandidate):
    """The kernel of a product, and its cost."""

    problem: WeightOnlyProduct
    cycles: float

    @property
    def key(self) -> str:
        return "weight_only"

    def plan(self, gpu: Gpu) -> LaunchPlan:
        found = plan_weight_only(self.problem, gpu)
        assert isinstance(found, LaunchPlan), found
        return found


def choose_weight_only(
    problem: WeightOnlyProduct, gpu: Gpu, *, has_function: bool
) -> PolicyChoice[WeightOnlyCandidate]:
    """Choose the kernel, or the product of dequantised weights. ``refusal`` has been asked.

    A function of the elements that the kernel does not apply comes after it, and is part of XLA's
    side.
    """
    tile = tile_of(problem, gpu)
    matrix = problem.columns * problem.k / 1e6
    weights = problem.batch * matrix
    token_tiles = math.ceil(problem.m / tile.tokens) * problem.batch
    if problem.ragged:
        # Each matrix that has rows has a tile that is not full.
        token_tiles = problem.m // tile.tokens + min(problem.batch, problem.m)
    row_tiles = math.ceil(problem.n / tile.rows) * token_tiles
    ours = _LAUNCH + token_tiles * matrix / _WEIGHTS_IN_A_MICROSECOND[problem.bits][tile.tokens]
    ours += _NEXT_LAUNCH * (_split(problem, row_tiles, tile, gpu)[0] > 1)
    if has_function:
        elements = problem.multiply_adds / problem.k
        ours += _NEXT_LAUNCH + 2 * F32.itemsize * elements / _WRITTEN_BYTES
    xla = _LAUNCHES + weights / _DEQUANTISED
    xla += max(weights / _READ, problem.multiply_adds / 1e6 / _MULTIPLIED)
    candidate = WeightOnlyCandidate(problem, ours * gpu.rates.cycles_per_microsecond)
    weight_bytes = problem.batch * problem.n * problem.k * problem.bits / 8
    workload = weight_workload(problem.multiply_adds, weight_bytes, problem.dtype, xla)
    return choose(workload, [candidate], gpu)


def plan_weight_only(problem: WeightOnlyProduct, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan ``out`` of ``weights``, ``x``, ``scales``, ``zeros`` if there are any, and an epilogue.

    Bounds of ragged rows come before what the epilogue reads. ``weights`` are bytes of shape
    ``(batch, n, k * bits / 8)``. A first launch orders ``x`` along
    ``k`` as fragments of weights are, while weights are loaded.
    """
    if why := refusal(problem, gpu):
        return NoKernel(why)
    tile = tile_of(problem, gpu)
    tiles = math.ceil(problem.n / tile.rows), math.ceil(problem.m / tile.tokens)
    splits, split_k_tiles = _split(problem, math.prod(tiles) * problem.batch, tile, gpu)
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
    shape = Scalars.pack(
        "12i",
        problem.m,
        problem.n,
        problem.group,
        problem.groups,
        problem.row_block,
        math.ceil(problem.n / problem.row_block),
        problem.k_tiles,
        split_k_tiles,
        problem.batch,
        problem.x_batched,
        problem.weights_batched,
        problem.columns,
    )
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
            shared_memory_bytes=tile.stages * _stage_bytes(problem, tile)
            + tile.result_bytes
            + _BARRIERS_BYTES
            + problem.spans_bytes,
        ),
    ]
    if sums is not None:
        launches.append(sums.launch(compiled, Buffer(ordered + 1), Buffer(out)))
    text = f"{tile.rows}x{tile.tokens} tiles of the transpose{' by groups' * problem.ragged}"
    return LaunchPlan(
        name=f"weight_only_matmul int{problem.bits} {problem.dtype}",
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
            _rows_of_x(problem) * problem.chunks * _ROW_BYTES,
            *((sums.workspace_bytes,) if sums else ()),
        ),
        reason=f"{text}, {problem.bits}-bit weights by registers"
        + (f", k in {splits} parts" if partial else ""),
    )


def _scales(buffer: int, has_zeros: bool) -> tuple[Buffer, Buffer]:
    """Return scales, and zero points that come next if there are any."""
    return Buffer(buffer), Buffer(buffer + has_zeros)


def _stage_bytes(problem: WeightOnlyProduct, tile: Tile) -> int:
    return (tile.rows + problem.block_k // _CHUNK * tile.tokens) * _ROW_BYTES


def tile_of(problem: WeightOnlyProduct, gpu: Gpu) -> Tile:
    """Return tiles of all rows of ``x``, as far as accumulators have registers.

    A tile of few rows has two consumers along k and leaves registers for another CTA, so that loads
    and conversions overlap. Of many rows, two consumers share the tile in shared memory. One of few
    ragged rows has one consumer and leaves registers for more CTAs.
    """
    # Scales and zero points of groups of 32 take registers, too.
    many_zeros = problem.zero_dtype is not None and problem.group == _GROUPS[0]
    possible = _TOKENS[:-2] if many_zeros else _TOKENS
    tokens = next((x for x in possible if x >= problem.rows_of_matrix), possible[-1])
    if problem.ragged and tokens <= _TOKENS[1]:
        # A tile has few k-tiles, and CTAs side by side hide where it begins and ends.
        smallest = tokens == _TOKENS[0] and problem.zero_dtype is None
        tile = Tile(tokens, 1, cooperative=False, stages=1, ctas=4 if smallest else 3)
        return _with_stages(problem, tile, gpu)
    # So do zero points beside another CTA of an SM.
    few = tokens <= _TOKENS[1 if problem.zero_dtype is None else 0]
    tile = Tile(
        tokens,
        consumers=2,
        cooperative=not few,
        stages=1,
        ctas=2 if few else 1,
    )
    return _with_stages(problem, tile, gpu)


def _with_stages(problem: WeightOnlyProduct, tile: Tile, gpu: Gpu) -> Tile:
    """Return a tile with the stages that shared memory has room for."""
    room = (gpu.shared_memory_bytes + RESERVED_SHARED_BYTES) // tile.ctas - RESERVED_SHARED_BYTES
    room -= tile.result_bytes + _BARRIERS_BYTES + problem.spans_bytes
    most = _RAGGED_STAGES if problem.ragged else _STAGES
    stages = min(room // _stage_bytes(problem, tile), most)
    # Consumers that alternate k-tiles have stages of their own.
    along_k = 1 if tile.cooperative else tile.consumers
    return dataclasses.replace(tile, stages=stages - stages % along_k)


def _split(problem: WeightOnlyProduct, tiles: int, tile: Tile, gpu: Gpu) -> tuple[int, int]:
    """Return parts of k, and k-tiles of each: as many CTAs as a GPU holds, if there are fewer."""
    if problem.ragged:
        return 1, problem.k_tiles
    slots = gpu.available_sms * tile.ctas
    most = max(1, problem.k_tiles // _SPLIT_K_TILES)
    split_k_tiles = math.ceil(problem.k_tiles / min(most, max(1, slots // tiles)))
    return math.ceil(problem.k_tiles / split_k_tiles), split_k_tiles


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
        f"tilekern::weight_only_{name}matmul<{types}, {problem.bits}, {config}, {group}, {zeros}, "
        f"{tile.ctas}>",
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
    padded = problem.chunks * _CHUNK // span
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
        box=(_ROW_BYTES, tile.rows, 1, 1, 1),
        swizzle=128,
    )
    row = problem.chunks * _ROW_BYTES
    x = TensorMap(
        buffer=ordered,
        dtype=_TENSOR_MAP_DTYPES[problem.dtype],
        sizes=(_CHUNK, problem.m, problem.chunks, problem.batch if problem.x_batched else 1, 1),
        strides_bytes=(row, _ROW_BYTES, *[problem.m * row] * 2),
        box=(_CHUNK, tile.tokens, problem.block_k // _CHUNK, 1, 1),
        swizzle=128,
    )
    return weights, x
