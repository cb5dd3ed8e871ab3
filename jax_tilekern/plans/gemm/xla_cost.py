"""A cost model of XLA's matrix products, which says what to leave to XLA.

XLA times Triton, cuBLAS and CUTLASS kernels of many tiles for each product and takes the fastest.
The model does the same with one formula for all of them. A product takes

    launch + max(compute, memory) + not_hidden * min(compute, memory)

for the best tile and number of splits of ``k``. Compute is

    max(CTAs of an SM * arithmetic of a CTA, waves * k of a CTA * latency of an index of k)

and the reduction of the splits. Splits that do not divide ``k`` make XLA pad the operands first.
The constants are fitted to random products by ``python -m benchmarks xla_cost``, which reports
their error.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gpu import Gpu

# An m or n below 16 is padded to it, as tensor cores need.
_TILE_SIZES = (16, 32, 64, 128, 256)
_LARGEST_TILE = 128 * 256
_SPLITS = (1, 2, 4, 8, 16, 32)
_K_STEP = 16
_SHORTEST_SPLIT = 32
# CTAs of a tile that an SM holds: as many as their accumulators allow, but not more than 8.
_ACCUMULATORS, _MOST_CTAS = 128 * 128, 8
_ALIGNMENT = 16
_CUDA_CORES = ("f32", "f32_emulated", "f64")
# An m, n and k from which on 16-bit products with a long unaligned m of an m-major lhs take 0.65 of
# the time of other unaligned ones, which is a step less (13 products on H100s: 0.46 to 0.99).
_LARGE = (2048, 512, 512)
# Arithmetics that share constants.
_LIKE = {"f16": "bf16", "f32_emulated": "f32", "fp8_fast": "fp8"}


@dataclass(frozen=True)
class XlaArithmetic:
    """How fast XLA's kernels multiply in an arithmetic.

    Attributes
    ----------
    rate
        Million floating-point operations of an SM in a microsecond.
    latency
        Microseconds that a CTA takes for an index of ``k``, however small its tile is.
    """

    rate: float
    latency: float


@dataclass(frozen=True)
class XlaCosts:
    """What XLA's products take on a GPU.

    Attributes
    ----------
    launch
        Microseconds of the shortest product.
    memory
        The time of reading and writing, over that at the full bandwidth.
    not_hidden
        The share of the shorter of compute and memory that the longer does not hide.
    reduction, split
        Microseconds of adding up splits of ``k``: of any, and of each.
    padding, padded_memory
        Microseconds of padding operands, and the factor of the memory's time.
    unaligned_compute, unaligned_memory
        Factors for each power of two that the alignment of an operand's rows lacks to 16 bytes.
        The first is that of tensor cores alone.
    neither_k_major
        Factor where neither operand is contiguous along ``k``, but for 16-bit operands and batches
        of wider ones.
    arithmetics
        By the name of the arithmetic.
    """

    launch: float
    memory: float
    not_hidden: float
    reduction: float
    split: float
    padding: float
    padded_memory: float
    unaligned_compute: float
    unaligned_memory: float
    neither_k_major: float
    arithmetics: dict[str, XlaArithmetic]

    def values(self) -> list[float]:
        """Return all constants."""
        of_arithmetics = (x for a in self.arithmetics.values() for x in (a.rate, a.latency))
        return [*(getattr(self, name) for name in _SCALARS), *of_arithmetics]

    def with_values(self, values: Sequence[float]) -> XlaCosts:
        """Return other constants, in the order of :meth:`values`."""
        scalars, rest = values[: len(_SCALARS)], values[len(_SCALARS) :]
        pairs = zip(rest[::2], rest[1::2], strict=True)
        arithmetics = {
            name: XlaArithmetic(float(rate), float(latency))
            for name, (rate, latency) in zip(self.arithmetics, pairs, strict=True)
        }
        named: dict[str, Any] = dict(zip(_SCALARS, map(float, scalars), strict=True))
        return XlaCosts(**named, arithmetics=arithmetics)


_SCALARS = tuple(name for name in XlaCosts.__annotations__ if name != "arithmetics")


@functools.cache
def load_costs() -> XlaCosts:
    """Return the constants of an H100, which ``xla_h100.json`` has."""
    found = json.loads((files(__package__) / "xla_h100.json").read_text())
    arithmetics = {name: XlaArithmetic(**x) for name, x in found["arithmetics"].items()}
    return XlaCosts(**{name: found[name] for name in _SCALARS}, arithmetics=arithmetics)


def xla_microseconds(product: Product, gpu: Gpu, costs: XlaCosts) -> float:
    """Return what XLA's kernel of a product takes.

    Parameters
    ----------
    product
        A product of matrices. Vectors have kernels of another kind.
    gpu
        What it is for.
    costs
        Constants of that GPU.
    """
    geometry = product.geometry
    arithmetic = costs.arithmetics[_LIKE.get(product.arithmetic, product.arithmetic)]
    cycles = product.memory_cycles(gpu) + _broadcast_bytes(product) / gpu.rates.memory_bandwidth
    memory = costs.memory * cycles / gpu.rates.cycles_per_microsecond
    rate = arithmetic.rate
    steps = _unaligned_steps(product)
    if product.arithmetic not in _CUDA_CORES:
        rate /= costs.unaligned_compute**steps
    memory *= costs.unaligned_memory**steps
    k_major = geometry.lhs_strides[-1] == 1 or geometry.rhs_strides[-2] == 1
    itemsize = product.lhs_dtype.itemsize
    if not k_major and (itemsize == 1 or (itemsize > 2 and not geometry.batch)):
        rate /= costs.neither_k_major
        memory *= costs.neither_k_major
    ways = itertools.product(_tiles(geometry.m, geometry.n), _SPLITS)
    return min(
        _microseconds(product, gpu, XlaArithmetic(rate, arithmetic.latency), *way, memory, costs)
        for way in ways
    )


def _microseconds(
    product: Product,
    gpu: Gpu,
    arithmetic: XlaArithmetic,
    tile: tuple[int, int],
    splits: int,
    memory: float,
    costs: XlaCosts,
) -> float:
    geometry = product.geometry
    if splits > 1 and geometry.k < splits * _SHORTEST_SPLIT:
        return math.inf
    tile_m, tile_n = tile
    batches = math.prod(geometry.batch)
    ctas = batches * math.ceil(geometry.m / tile_m) * math.ceil(geometry.n / tile_n) * splits
    k = _K_STEP * math.ceil(geometry.k / splits / _K_STEP)
    of_an_sm = math.ceil(ctas / gpu.sm_count)
    waves = math.ceil(of_an_sm / max(1, min(_MOST_CTAS, _ACCUMULATORS // (tile_m * tile_n))))
    busy = of_an_sm * 2e-6 * tile_m * tile_n * k / arithmetic.rate
    compute = max(busy, waves * k * arithmetic.latency)
    launches = costs.launch
    if splits > 1:
        compute += costs.reduction + costs.split * splits
    if geometry.k % splits:
        launches += costs.padding
        memory *= costs.padded_memory
    return launches + max(compute, memory) + costs.not_hidden * min(compute, memory)


def _tiles(m: int, n: int) -> list[tuple[int, int]]:
    """Return the tiles that are not twice as large as the matrix."""
    return [
        (tile_m, tile_n)
        for tile_m, tile_n in itertools.product(_TILE_SIZES, _TILE_SIZES)
        if tile_m * tile_n <= _LARGEST_TILE
        and (tile_m == _TILE_SIZES[0] or tile_m < 2 * m)
        and (tile_n == _TILE_SIZES[0] or tile_n < 2 * n)
    ]


def _broadcast_bytes(product: Product) -> int:
    """Return the bytes of the operands that XLA copies for each matrix of a batch."""
    geometry = product.geometry
    operands: tuple[tuple[tuple[int, ...], int, Any], ...] = (
        (geometry.lhs_strides, geometry.m, product.lhs_dtype),
        (geometry.rhs_strides, geometry.n, product.rhs_dtype),
    )
    return sum(
        math.prod(geometry.batch) * size * geometry.k * dtype.itemsize
        for strides, size, dtype in operands
        if any(x == 0 and y > 1 for x, y in zip(strides, geometry.batch, strict=False))
    )


def _unaligned_steps(product: Product) -> int:
    """Return how many powers of two the alignment of rows lacks to 16 bytes."""
    geometry = product.geometry
    lhs_bytes = max(geometry.lhs_strides[-2:]) * product.lhs_dtype.itemsize
    rhs_bytes = max(geometry.rhs_strides[-2:]) * product.rhs_dtype.itemsize
    steps = int(math.log2(_ALIGNMENT // math.gcd(_ALIGNMENT, lhs_bytes, rhs_bytes)))
    sizes = geometry.m, geometry.n, geometry.k
    is_large = not geometry.batch and all(map(operator.ge, sizes, _LARGE))
    is_m_major = geometry.lhs_strides[-1] != 1 and rhs_bytes % _ALIGNMENT == 0
    if is_large and is_m_major and product.lhs_dtype.itemsize == 2:
        return max(steps - 1, 0)
    return steps
