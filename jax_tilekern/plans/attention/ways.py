"""What computes a pass of attention on a GPU, with estimates that data correct."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from jax_tilekern.plans.attention.sm90 import Attention
from jax_tilekern.plans.candidate import Costed
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.policy.workload import Workload, attention_workload

KERNELS, CUDNN = "kernels", "cuDNN"
_TILE = 128  # queries of a CTA
# An SM evaluates so many exponentials in a cycle.
_EXPONENTIALS = 16
# What XLA launches for a block of scores, and the bytes of each score that it moves, by whether
# it is a gradient: products write scores in float32, and a softmax reads them twice. Operands are
# read several times.
_XLA_LAUNCHES = {False: 6, True: 12}
_XLA_BYTES = {False: 20, True: 44}
_XLA_READS = 3
_BLOCK = 1 << 25  # scores


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
        return self.scores * self.features(*((3, 2) if self.is_gradient else (1, 1)))

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

    def features(self, of_keys: int, of_values: int) -> int:
        """Return the multiply-adds of a score by so many products of keys and of values."""
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
    return attention_workload(call, _xla_microseconds(call, gpu))


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
    multiplied = scores_of_tile * call.features(*products) / rates.wgmma_macs["bf16"]
    evaluated = scores_of_tile * exponentials / _EXPONENTIALS
    computed = rounds * (rates.cta_cycles + max(multiplied, evaluated))
    moved = call.bytes / rates.memory_bandwidth
    launched = rates.launch_cycles + (launches - 1) * rates.next_launch_cycles
    by_xla = 0.0
    if call.of_arrays and key == KERNELS:
        by_xla = _xla_microseconds(call, gpu) * rates.cycles_per_microsecond
    return launched + max(computed, moved) + by_xla


def _xla_microseconds(call: Pass, gpu: Gpu) -> float:
    """Return the estimate of XLA's blocks, which compute the scores that a mask hides, too."""
    rates, scores = gpu.rates, call.scores / call.share
    launches = _XLA_LAUNCHES[call.is_gradient] * math.ceil(scores / _BLOCK)
    operations = call.operations / call.share
    cycles = (
        rates.launch_cycles
        + launches * rates.next_launch_cycles
        + operations / (gpu.sm_count * rates.wgmma_macs["bf16"])
        + (scores * _XLA_BYTES[call.is_gradient] + _XLA_READS * call.bytes) / rates.memory_bandwidth
    )
    return cycles / rates.cycles_per_microsecond
