"""Products of 8-bit floats with scales of blocks: ``scaled_wgmma_matmul``.

Accumulators are promoted, and multiplied by scales, every 128 of ``k``. MMAs of a consumer's row
blocks have the same accumulators one after the other, so that a tile of 256x128 fits into
registers. Scales of columns reach them through shared memory.
"""

from __future__ import annotations

import dataclasses

from jax_tilekern.plans.gemm.problem import Product, Scales
from jax_tilekern.plans.gemm.sm90.config import WgmmaInstance, WgmmaTile
from jax_tilekern.plans.gemm.sm90.variant import Parameters, Variant
from jax_tilekern.plans.gemm.tiles import MAX_TMA_BATCH_DIMS, OrientedProduct
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, NoKernel, Scalars

# Offsets of scales in a matrix have 32 bits.
_MAX_OFFSET = 2**31 - 1


def refusal_of_scales(product: Product) -> NoKernel | None:
    """Return why a kernel does not take the scales, or ``None``."""
    g = product.geometry
    for rows, scales in zip((g.m, g.n), _scales(product), strict=True):
        if rows // scales.block_rows * scales.row_stride > _MAX_OFFSET:
            return NoKernel("a matrix has more than 2**31 scales")
    return None


def scale_parameters(product: Product, instance: WgmmaInstance) -> Parameters:
    """Return a kernel's parameters of scales: the arrays, and where the scales lie in them."""
    first = product.first_scales
    operands = [*zip((first, first + 1), _scales(product), strict=True)]
    if instance.out_m_major:
        operands.reverse()
    return (
        tuple(Buffer(buffer) for buffer, _ in operands),
        tuple(_strides(scales) for _, scales in operands),
    )


def with_scales(
    product: Product, _: OrientedProduct, instance: WgmmaInstance, gpu: Gpu
) -> WgmmaInstance | None:
    """Return the kernel with scales of columns as the product has them, or ``None``."""
    if not (instance.lhs_k_major and instance.rhs_k_major):  # one element of k
        return None
    g, (row_scales, scales) = product.geometry, _scales(product)
    columns = g.n
    if instance.out_m_major:
        scales, columns = row_scales, g.m
    varies = scales.row_stride > 0 and scales.block_rows % instance.block_n > 0
    if varies and not scales.fit_bulk_copies(columns):
        return None
    return dataclasses.replace(instance, scaled_columns=varies).with_max_stages(gpu)


def _scales(product: Product) -> tuple[Scales, Scales]:
    assert product.scales is not None
    return product.scales


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


SCALED = Variant(
    name="scaled_wgmma_matmul",
    key="scaled wgmma",
    # Ping-pong consumers would not promote while the other one multiplies.
    tiles=(
        WgmmaTile(256, 128),
        WgmmaTile(128, 128),
        WgmmaTile(128, 64),
        WgmmaTile(128, 32),
        WgmmaTile(128, 16),
        WgmmaTile(64, 128, consumers=1),
        WgmmaTile(64, 64, consumers=1),
        WgmmaTile(64, 32, consumers=1),
        WgmmaTile(64, 16, consumers=1),
    ),
    refusal=refusal_of_scales,
    instance=with_scales,
    parameters=scale_parameters,
)
