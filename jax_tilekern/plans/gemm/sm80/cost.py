"""The cost model of the kernels of ``gemm/sm80``."""

from __future__ import annotations

import math

from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.sm80.config import TILE_ROW_BYTES, MatmulInstance
from jax_tilekern.plans.gpu import Gpu

# Cycles of the barrier after each k-tile, unless another CTA of the SM runs meanwhile.
_BARRIER_CYCLES = 80
# Warps of an SM that hide the latency of shared memory and MMAs.
_ENOUGH_WARPS = 8
# By the bytes of a copy: the time of a k-tile over that with 16 (H100). Narrow copies are bound by
# their number.
_NARROW_LOADS = {16: 1.0, 8: 1.3, 4: 1.6, 1: 2.5}


def busy_cycles(
    instance: MatmulInstance, resident: int, ctas: int, product: Product, gpu: Gpu
) -> float:
    """Estimate the cycles of the busiest SM if memory were no limit.

    Parameters
    ----------
    instance
        The kernel.
    resident
        How many of its CTAs an SM holds at a time.
    ctas
        Tiles of the output, all batches together.
    product
        What is computed.
    gpu
        What it is for.
    """
    geometry, rates = product.geometry, gpu.rates
    tile, block_k = instance.tile, instance.block_k
    warps = tile.warps_m * tile.warps_n
    warp_mn = tile.block_m // tile.warps_m + tile.block_n // tile.warps_n
    mn = min(tile.block_m, geometry.m) + min(tile.block_n, geometry.n)
    busy = math.ceil(ctas / gpu.sm_count)
    l2_share = rates.l2_load_share * gpu.sm_count / ctas * busy
    k_tile = max(
        tile.block_m * tile.block_n * block_k / rates.mma_macs[product.arithmetic],
        (warp_mn * warps * TILE_ROW_BYTES + tile.stage_bytes) / rates.shared_memory_bandwidth,
        mn * TILE_ROW_BYTES / min(rates.l2_load_bandwidth, l2_share),
    )
    k_tile *= _NARROW_LOADS[min(instance.lhs.load_bytes, instance.rhs.load_bytes)]
    resident = min(busy, resident)
    if resident == 1:
        k_tile += _BARRIER_CYCLES
    hidden = min(1, resident * warps / _ENOUGH_WARPS) ** 0.5
    k_tiles = math.ceil(geometry.k / block_k)
    cycles: float = busy * (k_tiles * k_tile + rates.cta_cycles) / hidden
    return cycles
