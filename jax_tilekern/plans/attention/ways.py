"""What computes a pass of attention on a GPU, with estimates that data correct."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from jax_tilekern.plans.attention.sm90 import Attention
from jax_tilekern.plans.candidate import Costed
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.policy.workload import Workload, attention_workload

KERNELS, CUDNN = "kernels", "cuDNN"
_TILE = 128  # queries of a CTA
# An SM evaluates so many exponentials in a cycle.
_EXPONENTIALS = 16
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
_GRADIENT_OF_ARRAYS = _Blocks(8, 24, (1, 1))


@dataclass(frozen=True)
class Pass:
    """A value of attention or a gradient, as numbers.

    Attributes
    ----------
    sizes
        The call.
    is_gradient
        Whether it is the gradient.
    share
        Of the tiles of scores that the mask leaves; 1 where arrays decide.
    has_mask, has_window, has_score
        Whether queries see some of the keys alone, those of a window, and whether scores are more
        than products.
    arrays
        How many arrays the scores and the mask read.
    of_bias, of_arrays
        Whether a kernel computes the gradient of a bias, and of how many other arrays gradients are
        wanted.
    """

    sizes: Attention
    is_gradient: bool
    share: float = 1.0
    has_mask: bool = False
    has_window: bool = False
    has_score: bool = False
    arrays: int = 0
    of_bias: bool = False
    of_arrays: int = 0

    @property
    def scores(self) -> float:
        """The number of scores of all tiles that the mask leaves."""
        sizes = self.sizes
        return self.share * sizes.batch * sizes.heads * sizes.queries * sizes.keys

    @property
    def operations(self) -> float:
        """The fewest multiply-adds: two products of a value, and five of a gradient."""
        return self.scores * self.features((3, 2) if self.is_gradient else (1, 1))

    @property
    def bytes(self) -> float:
        """The bytes of operands and results."""
        sizes = self.sizes
        rows = sizes.batch * sizes.queries * sizes.heads
        keys = sizes.batch * sizes.keys * sizes.key_heads
        passes = 2 if self.is_gradient else 1
        both = sizes.features + sizes.value_features
        biases = self.arrays * sizes.heads * sizes.queries * sizes.keys
        return sizes.dtype.itemsize * passes * float((rows + keys) * both + biases)

    def features(self, products: tuple[int, int]) -> int:
        """Return the multiply-adds of a score by so many products of keys and of values."""
        of_keys, of_values = products
        return of_keys * self.sizes.features + of_values * self.sizes.value_features


@dataclass(frozen=True)
class Way(Costed):
    """The kernels, or cuDNN."""

    key: str
    cycles: float
    numbers: tuple[float, ...]


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
    cycles = _xla_cycles(call, gpu, _GRADIENT if call.is_gradient else _VALUE)
    return attention_workload(call, cycles / gpu.rates.cycles_per_microsecond)


def _cycles(call: Pass, gpu: Gpu, key: str) -> float:
    """Return the estimate of a way: the tiles of the busiest SM, or bytes.

    The kernels compute a gradient in two passes, which both have the scores and their gradients,
    and XLA those of arrays.
    """
    sizes, rates = call.sizes, gpu.rates
    products, exponentials, launches = (1, 1), 1, 1
    if call.is_gradient:
        products, exponentials = ((4, 3), 2) if key == KERNELS else ((3, 2), 1)
        launches = 2
        if call.of_bias:
            products = products[0] + 1, products[1] + 1
            exponentials, launches = exponentials + 1, 3
    tiles = sizes.batch * sizes.heads * math.ceil(sizes.queries / _TILE)
    rounds = math.ceil(tiles / gpu.sm_count)
    scores_of_tile = call.share * _TILE * sizes.keys
    multiplied = scores_of_tile * call.features(products) / rates.wgmma_macs["bf16"]
    evaluated = scores_of_tile * exponentials / _EXPONENTIALS
    computed = rounds * (rates.cta_cycles + max(multiplied, evaluated))
    moved = call.bytes / rates.memory_bandwidth
    launched = rates.launch_cycles + (launches - 1) * rates.next_launch_cycles
    of_arrays = call.of_arrays > 0 and key == KERNELS
    by_xla = _xla_cycles(call, gpu, _GRADIENT_OF_ARRAYS) if of_arrays else 0.0
    return launched + max(computed, moved) + by_xla


def _xla_cycles(call: Pass, gpu: Gpu, blocks: _Blocks) -> float:
    """Return the estimate of XLA's blocks, which compute the scores that a mask hides, too."""
    rates, scores = gpu.rates, call.scores / call.share
    launches = blocks.launches * math.ceil(scores / _BLOCK)
    moved = scores * blocks.bytes + _XLA_READS * call.bytes
    multiplied = scores * call.features(blocks.products)
    return (
        rates.launch_cycles
        + launches * rates.next_launch_cycles
        + multiplied / (gpu.sm_count * rates.wgmma_macs["bf16"])
        + moved / rates.memory_bandwidth
    )
