"""The cost model of ``grouped_gemm/sm90/matmul.cuh``, for groups of random sizes."""

from __future__ import annotations

import dataclasses
import math

from jax_tilekern.plans.gemm.sm90.config import WgmmaInstance, WgmmaTile, dense_tiles
from jax_tilekern.plans.gemm.sm90.cost import busy_cycles
from jax_tilekern.plans.gemm.tiles import OrientedProduct
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.grouped_gemm.problem import GroupedProduct

# All factors and cycles below were measured on an H100.

# A tile with more of the weights and fewer rows, against the other way round.
_MORE_WEIGHTS = 1.03
# What a cluster takes of the time of as many CTAs: with promoted accumulators and k-major weights,
# with operands of 4 bytes, and otherwise.
_CLUSTER_PROMOTED, _CLUSTER_4_BYTES, _CLUSTER = 0.88, 1.0, 0.97
# A cluster's first work tile comes later than a CTA's.
_CLUSTER_START = 3000


def grouped_busy_cycles(
    product: GroupedProduct,
    tile: WgmmaTile,
    instance: WgmmaInstance,
    view: OrientedProduct,
    gpu: Gpu,
) -> float:
    """Estimate the cycles of the busiest SM if memory were no limit."""
    return _in_clusters(_busy_cycles(product, tile, instance, view, gpu), tile, instance, view)


def _busy_cycles(
    product: GroupedProduct,
    tile: WgmmaTile,
    instance: WgmmaInstance,
    view: OrientedProduct,
    gpu: Gpu,
) -> float:
    arithmetic, rows = product.arithmetic, product.geometry.average_rows
    if instance.ragged == "k":
        # A group's last k-tile is half full on average.
        average_k_tiles = rows / instance.block_k + 0.5
        work_tiles = dense_tiles(tile, view)
        return busy_cycles(tile, instance, view, arithmetic, work_tiles, average_k_tiles, gpu)
    tiles = max(1.0, rows / tile.block_n + 0.5)
    columns = min(tile.block_n, math.ceil((rows + instance.column_step / 2) / tiles))
    tiles_m, _ = tile.grid(view.lhs.mn, 1)
    average_tiles = math.prod(view.batch) * tiles * tiles_m
    k_tiles = math.ceil(view.k / instance.block_k)
    average = dataclasses.replace(tile, block_n=columns)
    cycles = busy_cycles(average, instance, view, arithmetic, average_tiles, k_tiles, gpu)
    return cycles * (_MORE_WEIGHTS if tile.block_m > tile.block_n else 1)


def _in_clusters(
    cycles: float, tile: WgmmaTile, instance: WgmmaInstance, view: OrientedProduct
) -> float:
    """Return what clusters take, of which the dense model counts the rounds alone.

    CTAs of a dense product happen to read the same tiles at the same time, which L2 serves at once.
    Tiles of groups take different times, so CTAs read apart, and sharing in a cluster pays.
    """
    if tile.cluster == 1:
        return cycles
    if instance.promote and view.lhs.k_major:
        share = _CLUSTER_PROMOTED
    else:
        share = _CLUSTER_4_BYTES if view.lhs_dtype.itemsize == 4 else _CLUSTER
    return cycles * share + _CLUSTER_START
