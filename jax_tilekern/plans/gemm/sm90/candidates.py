"""Plans for matrix products on the kernels of ``gemm/sm90``, each of them a ``Variant``.

A candidate is a tile, an orientation (A and B swapped or not), and a number of splits (split-K).
Operands that tensor maps cannot describe are packed first, and partial results are added last.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.candidate import Family
from jax_tilekern.plans.gemm.epilogue import QUANTIZED_COLUMNS
from jax_tilekern.plans.gemm.geometry import StridedOperand
from jax_tilekern.plans.gemm.passes.pack_operand import PackPass
from jax_tilekern.plans.gemm.passes.reduce_row_tiles import RowTilesPass
from jax_tilekern.plans.gemm.passes.reduce_splits import SumPass
from jax_tilekern.plans.gemm.problem import Product, copy_cycles
from jax_tilekern.plans.gemm.sm90.config import (
    WGMMA_ARITHMETICS,
    WgmmaTile,
    dense_tiles,
    instance_for,
)
from jax_tilekern.plans.gemm.sm90.pair import PAIR
from jax_tilekern.plans.gemm.sm90.scaled import SCALED
from jax_tilekern.plans.gemm.sm90.symmetric import SYMMETRIC
from jax_tilekern.plans.gemm.sm90.tiling import (
    CLAIMED_BYTES,
    CLEAR_CLAIMED,
    TiledWgmmaCandidate,
    busy_cycles,
    clear_claimed,
    is_launchable,
    launch_tiles,
    oriented_tiles,
    refusal,
    reread_cycles,
    with_scheduler,
)
from jax_tilekern.plans.gemm.sm90.variant import Variant
from jax_tilekern.plans.gemm.tiles import TILE_ROW_BYTES, OrientedProduct, fits_tma
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import TMA_STRIDE_BYTES, Buffer, LaunchPlan, NoKernel

# Where A and B are swapped, an epilogue reads its matrices across their rows, element by element.
_ACROSS_ROWS = 1.1
# Splits of fewer k-tiles spend their time on filling the pipeline. More splits than there are idle
# SMs for balance the rounds of work tiles, and each costs a pass over the partial results. These
# take a part of the L2 cache, next to the operands: those that go to memory take more time than
# they save.
_MIN_SPLIT_K_TILES = 8
_MAX_SPLITS = 12
_L2_SHARE_OF_SPLITS = 0.5


PLAIN = Variant(
    name="wgmma_matmul",
    key="wgmma",
    # An MMA of one warpgroup is 64 rows by up to 256 columns.
    tiles=(
        WgmmaTile(128, 256),
        WgmmaTile(256, 128),
        WgmmaTile(128, 224),
        WgmmaTile(128, 192, cooperative=False),
        WgmmaTile(128, 160, cooperative=False),
        WgmmaTile(128, 128, cooperative=False),
        WgmmaTile(128, 96, cooperative=False),
        WgmmaTile(128, 128),
        WgmmaTile(128, 64),
        WgmmaTile(64, 256, consumers=1),
        WgmmaTile(64, 192, consumers=1),
        WgmmaTile(64, 128, consumers=1),
        WgmmaTile(64, 96, consumers=1),
        WgmmaTile(64, 64, consumers=1),
        WgmmaTile(64, 64, cooperative=False),
        WgmmaTile(128, 32),
        WgmmaTile(128, 16),
        WgmmaTile(64, 32, consumers=1),
        WgmmaTile(64, 16, consumers=1),
    ),
)


def variant_of(product: Product) -> Variant:
    """Return the kernel of a dense product."""
    if product.scales:
        return SCALED
    if product.pair:
        return PAIR
    return SYMMETRIC if product.symmetric else PLAIN


@dataclass(frozen=True)
class WgmmaCandidate(TiledWgmmaCandidate):
    """A kernel for a product, not compiled yet.

    Attributes
    ----------
    product
        What is computed.
    splits
        The factor of split-K; another kernel adds the partial results.
    """

    product: Product
    splits: int

    @property
    def key(self) -> str:
        """The kernel, the tile, the orientation, and the factor of split-K."""
        splits = f" in {self.splits} splits" if self.splits > 1 else ""
        return f"{variant_of(self.product).key} {self.tile_key}{splits}"

    def plan(self, gpu: Gpu) -> LaunchPlan:
        """Compile it, with the passes that it needs."""
        product, instance = self.product, self.instance
        variant = variant_of(product)
        packs = _packs(product)
        sums = _reduce_pass(product, self.splits)
        rows = self._row_passes
        passes: list[PackPass | SumPass | RowTilesPass] = [
            *packs.values(), *([sums] if sums else []), *rows
        ]  # fmt: skip
        first = product.first_workspace
        workspaces = {id(p): Buffer(first + i) for i, p in enumerate(passes)}
        # The reduction of split-K applies the epilogue, to whole sums.
        kernel, more = self.fused(
            None if sums else product.epilogue,
            product.geometry,
            product.out_buffer,
            [workspaces[id(p)] for p in rows],
        )
        before, after = variant.parameters(product, instance)
        dynamic = [CLEAR_CLAIMED] if instance.dynamic else []
        kernels = dict.fromkeys([kernel, *dynamic, *(p.kernel for p in passes)])
        compiled = compile_kernels(*kernels, arch=gpu.arch)

        out = Buffer(product.out_buffer)
        launches = [
            pack.launch(compiled, Buffer(buffer), workspaces[id(pack)])
            for buffer, pack in packs.items()
        ]
        view = _packed(OrientedProduct.of(product), packs, first)
        if sums:
            view = _with_split_output(view, sums, workspaces[id(sums)].index, self.splits)
        view = view.swapped() if self.swapped else view
        claimed = Buffer(first + len(passes))
        if instance.dynamic:
            launches.append(clear_claimed(compiled, claimed))
        launches.append(
            launch_tiles(
                compiled, self.tile, instance, view, self.splits, gpu,
                kernel=kernel,
                work_tiles=self.splits * variant.work_tiles(self.tile, view),
                more=((*before, *([claimed] if instance.dynamic else [])), (*after, *more)),
                stores=product.epilogue is None or product.epilogue.stores,
            )
        )  # fmt: skip
        if sums:
            launch = sums.launch(compiled, workspaces[id(sums)], out)
            # An int8 product whose launches overlapped took longer.
            overlaps = product.arithmetic != "int8"
            launches.append(dataclasses.replace(launch, overlaps=overlaps))
        for i, reduction in enumerate(rows):
            result = Buffer(product.first_reduction + i)
            launches.append(reduction.launch(compiled, workspaces[id(reduction)], result))
        out_alignment = self.out_alignment(product.out_dtype.itemsize)
        return LaunchPlan(
            name=f"{variant.name} {product.arithmetic}",
            gpu=gpu,
            launches=tuple(launches),
            alignments=product.alignments(
                product.lhs_dtype.itemsize if 0 in packs else TMA_STRIDE_BYTES,
                product.rhs_dtype.itemsize if 1 in packs else TMA_STRIDE_BYTES,
                sums.out_alignment if sums else out_alignment,
            ),
            workspace_bytes=(
                *(p.workspace_bytes for p in passes),
                *([CLAIMED_BYTES] if instance.dynamic else []),
            ),
            reason=self._reason(packs),
        )

    @property
    def _row_passes(self) -> list[RowTilesPass]:
        epilogue, geometry = self.product.epilogue, self.product.geometry
        if epilogue is None:
            return []
        rows, columns = geometry.m, geometry.n
        if self.swapped:
            epilogue, rows, columns = epilogue.swapped(), columns, rows
        tiles = math.ceil(columns / self.tile.out_n)
        return [RowTilesPass(x, geometry.batch, rows, tiles) for x in epilogue.reductions]

    def _reason(self, packs: dict[int, PackPass]) -> str:
        computes = variant_of(self.product).computes
        text = f"{computes}, {self.tile_reason}" if computes else self.tile_reason
        text += f", split-K by {self.splits}" if self.splits > 1 else ""
        names = [("lhs", "rhs")[buffer] for buffer in packs]
        return text + (f", {' and '.join(names)} packed first" if names else "")


def wgmma_candidates(product: Product, gpu: Gpu) -> list[WgmmaCandidate] | NoKernel:
    """Return the ways to compute a product, or why there is none."""
    variant, epilogue = variant_of(product), product.epilogue
    if product.arithmetic not in variant.arithmetics:
        return NoKernel(f"no {variant.kernel} computes in {product.arithmetic}")
    how = WGMMA_ARITHMETICS[product.arithmetic]
    refused = refusal(product, how.types, gpu) or variant.refusal(product)
    if refused:
        return refused
    packs = _packs(product)
    if packs and not variant.has_passes:
        return NoKernel("TMA does not load rows that are no multiples of 16 bytes")
    if not all(pack.fits for pack in packs.values()):
        return NoKernel("an operand has more rows than a launch can pack")
    packing = sum(copy_cycles(pack.workspace_bytes, gpu) for pack in packs.values())
    view = _packed(OrientedProduct.of(product), packs, product.first_workspace)
    found = []
    for tile, oriented in oriented_tiles(
        view, variant.tiles, gpu, swaps=variant.swaps, store_row_bytes=variant.store_row_bytes
    ):
        for splits in (
            _split_counts(tile, oriented, _outputs(product), gpu) if variant.has_passes else (1,)
        ):
            plain = instance_for(tile, oriented, how.promote, splits, gpu)
            instance = variant.instance(product, oriented, plain, gpu)
            if instance is None:
                continue
            if epilogue and epilogue.has_row_results:
                # A row of a split has no sums to reduce.
                if splits > 1 or not epilogue.fits_orientation(swapped=instance.out_m_major):
                    continue
                if epilogue.quantized and tile.out_n % QUANTIZED_COLUMNS:
                    continue
                if not epilogue.stores:
                    # No address of an element takes registers.
                    instance = dataclasses.replace(instance, tma_store=True)
            work_tiles = splits * variant.work_tiles(tile, oriented)
            if not is_launchable(instance, work_tiles):
                continue
            instance = with_scheduler(instance, work_tiles, gpu)
            k_tiles = math.ceil(math.ceil(oriented.k / instance.block_k) / splits)
            busy = busy_cycles(
                tile, instance, oriented, product.arithmetic, work_tiles, k_tiles, gpu,
                # The reduction of split-K applies it otherwise.
                epilogue if splits == 1 else None,
            )  # fmt: skip
            if not tile.cooperative:
                busy *= variant.ping_pong
            cycles = product.cycles(busy, gpu) + packing
            if variant.rereads:
                cycles += reread_cycles(tile, oriented, gpu)
            if splits > 1:
                # What the reduction reads for the epilogue, no product hides.
                bytes_ = splits * _outputs(product) * 4 + product.epilogue_bytes // 2
                cycles += copy_cycles(bytes_, gpu)
            if epilogue and epilogue.has_matrices and oriented.out_m_major:
                cycles *= _ACROSS_ROWS
            found.append(WgmmaCandidate(tile, instance, cycles, product, splits))
    return found or NoKernel("no wgmma tile fits the operands")


WGMMA = Family(WGMMA_ARITHMETICS, wgmma_candidates)


def _packs(product: Product) -> dict[int, PackPass]:
    """Return the packs that operands need, by buffer.

    From shared memory, wgmma takes MN-major operands of 16-bit types alone. The kernel transposes
    one other operand through registers, so if both are MN-major, the smaller is packed.
    """
    operands = (StridedOperand.lhs(product.geometry), StridedOperand.rhs(product.geometry))
    dtypes = (product.lhs_dtype, product.rhs_dtype)
    packs = {
        buffer: PackPass(operand, dtype.itemsize)
        for buffer, (operand, dtype) in enumerate(zip(operands, dtypes, strict=True))
        if not fits_tma(operand, dtype)
    }
    mn_major = [i for i, operand in enumerate(operands) if not operand.k_major and i not in packs]
    if dtypes[0].itemsize == 2 or not variant_of(product).has_passes:
        return packs
    packed = None
    if product.epilogue and product.epilogue.has_row_results:
        # The orientation is given, and with it the operand that shared memory alone holds.
        rhs = 0 if product.epilogue.fits_orientation(swapped=True) else 1
        packed = rhs if rhs in mn_major else None
    elif len(mn_major) == 2:
        packed = min(mn_major, key=lambda i: operands[i].mn * operands[i].matrices)
    if packed is not None:
        packs[packed] = PackPass(operands[packed], dtypes[packed].itemsize)
    return packs


def _packed(
    view: OrientedProduct, packs: dict[int, PackPass], first_workspace: int
) -> OrientedProduct:
    """Return the product with packed operands in workspaces."""
    for i, (buffer, pack) in enumerate(packs.items()):
        *batch, mn, k = pack.strides
        operand = dataclasses.replace(
            pack.operand, batch_strides=tuple(batch), mn_stride=mn, k_stride=k
        )
        workspace = first_workspace + i
        if buffer == 0:
            view = dataclasses.replace(view, lhs=operand, lhs_buffer=workspace)
        else:
            view = dataclasses.replace(view, rhs=operand, rhs_buffer=workspace)
    return view


def _reduce_pass(product: Product, splits: int) -> SumPass | None:
    if splits == 1:
        return None
    sum_dtype = np.dtype(np.int32 if product.arithmetic == "int8" else np.float32)
    return SumPass(product.geometry, splits, sum_dtype, product.out_dtype, product.epilogue)


def _outputs(product: Product) -> int:
    return math.prod(product.geometry.batch) * product.geometry.m * product.geometry.n


def _with_split_output(
    view: OrientedProduct, sums: SumPass, buffer: int, splits: int
) -> OrientedProduct:
    m, n = view.lhs.mn, view.rhs.mn
    return dataclasses.replace(
        view,
        out_dtype=sums.sum_dtype,
        out_buffer=buffer,
        out_batch=((splits * math.prod(view.batch), m * n),),
        out_m_stride=n,
        out_n_stride=1,
    )


def _split_counts(tile: WgmmaTile, view: OrientedProduct, outputs: int, gpu: Gpu) -> Iterator[int]:
    """Yield 1, and up to three factors of split-K that leave SMs idle for less of the time."""
    yield 1
    work_tiles = dense_tiles(tile, view)
    k_tiles = math.ceil(view.k * view.lhs_dtype.itemsize / TILE_ROW_BYTES)
    most = min(
        max(gpu.available_sms // work_tiles, _MAX_SPLITS),
        k_tiles // _MIN_SPLIT_K_TILES,
        int(_L2_SHARE_OF_SPLITS * gpu.l2_bytes / (4 * max(1, outputs))),
    )
    useful = []
    least = math.ceil(work_tiles / gpu.available_sms) * k_tiles
    for splits in range(2, most + 1):
        split_k_tiles = math.ceil(k_tiles / splits)
        busy = math.ceil(splits * work_tiles / gpu.available_sms) * split_k_tiles
        # Every split has at least one k-tile.
        if busy < least and (splits - 1) * split_k_tiles < k_tiles:
            useful.append(splits)
            least = busy
    if useful:
        yield from sorted({useful[0], useful[len(useful) // 2], useful[-1]})
