"""Plans for products of 8-bit floats with scales of blocks: ``scaled_wgmma_matmul``.

Accumulators are promoted, and multiplied by scales, every 128 of ``k``. MMAs of a consumer's row
blocks have the same accumulators one after the other, so that a tile of 256x128 fits into
registers. Scales of columns reach them through shared memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from jax_tilekern.plans.gemm.problem import OfScaled, ScaledProduct, Scales, copy_cycles
from jax_tilekern.plans.gemm.sm90.candidates import WgmmaCandidate, candidates_in
from jax_tilekern.plans.gemm.sm90.config import WgmmaInstance, WgmmaTile
from jax_tilekern.plans.gemm.tiles import MAX_TMA_BATCH_DIMS
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, NoKernel, Parameter, Scalars

# Ping-pong consumers would not promote while the other one multiplies.
_TILES = (
    WgmmaTile(256, 128),
    WgmmaTile(128, 128),
    WgmmaTile(128, 64),
    WgmmaTile(128, 32),
    WgmmaTile(128, 16),
    WgmmaTile(64, 128, consumers=1),
    WgmmaTile(64, 64, consumers=1),
    WgmmaTile(64, 32, consumers=1),
    WgmmaTile(64, 16, consumers=1),
)
# Offsets of scales in a matrix have 32 bits.
_MAX_OFFSET = 2**31 - 1
# Bytes of a line of L1, and of L1 beside the shared memory of a kernel.
_LINE_BYTES = 128
_L1_BYTES = 28 << 10
# The share of a kernel's time that scales cost whose lines do not stay in L1: 0.08 to 0.14 on an
# H100 (docs/tuning-log.md).
_SCATTERED_ROWS = 0.08


@dataclass(frozen=True)
class ScaledCandidate(WgmmaCandidate):
    """A kernel for a product of operands with scales, not compiled yet.

    Attributes
    ----------
    product
        What is computed.
    """

    _NAME: ClassVar[str] = "scaled_wgmma_matmul"

    product: ScaledProduct

    @property
    def key(self) -> str:
        """The tile, the orientation, and the factor of split-K."""
        return f"scaled {super().key}"

    @property
    def _scale_parameters(self) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
        return scale_parameters(self.product, self.swapped)


def scaled_candidates(product: ScaledProduct, gpu: Gpu) -> list[WgmmaCandidate] | NoKernel:
    """Return the ways to compute a product of operands with scales, or why there is none."""
    refused = refusal_of_scales(product)
    if refused:
        return refused
    return candidates_in(
        product,
        _TILES,
        gpu,
        specialised=functools.partial(specialised, product, gpu),
        candidate=ScaledCandidate,
    )


def copies_rows_first(product: ScaledProduct, gpu: Gpu) -> bool:
    """Return whether a product is faster after a copy of lhs's scales, with adjacent rows."""
    scales, g = product.lhs_scales, product.geometry
    if scales.block_rows != 1 or scales.row_stride <= 1:
        return False
    found = scaled_candidates(product, gpu)
    if isinstance(found, NoKernel):
        return False
    best = min(found, key=lambda candidate: candidate.cycles)
    lines = best.tile.block_m * min(_LINE_BYTES, 4 * scales.row_stride)
    if best.swapped or lines <= _L1_BYTES:
        return False
    count = math.prod(g.batch) * g.m * math.ceil(g.k / best.instance.block_k)
    return _SCATTERED_ROWS * best.cycles > copy_cycles(4 * count, gpu)


def refusal_of_scales(product: OfScaled[Any]) -> NoKernel | None:
    """Return why a kernel does not take the scales, or ``None``."""
    g = product.strided
    for rows, scales in ((g.m, product.lhs_scales), (g.n, product.rhs_scales)):
        if rows // scales.block_rows * scales.row_stride > _MAX_OFFSET:
            return NoKernel("a matrix has more than 2**31 scales")
    return None


def scale_parameters(
    product: OfScaled[Any], swapped: bool
) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
    """Return a kernel's parameters of scales: the arrays, and where the scales lie in them."""
    operands = product.scales[::-1] if swapped else product.scales
    return (
        tuple(Buffer(buffer) for buffer, _ in operands),
        tuple(_strides(scales) for _, scales in operands),
    )


def specialised(product: OfScaled[Any], gpu: Gpu, instance: WgmmaInstance) -> WgmmaInstance | None:
    """Return the kernel with scales of columns as the product has them, or ``None``."""
    if not (instance.lhs_k_major and instance.rhs_k_major):  # one element of k
        return None
    g = product.strided
    scales, columns = product.rhs_scales, g.n
    if instance.out_m_major:
        scales, columns = product.lhs_scales, g.m
    varies = scales.row_stride > 0 and scales.block_rows % instance.block_n > 0
    if varies and not scales.fit_bulk_copies(columns):
        return None
    return dataclasses.replace(instance, scaled_columns=varies).with_max_stages(gpu)


def _strides(scales: Scales) -> Scalars:
    missing = (0,) * (MAX_TMA_BATCH_DIMS - len(scales.batch_strides))
    return Scalars.pack(
        f"{MAX_TMA_BATCH_DIMS + 2}q2i",
        *missing,
        *scales.batch_strides,
        scales.row_stride,
        scales.k_stride,
        scales.block_rows.bit_length() - 1,
        0,
    )
