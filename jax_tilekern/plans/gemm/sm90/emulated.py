"""Plans for products of float32 on the 16-bit tensor cores of Hopper, as accurate as float32's own.

Each operand is split into two float16 pieces, and three of the four products of pieces are added
up. Where the operands' range would cost accuracy, the kernels find it out on the device, and plain
float32 arithmetic takes over (``gemm/passes/split_float32.cuh`` has the bound).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.gemm.passes.split_float32 import (
    DECIDE_KERNEL,
    PIECES,
    SplitPass,
    decide_launch,
)
from jax_tilekern.plans.gemm.problem import Candidate, Product, copy_cycles
from jax_tilekern.plans.gemm.sm80 import candidates as mma
from jax_tilekern.plans.gemm.sm90.config import (
    MAX_BATCH_DIMS,
    View,
    WgmmaArithmetic,
    WgmmaInstance,
    WgmmaTile,
    dense_items,
    instance_for,
    takes,
)
from jax_tilekern.plans.gemm.sm90.cost import busy_cycles
from jax_tilekern.plans.gemm.sm90.launch import launch_tiles
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, LaunchPlan, Parameter, Scalars
from jax_tilekern.plans.strided_rows import StridedOperand

_F16: np.dtype[Any] = np.dtype(np.float16)
_FLAG_BYTES = 4
# Two sets of sums for each output, and tiles of four pieces in every stage.
_TILES = (WgmmaTile(128, 128), WgmmaTile(128, 64), WgmmaTile(64, 64, consumers=1))
_HOW = WgmmaArithmetic(2048, promote=True)

ARITHMETICS = ("f32", "f32_emulated")


@dataclass(frozen=True)
class EmulatedCandidate(Candidate):
    """Two splits, a decision, a product of pieces, and the plain product that may take its place.

    Attributes
    ----------
    product
        What is computed.
    tile
        The output's tile.
    exchanged
        Whether the kernel computes the output's transpose from the operands' transposes.
    instance
        The kernel of the product of pieces.
    plain
        The product in float32 arithmetic.
    cycles
        The estimated cost.
    """

    product: Product
    tile: WgmmaTile
    exchanged: bool
    instance: WgmmaInstance
    plain: mma.MmaCandidate
    cycles: float

    @property
    def key(self) -> str:
        """The tile, and the order of the operands."""
        return f"pieces {self.tile}" + (" exchanged" if self.exchanged else "")

    def plan(self, gpu: Gpu) -> LaunchPlan:
        """Compile all kernels."""
        product = self.product
        lhs, rhs = _splits(product, gpu)
        plain = self.plain.instance
        plain_kernel = dataclasses.replace(plain.kernel, name=_guarded(plain.kernel.name))
        kernels = (lhs.kernel, rhs.kernel, DECIDE_KERNEL, self.instance.kernel, plain_kernel)
        compiled = compile_kernels(*dict.fromkeys(kernels), arch=gpu.arch)

        lhs_pieces, rhs_pieces, lhs_facts, rhs_facts, flag = map(Buffer, range(3, 8))
        view = _view(product, lhs, rhs, lhs_pieces.index, rhs_pieces.index)
        exponents: list[Parameter] = [lhs_facts, rhs_facts]
        strides = [_batch_strides(lhs), _batch_strides(rhs)]
        if self.exchanged:
            view = view.exchanged()
            exponents.reverse()
            strides.reverse()
        more = ((*exponents, flag), (Scalars.int64(*strides[0], *strides[1]),))
        return LaunchPlan(
            name="float32 by float16 pieces",
            gpu=gpu,
            launches=(
                lhs.launch(compiled, Buffer(0), lhs_pieces, lhs_facts),
                rhs.launch(compiled, Buffer(1), rhs_pieces, rhs_facts),
                decide_launch(compiled, lhs, rhs, lhs_facts, rhs_facts, flag),
                launch_tiles(compiled, self.tile, self.instance, view, 1, gpu, more=more),
                self.plain.launch(
                    compiled, flag, Buffer(0), Buffer(1), Buffer(2), kernel=plain_kernel
                ),
            ),
            alignments=(
                plain.lhs.load_bytes,
                plain.rhs.load_bytes,
                16 if self.instance.out_boxes or self.plain.out_vectors else 4,
            ),
            workspace_bytes=(
                lhs.pieces_bytes,
                rhs.pieces_bytes,
                lhs.facts_bytes,
                rhs.facts_bytes,
                _FLAG_BYTES,
            ),
            reason=f"{self.tile}, three products of two float16 pieces each, or float32 arithmetic "
            "where the operands' range needs it",
        )


def candidates(product: Product, gpu: Gpu) -> Iterator[EmulatedCandidate]:
    """Yield the ways to compute a product; none if it is not for the arithmetic or the GPU."""
    if product.arithmetic not in ARITHMETICS or gpu.compute_capability != (9, 0):
        return
    plain = mma.candidates(dataclasses.replace(product, arithmetic="f32"), gpu)
    if not isinstance(plain, list) or len(product.geometry.batch) > MAX_BATCH_DIMS:
        return
    lhs, rhs = _splits(product, gpu)
    if not (lhs.fits and rhs.fits):
        return
    view = _view(product, lhs, rhs, 3, 4)
    passes = copy_cycles(lhs.pieces_bytes) + copy_cycles(rhs.pieces_bytes) + 2 * copy_cycles(0)
    best = min(plain, key=lambda candidate: candidate.cycles)
    for exchanged in (False, True):
        oriented = view.exchanged() if exchanged else view
        for tile in _TILES:
            if not takes(tile, oriented, gpu):
                continue
            instance = instance_for(tile, oriented, _HOW, 1, gpu, PIECES)
            items = dense_items(tile, oriented)
            k_tiles = math.ceil(oriented.k / instance.block_k)
            cycles = busy_cycles(tile, instance, oriented, _HOW, items, k_tiles, gpu)
            yield EmulatedCandidate(
                product, tile, exchanged, instance, best, product.cycles(cycles) + passes
            )


def _splits(product: Product, gpu: Gpu) -> tuple[SplitPass, SplitPass]:
    lhs, rhs = StridedOperand.lhs(product.geometry), StridedOperand.rhs(product.geometry)
    return SplitPass(lhs, gpu), SplitPass(rhs, gpu)


def _view(
    product: Product, lhs: SplitPass, rhs: SplitPass, lhs_buffer: int, rhs_buffer: int
) -> View:
    return dataclasses.replace(
        View.of(product),
        lhs=_pieces_operand(lhs),
        rhs=_pieces_operand(rhs),
        lhs_dtype=_F16,
        rhs_dtype=_F16,
        lhs_buffer=lhs_buffer,
        rhs_buffer=rhs_buffer,
        piece_step=lhs.k_padded,
    )


def _pieces_operand(split: SplitPass) -> StridedOperand:
    """Return the pieces of a line as one row of ``k``."""
    *batch, line, _, k = split.strides
    return dataclasses.replace(
        split.operand,
        k=PIECES * split.k_padded,
        batch_strides=tuple(batch),
        line_stride=line,
        k_stride=k,
    )


def _batch_strides(split: SplitPass) -> tuple[int, ...]:
    batch = split.fact_strides[:-1]
    return (*(0,) * (MAX_BATCH_DIMS - len(batch)), *batch)


def _guarded(name: str) -> str:
    """Return the kernel that looks at the flag first; its types are float32 anyway."""
    return f"tilekern::simt_matmul_if<{name[name.index('tilekern::MatmulConfig') :]}"
