"""The cost model of the kernels of ``gemm/sm80``."""

from __future__ import annotations

import math

from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.sm80.config import ARITHMETICS, TILE_ROW_BYTES, MatmulInstance
from jax_tilekern.plans.gpu import Gpu


def busy_cycles(
    instance: MatmulInstance, resident: int, blocks: int, product: Product, gpu: Gpu
) -> float:
    """Estimate the cycles of the busiest multiprocessor.

    Parameters
    ----------
    instance
        The kernel.
    resident
        How many of its blocks are on a multiprocessor at a time.
    blocks
        Tiles of the output, all batches together.
    product
        What is computed.
    gpu
        What it is for.
    """
    # Bytes a cycle: of shared memory; of the second-level cache, to one multiprocessor at most and
    # to each when all ask.
    shared_bandwidth, l2_bandwidth, l2_share = 128, 64, 34
    # Start and end of a block, its barrier where no other block runs meanwhile, and the warps that
    # it takes to hide latencies.
    fixed, barrier, enough_warps = 2500, 80, 8

    geometry = product.geometry
    how = ARITHMETICS[product.arithmetic]
    tile, block_k = instance.tile, instance.block_k
    warps = tile.warps_m * tile.warps_n
    warp_lines = tile.block_m // tile.warps_m + tile.block_n // tile.warps_n
    lines = min(tile.block_m, geometry.m) + min(tile.block_n, geometry.n)
    busy = math.ceil(blocks / gpu.multiprocessors)
    k_tile = max(
        tile.block_m * tile.block_n * block_k / how.macs_per_cycle,
        (warp_lines * warps * TILE_ROW_BYTES + tile.stage_bytes) / shared_bandwidth,
        lines * TILE_ROW_BYTES / min(l2_bandwidth, l2_share * gpu.multiprocessors / blocks * busy),
    )
    # Narrow copies are bound by their number; measured.
    k_tile *= {16: 1.0, 8: 1.3, 4: 1.6, 1: 2.5}[
        min(instance.lhs.load_bytes, instance.rhs.load_bytes)
    ]
    resident = min(busy, resident)
    if resident == 1:
        k_tile += barrier
    hidden = min(1, resident * warps / enough_warps) ** 0.5
    cycles: float = busy * (math.ceil(geometry.k / block_k) * k_tile + fixed) / hidden
    return cycles
