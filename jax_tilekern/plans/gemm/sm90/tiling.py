"""Candidates on the kernels of ``gemm/sm90``: their predicted times, and their launches.

Dense products, emulated float32 and grouped GEMMs share what is here. A candidate is a tile, in
either orientation of the product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Compiled, Kernel
from jax_tilekern.plans.candidate import CostedCandidate
from jax_tilekern.plans.gemm.arithmetic import ElementTypes
from jax_tilekern.plans.gemm.epilogue import Epilogue, EpilogueArray, Staging
from jax_tilekern.plans.gemm.epilogue_text import kernel_with_epilogue
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.sm90.config import MAX_WORK_TILES, WgmmaInstance, WgmmaTile, takes
from jax_tilekern.plans.gemm.tiles import (
    MAX_TMA_BATCH_DIMS,
    TILE_ROW_BYTES,
    OrientedProduct,
    operand_map,
    out_map,
    raster_height,
    staged_map,
)
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import (
    TMA_STRIDE_BYTES,
    Buffer,
    Launch,
    NoKernel,
    Parameter,
    Scalars,
    TensorMap,
)

# All factors and cycles below were measured on an H100, and those of epilogues on an H200 too.

# A k-tile where neither operand is k-major and the tile is wide.
_NEITHER_K_MAJOR = 1.03
# A k-tile of lhs through registers. Wide tiles hide more of it than narrow ones.
_LHS_IN_REGISTERS_WIDE, _LHS_IN_REGISTERS_NARROW = 1.1, 1.3
# A k-tile whose accumulators are promoted outside the tensor cores.
_PROMOTED = 1.2
# A k-tile with scales, by the number of row blocks of a consumer. Between two row blocks the other
# consumer uses the tensor cores. Scales of columns double the multiplications.
_SCALED = {1: 1.65, 2: 1.4}
_SCALED_COLUMNS = 1.3
# Columns from which a tile is wide.
_WIDE = 128
# The time in which TMA writes a byte to shared memory, in units of an MMA's read of a byte.
_TMA_WRITE = 0.75
# A k-tile of a single consumer: no other one computes while it waits.
_ONE_CONSUMER = 1.02
# The epilogue: cycles to begin with, bytes per cycle by TMA stores, and single elements per cycle.
_STORE_CYCLES, _STORE_BANDWIDTH = 400, 64
_SINGLE_ELEMENTS = 2
# Ping-pong consumers: cycles of the ordered barrier.
_PING_PONG_CYCLES = 100
# Ping-pong consumers that reduce rows.
_PING_PONG_REDUCTIONS = 1.7
# The part of an operand that exceeds L2 which narrow tiles read again from DRAM. Products with 3 to
# 5 such tiles took 1.17 to 1.69 times the estimate without it.
_NARROW, _READ_AGAIN = 64, 0.3


def busy_cycles(
    tile: WgmmaTile,
    instance: WgmmaInstance,
    view: OrientedProduct,
    arithmetic: str,
    work_tiles: float,
    k_tiles: float,
    gpu: Gpu,
    epilogue: Epilogue | None = None,
) -> float:
    """Estimate the cycles of the busiest SM if memory were no limit.

    Parameters
    ----------
    tile
        The output's tile.
    instance
        The kernel.
    view
        The product as the kernel computes it.
    arithmetic
        The arithmetic of an MMA.
    work_tiles
        Tiles of the output, all batches and splits together.
    k_tiles
        The k-tiles of each.
    gpu
        What it is for.
    epilogue
        What is done to the accumulators before they are stored.
    """
    rates = gpu.rates
    rounds = math.ceil(work_tiles / (gpu.available_sms // tile.cluster))
    # MMAs of a hi/lo split: all pairs of parts but those whose product is negligible.
    mmas = instance.parts * (instance.parts + 1) // 2
    macs = rates.wgmma_macs[arithmetic]
    loads = instance.stage_bytes
    reads = mmas * (tile.block_m // 64) * (64 + tile.block_n) * TILE_ROW_BYTES
    k_tile = max(
        mmas * tile.block_m * tile.block_n * instance.block_k / macs,
        (reads + _TMA_WRITE * loads) / rates.shared_memory_bandwidth,
        loads / rates.l2_tma_bandwidth,
    )
    if tile.consumers == 1:
        k_tile *= _ONE_CONSUMER
    wide = tile.block_n > _WIDE
    if not instance.lhs_k_major and not instance.rhs_k_major and wide:
        k_tile *= _NEITHER_K_MAJOR
    if not instance.lhs_k_major and view.lhs_dtype.itemsize != 2:
        k_tile *= _LHS_IN_REGISTERS_WIDE if wide else _LHS_IN_REGISTERS_NARROW
    if instance.scaled_columns is not None:
        k_tile *= _SCALED[tile.block_m // (64 * tile.consumers)]
        k_tile *= _SCALED_COLUMNS if instance.scaled_columns else 1
    elif instance.promote:
        k_tile *= _PROMOTED
    elements = tile.out_m * tile.out_n
    copies = 2 if instance.symmetric else 1
    stores = epilogue is None or epilogue.stores
    single_elements = stores and not instance.tma_store
    store = float(_STORE_CYCLES)
    if single_elements:
        store += elements / _SINGLE_ELEMENTS
    elif stores:
        store += copies * elements * view.out_dtype.itemsize / _STORE_BANDWIDTH
    arrays = 0.0
    if epilogue is not None:
        store += elements * epilogue.cycles
        # Loads overlap the stores of single elements.
        if not instance.ragged and not single_elements:
            arrays = copies * elements * epilogue.cycles_of_arrays(staged=tile.cooperative)
    # Ping-pong hides the epilogue behind the other consumer's mainloop, unless single elements are
    # stored.
    if tile.cooperative or rounds == 1 or single_elements:
        work_tile = k_tiles * k_tile + store + arrays
    else:
        mainloop = k_tiles * k_tile
        work_tile = max(mainloop, store, (mainloop + store + arrays) / 2) + _PING_PONG_CYCLES
        if epilogue is not None and epilogue.reductions:
            work_tile *= _PING_PONG_REDUCTIONS
    return rounds * work_tile


def reread_cycles(tile: WgmmaTile, view: OrientedProduct, gpu: Gpu) -> float:
    """Estimate the cycles of what narrow tiles read again of an operand that exceeds L2."""
    m_tiles, n_tiles = tile.grid(view.lhs.mn, view.rhs.mn)
    read_again = 0.0
    for operand, dtype, extent, tiles in (
        (view.lhs, view.lhs_dtype, tile.block_n, n_tiles),
        (view.rhs, view.rhs_dtype, tile.block_m, m_tiles),
    ):
        size = operand.mn * view.k * dtype.itemsize
        if size > gpu.l2_bytes and extent <= _NARROW:
            read_again += _READ_AGAIN * (tiles - 1) * size * operand.matrices
    return read_again / gpu.rates.memory_bandwidth


_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class TiledWgmmaCandidate(CostedCandidate):
    """A tile for a product, not compiled yet.

    Attributes
    ----------
    tile
        The output's tile.
    instance
        The kernel.
    cycles
        The estimated cost.
    """

    tile: WgmmaTile
    instance: WgmmaInstance
    cycles: float

    @property
    def kind(self) -> str:
        """The kind of its consumers, and the orientation."""
        consumers = "cooperative" if self.tile.cooperative else "ping-pong"
        return consumers + (" swapped" if self.swapped else "")

    @property
    def accumulators(self) -> int:
        """Accumulators of a thread."""
        return self.instance.accumulators

    @property
    def swapped(self) -> bool:
        """Whether the kernel computes the output's transpose, with the operands swapped."""
        return self.instance.out_m_major

    @property
    def tile_key(self) -> str:
        """The tile and the orientation, as a key has them."""
        return self.tile.key + (" swapped" if self.swapped else "")

    @property
    def tile_reason(self) -> str:
        """The tile, its pipeline and the orientation, for ``explain``."""
        text = f"{self.tile}, {self.instance.stages} stages"
        text += ", dynamic tile scheduler" if self.instance.dynamic else ""
        return text + (", operands swapped" if self.swapped else "")

    def fused(
        self,
        epilogue: Epilogue | None,
        geometry: MatmulGeometry,
        out_buffer: int,
        partials: Sequence[Buffer] = (),
    ) -> tuple[Kernel, tuple[Parameter, ...]]:
        """Return the kernel with an epilogue, and the parameters that follow its own.

        The epilogue and the geometry are those of the product before any swap; ``partials`` are
        workspaces of its reductions.
        """
        plain, rows, columns = self.instance.kernel, geometry.m, geometry.n
        if epilogue is None:
            return plain, ()
        if self.swapped:
            epilogue, rows, columns = epilogue.swapped(), columns, rows
        staging = staging_of(self.instance, epilogue, geometry, out_buffer)
        kernel = kernel_with_epilogue(
            plain,
            epilogue,
            columns=columns,
            within_rows=rows % (self.tile.out_m * self.tile.cluster) == 0,
            within_columns=columns % self.tile.out_n == 0,
            tile_columns=self.tile.out_n,
            staging=staging,
        )
        return kernel, epilogue.parameters(out_buffer, partials, staging)

    def out_alignment(self, itemsize: int) -> int:
        """Return the bytes that the output's address is a multiple of."""
        return TMA_STRIDE_BYTES if self.instance.tma_store else itemsize


def oriented_tiles(
    view: OrientedProduct,
    tiles: Sequence[WgmmaTile],
    gpu: Gpu,
    *,
    swaps: Sequence[bool] = (False, True),
    store_row_bytes: int = TILE_ROW_BYTES,
) -> Iterator[tuple[WgmmaTile, OrientedProduct]]:
    """Yield the tiles that a product can have, each with the product as the kernel computes it.

    Parameters
    ----------
    view
        The product as its operands lie.
    tiles
        Tiles to choose from.
    gpu
        What it is for.
    swaps
        Whether the operands are swapped; both orientations unless given.
    store_row_bytes
        What a tile's rows of the output are a multiple of.
    """
    for swapped in swaps:
        oriented = view.swapped() if swapped else view
        for tile in tiles:
            if takes(tile, oriented, gpu, store_row_bytes):
                yield tile, oriented


def is_launchable(instance: WgmmaInstance, work_tiles: int) -> bool:
    """Whether the kernel compiles without spills, and can count its work tiles."""
    return instance.fits_registers and work_tiles <= MAX_WORK_TILES


def with_scheduler(instance: WgmmaInstance, work_tiles: int, gpu: Gpu) -> WgmmaInstance:
    """Return the kernel with the tile scheduler that it needs where others occupy some SMs."""
    # A single round of tiles is scheduled by the hardware.
    once = work_tiles <= gpu.available_sms
    if once or not gpu.beside_collectives or instance.scaled_columns is not None:
        return instance
    return instance.with_dynamic_scheduler(gpu)


def refusal(product: Product, types: ElementTypes, gpu: Gpu) -> NoKernel | None:
    """Return why the kernels do not take a product on a GPU, or ``None``."""
    if gpu.compute_capability != _CAPABILITY:
        return NoKernel(f"{product.arithmetic} takes sm_90a, and this is {gpu.arch}")
    batch = product.geometry.batch
    if len(batch) > MAX_TMA_BATCH_DIMS:
        return NoKernel(f"{len(batch)} batch dimensions (wgmma takes at most {MAX_TMA_BATCH_DIMS})")
    return product.refusal(types)


def launch_tiles(
    compiled: Compiled,
    tile: WgmmaTile,
    instance: WgmmaInstance,
    view: OrientedProduct,
    splits: int,
    gpu: Gpu,
    *,
    kernel: Kernel | None = None,
    work_tiles: int | None = None,
    more: tuple[tuple[Parameter, ...], tuple[Parameter, ...]] = ((), ()),
    stores: bool = True,
) -> Launch:
    """Return the launch of a kernel, given what ``instance.kernel`` was compiled to.

    Parameters
    ----------
    kernel
        The kernel, if it is not ``instance.kernel``.
    work_tiles
        The maximum number of work tiles, if they are not those of a dense product.
    more
        Parameters before and after the shape, of a kernel that has more of them.
    stores
        Whether the kernel stores elements of the output.
    """
    tiles_m, tiles_n = tile.grid(view.lhs.mn, view.rhs.mn)
    k_tiles = math.ceil(view.k / instance.block_k)
    split_k_tiles = math.ceil(k_tiles / splits)
    if work_tiles is None:
        work_tiles = math.ceil(k_tiles / split_k_tiles) * math.prod(view.batch) * tiles_m * tiles_n
    clusters = min(work_tiles, gpu.available_sms // instance.cluster)

    missing = (0,) * (MAX_TMA_BATCH_DIMS - len(view.batch))
    out_missing = (0,) * (MAX_TMA_BATCH_DIMS - len(view.out_batch))
    shape = Scalars.pack(
        f"{MAX_TMA_BATCH_DIMS + 1}q{3 * MAX_TMA_BATCH_DIMS + 10}i",
        *out_missing,
        *(stride for _, stride in view.out_batch),
        view.out_n_stride if instance.out_m_major else view.out_m_stride,
        *(1 for _ in missing),
        *view.batch,
        *missing,
        *(int(stride != 0) for stride in view.lhs.batch_strides),
        *missing,
        *(int(stride != 0) for stride in view.rhs.batch_strides),
        math.prod(view.batch),
        view.lhs.mn,
        view.rhs.mn,
        k_tiles,
        split_k_tiles,
        view.part_step,
        tiles_m,
        tiles_n,
        raster_height(
            gpu.available_sms // tile.cluster,
            tiles_m,
            tile.out_m * tile.cluster,
            tile.block_n,
        ),
        work_tiles,
    )
    lhs = lhs_map(view, instance)
    # An epilogue subtile is 64 rows of m, and rows of n where they are adjacent in the output.
    columns = subtile_columns(instance, view)
    if view.out_m_major:
        out_box = TILE_ROW_BYTES // view.out_dtype.itemsize, columns
    else:
        out_box = columns, 64
    rhs = rhs_map(view, instance, instance.rhs_tma_rows)
    return Launch(
        entry=compiled.entry((kernel or instance.kernel).name),
        grid=(clusters * instance.cluster, 1, 1),
        block=(instance.threads, 1, 1),
        # A kernel that stores single elements, or none, does not read the map of the output.
        parameters=(
            lhs,
            rhs,
            out_map(view, *out_box) if instance.tma_store and stores else lhs,
            Buffer(view.out_buffer),
            *more[0],
            shape,
            *more[1],
        ),
        shared_memory_bytes=instance.shared_memory_bytes,
        cluster=(instance.cluster, 1, 1),
    )


def subtile_columns(instance: WgmmaInstance, view: OrientedProduct) -> int:
    """Return the columns of an epilogue subtile, see ``gemm/sm90/store.cuh``."""
    return math.gcd(instance.out_n, TILE_ROW_BYTES // view.out_dtype.itemsize)


def lhs_map(view: OrientedProduct, instance: WgmmaInstance) -> TensorMap:
    """Return the map of ``lhs``."""
    rows = instance.lhs_tma_rows
    return operand_map(view.lhs, view.lhs_dtype, view.lhs_buffer, instance.lhs_k_major, rows)


def rhs_map(view: OrientedProduct, instance: WgmmaInstance, rows: int) -> TensorMap:
    """Return the map of ``rhs`` in TMA tiles of so many rows of N."""
    return operand_map(view.rhs, view.rhs_dtype, view.rhs_buffer, instance.rhs_k_major, rows)


# Columns that a stage may have beside all of the tile's.
_COLUMNS = (128, 64, 32)
_ROW_BYTES = 128
_MATRIX_ROW_BYTES = 32


def staging_of(
    instance: WgmmaInstance, epilogue: Epilogue, geometry: MatmulGeometry, out_buffer: int
) -> Staging | None:
    """Return the operands that are staged, or ``None``.

    Parameters
    ----------
    instance
        The kernel.
    epilogue
        The epilogue of the product as the kernel computes it.
    geometry
        The product before any swap.
    out_buffer
        The buffer of the first result.
    """
    rows_are_adjacent = instance.out_m_major
    excluded = instance.ragged or instance.pair or rows_are_adjacent or epilogue.has_row_results
    if not instance.cooperative or excluded:
        return None
    staged = {i: x for i, x in enumerate(epilogue.operands) if x.fits_tma}
    for columns in (instance.block_n, *_COLUMNS):
        if staged and instance.block_n % columns == 0 and _fits(staged, columns, instance):
            first = out_buffer - len(epilogue.operands)
            sizes = (*geometry.batch, geometry.m, geometry.n)
            maps = {
                i: staged_map(x, first + i, sizes, columns, instance.block_m)
                for i, x in staged.items()
            }
            return Staging(maps, instance.block_m, columns)
    return None


def _fits(staged: dict[int, EpilogueArray], columns: int, instance: WgmmaInstance) -> bool:
    nbytes = 0
    for array in staged.values():
        row_bytes = columns * array.dtype.itemsize
        matrix = array.strides[-2] != 0
        if row_bytes % (_MATRIX_ROW_BYTES if matrix else _ROW_BYTES):
            return False
        if matrix and row_bytes > _ROW_BYTES and row_bytes % _ROW_BYTES:
            return False
        nbytes += row_bytes * (instance.block_m if matrix else 1)
    return nbytes <= instance.stage_bytes


# The workspace that counts the tiles which clusters have claimed.
CLAIMED_BYTES = 4
CLEAR_CLAIMED = Kernel("gemm/sm90/dynamic_tile_scheduler.cuh", "tilekern::clear_claimed_tiles")


def clear_claimed(compiled: Compiled, claimed: Buffer) -> Launch:
    """Return the launch that comes before the kernel: no tile has been claimed."""
    return Launch(
        entry=compiled.entry(CLEAR_CLAIMED.name),
        grid=(1, 1, 1),
        block=(1, 1, 1),
        parameters=(claimed,),
    )
