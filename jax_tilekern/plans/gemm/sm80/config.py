"""The compile-time choices of the kernels of ``gemm/sm80``.

An instance is made of a tile, the types and the layouts of the operands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Kernel
from jax_tilekern.plans.cxx import CXX_TYPES, Dtype, cxx_config
from jax_tilekern.plans.gemm.arithmetic import TYPES, ElementTypes
from jax_tilekern.plans.gemm.geometry import MAX_BATCH_DIMS, MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.tiles import TILE_ROW_BYTES
from jax_tilekern.plans.gpu import RESERVED_SHARED_BYTES, SM_REGISTERS, VECTOR_BYTES, Gpu
from jax_tilekern.plans.launch import Scalars


@dataclass(frozen=True)
class OperandLayout:
    """The layout of an operand, as far as a kernel's code depends on it.

    Attributes
    ----------
    k_major
        Whether its unit stride is along ``k``.
    load_bytes
        Bytes of a copy. The address and the length of every row are multiples of it (16, 8 or 4);
        1 is for copies that take any address and length.
    """

    k_major: bool
    load_bytes: int


def lhs_operand(geometry: MatmulGeometry, itemsize: int) -> OperandLayout:
    """Return the layout of ``lhs``."""
    *batch, m, k = geometry.lhs_strides
    return _operand(
        (geometry.m, m), (geometry.k, k), zip(geometry.batch, batch, strict=True), itemsize
    )


def rhs_operand(geometry: MatmulGeometry, itemsize: int) -> OperandLayout:
    """Return the layout of ``rhs``."""
    *batch, k, n = geometry.rhs_strides
    return _operand(
        (geometry.n, n), (geometry.k, k), zip(geometry.batch, batch, strict=True), itemsize
    )


def _operand(
    rows: tuple[int, int], along_k: tuple[int, int], batch: Iterable[tuple[int, int]], itemsize: int
) -> OperandLayout:
    """Return the layout of an operand, given the size and the stride of each dimension."""
    # With k of size 1 either order is right, and rows along the other dimension allow wider loads.
    k_major = rows[1] != 1 or (along_k[1] == 1 and along_k[0] > 1)
    outer, (length, _) = (rows, along_k) if k_major else (along_k, rows)
    return OperandLayout(k_major, _load_bytes(length, (outer, *batch), itemsize))


def _load_bytes(length: int, strides: tuple[tuple[int, int], ...], itemsize: int) -> int:
    """Return the widest copy that divides rows of `length` elements and the steps between them."""
    steps = [length, *(stride for size, stride in strides if size > 1)]
    common = math.gcd(VECTOR_BYTES, *(step * itemsize for step in steps))
    return common if common >= 4 else 1


def has_vector_rows(geometry: MatmulGeometry, itemsize: int) -> bool:
    """Whether every row of the output is a whole number of aligned 16-byte vectors."""
    *batch, m, _ = geometry.out_strides
    strides = ((geometry.m, m), *zip(geometry.batch, batch, strict=True))
    return _load_bytes(geometry.n, strides, itemsize) == VECTOR_BYTES


# The kernels need two stages, which are enough only for a single k-tile. A CTA that has the SM for
# itself gains nothing beyond three and loses L2 hits. Small CTAs, which are bound by memory, gain
# up to six (docs/tuning-log.md).
_MIN_STAGES = 2
_MAX_STAGES_ALONE = 3
_MAX_STAGES = 6


@dataclass(frozen=True)
class MatmulTile:
    """The tile of the output that a CTA computes.

    Attributes
    ----------
    block_m, block_n
        Its size.
    warps_m, warps_n
        The grid of warps that covers it.
    max_blocks
        CTAs that an SM's registers hold.
    """

    block_m: int
    block_n: int
    warps_m: int
    warps_n: int
    max_blocks: int

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps_m * self.warps_n

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage: a tile of each operand."""
        return (self.block_m + self.block_n) * TILE_ROW_BYTES

    def grid(self, geometry: MatmulGeometry) -> tuple[int, int]:
        """Tiles along ``m`` and ``n``."""
        return math.ceil(geometry.m / self.block_m), math.ceil(geometry.n / self.block_n)


# Warp tiles of 64x64 read the least shared memory for their work, and fill the register file.
TALL = MatmulTile(256, 128, 4, 2, max_blocks=1)
SQUARE = MatmulTile(128, 128, 2, 4, max_blocks=1)
NARROW = MatmulTile(64, 64, 2, 2, max_blocks=3)
TINY = MatmulTile(32, 32, 1, 1, max_blocks=8)
# The lanes of simt_matmul make warp tiles of 32x64.
SIMT_SQUARE = MatmulTile(128, 128, 4, 2, max_blocks=1)
SIMT_SMALL = MatmulTile(64, 64, 2, 1, max_blocks=4)

_MMA_TILES = (TALL, SQUARE, NARROW, TINY)


@dataclass(frozen=True)
class MmaArithmetic:
    """How the kernels compute in an arithmetic.

    Attributes
    ----------
    types
        Element types.
    tiles
        Tiles to choose from, largest first.
    family
        The kernel: ``"mma"``, on tensor cores, or ``"simt"``, on CUDA cores.
    min_capability
        The oldest architecture that has the instructions.
    """

    types: ElementTypes
    tiles: tuple[MatmulTile, ...]
    family: str = "mma"
    min_capability: tuple[int, int] = (8, 0)


MMA_ARITHMETICS: dict[str, MmaArithmetic] = {
    "bf16": MmaArithmetic(TYPES["bf16"], _MMA_TILES),
    "f16": MmaArithmetic(TYPES["f16"], _MMA_TILES),
    "tf32": MmaArithmetic(TYPES["tf32"], _MMA_TILES),
    "f32": MmaArithmetic(TYPES["f32"], (SIMT_SQUARE, SIMT_SMALL), family="simt"),
    "f64": MmaArithmetic(TYPES["f64"], (NARROW, TINY)),
    "int8": MmaArithmetic(TYPES["int8"], _MMA_TILES),
    # Accumulators of the tensor cores' float8 MMAs are promoted to float32 every 128 of k ...
    "fp8": MmaArithmetic(TYPES["fp8"], _MMA_TILES, min_capability=(8, 9)),
    # ... or not.
    "fp8_fast": MmaArithmetic(TYPES["fp8_fast"], _MMA_TILES, min_capability=(8, 9)),
}


@dataclass(frozen=True)
class MatmulInstance:
    """One compiled kernel: a file of device code, its types and its ``MatmulConfig``.

    Attributes
    ----------
    family
        The kernel: ``"mma"`` or ``"simt"``.
    types
        C++ types of ``lhs``, ``rhs`` and ``out``.
    tile, block_k, stages, min_blocks, lhs, rhs, promote, widen
        See ``MatmulConfig`` in ``gemm/sm80/config.cuh``.
    """

    family: str
    types: tuple[str, ...]
    tile: MatmulTile
    block_k: int
    stages: int
    min_blocks: int
    lhs: OperandLayout
    rhs: OperandLayout
    promote: bool
    widen: bool

    @property
    def kernel(self) -> Kernel:
        """The kernel to compile."""
        name = f"{self.family}_matmul"
        return Kernel(f"gemm/sm80/{name}.cuh", f"tilekern::{name}<{self.template_arguments}>")

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
        """Dynamic shared memory of a CTA."""
        return self.stages * self.tile.stage_bytes


def instances_for(
    product: Product, lhs: OperandLayout, rhs: OperandLayout, gpu: Gpu
) -> Iterator[tuple[MatmulInstance, int]]:
    """Yield a kernel for each tile, and how many of its CTAs an SM holds at a time.

    Parameters
    ----------
    product
        A product that is not refused, of which the types and ``k`` count.
    lhs, rhs
        The layouts of the operands.
    gpu
        What it is for.
    """
    how = MMA_ARITHMETICS[product.arithmetic]
    dtypes = product.dtypes
    treatment = _float8_treatment(product.arithmetic, gpu)
    k_tiles = math.ceil(product.geometry.k * product.lhs_dtype.itemsize / TILE_ROW_BYTES)
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
    """Return the kernel's ``MatmulShape``: strides, then sizes, as in ``gemm/sm80/config.cuh``."""
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


def _instance(
    how: MmaArithmetic,
    tile: MatmulTile,
    occupancy: tuple[int, int],
    lhs: OperandLayout,
    rhs: OperandLayout,
    dtypes: tuple[Dtype, Dtype, Dtype],
    treatment: tuple[bool, bool],
) -> MatmulInstance:
    blocks, stages = occupancy
    promote, widen = treatment
    if min(lhs.load_bytes, rhs.load_bytes) == 1:
        # Shifting loads use the maximum number of registers per thread.
        blocks = min(blocks, SM_REGISTERS // (256 * tile.threads))
    return MatmulInstance(
        family=how.family,
        types=tuple(CXX_TYPES[dtype] for dtype in dtypes),
        tile=tile,
        block_k=TILE_ROW_BYTES // dtypes[0].itemsize,
        stages=stages,
        min_blocks=blocks,
        lhs=lhs,
        rhs=rhs,
        promote=promote,
        widen=widen,
    )


def _float8_treatment(arithmetic: str, gpu: Gpu) -> tuple[bool, bool]:
    """Whether to promote accumulators and whether to widen operands; see ``MatmulConfig``."""
    widen = arithmetic.startswith("fp8") and gpu.compute_capability[0] in (9, 10, 11)
    # Widened operands are multiplied and accumulated as float16.
    return arithmetic == "fp8" and not widen, widen


def _usable_tiles(
    how: MmaArithmetic, lhs: OperandLayout, rhs: OperandLayout, promote: bool
) -> Iterator[MatmulTile]:
    """Yield the tiles whose kernel fits into registers, on every architecture."""
    narrowest = min(lhs.load_bytes, rhs.load_bytes)
    bytes_ = how.types.operands[0].itemsize == 1
    for tile in how.tiles:
        # The largest has none left for a second set of accumulators or for shifting loads ...
        if tile == TALL and (promote or narrowest == 1):
            continue
        # ... and the next has room for little more than one of them.
        if tile == SQUARE and (narrowest < VECTOR_BYTES if promote else narrowest == 1 and bytes_):
            continue
        yield tile


def _occupancy(tile: MatmulTile, gpu: Gpu, k_tiles: int) -> tuple[int, int] | None:
    """CTAs of an SM, and stages of each; ``None`` if too few stages fit."""
    total = gpu.shared_memory_bytes + RESERVED_SHARED_BYTES
    if k_tiles == 1:
        # A CTA overlaps nothing by itself, so the maximum number of CTAs is best.
        return tile.max_blocks, _MIN_STAGES
    for blocks in range(tile.max_blocks, 0, -1):
        stages = (total // blocks - RESERVED_SHARED_BYTES) // tile.stage_bytes
        if stages > _MIN_STAGES:
            return blocks, min(stages, _MAX_STAGES_ALONE if blocks == 1 else _MAX_STAGES)
    return None
