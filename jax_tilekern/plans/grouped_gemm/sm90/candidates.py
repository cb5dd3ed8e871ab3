"""Plans for grouped GEMMs on Hopper: the kernel of ``grouped_gemm/sm90/matmul.cuh``.

Where rows of the output are ragged, the kernel swaps A and B: a group's rows are columns of its
tiles, and an MMA can have any number of column steps. Each range of rows is divided evenly among
the fewest tiles that hold it, so little work is padding, whatever the sizes are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.candidate import Family
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.sm90.config import (
    RING_BYTES,
    WGMMA_ARITHMETICS,
    WgmmaInstance,
    WgmmaTile,
    dense_tiles,
    instance_for,
)
from jax_tilekern.plans.gemm.sm90.scaled import (
    refusal_of_scales,
    scale_parameters,
    with_scales,
)
from jax_tilekern.plans.gemm.sm90.tiling import (
    CLAIMED_BYTES,
    CLEAR_CLAIMED,
    TiledWgmmaCandidate,
    busy_cycles,
    clear_claimed,
    is_launchable,
    launch_tiles,
    lhs_map,
    oriented_tiles,
    refusal,
    rhs_map,
)
from jax_tilekern.plans.gemm.tiles import OrientedProduct, fits_tma
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.grouped_gemm.problem import max_tiles, pack_groups
from jax_tilekern.plans.launch import TMA_STRIDE_BYTES, Buffer, LaunchPlan, NoKernel, TensorMap

# All factors and cycles below were measured on an H100.

# A tile with more of the weights and fewer rows, against the other way round.
_MORE_WEIGHTS = 1.03
# The time of a cluster relative to that of as many CTAs: with promoted accumulators and k-major
# weights, with operands of 4 bytes, and otherwise.
_CLUSTER_PROMOTED, _CLUSTER_4_BYTES, _CLUSTER = 0.8976, 1.02, 0.9894
# A cluster's first work tile comes later than a CTA's.
_CLUSTER_START = 3000


def grouped_busy_cycles(
    product: Product,
    tile: WgmmaTile,
    instance: WgmmaInstance,
    view: OrientedProduct,
    gpu: Gpu,
) -> float:
    """Estimate the cycles of the busiest SM if memory were no limit."""
    return _in_clusters(_busy_cycles(product, tile, instance, view, gpu), tile, instance, view)


def _busy_cycles(
    product: Product,
    tile: WgmmaTile,
    instance: WgmmaInstance,
    view: OrientedProduct,
    gpu: Gpu,
) -> float:
    arithmetic, geometry = product.arithmetic, product.groups
    if instance.ragged == "k":
        # A group's last k-tile is half full on average.
        average_k_tiles = geometry.average_rows / instance.block_k + 0.5
        work_tiles = dense_tiles(tile, view)
        return busy_cycles(tile, instance, view, arithmetic, work_tiles, average_k_tiles, gpu)
    rows = geometry.rows / geometry.used_groups
    if instance.ragged == "m":
        tiles = max(1.0, rows / (tile.block_m * tile.cluster) + 0.5)
        _, tiles_n = tile.grid(1, view.rhs.mn)
        average_tiles = math.prod(geometry.outer_batch) * geometry.used_groups * tiles * tiles_n
        k_tiles = math.ceil(view.k / instance.block_k)
        return busy_cycles(tile, instance, view, arithmetic, average_tiles, k_tiles, gpu)
    tiles = max(1.0, rows / tile.block_n + 0.5)
    columns = min(tile.block_n, math.ceil((rows + instance.column_step / 2) / tiles))
    tiles_m, _ = tile.grid(view.lhs.mn, 1)
    average_tiles = math.prod(geometry.outer_batch) * geometry.used_groups * tiles * tiles_m
    k_tiles = math.ceil(view.k / instance.block_k)
    average = dataclasses.replace(tile, block_n=columns)
    cycles = busy_cycles(
        average, instance, view, arithmetic, average_tiles, k_tiles, gpu, product.epilogue
    )
    return cycles * (_MORE_WEIGHTS if tile.block_m > tile.block_n else 1)


def _in_clusters(
    cycles: float, tile: WgmmaTile, instance: WgmmaInstance, view: OrientedProduct
) -> float:
    """Return what clusters take, of which the dense model counts the rounds alone.

    CTAs of a dense product happen to read the same tiles at the same time, which L2 serves at once.
    Tiles of groups take different times, so CTAs read apart, and sharing in a cluster pays.
    """
    if tile.cluster == 1:
        return cycles
    if instance.promote and view.lhs.k_major:
        share = _CLUSTER_PROMOTED
    else:
        share = _CLUSTER_4_BYTES if view.lhs_dtype.itemsize == 4 else _CLUSTER
    return cycles * share + _CLUSTER_START


_BOUNDS = Buffer(2)
# More ranges of rows would leave little shared memory for operands.
_MAX_SPANS = 1 << 13
_MIN_STAGES = 2

# The minimum granularity of MMAs in columns. Each shape takes registers for addresses.
_COLUMN_STEP = 32

_TILES = (
    WgmmaTile(128, 256),
    WgmmaTile(128, 256, cluster=2),
    WgmmaTile(128, 128, cluster=2),
    WgmmaTile(256, 128),
    WgmmaTile(128, 128),
    WgmmaTile(128, 64),
    WgmmaTile(64, 128, consumers=1),
    WgmmaTile(64, 64, consumers=1),
)
# Half of the rows of a tile are those of each product of a pair.
PAIR_TILES: Sequence[WgmmaTile] = (
    WgmmaTile(256, 128, lhs_pair=True),
    WgmmaTile(256, 128, cluster=2, lhs_pair=True),
    WgmmaTile(128, 192, cooperative=False, lhs_pair=True),
    WgmmaTile(128, 192, cooperative=False, cluster=2, lhs_pair=True),
    WgmmaTile(128, 128, cooperative=False, lhs_pair=True),
    WgmmaTile(128, 128, cooperative=False, cluster=2, lhs_pair=True),
    WgmmaTile(256, 64, lhs_pair=True),
    WgmmaTile(128, 128, consumers=1, lhs_pair=True),
    WgmmaTile(128, 64, consumers=1, lhs_pair=True),
)


@dataclass(frozen=True)
class GroupedWgmmaCandidate(TiledWgmmaCandidate):
    """A kernel for a grouped GEMM, not compiled yet.

    Attributes
    ----------
    product
        What is computed.
    max_work_tiles
        Tiles of the output at most, whatever the sizes of the groups are.
    """

    product: Product
    max_work_tiles: int

    @property
    def key(self) -> str:
        """The tile and the orientation."""
        kind = "scaled " if self.product.scales else ""
        return f"{kind}ragged wgmma {self.tile_key}"

    def plan(self, gpu: Gpu) -> LaunchPlan:
        """Compile it."""
        product, instance = self.product, self.instance
        view = _view(product, self.swapped)
        kernel, epilogue = self.fused(product.epilogue, product.geometry, product.out_buffer)
        # Where every cluster has one tile at most, none is claimed.
        counts = self.max_work_tiles > gpu.available_sms // instance.cluster
        clears = [CLEAR_CLAIMED] if counts else []
        compiled = compile_kernels(kernel, *clears, arch=gpu.arch)
        claimed = Buffer(product.first_workspace)
        scales, strides = scale_parameters(product, instance) if product.scales else ((), ())
        launch = launch_tiles(
            compiled,
            self.tile,
            instance,
            view,
            1,
            gpu,
            kernel=kernel,
            work_tiles=self.max_work_tiles,
            more=(
                (
                    *self._second_maps(view),
                    rhs_map(view, instance, instance.tma_column_step),
                    _BOUNDS,
                    claimed,
                    *scales,
                ),
                (pack_groups(product.groups), *strides, *epilogue),
            ),
        )
        out_alignment = self.out_alignment(product.out_dtype.itemsize)
        name = ("scaled_" if product.scales else "") + "ragged_wgmma_matmul"
        name += " of a pair" if product.pair else ""
        return LaunchPlan(
            name=f"{name} {product.arithmetic}",
            gpu=gpu,
            launches=(*(clear_claimed(compiled, claimed) for _ in clears), launch),
            alignments=product.alignments(TMA_STRIDE_BYTES, TMA_STRIDE_BYTES, out_alignment),
            workspace_bytes=(CLAIMED_BYTES,),
            reason=f"{self.tile_reason}, {product.groups.groups} groups",
        )

    def _second_maps(self, view: OrientedProduct) -> tuple[TensorMap, ...]:
        """Return the maps of the second product's operands, if there are two products."""
        if not self.product.pair:
            return ()
        second = dataclasses.replace(view, lhs_buffer=self.product.second_rhs)
        return (lhs_map(second, self.instance),)


def grouped_wgmma_candidates(product: Product, gpu: Gpu) -> list[GroupedWgmmaCandidate] | NoKernel:
    """Return the ways to compute a grouped GEMM, or why there is none."""
    geometry, how = product.groups, WGMMA_ARITHMETICS[product.arithmetic]
    refused = refusal(product, how.types, gpu)
    if refused:
        return refused
    if product.pair and product.lhs_dtype.itemsize != 2:
        return NoKernel("kernels of pairs have 16-bit operands")
    view = _view(product, swapped=False)
    refused = _refusal(product, view)
    if refused:
        return refused
    found = []
    # Ragged rows are columns of the transposed product's tiles, and with scales rows as well.
    swaps = (True,) if geometry.ragged == "m" and not product.scales else (False, True)
    tiles = PAIR_TILES if product.pair else _TILES
    for tile, oriented in oriented_tiles(view, tiles, gpu, swaps=swaps):
        instance = _instance(product, tile, oriented, how.promote, gpu)
        if instance is None:
            continue
        work_tiles = dense_tiles(tile, oriented)
        if instance.ragged == "n":
            tiles_m, _ = tile.grid(oriented.lhs.mn, 1)
            work_tiles = tiles_m * max_tiles(geometry, tile.block_n)
        elif instance.ragged == "m":
            _, tiles_n = tile.grid(1, oriented.rhs.mn)
            work_tiles = tiles_n * max_tiles(geometry, tile.block_m * tile.cluster)
        # ptxas would serialize the MMAs of such a tile (C7511).
        serialized = instance.ragged == "k" and tile.block_m > 64 * tile.consumers
        if serialized or instance.stages < _MIN_STAGES:
            continue
        if is_launchable(instance, work_tiles):
            busy = grouped_busy_cycles(product, tile, instance, oriented, gpu)
            cycles = product.cycles(busy, gpu)
            found.append(GroupedWgmmaCandidate(tile, instance, cycles, product, work_tiles))
    return found or NoKernel("no wgmma tile fits the operands")


GROUPED_WGMMA = Family(WGMMA_ARITHMETICS, grouped_wgmma_candidates)


def _refusal(product: Product, view: OrientedProduct) -> NoKernel | None:
    """Return why the kernel does not take the groups, or ``None``."""
    geometry = product.groups
    if product.scales:
        refused = refusal_of_scales(product)
        if refused:
            return refused
    if geometry.ragged == "m" and geometry.spans > _MAX_SPANS:
        return NoKernel(f"{geometry.spans} ranges of rows (wgmma: at most {_MAX_SPANS})")
    for name, operand, dtype, ragged in (
        ("lhs", view.lhs, view.lhs_dtype, True),
        ("rhs", view.rhs, view.rhs_dtype, geometry.ragged == "k"),
    ):
        if not fits_tma(operand, dtype):
            return NoKernel(f"strides of {name} are not multiples of {TMA_STRIDE_BYTES} bytes")
        # TMA faults unless tiles start at multiples of 16 bytes along the unit stride, and a group
        # starts anywhere.
        if ragged and operand.k_major == (geometry.ragged == "k"):
            return NoKernel(f"the ragged dimension is the innermost of {name}")
    return None


def _view(product: Product, swapped: bool) -> OrientedProduct:
    view = OrientedProduct.of(product)
    return view.swapped() if swapped else view


def _instance(
    product: Product, tile: WgmmaTile, view: OrientedProduct, promote: bool, gpu: Gpu
) -> WgmmaInstance | None:
    """Return the kernel, or ``None`` if it does not have the product's scales."""
    geometry = product.groups
    instance = instance_for(tile, view, promote, 1, gpu)
    one_shape = geometry.ragged == "k"
    if product.scales:
        special = with_scales(product, view, instance, gpu)
        # Groups begin at any column, and scales of columns at multiples of 16 bytes.
        if special is None or (special.scaled_columns and special.out_m_major):
            return None
        # ptxas would serialize MMAs of more than one shape (C7511).
        instance, one_shape = special, True
    # Ragged rows that TMA does not store are stored in runs of as many bytes.
    row_bytes = geometry.n * product.out_dtype.itemsize
    whole_runs = geometry.ragged == "k" or row_bytes % TMA_STRIDE_BYTES == 0
    tile_numbers_bytes = 4 * (geometry.spans + 1) if geometry.ragged == "m" else 0
    return dataclasses.replace(
        instance,
        tma_store=instance.tma_store and whole_runs,
        ragged="k" if geometry.ragged == "k" else "n" if instance.out_m_major else "m",
        column_step=tile.block_n if one_shape else _column_step(tile, view, promote),
        scheduler_bytes=RING_BYTES + tile_numbers_bytes,
    ).with_max_stages(gpu)


def _column_step(tile: WgmmaTile, view: OrientedProduct, promote: bool) -> int:
    """Return the granularity of MMAs in columns: the minimum that registers allow."""
    through_registers = not view.lhs.k_major and view.lhs_dtype.itemsize == 1
    if promote:
        # With more MMA shapes in a cluster ptxas serializes the MMAs (C7511).
        one_shape = through_registers or tile.cluster > 1
        return tile.block_n if one_shape else 2 * _COLUMN_STEP
    many_accumulators = tile.block_m * tile.block_n > 64 * 128 * tile.consumers
    return tile.block_n if through_registers and many_accumulators else _COLUMN_STEP
