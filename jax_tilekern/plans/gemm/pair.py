"""The choice between one kernel for two products of one ``lhs``, and a kernel for each."""

from __future__ import annotations

import dataclasses
import math

from jax_tilekern.plans.gemm.epilogue import EpilogueArray
from jax_tilekern.plans.gemm.fused import fused_plan
from jax_tilekern.plans.gemm.problem import PairProduct, Product, copy_cycles
from jax_tilekern.plans.gemm.select import candidates
from jax_tilekern.plans.gemm.sm90.pair import pair_candidates
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel
from jax_tilekern.plans.policy import choose, workload

# The share of the time of writing a result that kernels took beyond their estimates (H100).
_EXPOSED_STORES = 0.4


def plan_pair(product: PairProduct, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan and compile two products in one kernel, if that is predicted to be faster.

    It is compared with a kernel for each product, the second of which reads the first one's
    result, and with XLA's products and a pass that combines them.
    """
    found = pair_candidates(product, gpu)
    if isinstance(found, NoKernel):
        return found
    limit, what = min((_of_two_kernels(product, gpu), "two"), (_of_xla(product, gpu), "XLA's"))
    faster = sorted((x for x in found if x.cycles < limit), key=lambda x: x.cycles)
    if not faster:
        ours, limit = (
            x / gpu.rates.cycles_per_microsecond for x in (min(x.cycles for x in found), limit)
        )
        return NoKernel(f"one kernel is predicted to take {ours:.1f} us, {what} {limit:.1f} us")
    return fused_plan(faster, gpu)


def _of_two_kernels(product: PairProduct, gpu: Gpu) -> float:
    """Return the predicted cycles of a kernel for each product."""
    plain, epilogue = _plain(product), product.epilogue
    assert epilogue is not None
    read = EpilogueArray(product.out_dtype, "float", product.geometry.out_strides)
    operands = (read, *epilogue.operands)
    second = plain.with_epilogue(dataclasses.replace(epilogue, operands=operands, products=1))
    found = [candidates(each, gpu) for each in (plain, second)]
    stores = _result_bytes(product) / gpu.rates.memory_bandwidth
    times = (math.inf if isinstance(x, NoKernel) else x[0].cycles for x in found)
    return _EXPOSED_STORES * stores + sum(times)


def _of_xla(product: PairProduct, gpu: Gpu) -> float:
    """Return the predicted cycles of XLA's products and of the pass that combines them."""
    plain = _plain(product)
    found = candidates(plain, gpu)
    if isinstance(found, NoKernel):
        return math.inf
    choice = choose(workload.of_product(plain), found, gpu)
    if choice.ours is None or choice.xla is None:
        return math.inf
    # What the policy knows of a product holds for a pair: kernels are compared by their estimates.
    # The pass reads two arrays and writes one.
    combining = copy_cycles(3 * _result_bytes(product) // 2, gpu)
    return 2 * found[0].cycles * choice.xla / choice.ours + combining


def _result_bytes(product: PairProduct) -> int:
    geometry = product.geometry
    return math.prod(geometry.batch) * geometry.m * geometry.n * product.out_dtype.itemsize


def _plain(product: PairProduct) -> Product:
    """Return one of the products, without an epilogue."""
    return Product(product.geometry, *product.dtypes, product.arithmetic)
