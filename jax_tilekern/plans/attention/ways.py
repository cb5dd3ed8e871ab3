"""What computes a pass of attention on a GPU, with estimates that data correct."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from jax_tilekern.plans.attention.problem import CHUNK, Attention, Pass
from jax_tilekern.plans.candidate import Costed
from jax_tilekern.plans.gemm.arithmetic import F32
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.policy.workload import Workload, attention_workload

KERNELS, CUDNN = "kernels", "cuDNN"
_TILE = 128  # rows of a CTA
# An SM evaluates so many exponentials in a cycle. A score of a gradient takes as long as so many,
# and a function about as many more. A bias that cuDNN reads takes as long as so many on an H200, in
# a value and in a gradient.
_EXPONENTIALS = 16
_OF_GRADIENT, _OF_FUNCTION = 3, 2
_OF_CUDNN_BIAS = 3, 8
# The kernels by ``mma.sync`` reach so much of its rate, on an H200: up to 128 features, beyond, and
# of split operands.
_MMA_SHARE, _MMA_SHARE_OF_WIDE, _MMA_SHARE_OF_SPLIT = 0.6, 0.3, 0.45
_BLOCK = 1 << 25  # scores of a block of XLA's
_XLA_READS = 3  # of operands


class _Blocks(NamedTuple):
    """How XLA computes a block of scores.

    Attributes
    ----------
    launches
        Of a block.
    bytes
        Moved for each score: products write float32, and a softmax reads them twice.
    products
        Of keys and of values.
    """

    launches: int
    bytes: int
    products: tuple[int, int]


_VALUE = _Blocks(6, 20, (1, 1))
_GRADIENT = _Blocks(12, 44, (3, 2))
# Weights of float32 take more bytes, and are not converted; on an H200.
_VALUE_OF_FLOAT32 = _Blocks(6, 24, (1, 1))
_GRADIENT_OF_FLOAT32 = _Blocks(12, 40, (3, 2))
_GRADIENT_OF_ARRAYS = _Blocks(8, 24, (1, 1))


@dataclass(frozen=True)
class Way(Costed):
    """The kernels, or cuDNN."""

    key: str
    cycles: float
    numbers: tuple[float, ...]


def is_timed(sizes: Attention, gpu: Gpu) -> bool:
    """Whether times of the kernels of such a call are measured: those on Hopper."""
    return sizes.by_wgmma or (gpu.compute_capability[0] == 9 and sizes.dtype == F32)


def ways_of(call: Pass, gpu: Gpu, keys: Collection[str]) -> list[Way]:
    """Return the ways of some keys, the one of the best estimate first, and cuDNN of equals."""
    found = [
        Way(key, _cycles(call, gpu, key), (float(key == CUDNN),))
        for key in (CUDNN, KERNELS)
        if key in keys
    ]
    return sorted(found, key=lambda way: way.cycles)


def workload_of(call: Pass, gpu: Gpu) -> Workload:
    """Return the workload of a pass, with the estimate of the time of XLA's blocks of scores."""
    if call.sizes.dtype == F32:
        blocks = _GRADIENT_OF_FLOAT32 if call.is_gradient else _VALUE_OF_FLOAT32
    else:
        blocks = _GRADIENT if call.is_gradient else _VALUE
    cycles = _xla_cycles(call, gpu, blocks)
    return attention_workload(call, cycles / gpu.rates.cycles_per_microsecond)


def _cycles(call: Pass, gpu: Gpu, key: str) -> float:
    """Return the estimate of a way: the busiest SM's tiles, or the bytes that memory moves.

    The kernels compute a gradient in two launches, which both have the scores and their gradients.
    """
    sizes, rates = call.sizes, gpu.rates
    queries, keys = sizes.queries, sizes.keys
    launches = [_Launch(queries, keys, (1, 1))]
    if key == CUDNN:
        # Heads that share keys share a tile, and few tiles share their keys out among the SMs.
        heads = sizes.heads // sizes.key_heads
        launches = [_Launch(queries, keys, (1, 1), heads, splits=True)]
    if call.is_gradient:
        launches = [_Launch(keys, queries, (3, 2))]
        if key == KERNELS:
            of_keys = (3, 2) if sizes.shares_keys else (2, 2)
            launches = [_Launch(keys, queries, of_keys), _Launch(queries, keys, (2, 1))]
    evaluated = (_OF_GRADIENT if call.is_gradient else 1) + call.has_function * _OF_FUNCTION
    of_pass = evaluated
    if key == CUDNN and call.arrays:
        of_pass += _OF_CUDNN_BIAS[call.is_gradient]
    macs = _kernels_macs(sizes, gpu) if key == KERNELS else rates.wgmma_macs["bf16"]
    computed = sum(_tiles_cycles(call, gpu, x, of_pass, macs) for x in launches)
    if call.of_bias:
        computed += _tiles_cycles(call, gpu, _Launch(queries, keys, (1, 1)), evaluated, macs)
    moved = call.bytes / rates.memory_bandwidth
    of_arrays = call.of_arrays > 0 and key == KERNELS
    return (
        rates.launch_cycles
        # Statistics of rows are a launch of their own.
        + (len(launches) - 1 + call.is_gradient + call.of_bias) * rates.next_launch_cycles
        + max(computed, moved)
        + (_xla_cycles(call, gpu, _GRADIENT_OF_ARRAYS) if of_arrays else 0.0)
    )


class _Launch(NamedTuple):
    """Tiles of rows, each with all others that it sees: queries with keys, or keys with queries.

    ``products`` are those of keys and of values, and ``heads`` how many have their rows in a tile.
    Where it ``splits``, several SMs have a part of the others each.
    """

    rows: int
    others: int
    products: tuple[int, int]
    heads: int = 1
    splits: bool = False


def _kernels_macs(sizes: Attention, gpu: Gpu) -> float:
    """Return the multiply-adds of an SM in a cycle by the kernels."""
    if sizes.by_wgmma:
        return gpu.rates.wgmma_macs["bf16"]
    share = _MMA_SHARE_OF_WIDE if max(sizes.padded) > 2 * CHUNK else _MMA_SHARE
    if sizes.is_split:
        return min(share, _MMA_SHARE_OF_SPLIT) * gpu.rates.mma_macs["tf32"] / 3
    return share * gpu.rates.mma_macs["tf32" if sizes.dtype == F32 else "bf16"]


def _xla_macs(sizes: Attention, gpu: Gpu) -> float:
    if sizes.dtype != F32:
        return gpu.rates.wgmma_macs["bf16"]
    return gpu.rates.mma_macs["f32"] if sizes.is_split else gpu.rates.wgmma_macs["tf32"]


def _tiles_cycles(call: Pass, gpu: Gpu, launch: _Launch, evaluated: int, macs: float) -> float:
    """Return the cycles of the busiest SM, where a score takes as long as so many exponentials.

    Products do not overlap with functions of scores.
    """
    sizes, rates = call.sizes, gpu.rates
    heads = sizes.batch * sizes.heads // launch.heads
    rows = _TILE if sizes.by_wgmma else sizes.tiles("forward").queries
    tiles = heads * math.ceil(launch.heads * launch.rows / rows)
    parts = max(1, gpu.sm_count // tiles) if launch.splits else 1
    scores = call.share * rows * _padded(math.ceil(launch.others / parts))
    multiplied = sum(
        count * features for count, features in zip(launch.products, sizes.padded, strict=True)
    )
    of_score = multiplied / macs + evaluated / _EXPONENTIALS
    return math.ceil(tiles / gpu.sm_count) * (rates.cta_cycles + scores * of_score)


def _padded(size: int) -> int:
    return CHUNK * math.ceil(size / CHUNK)


def _xla_cycles(call: Pass, gpu: Gpu, blocks: _Blocks) -> float:
    """Return the estimate of XLA's blocks, which compute the scores that a mask hides, too."""
    rates, scores = gpu.rates, call.scores / call.share
    launches = blocks.launches * math.ceil(scores / _BLOCK)
    moved = scores * blocks.bytes + _XLA_READS * call.bytes
    multiplied = scores * call.features(blocks.products)
    return (
        rates.launch_cycles
        + launches * rates.next_launch_cycles
        + multiplied / (gpu.sm_count * _xla_macs(call.sizes, gpu))
        + moved / rates.memory_bandwidth
    )
