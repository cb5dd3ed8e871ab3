"""Plans for float32 products on the 16-bit tensor cores of Hopper, as accurate as plain float32.

Each operand is split into hi and lo float16 parts (split-float16 emulation), and hi*hi, hi*lo and
lo*hi are added. A kernel decides on the device whether the operands' range would cost accuracy;
then plain float32 arithmetic takes over (``gemm/passes/split_float32.cuh`` has the bound).

``"f32_normwise"`` skips the check. Each element then has an additional error of at most ``k 2^-38``
times the product of the largest elements of its row of ``lhs`` and its column of ``rhs``. That is
enough where errors are bounded by norms of rows and columns.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.compilation.compiler import Compiled, Kernel, compile_kernels
from jax_tilekern.plans.candidate import Family
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gemm.arithmetic import TYPES
from jax_tilekern.plans.gemm.epilogue import Epilogue, EpilogueArray
from jax_tilekern.plans.gemm.geometry import StridedOperand
from jax_tilekern.plans.gemm.passes.split_float32 import (
    DECIDE_KERNEL,
    PARTS,
    SplitPass,
    decide_launch,
    padded,
)
from jax_tilekern.plans.gemm.problem import Product, copy_cycles
from jax_tilekern.plans.gemm.sm80.candidates import MmaCandidate, mma_candidates
from jax_tilekern.plans.gemm.sm90.config import WgmmaTile, dense_tiles, instance_for
from jax_tilekern.plans.gemm.sm90.tiling import (
    TiledWgmmaCandidate,
    busy_cycles,
    is_launchable,
    launch_tiles,
    oriented_tiles,
    refusal,
)
from jax_tilekern.plans.gemm.tiles import MAX_TMA_BATCH_DIMS, OrientedProduct
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import (
    Buffer,
    Launch,
    LaunchPlan,
    NoKernel,
    Parameter,
    Scalars,
    overlapping,
)

_F16: np.dtype[Any] = np.dtype(np.float16)
_FLAG_BYTES = 4
# Tiles that leave room for two sets of accumulators, and for both parts of each operand in a stage.
_TILES = (WgmmaTile(128, 128), WgmmaTile(128, 64), WgmmaTile(64, 64, consumers=1))
# The arithmetic of an MMA.
_MMA_ARITHMETIC = "f16"

# The decision reads the facts of each row, and each CTA of the plain product reads the decision.
# Measured on batches with 65,000 and 227,000 rows (docs/tuning-log.md).
_CYCLES_OF_A_ROW, _CYCLES_OF_A_SKIPPED_CTA = 0.18, 4
# MMAs of 64x64 need all of shared memory's bandwidth, and take longer by this factor where an SM
# has several tiles. It is the median of 11 products, which took 1.03 to 1.8 times the estimate
# without it, where those of 64x128 took 0.94 to 1.11 times theirs.
_NARROW_TILE = 1.18

# Cycles of a tile besides its MMAs and stores, and the factor of the time of a split whose operand
# is not k-major, because its rows are read twice (59 products of eight samples).
_CYCLES_OF_A_TILE, _ACROSS_K = 2500, 1.5
# CTAs with many tiles of a long k drift apart, until L2 serves no operand to two of them. Such a
# product is the sum of products of at most so much k, if an SM has so many tiles.
_SLICE_K, _SLICED_ROUNDS = 8192, 16

EMULATED_ARITHMETICS = ("f32", "f32_emulated", "f32_normwise")


@dataclass(frozen=True)
class EmulatedCandidate(TiledWgmmaCandidate):
    """Two splits and a float16 product; a decision and the float32 product in its place.

    Attributes
    ----------
    product
        What is computed.
    plain
        The product in plain float32 arithmetic; ``None`` if nothing is decided.
    """

    product: Product
    plain: MmaCandidate | None

    @property
    def key(self) -> str:
        """The tile and the orientation."""
        return f"split float16 {self.tile_key}"

    def _slices(self, gpu: Gpu) -> Iterator[_Slice]:
        """Yield the products whose sum is the product."""
        product, geometry = self.product, self.product.geometry
        sizes = (geometry.n, geometry.m) if self.swapped else (geometry.m, geometry.n)
        tiles = math.prod(geometry.batch) * math.prod(self.tile.grid(*sizes))
        count = math.ceil(geometry.k / _SLICE_K)
        if product.epilogue is not None or tiles < _SLICED_ROUNDS * gpu.available_sms or count == 1:
            yield _Slice(self, product, 0)
            return
        size = padded(math.ceil(geometry.k / count))
        for first in range(0, geometry.k, size):
            sliced = dataclasses.replace(
                product,
                geometry=dataclasses.replace(geometry, k=min(size, geometry.k - first)),
                epilogue=_added(product) if first > 0 else None,
            )
            yield _Slice(dataclasses.replace(self, product=sliced), product, first)

    def plan(self, gpu: Gpu) -> LaunchPlan:
        """Compile all kernels."""
        product = self.product
        lhs, rhs = _splits(product, gpu)
        plain = None if self.plain is None else _Guarded(self.plain)
        slices = list(self._slices(gpu))
        kernels = [lhs.kernel, rhs.kernel, *(each.kernel for each in slices)]
        if plain is not None:
            kernels += DECIDE_KERNEL, plain.kernel
        compiled = compile_kernels(*dict.fromkeys(kernels), arch=gpu.arch)

        first = product.first_workspace
        lhs_parts, rhs_parts, lhs_facts, rhs_facts, flag = (Buffer(first + i) for i in range(5))
        launches = [
            lhs.launch(compiled, Buffer(0), lhs_parts, lhs_facts),
            rhs.launch(compiled, Buffer(1), rhs_parts, rhs_facts),
            *(each.launch(compiled, lhs, rhs, gpu) for each in slices),
        ]
        workspaces = [lhs.parts_bytes, rhs.parts_bytes, lhs.facts_bytes, rhs.facts_bytes]
        reason = f"{self.tile}, three MMAs of hi and lo float16 parts"
        if len(slices) > 1:
            reason += f", {len(slices)} parts of k that are added in order"
        loads, vectors = (16, 16), self.instance.tma_store or len(slices) > 1
        if plain is not None:
            launches.insert(2, decide_launch(compiled, lhs, rhs, lhs_facts, rhs_facts, flag))
            launches.append(plain.launch(compiled, flag, Buffer(product.out_buffer)))
            workspaces.append(_FLAG_BYTES)
            reason += ", or float32 arithmetic where the operands' range needs it"
            instance = plain.candidate.instance
            loads = instance.lhs.load_bytes, instance.rhs.load_bytes
            vectors = vectors or plain.candidate.out_vectors
        return LaunchPlan(
            name=f"split_float16_matmul {product.arithmetic}",
            gpu=gpu,
            launches=overlapping(gpu, *launches),
            alignments=product.alignments(*loads, 16 if vectors else 4),
            workspace_bytes=tuple(workspaces),
            reason=reason,
        )


@dataclass(frozen=True)
class _Slice:
    """A slice of ``k``, whose product is added to those of the slices before it.

    Attributes
    ----------
    candidate
        The kernel, for the product of this slice.
    whole
        The product of all of ``k``.
    first_k
        Where the slice begins.
    """

    candidate: EmulatedCandidate
    whole: Product
    first_k: int

    @functools.cached_property
    def _fused(self) -> tuple[Kernel, tuple[Parameter, ...]]:
        product = self.candidate.product
        return self.candidate.fused(product.epilogue, product.geometry, product.out_buffer)

    @property
    def kernel(self) -> Kernel:
        """The kernel to compile."""
        return self._fused[0]

    def launch(self, compiled: Compiled, lhs: SplitPass, rhs: SplitPass, gpu: Gpu) -> Launch:
        """Return the launch, in the buffers of the whole product."""
        product = self.candidate.product
        first, whole_first = product.first_workspace, self.whole.first_workspace
        lhs_facts, rhs_facts, flag = (Buffer(first + i) for i in (2, 3, 4))
        kernel, fused = self._fused
        launch = _launch_product(
            self.candidate,
            compiled,
            kernel,
            _view(product, lhs, rhs, first, first + 1),
            [(lhs_facts, _batch_strides(lhs)), (rhs_facts, _batch_strides(rhs))],
            Scalars.int64(0) if self.candidate.plain is None else flag,
            fused,
            gpu,
        )
        if product is self.whole:
            return launch
        # The output is the operand of the epilogue, too.
        outputs = [Buffer(self.whole.out_buffer)] * (first - 2)
        parts = [Buffer(whole_first + i, self.first_k * _F16.itemsize) for i in range(2)]
        others = [Buffer(whole_first + i) for i in range(2, 5)]
        return launch.placed([Buffer(0), Buffer(1), *outputs, *parts, *others])


def _launch_product(
    candidate: TiledWgmmaCandidate,
    compiled: Compiled,
    kernel: Kernel,
    view: OrientedProduct,
    exponents: list[tuple[Buffer, tuple[int, ...]]],
    decision: Parameter,
    fused: tuple[Parameter, ...],
    gpu: Gpu,
) -> Launch:
    """Return the launch that multiplies parts.

    ``exponents`` has those of the rows of both operands, and the strides of their batch dimensions.
    """
    if candidate.swapped:
        view = view.swapped()
        exponents = exponents[::-1]
    (lhs, lhs_strides), (rhs, rhs_strides) = exponents
    more = (lhs, rhs, decision), (Scalars.int64(*lhs_strides, *rhs_strides), *fused)
    return launch_tiles(
        compiled, candidate.tile, candidate.instance, view, 1, gpu, kernel=kernel, more=more
    )


def launch_of_parts(
    product: Product, part_step: int, exponent_strides: tuple[int, ...], gpu: Gpu
) -> Launch | NoKernel:
    """Return the fastest launch for operands that have been split, without a check.

    Its buffers are those of the product, and two of the exponents of the rows of ``lhs`` and of the
    columns of ``rhs`` in place of workspaces.

    Parameters
    ----------
    product
        A product of a multiple of 128 bytes of ``k``. The strides of the operands are those of
        their parts, k-major.
    part_step
        The distance between the hi and the lo parts of a row or column.
    exponent_strides
        Of the batch dimensions of the exponents.
    gpu
        The GPU to plan for.
    """
    plain = OrientedProduct.of(product)
    view = dataclasses.replace(
        plain,
        # The lo parts are in the same row.
        lhs=dataclasses.replace(plain.lhs, k=part_step + plain.k),
        rhs=dataclasses.replace(plain.rhs, k=part_step + plain.k),
        lhs_dtype=_F16,
        rhs_dtype=_F16,
        part_step=part_step,
    )
    found = list(_candidates(view, product, 0.0, None, gpu))
    if not found:
        return NoKernel("no wgmma tile fits the operands")
    best = min(found, key=lambda candidate: candidate.cycles)
    kernel, fused = best.fused(product.epilogue, product.geometry, product.out_buffer)
    strides = (*(0,) * (MAX_TMA_BATCH_DIMS - len(exponent_strides)), *exponent_strides)
    exponents = [(Buffer(product.first_workspace + i), strides) for i in range(2)]
    compiled = compile_kernels(kernel, arch=gpu.arch)
    return _launch_product(best, compiled, kernel, view, exponents, Scalars.int64(0), fused, gpu)


class _Guarded:
    """The product in plain float32 arithmetic, of a kernel that reads the decision first."""

    def __init__(self, candidate: MmaCandidate) -> None:
        name = candidate.instance.kernel.name
        # Its types are always float32.
        guarded = f"tilekern::simt_matmul_if<{name[name.index('tilekern::MatmulConfig') :]}"
        kernel = dataclasses.replace(candidate.instance.kernel, name=guarded)
        self.candidate = candidate
        self.kernel, self._more = candidate.fused(kernel)

    def launch(self, compiled: Compiled, flag: Buffer, out: Buffer) -> Launch:
        """Return the launch for the product's operands."""
        return self.candidate.launch(
            compiled, flag, Buffer(0), Buffer(1), out, kernel=self.kernel, more=self._more
        )


def emulated_candidates(product: Product, gpu: Gpu) -> list[EmulatedCandidate] | NoKernel:
    """Return the ways to compute a product, or why there is none."""
    refused = refusal(product, TYPES[product.arithmetic], gpu)
    if refused:
        return refused
    best: MmaCandidate | None = None
    if product.arithmetic != "f32_normwise":
        plain = mma_candidates(dataclasses.replace(product, arithmetic="f32"), gpu)
        if isinstance(plain, NoKernel):
            return plain
        best = min(plain, key=lambda candidate: candidate.cycles)
    lhs, rhs = _splits(product, gpu)
    if not (lhs.fits and rhs.fits):
        return NoKernel("an operand has more rows than a launch can split")
    first = product.first_workspace
    view = _view(product, lhs, rhs, first, first + 1)
    splitting = sum(
        (1 if split.operand.k_major else _ACROSS_K) * copy_cycles(split.parts_bytes, gpu)
        for split in (lhs, rhs)
    )
    deciding = 0.0
    if best is not None:
        deciding = 2 * copy_cycles(0, gpu) + _CYCLES_OF_A_ROW * (lhs.rows + rhs.rows)
        deciding += _CYCLES_OF_A_SKIPPED_CTA * math.prod(best.grid)
    found = list(_candidates(view, product, splitting + deciding, best, gpu))
    return found or NoKernel("no wgmma tile fits the operands")


def _candidates(
    view: OrientedProduct,
    product: Product,
    other_cycles: float,
    plain: MmaCandidate | None,
    gpu: Gpu,
) -> Iterator[EmulatedCandidate]:
    """Yield a candidate for each tile, which takes ``other_cycles`` beside the product of parts."""
    for tile, oriented in oriented_tiles(view, _TILES, gpu):
        instance = instance_for(tile, oriented, True, 1, gpu, PARTS)
        work_tiles = dense_tiles(tile, oriented)
        if not is_launchable(instance, work_tiles):
            continue
        k_tiles = math.ceil(oriented.k / instance.block_k)
        busy = busy_cycles(
            tile, instance, oriented, _MMA_ARITHMETIC, work_tiles, k_tiles, gpu, product.epilogue
        )
        if tile.block_m > tile.block_n and work_tiles > gpu.available_sms:
            busy *= _NARROW_TILE
        busy += _CYCLES_OF_A_TILE * math.ceil(work_tiles / gpu.available_sms)
        cycles = product.cycles(busy, gpu) + other_cycles
        yield EmulatedCandidate(tile, instance, cycles, product, plain)


EMULATED = Family(EMULATED_ARITHMETICS, emulated_candidates)


def _splits(product: Product, gpu: Gpu) -> tuple[SplitPass, SplitPass]:
    lhs, rhs = StridedOperand.lhs(product.geometry), StridedOperand.rhs(product.geometry)
    return SplitPass(lhs, gpu), SplitPass(rhs, gpu)


def _view(
    product: Product, lhs: SplitPass, rhs: SplitPass, lhs_buffer: int, rhs_buffer: int
) -> OrientedProduct:
    return dataclasses.replace(
        OrientedProduct.of(product),
        lhs=_parts_operand(lhs, product.geometry.k),
        rhs=_parts_operand(rhs, product.geometry.k),
        lhs_dtype=_F16,
        rhs_dtype=_F16,
        lhs_buffer=lhs_buffer,
        rhs_buffer=rhs_buffer,
        part_step=lhs.k_padded,
    )


def _parts_operand(split: SplitPass, k: int) -> StridedOperand:
    """Return the hi and lo parts of ``k`` elements of a row as one row."""
    *batch, mn, _, k_stride = split.strides
    return dataclasses.replace(
        split.operand,
        k=split.k_padded + padded(k),
        batch_strides=tuple(batch),
        mn_stride=mn,
        k_stride=k_stride,
    )


def _added(product: Product) -> Epilogue:
    """Return the epilogue that adds what the output has."""
    out = EpilogueArray(
        product.out_dtype, CXX_TYPES[product.out_dtype], product.geometry.out_strides
    )
    return Epilogue(
        statements=(),
        results=("x0 + x1",),
        operands=(out,),
        outputs=(),
        batch=product.geometry.batch,
        instructions=1,
    )


def _batch_strides(split: SplitPass) -> tuple[int, ...]:
    batch = split.fact_strides[:-1]
    return (*(0,) * (MAX_TMA_BATCH_DIMS - len(batch)), *batch)
