"""The compile-time choices and sizes of ``gemm/small/small_matmul.cuh``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Kernel
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gemm.geometry import MAX_BATCH_DIMS
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.small.rows import Rows, lhs_rows, out_rows, rhs_rows
from jax_tilekern.plans.gpu import Gpu

# Rows of a fragment of lhs, and columns of one of rhs.
FRAGMENT_M, FRAGMENT_N = 16, 8
# k of all of a product is copied at once if that takes no more shared memory ...
_LARGEST_SINGLE_STAGE = 96 << 10
# ... and otherwise in chunks of about so much, of which three are in flight.
_CHUNK_BYTES, _STAGES = 24 << 10, 3
# Chunks of so many elements of k start at multiples of 16 bytes, and are whole steps.
_CHUNK_UNIT = 64
_READ_BEYOND = 80


@dataclass(frozen=True)
class SmallTile:
    """The tile that a CTA computes, in fragments, and its warps.

    Attributes
    ----------
    fragments_m, fragments_n
        Fragments of a warp.
    warps_m, warps_n
        The grid of warps that covers the tile.
    warps_k
        Warps that share the ``k`` of each part of it.
    """

    fragments_m: int
    fragments_n: int
    warps_m: int
    warps_n: int
    warps_k: int

    @property
    def block_m(self) -> int:
        """Rows."""
        return self.fragments_m * self.warps_m * FRAGMENT_M

    @property
    def block_n(self) -> int:
        """Columns."""
        return self.fragments_n * self.warps_n * FRAGMENT_N

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return self.warps_m * self.warps_n * self.warps_k

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps

    def __str__(self) -> str:
        """Return the tile and its warps in words, for example ``"64x48 by 2x1x2"``."""
        warps = f"{self.warps_m}x{self.warps_n}x{self.warps_k}"
        return f"{self.block_m}x{self.block_n} by {warps}"


@dataclass(frozen=True)
class SmallInstance:
    """One kernel with its sizes for a product.

    Attributes
    ----------
    product
        What is computed.
    tile
        The tile of a CTA.
    chunk_k
        The ``k`` of a stage.
    lhs, rhs, out
        The rows of the arrays in memory and in shared memory.
    widen
        Whether 8-bit floats are widened to float16.
    """

    product: Product
    tile: SmallTile
    chunk_k: int
    lhs: Rows
    rhs: Rows
    out: Rows
    widen: bool

    @classmethod
    def of(cls, product: Product, tile: SmallTile, gpu: Gpu) -> SmallInstance:
        """Return the kernel of a tile."""
        k = product.geometry.k

        def instance(chunk_k: int) -> SmallInstance:
            return cls(
                product=product,
                tile=tile,
                chunk_k=chunk_k,
                lhs=lhs_rows(product, tile.block_m, chunk_k, tile.threads),
                rhs=rhs_rows(product, tile.block_n, chunk_k, tile.threads),
                out=out_rows(product, tile.block_m, tile.block_n, tile.threads),
                widen=product.arithmetic.startswith("fp8")
                and gpu.compute_capability[0] in (9, 10, 11),
            )

        whole = instance(k)
        if whole.stage_bytes <= min(_LARGEST_SINGLE_STAGE, gpu.shared_memory_bytes):
            return whole
        units = _CHUNK_BYTES * k // whole.stage_bytes // _CHUNK_UNIT
        return instance(max(units, 1) * _CHUNK_UNIT)

    @property
    def stages(self) -> int:
        """Chunks of ``k`` in shared memory at a time."""
        return 1 if self.chunk_k >= self.product.geometry.k else _STAGES

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a chunk of ``k`` of both operands, and what lanes read beyond them.

        Lanes ignore what they read there, but the next stage may be written at the same time.
        """
        read = max(self.lhs.read_bytes, self.lhs.tile_bytes + self.rhs.read_bytes)
        return read + _READ_BEYOND

    @property
    def shared_memory_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        tile = self.tile
        accumulator = 8 if self.product.arithmetic == "f64" else 4
        partial = tile.block_m * tile.block_n * (tile.warps_k - 1) * accumulator
        return max(self.stages * self.stage_bytes, partial, self.out.tile_bytes)

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles of a matrix along ``m`` and ``n``."""
        geometry = self.product.geometry
        return (
            math.ceil(geometry.m / self.tile.block_m),
            math.ceil(geometry.n / self.tile.block_n),
        )

    @property
    def ctas(self) -> int:
        """Tiles of all matrices."""
        return math.prod(self.product.geometry.batch) * math.prod(self.tiles)

    @property
    def kernel(self) -> Kernel:
        """The kernel to compile."""
        types = ", ".join(CXX_TYPES[dtype] for dtype in self.product.dtypes)
        tile = self.tile
        choices = (
            tile.fragments_m,
            tile.fragments_n,
            tile.warps_m,
            tile.warps_n,
            tile.warps_k,
            self.stages,
            int(self.widen),
            int(self.product.arithmetic == "f32"),
        )
        config = ", ".join((*map(str, choices), self.lhs.cxx_config, self.rhs.cxx_config))
        return Kernel(
            "gemm/small/small_matmul.cuh",
            f"tilekern::small_matmul<{types}, tilekern::SmallMatmulConfig{{{config}}}, "
            f"tilekern::SmallMatmulShape{{{self._cxx_shape}}}>",
        )

    @property
    def _cxx_shape(self) -> str:
        """The values of its ``SmallMatmulShape``."""
        geometry = self.product.geometry
        dims = len(geometry.batch)
        # The first has none, so that products that differ in it share a kernel.
        batch = (1, *geometry.batch[1:], *(1,) * (MAX_BATCH_DIMS - dims))[:MAX_BATCH_DIMS]
        sizes = (
            dims,
            geometry.m,
            geometry.n,
            geometry.k,
            self.chunk_k,
            *self.tiles,
            self.lhs.tile_bytes,
            self.stage_bytes,
        )
        arrays = (self.lhs.cxx_shape, self.rhs.cxx_shape, self.out.cxx_shape)
        return ", ".join((*arrays, f"{{{', '.join(map(str, batch))}}}", *map(str, sizes)))
