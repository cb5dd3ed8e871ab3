"""Plans for matrix products on Hopper: the kernel of ``gemm/sm90/matmul.cuh``.

A candidate is a tile, whether the operands change places, and in how many splits ``k`` is taken.
Operands that tensor maps cannot read are packed first, and splits are added up last.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.passes.pack_operand import PackPass
from jax_tilekern.plans.gemm.passes.reduce_splits import SumPass
from jax_tilekern.plans.gemm.problem import Candidate, Product, copy_cycles
from jax_tilekern.plans.gemm.sm80 import config as mma_kernel
from jax_tilekern.plans.gemm.sm90.config import (
    ARITHMETICS,
    BOX_STRIDE_BYTES,
    MAX_BATCH_DIMS,
    MOST_ITEMS,
    TILE_ROW_BYTES,
    View,
    WgmmaInstance,
    WgmmaTile,
    dense_items,
    fits_boxes,
    instance_for,
    takes,
)
from jax_tilekern.plans.gemm.sm90.cost import busy_cycles
from jax_tilekern.plans.gemm.sm90.launch import launch_tiles
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, LaunchPlan
from jax_tilekern.plans.strided_rows import StridedOperand

# Products of one warpgroup are 64 rows by up to 256 columns.
TILES = (
    WgmmaTile(128, 256),
    WgmmaTile(256, 128),
    WgmmaTile(128, 256, cluster=2),
    WgmmaTile(256, 128, cluster=2),
    WgmmaTile(128, 192, cooperative=False),
    WgmmaTile(128, 128, cooperative=False),
    WgmmaTile(128, 128),
    WgmmaTile(128, 64),
    WgmmaTile(64, 128, consumers=1),
    WgmmaTile(64, 64, consumers=1),
    WgmmaTile(64, 64, cooperative=False),
    WgmmaTile(128, 32),
    WgmmaTile(128, 16),
    WgmmaTile(64, 32, consumers=1),
    WgmmaTile(64, 16, consumers=1),
)


@dataclass(frozen=True)
class WgmmaCandidate(Candidate):
    """A kernel for a product, not compiled yet.

    Attributes
    ----------
    product
        What it computes.
    tile
        The output's tile.
    exchanged
        Whether the kernel computes the output's transpose from the operands' transposes.
    splits
        Parts of ``k`` whose sums are added up by another kernel.
    instance
        The kernel.
    cycles
        The estimated cost.
    """

    product: Product
    tile: WgmmaTile
    exchanged: bool
    splits: int
    instance: WgmmaInstance
    cycles: float

    @property
    def key(self) -> str:
        """The tile, the order of the operands, and splits."""
        text = f"wgmma {self.tile}" + (" exchanged" if self.exchanged else "")
        return text + (f" in {self.splits} splits" if self.splits > 1 else "")

    def plan(self, gpu: Gpu) -> LaunchPlan:
        """Compile it, with the passes that it needs."""
        product, instance = self.product, self.instance
        packs = _packs(product)
        sums = _sum_pass(product, self.splits)
        passes: list[PackPass | SumPass] = [*packs.values(), *([sums] if sums else [])]
        kernels = dict.fromkeys([instance.kernel, *(p.kernel for p in passes)])
        compiled = compile_kernels(*kernels, arch=gpu.arch)

        workspaces = {id(p): Buffer(3 + i) for i, p in enumerate(passes)}
        launches = [
            pack.launch(compiled, Buffer(buffer), workspaces[id(pack)])
            for buffer, pack in packs.items()
        ]
        view = _packed(View.of(product), packs, 3)
        if sums:
            view = _with_split_output(view, sums, workspaces[id(sums)].index, self.splits)
        view = view.exchanged() if self.exchanged else view
        launches.append(launch_tiles(compiled, self.tile, instance, view, self.splits, gpu))
        if sums:
            launches.append(sums.launch(compiled, workspaces[id(sums)], Buffer(2)))
        out_alignment = BOX_STRIDE_BYTES if instance.out_boxes else product.out_dtype.itemsize
        return LaunchPlan(
            name=f"wgmma_matmul {product.arithmetic}",
            gpu=gpu,
            launches=tuple(launches),
            alignments=(
                *(
                    dtype.itemsize if buffer in packs else BOX_STRIDE_BYTES
                    for buffer, dtype in enumerate((product.lhs_dtype, product.rhs_dtype))
                ),
                sums.out_alignment if sums else out_alignment,
            ),
            workspace_bytes=tuple(p.workspace_bytes for p in passes),
            reason=self._reason(packs),
        )

    def _reason(self, packs: dict[int, PackPass]) -> str:
        text = f"{self.tile}, {self.instance.stages} stages"
        text += ", as the transposed product" if self.exchanged else ""
        text += f", k in {self.splits} splits" if self.splits > 1 else ""
        names = [("lhs", "rhs")[buffer] for buffer in packs]
        return text + (f", {' and '.join(names)} packed first" if names else "")


def candidates(product: Product, gpu: Gpu) -> Iterator[WgmmaCandidate]:
    """Yield the ways to compute a product; none if the kernel is not for the product or the GPU."""
    how = ARITHMETICS.get(product.arithmetic)
    if how is None or gpu.compute_capability != (9, 0):
        return
    packs = _packs(product)
    if not all(pack.fits for pack in packs.values()):
        return
    view = _packed(View.of(product), packs, 3)
    if max(len(view.lhs.batch_strides), len(view.batch)) > MAX_BATCH_DIMS:
        return
    for exchanged in (False, True):
        oriented = view.exchanged() if exchanged else view
        for tile in TILES:
            if not takes(tile, oriented, gpu):
                continue
            for splits in _split_counts(tile, oriented, gpu):
                instance = instance_for(tile, oriented, how, splits, gpu)
                items = splits * dense_items(tile, oriented)
                if items > MOST_ITEMS or not instance.fits_registers:
                    continue
                k_tiles = math.ceil(math.ceil(oriented.k / instance.block_k) / splits)
                busy = busy_cycles(tile, instance, oriented, how, items, k_tiles, gpu)
                cycles = product.cycles(busy)
                cycles += sum(copy_cycles(pack.workspace_bytes) for pack in packs.values())
                if splits > 1:
                    cycles += copy_cycles(splits * _outputs(product) * 4)
                yield WgmmaCandidate(product, tile, exchanged, splits, instance, cycles)


def _packs(product: Product) -> dict[int, PackPass]:
    """Return the packs that operands need, by buffer.

    Of tiles in shared memory, wgmma takes lines side by side in 16-bit types alone. The kernel
    turns around one such operand, so that if both are, the smaller is packed.
    """
    operands = (StridedOperand.lhs(product.geometry), StridedOperand.rhs(product.geometry))
    dtypes = (product.lhs_dtype, product.rhs_dtype)
    packs = {
        buffer: PackPass(operand, dtype.itemsize)
        for buffer, (operand, dtype) in enumerate(zip(operands, dtypes, strict=True))
        if not fits_boxes(operand, dtype)
    }
    turned = [i for i, operand in enumerate(operands) if not operand.k_major and i not in packs]
    if dtypes[0].itemsize != 2 and len(turned) == 2:
        smaller = min(turned, key=lambda i: operands[i].lines * operands[i].matrices)
        packs[smaller] = PackPass(operands[smaller], dtypes[smaller].itemsize)
    return packs


def _packed(view: View, packs: dict[int, PackPass], first_workspace: int) -> View:
    """Return the product with the operands that are packed in workspaces."""
    for i, (buffer, pack) in enumerate(packs.items()):
        *batch, line, k = pack.strides
        operand = dataclasses.replace(
            pack.operand, batch_strides=tuple(batch), line_stride=line, k_stride=k
        )
        workspace = first_workspace + i
        if buffer == 0:
            view = dataclasses.replace(view, lhs=operand, lhs_buffer=workspace)
        else:
            view = dataclasses.replace(view, rhs=operand, rhs_buffer=workspace)
    return view


def _sum_pass(product: Product, splits: int) -> SumPass | None:
    if splits == 1:
        return None
    sum_dtype = np.dtype(np.int32 if product.arithmetic == "int8" else np.float32)
    return SumPass(product.geometry, splits, sum_dtype, product.out_dtype)


def _outputs(product: Product) -> int:
    return math.prod(product.geometry.batch) * product.geometry.m * product.geometry.n


def _with_split_output(view: View, sums: SumPass, buffer: int, splits: int) -> View:
    m, n = view.lhs.lines, view.rhs.lines
    return dataclasses.replace(
        view,
        out_dtype=sums.sum_dtype,
        out_buffer=buffer,
        out_batch=((splits * math.prod(view.batch), m * n),),
        out_m_stride=n,
        out_n_stride=1,
    )


def _split_counts(tile: WgmmaTile, view: View, gpu: Gpu) -> Iterator[int]:
    """Yield 1, and numbers of splits that occupy multiprocessors that would be idle."""
    yield 1
    items = dense_items(tile, view)
    k_tiles = math.ceil(view.k * view.lhs_dtype.itemsize / TILE_ROW_BYTES)
    most = min(gpu.multiprocessors // tile.cluster // items, k_tiles // 8)
    for splits in sorted({most, most // 2, 2} - {1}):
        # Every split has some of k.
        if 1 < splits <= most and (splits - 1) * math.ceil(k_tiles / splits) < k_tiles:
            yield splits


# Sizes of which no dimension is short.
_MANY = 1 << 12


def instances(gpu: Gpu) -> Iterator[WgmmaInstance]:
    """Kernels that plans for ``gpu`` can ask for, so that a test can compile them.

    Features that are independent in the code are not crossed: of bfloat16, TF32, int8 and a pair of
    8-bit floats there is each tile in the order that most take, and the larger ones in all four
    major orders and with stores of single elements; of the other types one tile.
    """
    for arithmetic in ARITHMETICS:
        types = mma_kernel.ARITHMETICS[arithmetic]
        for lhs_dtype, rhs_dtype, out_dtype in itertools.product(
            types.operands, types.operands, types.results
        ):
            first = (lhs_dtype, rhs_dtype) == (types.operands[0], types.operands[0])
            one_tile = not first or out_dtype.name == "float16" or arithmetic == "f16"
            for lhs_k_major, rhs_k_major, odd in (
                *((lhs, rhs, 0) for lhs in (True, False) for rhs in (True, False)),
                (True, True, 1),
            ):
                geometry = _geometry(lhs_k_major, rhs_k_major, odd)
                product = Product(geometry, lhs_dtype, rhs_dtype, out_dtype, arithmetic)
                all_tiles = lhs_k_major and rhs_k_major and not odd
                for candidate in candidates(product, gpu):
                    tile = candidate.tile
                    if one_tile and tile != WgmmaTile(128, 128):
                        continue
                    if all_tiles or tile.block_m * tile.block_n >= 128 * 128:
                        yield candidate.instance


def _geometry(lhs_k_major: bool, rhs_k_major: bool, odd: int) -> MatmulGeometry:
    n = _MANY + odd
    return MatmulGeometry(
        (),
        _MANY,
        n,
        _MANY,
        (_MANY, 1) if lhs_k_major else (1, _MANY),
        (1, _MANY) if rhs_k_major else (n, 1),
        (n, 1),
    )
