"""The choice between one kernel for two products of one ``lhs``, and a kernel for each."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jax_tilekern.plans.gemm.epilogue import EpilogueArray
from jax_tilekern.plans.gemm.fused import fused_plan
from jax_tilekern.plans.gemm.problem import PairProduct, Product, copy_cycles
from jax_tilekern.plans.gemm.select import candidates
from jax_tilekern.plans.gemm.sm90.pair import pair_candidates
from jax_tilekern.plans.gemm.xla import our_microseconds
from jax_tilekern.plans.gemm.xla_cost import load_costs, xla_microseconds
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel


def plan_pair(product: PairProduct, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan and compile two products in one kernel, if that is predicted to be faster.

    It is compared with a kernel for each product, the second of which reads the first one's
    result, and with XLA's products and a pass that combines them.
    """
    found = pair_candidates(product, gpu)
    if isinstance(found, NoKernel):
        return found
    limit, what = min(_of_two_kernels(product, gpu), _of_xla(product, gpu))
    faster = sorted(
        (x for x in found if our_microseconds(product, x.cycles, gpu) < limit),
        key=lambda candidate: candidate.cycles,
    )
    if not faster:
        ours = min(our_microseconds(product, x.cycles, gpu) for x in found)
        return NoKernel(f"one kernel is predicted to take {ours:.1f} us, {what} {limit:.1f} us")
    return fused_plan(faster, gpu)


def _of_two_kernels(product: PairProduct, gpu: Gpu) -> tuple[float, str]:
    """Return the predicted microseconds of the faster kernels for each product, and their name."""
    plain, epilogue = _plain(product), product.epilogue
    assert epilogue is not None
    read = EpilogueArray(product.out_dtype, "float", product.geometry.out_strides)
    operands = (read, *epilogue.operands)
    second = plain.with_epilogue(dataclasses.replace(epilogue, operands=operands, products=1))
    times = []
    for each in (plain, second):
        found = candidates(each, gpu)
        if isinstance(found, NoKernel):
            return math.inf, "two"
        times.append(our_microseconds(each, found[0].cycles, gpu))
    times[0] = min(times[0], xla_microseconds(plain, gpu, load_costs()))
    return sum(times), "two"


def _of_xla(product: PairProduct, gpu: Gpu) -> tuple[float, str]:
    plain, geometry = _plain(product), product.geometry
    results = int(np.prod(geometry.batch)) * geometry.m * geometry.n * product.out_dtype.itemsize
    # The pass reads two arrays and writes one.
    combining = copy_cycles(3 * results // 2, gpu) / gpu.rates.cycles_per_microsecond
    return 2 * xla_microseconds(plain, gpu, load_costs()) + combining, "XLA's"


def _plain(product: PairProduct) -> Product:
    """Return one of the products, without an epilogue."""
    return Product(product.geometry, *product.dtypes, product.arithmetic)
