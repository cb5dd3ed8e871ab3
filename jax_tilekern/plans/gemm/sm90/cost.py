"""The cost model of ``gemm/sm90/matmul.cuh``: what its tiles take."""

from __future__ import annotations

import math

from jax_tilekern.plans.gemm.sm90.config import (
    TILE_ROW_BYTES,
    View,
    WgmmaArithmetic,
    WgmmaInstance,
    WgmmaTile,
)
from jax_tilekern.plans.gpu import Gpu

# Measured on an H100: what a multiprocessor gets from the second-level cache, in bytes a cycle.
_L2_BANDWIDTH = 62
_SHARED_BANDWIDTH = 128


def busy_cycles(
    tile: WgmmaTile,
    instance: WgmmaInstance,
    view: View,
    how: WgmmaArithmetic,
    items: float,
    k_tiles: float,
    gpu: Gpu,
) -> float:
    """Estimate the cycles of the busiest multiprocessor, were memory no limit.

    ``items`` are tiles with so many tiles of ``k`` each.
    """
    rounds = math.ceil(items / (gpu.multiprocessors // tile.cluster))
    operand_reads = tile.block_m // 64 * (64 + tile.block_n) * TILE_ROW_BYTES
    products = instance.pieces * (instance.pieces + 1) // 2
    k_tile = max(
        products * tile.block_m * tile.block_n * instance.block_k / how.macs_per_cycle,
        products * operand_reads / _SHARED_BANDWIDTH,
        instance.pieces * (tile.block_m + tile.block_n) * TILE_ROW_BYTES / _L2_BANDWIDTH,
    )
    # Measured: two 16-bit operands of which neither is k-major, what passes through registers, and
    # what is added up outside the tensor cores.
    if not instance.lhs_k_major and not instance.rhs_k_major and tile.block_n > 128:
        k_tile *= 1.03
    if not instance.lhs_k_major and view.lhs_dtype.itemsize != 2:
        k_tile *= 1.1 if tile.block_n > 128 else 1.3
    if how.promote:
        k_tile *= 1.2
    store = 400 + tile.block_m * tile.block_n * view.out_dtype.itemsize / 64
    if not instance.out_boxes:
        store *= 4
    # Consumers that take turns store while others multiply, unless they store element by element.
    if tile.cooperative or rounds == 1 or not instance.out_boxes:
        item = k_tiles * k_tile + store
    else:
        # Over many rounds they spread over more of the operands than the cache holds, from which
        # smaller tiles read about as much as it gives.
        item = (max(k_tiles * k_tile, store) + 100) * (
            1.05 if rounds > 2 and tile.block_n <= 128 else 1
        )
    # Clusters save reads of the second-level cache, which has not been seen to pay.
    return rounds * item * (1 if tile.cluster == 1 else 1.02)
