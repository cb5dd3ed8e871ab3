"""The compile-time choices of ``gemm/sm90/matmul.cuh``, and its resources."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jax_tilekern.compilation.compiler import Kernel
from jax_tilekern.plans.cxx import CXX_TYPES, Dtype, cxx_config
from jax_tilekern.plans.gemm.arithmetic import TYPES, ElementTypes
from jax_tilekern.plans.gemm.tiles import TILE_ROW_BYTES, OrientedProduct
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import TMA_STRIDE_BYTES

_F32, _INT32 = np.dtype(np.float32), np.dtype(np.int32)
# Two epilogue subtiles of a consumer.
_SUBTILES_BYTES = 2 * 8192
_BARRIER_BYTES = 8
# Shared memory of the ring that broadcasts work tiles to a CTA's threads (WorkTileRing), and of its
# alignment.
RING_BYTES = 16 + 4 * (64 + 2 * 8) + 8
# TMA loads this many rows of N at a time where a tile may be partial: at most two loads a tile.
_LONG_TMA_ROWS = 128
_MULTICAST_ROWS = 32
# Rows of a pair of matrices come in turns of so many (kPairedRowBlock).
_PAIRED_ROW_BLOCK = 64
# Each CTA adds the number of CTAs to its work tile until it passes the last.
MAX_WORK_TILES = 2**31 - 1024
# Accumulators of a thread, of a k-tile and of the result.
_SCALED_REGISTERS = 192
# Further stages would be idle, or delay the first MMA.
_MAX_STAGES = 12


@dataclass(frozen=True)
class WgmmaTile:
    """The output tile of a CTA.

    Attributes
    ----------
    block_m, block_n
        Its size.
    consumers
        Consumer (math) warpgroups.
    cooperative
        Whether the consumers compute one tile together, rather than a tile each in ping-pong.
    cluster
        CTAs of a cluster, to all of which TMA multicasts the tiles of ``rhs``.
    pair, lhs_pair
        Whether half of its columns, or of its rows, are those of a second product, see
        ``WgmmaConfig``.
    """

    block_m: int
    block_n: int
    consumers: int = 2
    cooperative: bool = True
    cluster: int = 1
    pair: bool = False
    lhs_pair: bool = False

    @property
    def out_m(self) -> int:
        """Rows of the output that it has."""
        return self.block_m // 2 if self.lhs_pair else self.block_m

    @property
    def out_n(self) -> int:
        """Columns of the output that it has."""
        return self.block_n // 2 if self.pair else self.block_n

    def grid(self, m: int, n: int) -> tuple[int, int]:
        """Tiles along ``m``, in clusters, and along ``n``."""
        return math.ceil(m / (self.out_m * self.cluster)), math.ceil(n / self.out_n)

    @property
    def key(self) -> str:
        """The part of a candidate's key that names the tile, which tuning stores."""
        text = f"{self.block_m}x{self.block_n}"
        text += "" if self.consumers == 2 else f" by {self.consumers}"
        text += "" if self.cooperative else " ping-pong"
        return text + ("" if self.cluster == 1 else f" clusters of {self.cluster}")

    def __str__(self) -> str:
        """Return the size and what is unusual, for ``explain``."""
        text = f"{self.block_m}x{self.block_n}"
        text += "" if self.consumers == 2 else ", 1 math warpgroup"
        text += "" if self.cooperative else ", ping-pong"
        return text + ("" if self.cluster == 1 else f", clusters of {self.cluster}")


@dataclass(frozen=True)
class WgmmaArithmetic:
    """How the kernel computes in an arithmetic.

    Attributes
    ----------
    types
        Element types.
    promote
        Whether accumulators are promoted outside the tensor cores; see ``WgmmaConfig``.
    """

    types: ElementTypes
    promote: bool = False


WGMMA_ARITHMETICS = {
    "bf16": WgmmaArithmetic(TYPES["bf16"]),
    "f16": WgmmaArithmetic(TYPES["f16"]),
    "tf32": WgmmaArithmetic(TYPES["tf32"]),
    "int8": WgmmaArithmetic(TYPES["int8"]),
    "fp8": WgmmaArithmetic(TYPES["fp8"], promote=True),
    "fp8_fast": WgmmaArithmetic(TYPES["fp8_fast"]),
}


# The file and the name of a kernel, by what it has beside a plain one.
_MATMUL, _DYNAMIC = "gemm/sm90/matmul.cuh", "gemm/sm90/dynamic_matmul.cuh"
_GROUPED = "grouped_gemm/sm90/matmul.cuh"
_KERNELS: Mapping[tuple[str, ...], tuple[str, str]] = {
    (): (_MATMUL, "wgmma_matmul"),
    ("parts",): (_MATMUL, "wgmma_matmul_of_parts"),
    ("scales",): ("gemm/sm90/scaled_matmul.cuh", "scaled_wgmma_matmul"),
    ("pair",): (_MATMUL, "wgmma_matmul_of_pair"),
    ("symmetric",): (_MATMUL, "wgmma_symmetric_matmul"),
    ("dynamic",): (_DYNAMIC, "wgmma_matmul_dynamic"),
    ("pair", "dynamic"): (_DYNAMIC, "wgmma_matmul_of_pair_dynamic"),
    ("symmetric", "dynamic"): (_DYNAMIC, "wgmma_symmetric_matmul_dynamic"),
    ("ragged",): (_GROUPED, "ragged_wgmma_matmul"),
    ("pair", "ragged"): (_GROUPED, "ragged_wgmma_matmul_of_pair"),
    ("scales", "ragged"): ("grouped_gemm/sm90/scaled_matmul.cuh", "scaled_ragged_wgmma_matmul"),
}
_NOT_IN_CONFIG = (
    "types", "symmetric", "scaled_columns", "dynamic", "ragged", "column_step", "scheduler_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class WgmmaInstance:
    """One compiled kernel: its types and its ``WgmmaConfig``; see ``gemm/sm90/config.cuh``.

    A kernel may compute half of a symmetric output, and store it twice. One of operands with scales
    has a scale for each column of a tile, or one for all of them.
    The kernel of a grouped GEMM has more choices: the ragged dimension, and the granularity in rows
    of N of loads and MMAs where a tile may be partial. A dynamic tile scheduler takes more shared
    memory.
    """

    types: tuple[str, str, str]
    block_m: int
    block_n: int
    block_k: int
    stages: int
    consumers: int
    cooperative: bool
    cluster: int
    lhs_k_major: bool
    rhs_k_major: bool
    out_m_major: bool
    tma_store: bool
    promote: bool
    parts: int = 1
    pair: bool = False
    lhs_pair: bool = False
    symmetric: bool = False
    scaled_columns: bool | None = None
    dynamic: bool = False
    ragged: Literal["m", "n", "k"] | None = None
    column_step: int = 0
    scheduler_bytes: int = 0

    @property
    def kernel(self) -> Kernel:
        """The kernel to compile."""
        names = [f.name for f in dataclasses.fields(self)]
        choices = {name: getattr(self, name) for name in names if name not in _NOT_IN_CONFIG}
        arguments = [*self.types, cxx_config("WgmmaConfig", **choices)]
        if self.parts > 1:
            del arguments[:3]
        if self.ragged:
            steps = self.column_step, self.tma_column_step, self.rhs_tma_rows
            arguments += [f"tilekern::Ragged::k{self.ragged.upper()}", *map(str, steps)]
        if self.scaled_columns is not None:
            arguments.append(str(self.scaled_columns).lower())
        has = {
            "parts": self.parts > 1,
            "scales": self.scaled_columns is not None,
            "pair": self.pair or self.lhs_pair,
            "symmetric": self.symmetric,
            "dynamic": self.dynamic,
            "ragged": bool(self.ragged),
        }
        file, name = _KERNELS[tuple(x for x in has if has[x])]
        return Kernel(file, f"tilekern::{name}<{', '.join(arguments)}>")

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 128 * (self.consumers + 1)

    @property
    def tma_column_step(self) -> int:
        """Granularity in rows of N of the loads of ``rhs``, which the CTAs of a cluster share."""
        return self.column_step if self.cluster == 1 else min(self.column_step, _MULTICAST_ROWS)

    @property
    def rhs_tma_rows(self) -> int:
        """Rows of N that TMA loads at a time."""
        if self.column_step:
            return max(self.tma_column_step, min(self.block_n, _LONG_TMA_ROWS) // self.cluster)
        return self.out_n // self.cluster

    @property
    def lhs_tma_rows(self) -> int:
        """Rows of M that TMA loads at a time."""
        return _PAIRED_ROW_BLOCK if self.lhs_pair else self.block_m

    @property
    def out_n(self) -> int:
        """Columns of the output tile."""
        return self.block_n // 2 if self.pair else self.block_n

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage: a tile of each operand."""
        return self.parts * (self.block_m + self.block_n) * TILE_ROW_BYTES

    @property
    def _ring_bytes(self) -> int:
        """Shared memory of one stage with its barriers and its scales of columns."""
        return (
            self.stage_bytes + (4 * self.block_n if self.scaled_columns else 0) + 2 * _BARRIER_BYTES
        )

    @property
    def shared_memory_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        ring = self.stages * self._ring_bytes
        return ring + self.consumers * (_SUBTILES_BYTES + _BARRIER_BYTES) + self.scheduler_bytes

    @property
    def accumulators(self) -> int:
        """Accumulators of a consumer's thread."""
        consumers = self.consumers if self.cooperative else 1
        return self.block_m * self.block_n // (128 * consumers)

    @property
    def fits_registers(self) -> bool:
        """Whether the accumulators leave a thread enough registers for the rest."""
        if self.scaled_columns is not None:
            # MMAs of one row block after the other have the same accumulators.
            # Addresses of single elements of 4 bytes take registers, too.
            addresses = 8 if self.types[2] == "float" and not self.tma_store else 0
            registers = self.accumulators + self.block_n // 2 + addresses
            return registers <= _SCALED_REGISTERS
        if self.promote:
            # There are two sets of accumulators.
            return self.accumulators <= 64
        # Addresses of single elements take registers, and so do transposed float32 outputs.
        transposed = (self.out_m_major or self.symmetric) and self.types[2] == "float"
        few = self.accumulators <= 128
        return few or (self.block_k == 64 and self.tma_store and not transposed)

    def with_dynamic_scheduler(self, gpu: Gpu) -> WgmmaInstance:
        """Return the same kernel with a dynamic tile scheduler."""
        dynamic = dataclasses.replace(self, dynamic=True, scheduler_bytes=RING_BYTES)
        return dynamic.with_max_stages(gpu)

    def with_max_stages(self, gpu: Gpu) -> WgmmaInstance:
        """Return the same kernel with the maximum number of useful stages that fit."""
        empty = dataclasses.replace(self, stages=0)
        room = gpu.shared_memory_bytes - empty.shared_memory_bytes
        stages = min(room // self._ring_bytes, _MAX_STAGES)
        return dataclasses.replace(self, stages=stages)


def dense_tiles(tile: WgmmaTile, view: OrientedProduct) -> int:
    """Return the number of work tiles of a dense product."""
    return math.prod(view.batch) * math.prod(tile.grid(view.lhs.mn, view.rhs.mn))


def takes(
    tile: WgmmaTile, view: OrientedProduct, gpu: Gpu, store_row_bytes: int = TILE_ROW_BYTES
) -> bool:
    """Whether the kernel can compute a product with this tile."""
    wide = view.lhs_dtype.itemsize == 2
    out_row = store_row_bytes // view.out_dtype.itemsize
    return not (
        tile.cluster > gpu.available_sms
        or (not wide and not view.rhs.k_major)
        or (not view.rhs.k_major and tile.out_n // tile.cluster % 64)
        or (not view.lhs.k_major and not wide and tile.block_m % (128 // view.lhs_dtype.itemsize))
        or (not view.out_m_major and tile.out_n % out_row)
    )


def instance_for(
    tile: WgmmaTile, view: OrientedProduct, promote: bool, splits: int, gpu: Gpu, parts: int = 1
) -> WgmmaInstance:
    """Return the kernel with this tile for a product."""
    out_dtype = view.out_dtype
    rows, stride = view.lhs.mn, view.out_m_stride
    if view.out_m_major:
        rows, stride = view.rhs.mn, view.out_n_stride
    out_batch = view.out_batch
    if splits > 1:
        # The output is the partial results, which are dense.
        out_dtype = _INT32 if out_dtype == _INT32 else _F32
        stride = view.lhs.mn if view.out_m_major else view.rhs.mn
        out_batch = ((splits * math.prod(view.batch), view.lhs.mn * view.rhs.mn),)
    tma_store = all(
        step * out_dtype.itemsize % TMA_STRIDE_BYTES == 0
        for size, step in ((rows, stride), *out_batch)
        if size > 1
    )
    dtypes = view.lhs_dtype, view.rhs_dtype, out_dtype
    majors = view.lhs.k_major, view.rhs.k_major, view.out_m_major
    return _instance(tile, dtypes, majors, tma_store, promote, parts, gpu)


# Products of all sizes have the same kernels.
@functools.lru_cache(maxsize=4096)
def _instance(
    tile: WgmmaTile,
    dtypes: tuple[Dtype, Dtype, Dtype],
    majors: tuple[bool, bool, bool],
    tma_store: bool,
    promote: bool,
    parts: int,
    gpu: Gpu,
) -> WgmmaInstance:
    lhs_k_major, rhs_k_major, out_m_major = majors
    lhs, rhs, out = (CXX_TYPES[dtype] for dtype in dtypes)
    return WgmmaInstance(
        types=(lhs, rhs, out),
        block_m=tile.block_m,
        block_n=tile.block_n,
        block_k=TILE_ROW_BYTES // dtypes[0].itemsize,
        stages=0,
        consumers=tile.consumers,
        cooperative=tile.cooperative,
        cluster=tile.cluster,
        lhs_k_major=lhs_k_major,
        rhs_k_major=rhs_k_major,
        out_m_major=out_m_major,
        tma_store=tma_store,
        promote=promote,
        parts=parts,
        pair=tile.pair,
        lhs_pair=tile.lhs_pair,
    ).with_max_stages(gpu)
