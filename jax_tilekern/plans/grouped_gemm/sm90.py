"""Plans for ragged matrix products on Hopper: the kernel of ``grouped_gemm/sm90/matmul.cuh``.

Where rows of the output are ragged, the kernel computes the transposed product: a group's rows are
columns of its tiles, of which the tensor cores multiply any number of steps. Each span of rows is
dealt out evenly to as few tiles as it takes, so that little is multiplied in vain, whatever the
sizes are.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Candidate, Product
from jax_tilekern.plans.gemm.sm80 import config as mma_kernel
from jax_tilekern.plans.gemm.sm90.config import (
    ARITHMETICS,
    BOX_STRIDE_BYTES,
    MAX_BATCH_DIMS,
    MOST_ITEMS,
    View,
    WgmmaArithmetic,
    WgmmaInstance,
    WgmmaTile,
    dense_items,
    fits_boxes,
    instance_for,
    takes,
)
from jax_tilekern.plans.gemm.sm90.cost import busy_cycles
from jax_tilekern.plans.gemm.sm90.launch import launch_tiles, rhs_map
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.grouped_gemm.problem import (
    RaggedGeometry,
    RaggedProduct,
    most_tiles,
    pack_groups,
)
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan

_BOUNDS, _ITEMS_TAKEN = Buffer(2), Buffer(4)
_ITEMS_TAKEN_BYTES = 4
_CLEAR_ITEMS_TAKEN = Kernel("gemm/sm90/dynamic_tile_scheduler.cuh", "tilekern::clear_claimed_tiles")
# The ring that broadcasts work tiles to a CTA's threads; see WorkTileRing.
_ITEM_SLOTS_BYTES = 4 * (64 + 2 * 8) + 8
_ALIGNMENT = 16
# More would leave little shared memory for operands.
_MOST_SPANS = 1 << 13
_FEWEST_STAGES = 2

# Products differ by so many columns at least. Each of them takes registers for addresses.
_LINE_STEP = 32

# A cluster's first item comes later than a block's.
_CLUSTER_START = 3000

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


@dataclass(frozen=True)
class RaggedWgmmaCandidate(Candidate):
    """A kernel for a ragged product, not compiled yet.

    Attributes
    ----------
    product
        What it computes.
    tile
        The output's tile.
    exchanged
        Whether the kernel computes the output's transpose from the operands' transposes.
    instance
        The kernel.
    items
        Tiles of the output at most.
    cycles
        The estimated cost.
    """

    product: RaggedProduct
    tile: WgmmaTile
    exchanged: bool
    instance: WgmmaInstance
    items: int
    cycles: float

    @property
    def key(self) -> str:
        """The tile, and the order of the operands."""
        return f"ragged wgmma {self.tile}" + (" exchanged" if self.exchanged else "")

    def plan(self, gpu: Gpu) -> LaunchPlan:
        """Compile it."""
        product, instance = self.product, self.instance
        view = _view(product, self.exchanged)
        compiled = compile_kernels(instance.kernel, _CLEAR_ITEMS_TAKEN, arch=gpu.arch)
        clear = Launch(
            entry=compiled.entry(_CLEAR_ITEMS_TAKEN.name),
            grid=(1, 1, 1),
            block=(1, 1, 1),
            parameters=(_ITEMS_TAKEN,),
        )
        launch = launch_tiles(
            compiled,
            self.tile,
            instance,
            view,
            1,
            gpu,
            items=self.items,
            more=(
                (rhs_map(view, instance, instance.copy_step), _BOUNDS, _ITEMS_TAKEN),
                (pack_groups(product.geometry),),
            ),
        )
        out_alignment = BOX_STRIDE_BYTES if instance.out_boxes else product.out_dtype.itemsize
        reason = f"{self.tile}, {instance.stages} stages, {product.geometry.groups} groups"
        return LaunchPlan(
            name=f"ragged_wgmma_matmul {product.arithmetic}",
            gpu=gpu,
            launches=(clear, launch),
            alignments=(BOX_STRIDE_BYTES, BOX_STRIDE_BYTES, 4, out_alignment),
            workspace_bytes=(_ITEMS_TAKEN_BYTES,),
            reason=reason + (", as the transposed product" if self.exchanged else ""),
        )


def candidates(product: RaggedProduct, gpu: Gpu) -> Iterator[RaggedWgmmaCandidate]:
    """Yield the ways to compute a product; none if the kernel is not for the product or the GPU."""
    how = ARITHMETICS.get(product.arithmetic)
    geometry = product.geometry
    if how is None or gpu.compute_capability != (9, 0):
        return
    if geometry.ragged == "m" and geometry.spans > _MOST_SPANS:
        return
    view = _view(product, exchanged=False)
    if len(view.batch) > MAX_BATCH_DIMS or not (
        fits_boxes(view.lhs, product.lhs_dtype) and fits_boxes(view.rhs, product.rhs_dtype)
    ):
        return
    starts = (
        [view.lhs.k_major, view.rhs.k_major] if geometry.ragged == "k" else [not view.lhs.k_major]
    )
    if any(starts):
        # A group starts anywhere along the operand's unit stride, and the copy engine faults unless
        # boxes start at multiples of 16 bytes there.
        return
    for exchanged in (True,) if geometry.ragged == "m" else (False, True):
        oriented = _view(product, exchanged)
        for tile in _TILES:
            if not takes(tile, oriented, gpu):
                continue
            instance = _instance(product, tile, oriented, how, gpu)
            items = dense_items(tile, oriented)
            if instance.ragged == "n":
                tiles_m, _ = tile.grid(oriented.lhs.lines, 1)
                items = tiles_m * most_tiles(geometry, tile.block_n)
            if (
                items > MOST_ITEMS
                or instance.stages < _FEWEST_STAGES
                or not instance.fits_registers
                # The assembler would have products wait for each other.
                or (instance.ragged == "k" and tile.block_m > 64 * tile.consumers)
            ):
                continue
            busy = _busy_cycles(product, tile, instance, oriented, how, gpu)
            cycles = product.cycles(_in_clusters(busy, tile, oriented, how))
            yield RaggedWgmmaCandidate(product, tile, exchanged, instance, items, cycles)


def _view(product: RaggedProduct, exchanged: bool) -> View:
    dense = Product(
        product.geometry.product,
        product.lhs_dtype,
        product.rhs_dtype,
        product.out_dtype,
        product.arithmetic,
    )
    view = dataclasses.replace(View.of(dense), out_buffer=3)
    return view.exchanged() if exchanged else view


def _instance(
    product: RaggedProduct, tile: WgmmaTile, view: View, how: WgmmaArithmetic, gpu: Gpu
) -> WgmmaInstance:
    geometry = product.geometry
    instance = instance_for(tile, view, how, 1, gpu)
    # Ragged rows that boxes do not store are stored by runs of as many bytes.
    row_bytes = geometry.product.n * product.out_dtype.itemsize
    whole_runs = geometry.ragged == "k" or row_bytes % BOX_STRIDE_BYTES == 0
    tile_numbers_bytes = 4 * (geometry.spans + 1) if geometry.ragged == "m" else 0
    return dataclasses.replace(
        instance,
        out_boxes=instance.out_boxes and whole_runs,
        ragged="n" if geometry.ragged == "m" else "k",
        line_step=_line_step(tile, view, how) if geometry.ragged == "m" else tile.block_n,
        ragged_bytes=_ALIGNMENT + _ITEM_SLOTS_BYTES + tile_numbers_bytes,
    ).with_most_stages(gpu)


def _line_step(tile: WgmmaTile, view: View, how: WgmmaArithmetic) -> int:
    """Return by how many columns products differ: as few as registers allow."""
    through_registers = not view.lhs.k_major and view.lhs_dtype.itemsize == 1
    if how.promote:
        # Of further numbers of columns in a cluster the assembler serializes products (C7511).
        one = through_registers or tile.cluster > 1
        return tile.block_n if one else 2 * _LINE_STEP
    many_sums = tile.block_m * tile.block_n > 64 * 128 * tile.consumers
    return tile.block_n if through_registers and many_sums else _LINE_STEP


def _busy_cycles(
    product: RaggedProduct,
    tile: WgmmaTile,
    instance: WgmmaInstance,
    view: View,
    how: WgmmaArithmetic,
    gpu: Gpu,
) -> float:
    """Estimate the cycles of the busiest multiprocessor for groups of random sizes."""
    geometry = product.geometry
    rows = geometry.average_rows
    if instance.ragged == "k":
        k_tiles = rows / instance.block_k + 0.5
        return busy_cycles(tile, instance, view, how, dense_items(tile, view), k_tiles, gpu)
    tiles = max(1.0, rows / tile.block_n + 0.5)
    columns = min(tile.block_n, math.ceil((rows + instance.line_step / 2) / tiles))
    tiles_m, _ = tile.grid(view.lhs.lines, 1)
    items = math.prod(view.batch) * tiles * tiles_m
    k_tiles = math.ceil(view.k / instance.block_k)
    own = dataclasses.replace(tile, block_n=columns)
    cycles = busy_cycles(own, instance, view, how, items, k_tiles, gpu)
    # Measured: more of the weights at a time and fewer rows are slower than the other way round.
    return cycles * (1.03 if tile.block_m > tile.block_n else 1)


def _in_clusters(cycles: float, tile: WgmmaTile, view: View, how: WgmmaArithmetic) -> float:
    """Return what blocks of a cluster take, of which the model has the rounds alone.

    Blocks of dense products happen to read the same at the same time, which the second-level cache
    serves at once. Tiles of groups differ in what they take, and blocks read apart, so sharing
    pays. All of it is measured.
    """
    if tile.cluster == 1:
        return cycles
    if how.promote and view.lhs.k_major:
        share = 0.88
    else:
        share = 1.0 if view.lhs_dtype.itemsize == 4 else 0.97
    return cycles * share + _CLUSTER_START


# Sizes of which no dimension is short.
_MANY = 1 << 12


def instances(gpu: Gpu) -> Iterator[WgmmaInstance]:
    """Kernels that plans for ``gpu`` can ask for, so that a test can compile them.

    Of each arithmetic it is each tile in the major orders that there are; of further types of the
    result, and of stores of single elements, the largest tile, which leaves the fewest registers.
    """
    for arithmetic in ARITHMETICS:
        types = mma_kernel.ARITHMETICS[arithmetic]
        operands = (types.operands[0], types.operands[-1])
        for out_dtype, (geometry, odd) in itertools.product(types.results, _samples()):
            first = out_dtype == types.results[0]
            if odd and not first:
                continue
            all_tiles = first and not odd
            product = RaggedProduct(geometry, *operands, out_dtype, arithmetic)
            found = list(candidates(product, gpu))
            for candidate in found:
                if all_tiles or candidate.tile == found[0].tile:
                    yield candidate.instance


def _samples() -> Iterator[tuple[RaggedGeometry, bool]]:
    """Yield geometries, and whether the output's rows have no whole 16 bytes."""
    # Of rows with room for an odd number of elements.
    row, groups = 2 * _MANY, 8
    matrix = row * row
    rows, columns = (row, 1), (1, row)
    for odd in (False, True):
        n = _MANY + odd
        sizes = ((groups,), _MANY, n, _MANY)
        for rhs in (columns,) if odd else (rows, columns):
            product = MatmulGeometry(*sizes, (0, *rows), (matrix, *rhs), (0, n, 1))
            yield RaggedGeometry(product, "m", ()), odd
        product = MatmulGeometry(*sizes, (0, *columns), (0, *rows), (matrix, n, 1))
        yield RaggedGeometry(product, "k", ()), odd
