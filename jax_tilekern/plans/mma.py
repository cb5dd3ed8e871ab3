"""Plans for dense matrix products on the kernels of ``mma_matmul.cuh`` and ``simt_matmul.cuh``.

What the operands allow (:class:`Operand`) and a tile make a candidate, which compiles to a launch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jax_tilekern.compiler import Compiled, Kernel, compile_kernels
from jax_tilekern.plans.cxx import CXX_TYPES, cxx_config
from jax_tilekern.plans.geometry import MAX_BATCH_DIMS, MatmulGeometry
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import MAX_GRID, Buffer, Launch, Scalars
from jax_tilekern.plans.product import Candidate, MatmulPlan, NoKernel, Product
from jax_tilekern.plans.tile_order import band_height

_Dtype = np.dtype[Any]


def _dtypes(*names: str) -> tuple[_Dtype, ...]:
    return tuple(np.dtype(getattr(ml_dtypes, name, name)) for name in names)


# A row of k in shared memory, and the width of a copy, in bytes.
_K_BYTES = 128
_WIDEST_LOAD = 16
# What a block's shared memory costs beyond what it asks for.
_RESERVED_SHARED_BYTES = 1024
_REGISTERS = 65536
# Two is what the kernels need, and enough only if there is one tile of k. A block that has the
# multiprocessor for itself gains nothing beyond three, and loses hits in the second-level cache;
# small blocks, which are bound by memory, gain up to six (docs/tuning-log.md).
_FEWEST_STAGES = 2
_MOST_STAGES_ALONE = 3
_MOST_STAGES = 6


@dataclass(frozen=True)
class MatmulTile:
    """The tile of the output that a block computes.

    Attributes
    ----------
    block_m, block_n
        Its size.
    warps_m, warps_n
        The grid of warps that covers it.
    max_blocks
        Blocks that a multiprocessor's registers hold.
    """

    block_m: int
    block_n: int
    warps_m: int
    warps_n: int
    max_blocks: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps_m * self.warps_n

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage: a tile of each operand."""
        return (self.block_m + self.block_n) * _K_BYTES

    def grid(self, geometry: MatmulGeometry) -> tuple[int, int]:
        """Tiles along ``m`` and ``n``."""
        return math.ceil(geometry.m / self.block_m), math.ceil(geometry.n / self.block_n)


# Warp tiles of 64x64 read the least shared memory for their work, and fill the register file.
TALL = MatmulTile(256, 128, 4, 2, max_blocks=1)
SQUARE = MatmulTile(128, 128, 2, 4, max_blocks=1)
SMALL = MatmulTile(64, 64, 2, 2, max_blocks=3)
TINY = MatmulTile(32, 32, 1, 1, max_blocks=8)
# The lanes of simt_matmul make warp tiles of 32x64.
SIMT_SQUARE = MatmulTile(128, 128, 4, 2, max_blocks=1)
SIMT_SMALL = MatmulTile(64, 64, 2, 1, max_blocks=4)

_MMA_TILES = (TALL, SQUARE, SMALL, TINY)


@dataclass(frozen=True)
class Arithmetic:
    """How a product is computed: types, and where.

    Attributes
    ----------
    operands
        Types of the operands, in any pairing.
    results
        Types of the result.
    tiles
        Candidates, largest first.
    macs_per_cycle
        Multiply-adds of a multiprocessor in a cycle. Only the order of magnitude matters: it is
        weighed against bytes when tiles are compared.
    file
        The kernel's file, which is named like the kernel.
    min_capability
        The oldest architecture that has the instructions.
    """

    operands: tuple[_Dtype, ...]
    results: tuple[_Dtype, ...]
    tiles: tuple[MatmulTile, ...]
    macs_per_cycle: int
    file: str = "mma_matmul.cuh"
    min_capability: tuple[int, int] = (8, 0)


_FLOAT8 = Arithmetic(
    _dtypes("float8_e4m3fn", "float8_e5m2"), _dtypes("float32", "bfloat16", "float16"),
    _MMA_TILES, 1024, min_capability=(8, 9),
)  # fmt: skip

ARITHMETICS: dict[str, Arithmetic] = {
    "bf16": Arithmetic(
        _dtypes("bfloat16"), _dtypes("bfloat16", "float32"), _MMA_TILES, 1024
    ),
    "f16": Arithmetic(
        _dtypes("float16"), _dtypes("float16", "float32"), _MMA_TILES, 1024
    ),
    "tf32": Arithmetic(
        _dtypes("float32"), _dtypes("float32"), _MMA_TILES, 512
    ),
    "f32": Arithmetic(
        _dtypes("float32"), _dtypes("float32"), (SIMT_SQUARE, SIMT_SMALL), 100,
        file="simt_matmul.cuh",
    ),
    "f64": Arithmetic(_dtypes("float64"), _dtypes("float64"), (SMALL, TINY), 100),
    "int8": Arithmetic(_dtypes("int8"), _dtypes("int32"), _MMA_TILES, 2048),
    # Sums of the tensor cores' 8-bit products are promoted to float32 every 128 of k ...
    "fp8": _FLOAT8,
    # ... or not.
    "fp8_fast": _FLOAT8,
}  # fmt: skip


@dataclass(frozen=True)
class Operand:
    """How an operand lies in memory, as far as a kernel's code depends on it.

    Attributes
    ----------
    k_major
        Whether its unit stride is along ``k``.
    load_bytes
        Bytes of a copy: what every row's address and length are multiples of (16, 8 or 4), or 1
        for copies that take any address and length.
    """

    k_major: bool
    load_bytes: int


@dataclass(frozen=True)
class MatmulInstance:
    """One compiled kernel: a file of device code, its types and its ``MatmulConfig``.

    Attributes
    ----------
    file
        The kernel's file, which is named like the kernel.
    types
        C++ types of ``lhs``, ``rhs`` and ``out``.
    tile, block_k, stages, min_blocks, lhs, rhs, promote, widen
        See ``MatmulConfig`` in ``matmul_shape.cuh``.
    """

    file: str
    types: tuple[str, ...]
    tile: MatmulTile
    block_k: int
    stages: int
    min_blocks: int
    lhs: Operand
    rhs: Operand
    promote: bool
    widen: bool

    @property
    def family(self) -> str:
        """What the kernel's name begins with, ``"mma"`` or ``"simt"``."""
        return self.file.removesuffix("_matmul.cuh")

    @property
    def kernel(self) -> Kernel:
        """What the compiler is asked for."""
        return Kernel(self.file, f"tilekern::{self.family}_matmul<{self.template_arguments}>")

    @property
    def template_arguments(self) -> str:
        """The types and the ``MatmulConfig``."""
        tile = self.tile
        config = cxx_config(
            "MatmulConfig",
            block_m=tile.block_m,
            block_n=tile.block_n,
            block_k=self.block_k,
            warps_m=tile.warps_m,
            warps_n=tile.warps_n,
            stages=self.stages,
            min_blocks=self.min_blocks,
            lhs_k_major=self.lhs.k_major,
            rhs_k_major=self.rhs.k_major,
            lhs_load_bytes=self.lhs.load_bytes,
            rhs_load_bytes=self.rhs.load_bytes,
            promote=self.promote,
            widen=self.widen,
        )
        return f"{', '.join(self.types)}, {config}"

    @property
    def shared_memory_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.stages * self.tile.stage_bytes


@dataclass(frozen=True)
class MmaCandidate(Candidate):
    """A kernel for a product, not compiled yet.

    Attributes
    ----------
    product
        What it computes.
    instance
        The kernel.
    grid
        Tiles along ``m`` and ``n``, and the product of the batch dimensions.
    band
        Rows of tiles that are computed together.
    out_vectors
        Whether the output's rows are stored 16 bytes at a time.
    cycles
        The estimated cost.
    """

    product: Product
    instance: MatmulInstance
    grid: tuple[int, int, int]
    band: int
    out_vectors: bool
    cycles: float

    @property
    def key(self) -> str:
        """The kernel's family and its tile."""
        tile = self.instance.tile
        return f"{self.instance.family} {tile.block_m}x{tile.block_n}"

    def plan(self, gpu: Gpu) -> MatmulPlan:
        """Compile it."""
        product, instance = self.product, self.instance
        compiled = compile_kernels(instance.kernel, arch=gpu.arch)
        dtypes = (product.lhs_dtype, product.rhs_dtype, product.out_dtype)
        widths = (
            instance.lhs.load_bytes,
            instance.rhs.load_bytes,
            16 if self.out_vectors else 1,
        )
        tile = instance.tile
        return MatmulPlan(
            name=f"{instance.family}_matmul {product.arithmetic}",
            gpu=gpu,
            launches=(self.launch(compiled, Buffer(0), Buffer(1), Buffer(2)),),
            alignments=tuple(max(t.itemsize, w) for t, w in zip(dtypes, widths, strict=True)),
            reason=f"{tile.block_m}x{tile.block_n}x{instance.block_k}, {instance.stages} stages, "
            f"{math.prod(self.grid)} tiles on {gpu.multiprocessors} multiprocessors",
        )

    def launch(self, compiled: Compiled, *buffers: Buffer, kernel: Kernel | None = None) -> Launch:
        """Return the launch, given what ``instance.kernel`` was compiled to and the buffers.

        ``kernel`` is another one that takes the same shape, or more buffers.
        """
        instance = self.instance
        shape = pack_shape(
            self.product.geometry, instance, self.grid[:2], self.band, self.out_vectors
        )
        return Launch(
            entry=compiled.entry((kernel or instance.kernel).name),
            grid=(math.prod(self.grid), 1, 1),
            block=(instance.tile.threads, 1, 1),
            parameters=(*buffers, shape),
            shared_memory_bytes=instance.shared_memory_bytes,
        )


def candidates(product: Product, gpu: Gpu) -> list[MmaCandidate] | NoKernel:
    """Return a candidate for each tile that the product can have, or why there is none."""
    refused = refusal(product, gpu)
    if refused:
        return refused
    geometry = product.geometry
    lhs = lhs_operand(geometry, product.lhs_dtype.itemsize)
    rhs = rhs_operand(geometry, product.rhs_dtype.itemsize)
    found: list[MmaCandidate] = []
    for instance, resident in instances_for(product, lhs, rhs, gpu):
        tile = instance.tile
        grid = (*tile.grid(geometry), math.prod(geometry.batch))
        if math.prod(grid) > MAX_GRID[0]:
            continue
        cycles = busy_cycles(instance, resident, math.prod(grid), product, gpu)
        found.append(
            MmaCandidate(
                product,
                instance,
                grid,
                band_height(
                    gpu.multiprocessors * instance.min_blocks, grid[0], tile.block_m, tile.block_n
                ),
                has_vector_rows(geometry, product.out_dtype.itemsize),
                # Of equals the larger, which reads less memory.
                product.cycles(cycles) * 1.01 ** len(found),
            )
        )
    return found or NoKernel(f"{geometry} has more tiles than a grid has blocks")


def refusal(product: Product, gpu: Gpu) -> NoKernel | None:
    """Return why there is no kernel for the product's types, or for its sizes, if there is none."""
    geometry = product.geometry
    lhs_dtype, rhs_dtype, out_dtype = product.lhs_dtype, product.rhs_dtype, product.out_dtype
    arithmetic = product.arithmetic
    how = ARITHMETICS.get(arithmetic)
    if how is None:
        return NoKernel(f"no kernel computes in {arithmetic}")
    if not {lhs_dtype, rhs_dtype} <= set(how.operands) or out_dtype not in how.results:
        return NoKernel(f"no {arithmetic} kernel for {lhs_dtype} x {rhs_dtype} -> {out_dtype}")
    if gpu.compute_capability < how.min_capability:
        major, minor = how.min_capability
        return NoKernel(f"{arithmetic} takes sm_{major}{minor} or later, and this is {gpu.arch}")
    if max(geometry.m, geometry.n, geometry.k) > 2**31 - 1024:
        return NoKernel("a dimension has more than 2**31 - 1024 elements")
    return None


def instances_for(
    product: Product, lhs: Operand, rhs: Operand, gpu: Gpu
) -> Iterator[tuple[MatmulInstance, int]]:
    """Yield a kernel for each tile, and how many of its blocks are on a multiprocessor at a time.

    Parameters
    ----------
    product
        Whose types and ``k`` count, of those that are not refused.
    lhs, rhs
        How the operands lie in memory.
    gpu
        What it is for.
    """
    how = ARITHMETICS[product.arithmetic]
    dtypes = (product.lhs_dtype, product.rhs_dtype, product.out_dtype)
    treatment = _float8_treatment(product.arithmetic, gpu)
    k_tiles = math.ceil(product.geometry.k * product.lhs_dtype.itemsize / _K_BYTES)
    for tile in _usable_tiles(how, lhs, rhs, treatment[0]):
        occupancy = _occupancy(tile, gpu, k_tiles)
        if occupancy is not None:
            yield _instance(how, tile, occupancy, lhs, rhs, dtypes, treatment), occupancy[0]


def pack_shape(
    geometry: MatmulGeometry,
    instance: MatmulInstance,
    tiles: tuple[int, int],
    band: int,
    out_vectors: bool,
) -> Scalars:
    """Return the kernel's ``MatmulShape``: strides, then sizes, as in ``matmul_shape.cuh``."""
    missing = MAX_BATCH_DIMS - len(geometry.batch)

    def batch_strides(strides: tuple[int, ...]) -> tuple[int, ...]:
        return (*(0,) * missing, *strides[:-2])

    lhs_m, lhs_k = geometry.lhs_strides[-2:]
    rhs_k, rhs_n = geometry.rhs_strides[-2:]
    return Scalars.pack(
        f"{3 * MAX_BATCH_DIMS + 3}q{MAX_BATCH_DIMS + 7}i",
        *batch_strides(geometry.lhs_strides),
        *batch_strides(geometry.rhs_strides),
        *batch_strides(geometry.out_strides),
        lhs_m if instance.lhs.k_major else lhs_k,
        rhs_n if instance.rhs.k_major else rhs_k,
        geometry.out_strides[-2],
        *(1,) * missing,
        *geometry.batch,
        geometry.m,
        geometry.n,
        geometry.k,
        *tiles,
        band,
        out_vectors,
    )


# Of k, for instances that a short product does not have.
_MANY = 1 << 20


def instances(gpu: Gpu) -> Iterator[MatmulInstance]:
    """Kernels that plans for ``gpu`` can ask for, so that a test can compile them.

    All would be thousands, so features that are independent in the code are not crossed: every
    arithmetic has its largest tile in all four major orders, and each of these in one order: the
    other tiles, a short k, the narrower loads, the other types.
    """
    orders = [(lhs, rhs) for lhs in (True, False) for rhs in (True, False)]
    for arithmetic, how in ARITHMETICS.items():
        if gpu.compute_capability < how.min_capability:
            continue
        treatment = _float8_treatment(arithmetic, gpu)
        types = (how.operands[0], how.operands[-1], how.results[0])
        wide = Operand(True, _WIDEST_LOAD)
        tiles = [
            tile
            for tile in _usable_tiles(how, wide, wide, treatment[0])
            if _occupancy(tile, gpu, _MANY)
        ]
        samples = [(tiles[0], _MANY, _WIDEST_LOAD, order, types) for order in orders]
        samples += [
            (tile, k_tiles, _WIDEST_LOAD, order, types)
            for tile, k_tiles, order in zip(tiles[1:], (_MANY, 1, 1), orders[1:], strict=False)
        ]
        for load_bytes, order in zip(_narrow_loads(types[0].itemsize), orders[1:], strict=False):
            narrow = Operand(True, load_bytes)
            tile = next(t for t in _usable_tiles(how, narrow, narrow, treatment[0]) if t in tiles)
            samples.append((tile, _MANY, load_bytes, order, types))
        samples += [
            (tiles[-1], _MANY, _WIDEST_LOAD, orders[1], (lhs, rhs, out))
            for lhs in how.operands
            for rhs in how.operands
            for out in how.results[1:]
        ]
        for tile, k_tiles, load_bytes, order, dtypes in samples:
            lhs, rhs = (Operand(k_major, load_bytes) for k_major in order)
            occupancy = _occupancy(tile, gpu, k_tiles)
            assert occupancy is not None
            yield _instance(how, tile, occupancy, lhs, rhs, dtypes, treatment)


def _instance(
    how: Arithmetic,
    tile: MatmulTile,
    occupancy: tuple[int, int],
    lhs: Operand,
    rhs: Operand,
    dtypes: tuple[_Dtype, _Dtype, _Dtype],
    treatment: tuple[bool, bool],
) -> MatmulInstance:
    blocks, stages = occupancy
    promote, widen = treatment
    if min(lhs.load_bytes, rhs.load_bytes) == 1:
        # Shifting loads take all registers that a thread can have.
        blocks = min(blocks, _REGISTERS // (256 * tile.threads))
    return MatmulInstance(
        file=how.file,
        types=tuple(CXX_TYPES[dtype] for dtype in dtypes),
        tile=tile,
        block_k=_K_BYTES // dtypes[0].itemsize,
        stages=stages,
        min_blocks=blocks,
        lhs=lhs,
        rhs=rhs,
        promote=promote,
        widen=widen,
    )


def _narrow_loads(itemsize: int) -> tuple[int, ...]:
    """Return the loads narrower than the widest that :func:`_load_bytes` can return."""
    return {4: (8, 4), 8: (8,)}.get(itemsize, (8, 4, 1))


def lhs_operand(geometry: MatmulGeometry, itemsize: int) -> Operand:
    """Return how ``lhs`` lies in memory."""
    *batch, m, k = geometry.lhs_strides
    # With k of size 1 either order is right, and along m there is more to load at once.
    k_major = m != 1 or (k == 1 and geometry.k > 1)
    outer = (geometry.m, m) if k_major else (geometry.k, k)
    strides = (outer, *zip(geometry.batch, batch, strict=True))
    return Operand(k_major, _load_bytes(geometry.k if k_major else geometry.m, strides, itemsize))


def rhs_operand(geometry: MatmulGeometry, itemsize: int) -> Operand:
    """Return how ``rhs`` lies in memory."""
    *batch, k, n = geometry.rhs_strides
    k_major = n != 1 or (k == 1 and geometry.k > 1)
    outer = (geometry.n, n) if k_major else (geometry.k, k)
    strides = (outer, *zip(geometry.batch, batch, strict=True))
    return Operand(k_major, _load_bytes(geometry.k if k_major else geometry.n, strides, itemsize))


def _load_bytes(length: int, strides: tuple[tuple[int, int], ...], itemsize: int) -> int:
    """Return the widest copy that divides rows of `length` elements and the steps between them."""
    steps = [length, *(stride for size, stride in strides if size > 1)]
    common = math.gcd(_WIDEST_LOAD, *(step * itemsize for step in steps))
    return common if common >= 4 else 1


def has_vector_rows(geometry: MatmulGeometry, itemsize: int) -> bool:
    """Whether every row of the output is a whole number of aligned 16-byte vectors."""
    *batch, m, _ = geometry.out_strides
    strides = ((geometry.m, m), *zip(geometry.batch, batch, strict=True))
    return _load_bytes(geometry.n, strides, itemsize) == _WIDEST_LOAD


def _float8_treatment(arithmetic: str, gpu: Gpu) -> tuple[bool, bool]:
    """Whether to promote sums and whether to widen operands; see ``MatmulConfig``."""
    widen = arithmetic.startswith("fp8") and gpu.compute_capability[0] in (9, 10, 11)
    # Products of widened operands are summed like float16's.
    return arithmetic == "fp8" and not widen, widen


def _usable_tiles(
    how: Arithmetic, lhs: Operand, rhs: Operand, promote: bool
) -> Iterator[MatmulTile]:
    """Yield the tiles whose kernel fits into registers, on every architecture."""
    narrowest = min(lhs.load_bytes, rhs.load_bytes)
    bytes_ = how.operands[0].itemsize == 1
    for tile in how.tiles:
        # The largest leaves none for a second set of sums, nor for shifting loads ...
        if tile == TALL and (promote or narrowest == 1):
            continue
        # ... and the next has room for little more than one of them.
        if tile == SQUARE and (narrowest < _WIDEST_LOAD if promote else narrowest == 1 and bytes_):
            continue
        yield tile


def _occupancy(tile: MatmulTile, gpu: Gpu, k_tiles: int) -> tuple[int, int] | None:
    """Blocks on a multiprocessor, and stages of each; None if too few stages fit."""
    total = gpu.shared_memory_bytes + _RESERVED_SHARED_BYTES
    if k_tiles == 1:
        # Nothing to overlap within a block, so the more blocks the better.
        return tile.max_blocks, _FEWEST_STAGES
    for blocks in range(tile.max_blocks, 0, -1):
        stages = (total // blocks - _RESERVED_SHARED_BYTES) // tile.stage_bytes
        if stages > _FEWEST_STAGES:
            return blocks, min(stages, _MOST_STAGES_ALONE if blocks == 1 else _MOST_STAGES)
    return None


def busy_cycles(
    instance: MatmulInstance, resident: int, blocks: int, product: Product, gpu: Gpu
) -> float:
    """Estimate the cycles of the busiest multiprocessor.

    Parameters
    ----------
    instance
        The kernel.
    resident
        How many of its blocks are on a multiprocessor at a time.
    blocks
        Tiles of the output, all batches together.
    product
        What is computed.
    gpu
        What it is for.
    """
    # Bytes a cycle: of shared memory; of the second-level cache, to one multiprocessor at most and
    # to each when all ask.
    shared_bandwidth, l2_bandwidth, l2_share = 128, 64, 34
    # Start and end of a block, its barrier where no other block runs meanwhile, and the warps that
    # it takes to hide latencies.
    fixed, barrier, enough_warps = 2500, 80, 8

    geometry = product.geometry
    how = ARITHMETICS[product.arithmetic]
    tile, block_k = instance.tile, instance.block_k
    warps = tile.warps_m * tile.warps_n
    warp_lines = tile.block_m // tile.warps_m + tile.block_n // tile.warps_n
    lines = min(tile.block_m, geometry.m) + min(tile.block_n, geometry.n)
    busy = math.ceil(blocks / gpu.multiprocessors)
    k_tile = max(
        tile.block_m * tile.block_n * block_k / how.macs_per_cycle,
        (warp_lines * warps * _K_BYTES + tile.stage_bytes) / shared_bandwidth,
        lines * _K_BYTES / min(l2_bandwidth, l2_share * gpu.multiprocessors / blocks * busy),
    )
    # Narrow copies are bound by their number; measured.
    k_tile *= {16: 1.0, 8: 1.3, 4: 1.6, 1: 2.5}[
        min(instance.lhs.load_bytes, instance.rhs.load_bytes)
    ]
    resident = min(busy, resident)
    if resident == 1:
        k_tile += barrier
    hidden = min(1, resident * warps / enough_warps) ** 0.5
    cycles: float = busy * (math.ceil(geometry.k / block_k) * k_tile + fixed) / hidden
    return cycles
