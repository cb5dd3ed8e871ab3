"""The predicted time of Strassen's algorithm on a CPU, by those of its products and passes."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jax_tilekern.plans.add import AddedDims
from jax_tilekern.plans.cpu import Cpu
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.policy import predicted_times
from jax_tilekern.plans.policy.workload import Workload, add_workload, product_workload

# Products of blocks, and passes over blocks of lhs, of rhs and of the result: additions, and a copy
# of each of the four blocks.
_PRODUCTS, _PASSES = 7, (4 + 4, 4 + 4, 7 + 4)
# Products of blocks without the algorithm.
_PLAIN_PRODUCTS = 8


def is_slower_in_blocks(product: Product, levels: int, cpu: Cpu) -> bool:
    """Return whether cutting a product so often, at least once, is not predicted to be faster.

    It has to be so by the margin that the policy's data demand of a kernel.
    """
    times = predicted_times(product_workload(product), [None], cpu)
    if times is None:
        return False
    block, plain = _of_blocks(product, levels, cpu)
    whole = min(float(times.ours[0]), times.xla, plain)
    return whole <= times.margin * block


def _of_blocks(product: Product, levels: int, cpu: Cpu) -> tuple[float, float]:
    """Return the predicted microseconds of blocks by the algorithm, and of 8 plain products."""
    g = product.geometry
    m, n, k = (math.ceil(size / 2) for size in (g.m, g.n, g.k))
    block = dataclasses.replace(product, geometry=dataclasses.replace(g, m=m, n=n, k=k))
    plain = of_product = _microseconds(product_workload(block), cpu)
    if levels > 1:
        of_product = min(plain, _of_blocks(block, levels - 1, cpu)[0])
    total = _PRODUCTS * of_product
    batch, dtype = math.prod(g.batch), np.dtype(product.out_dtype)
    for count, shape in zip(_PASSES, ((m, k), (k, n), (m, n)), strict=True):
        dims = AddedDims.of((batch, *shape), (batch, *shape))
        total += count * _microseconds(add_workload(dims, dtype), cpu)
    return total, _PLAIN_PRODUCTS * plain


def _microseconds(workload: Workload, cpu: Cpu) -> float:
    """Return the predicted microseconds of the faster one of a kernel and XLA."""
    times = predicted_times(workload, [None], cpu)
    return 0.0 if times is None else min(float(times.ours[0]), times.xla)
