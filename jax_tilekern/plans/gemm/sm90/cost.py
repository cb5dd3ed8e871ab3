"""The cost model of ``gemm/sm90/matmul.cuh``."""

from __future__ import annotations

import math

from jax_tilekern.plans.gemm.epilogue import Epilogue
from jax_tilekern.plans.gemm.sm90.config import WgmmaInstance, WgmmaTile
from jax_tilekern.plans.gemm.tiles import TILE_ROW_BYTES, OrientedProduct
from jax_tilekern.plans.gpu import Gpu

# All factors and cycles below were measured on an H100.

# A k-tile where neither operand is k-major and the tile is wide.
_NEITHER_K_MAJOR = 1.03
# A k-tile of lhs through registers, which wide and narrow tiles hide differently well.
_LHS_IN_REGISTERS_WIDE, _LHS_IN_REGISTERS_NARROW = 1.1, 1.3
# A k-tile whose accumulators are promoted outside the tensor cores.
_PROMOTED = 1.2
# Columns from which a tile is wide.
_WIDE = 128
# The epilogue: cycles to begin with, bytes per cycle by TMA stores, and single elements per cycle.
_STORE_CYCLES, _STORE_BANDWIDTH = 400, 64
_SINGLE_ELEMENTS = 2
# Ping-pong consumers: cycles of the ordered barrier, and the slowdown of small tiles over many
# rounds, which spread over more of the operands than L2 holds.
_PING_PONG_CYCLES = 100
# Ping-pong consumers that reduce rows.
_PING_PONG_REDUCTIONS = 1.7
# Instructions of a thread that an SM issues in a cycle.
_LANES = 128
_PING_PONG_SPREAD = 1.05
# Clusters save L2 reads, which has not been seen to pay.
_CLUSTERS = 1.02
# The part of an operand that exceeds L2 which narrow tiles read again from DRAM. Products with 3 to
# 5 such tiles took 1.17 to 1.69 times the estimate without it.
_NARROW, _READ_AGAIN = 64, 0.3


def busy_cycles(
    tile: WgmmaTile,
    instance: WgmmaInstance,
    view: OrientedProduct,
    arithmetic: str,
    work_tiles: float,
    k_tiles: float,
    gpu: Gpu,
    epilogue: Epilogue | None = None,
) -> float:
    """Estimate the cycles of the busiest SM if memory were no limit.

    Parameters
    ----------
    tile
        The output's tile.
    instance
        The kernel.
    view
        The product as the kernel computes it.
    arithmetic
        The arithmetic of an MMA.
    work_tiles
        Tiles of the output, all batches and splits together.
    k_tiles
        The k-tiles of each.
    gpu
        What it is for.
    epilogue
        What is done to the accumulators before they are stored.
    """
    rates = gpu.rates
    rounds = math.ceil(work_tiles / (gpu.available_sms // tile.cluster))
    operand_reads = tile.block_m // 64 * (64 + tile.block_n) * TILE_ROW_BYTES
    # MMAs of a hi/lo split: all pairs of parts but those whose product is negligible.
    mmas = instance.parts * (instance.parts + 1) // 2
    macs = rates.wgmma_macs[arithmetic]
    k_tile = max(
        mmas * tile.block_m * tile.block_n * instance.block_k / macs,
        mmas * operand_reads / rates.shared_memory_bandwidth,
        instance.parts * (tile.block_m + tile.block_n) * TILE_ROW_BYTES / rates.l2_tma_bandwidth,
    )
    wide = tile.block_n > _WIDE
    if not instance.lhs_k_major and not instance.rhs_k_major and wide:
        k_tile *= _NEITHER_K_MAJOR
    if not instance.lhs_k_major and view.lhs_dtype.itemsize != 2:
        k_tile *= _LHS_IN_REGISTERS_WIDE if wide else _LHS_IN_REGISTERS_NARROW
    if instance.promote:
        k_tile *= _PROMOTED
    elements = tile.block_m * tile.out_n
    stores = epilogue is None or epilogue.stores
    single_elements = stores and not instance.tma_store
    store = float(_STORE_CYCLES)
    if single_elements:
        store += elements / _SINGLE_ELEMENTS
    elif stores:
        store += elements * view.out_dtype.itemsize / _STORE_BANDWIDTH
    if epilogue is not None:
        store += elements * epilogue.instructions / _LANES
    # Ping-pong hides the epilogue behind the other consumer's mainloop, unless single elements are
    # stored.
    if tile.cooperative or rounds == 1 or single_elements:
        work_tile = k_tiles * k_tile + store
    else:
        work_tile = max(k_tiles * k_tile, store) + _PING_PONG_CYCLES
        work_tile *= _PING_PONG_SPREAD if rounds > 2 and not wide else 1
        if epilogue is not None and epilogue.reductions:
            work_tile *= _PING_PONG_REDUCTIONS
    return rounds * work_tile * (1 if tile.cluster == 1 else _CLUSTERS)


def reread_cycles(tile: WgmmaTile, view: OrientedProduct, gpu: Gpu) -> float:
    """Estimate the cycles of what narrow tiles read again of an operand that exceeds L2."""
    m_tiles, n_tiles = tile.grid(view.lhs.mn, view.rhs.mn)
    read_again = 0.0
    for operand, dtype, extent, tiles in (
        (view.lhs, view.lhs_dtype, tile.block_n, n_tiles),
        (view.rhs, view.rhs_dtype, tile.block_m, m_tiles),
    ):
        size = operand.mn * view.k * dtype.itemsize
        if size > gpu.l2_bytes and extent <= _NARROW:
            read_again += _READ_AGAIN * (tiles - 1) * size * operand.matrices
    return read_again / gpu.rates.memory_bandwidth
