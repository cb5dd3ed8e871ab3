"""The choice of a kernel for a matrix product, among what the families of kernels offer.

``sm80/`` plans for the tensor cores of sm_80 and later and for CUDA cores, ``sm90/`` for Hopper's
tensor cores and for float32 emulated on those, and ``vector_product.py`` where one operand is a
vector. Where a product was tuned, the measured choice of ``plans/tuned.py`` replaces that of the
policy. Two products of one ``lhs`` have one kernel or two.
"""

from __future__ import annotations

import dataclasses
import math

from jax_tilekern.plans.candidate import CostedCandidate, fused_plan, ranked_candidates
from jax_tilekern.plans.gemm.epilogue import EpilogueArray
from jax_tilekern.plans.gemm.problem import (
    PairProduct,
    Product,
    ScaledProduct,
    SymmetricProduct,
    copy_cycles,
)
from jax_tilekern.plans.gemm.sm80.candidates import MMA
from jax_tilekern.plans.gemm.sm90.candidates import WGMMA
from jax_tilekern.plans.gemm.sm90.emulated import EMULATED
from jax_tilekern.plans.gemm.sm90.pair import pair_candidates
from jax_tilekern.plans.gemm.sm90.scaled import scaled_candidates
from jax_tilekern.plans.gemm.sm90.symmetric import SymmetricCandidate, symmetric_candidates
from jax_tilekern.plans.gemm.small.candidates import SMALL
from jax_tilekern.plans.gemm.vector_product import vector_product_candidates
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel, PredictedUs
from jax_tilekern.plans.policy import choose, current_policy, plan_choice, workload
from jax_tilekern.plans.tuned import tuned_plan

_FAMILIES = (WGMMA, EMULATED, SMALL, MMA)
_QUANTIZING = (WGMMA, MMA)


def candidates(product: Product, gpu: Gpu) -> list[CostedCandidate] | NoKernel:
    """Return the ways to compute a product, best first by the cost model."""
    m, n = product.geometry.m, product.geometry.n
    if min(m, n) == 1 and product.epilogue is None:
        vectors = vector_product_candidates(product, gpu)
        if vectors:
            # Memory is the limit, and tensor cores gain nothing.
            return [*vectors]
        if m == n:
            return NoKernel("dot products of vectors that are no rows have no kernel")
    quantizes = product.epilogue is not None and product.epilogue.quantized
    return ranked_candidates(_QUANTIZING if quantizes else _FAMILIES, product, gpu)


def plan_matmul(product: Product, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan and compile a matrix product.

    Raises
    ------
    NvrtcNotFound
        If there is no NVRTC to compile the kernel with.
    """
    found = candidates(product, gpu)
    if isinstance(found, NoKernel):
        return found
    # Products are tuned without epilogues, and the choice holds with one.
    tuned = tuned_plan(product.with_epilogue(None), gpu, found)
    if tuned is not None:
        return tuned
    if product.epilogue is not None:
        return fused_plan(found, gpu)
    return plan_choice(workload.of_product(product), found, gpu)


# The time of a kernel that computes half of a product of 16-bit operands, over its estimate: up to
# 1.19 on an H100. Of other types none has been timed, and ``policy("kernels")`` alone chooses them.
_HALF_OVER_ESTIMATE = 1.1


def plan_symmetric(product: SymmetricProduct, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan and compile a product whose result is symmetric.

    A kernel that computes half of it is compared with the kernels that compute all of it, and
    without an epilogue with XLA's product.
    """
    asked = current_policy() == "kernels"
    if not asked and product.lhs_dtype.itemsize != 2:
        return plan_matmul(product, gpu)
    halves, wholes = symmetric_candidates(product, gpu), candidates(product, gpu)
    if isinstance(halves, NoKernel):
        return plan_matmul(product, gpu)
    slower = 1.0 if asked else _HALF_OVER_ESTIMATE
    costs: list[tuple[float, CostedCandidate]] = [(slower * x.cycles, x) for x in halves]
    if not isinstance(wholes, NoKernel):
        costs += [(x.cycles, x) for x in wholes]
    if product.epilogue is not None:
        return fused_plan([x for _, x in sorted(costs, key=lambda found: found[0])], gpu)
    least, best = min(costs, key=lambda found: found[0])
    if not isinstance(best, SymmetricCandidate):
        return plan_matmul(product, gpu)
    if asked or isinstance(wholes, NoKernel):
        return best.plan(gpu)
    ours, xla = choose(workload.of_product(product), wholes, gpu).predicted_us
    if ours is None or xla is None:
        return plan_matmul(product, gpu)
    # What the policy knows of a product's kernels holds for half of it.
    half = least / wholes[0].cycles * ours
    if half > xla:
        return plan_matmul(product, gpu)
    return dataclasses.replace(best.plan(gpu), predicted_us=PredictedUs(half, xla))


def plan_scaled(product: ScaledProduct, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan and compile a product of operands with scales."""
    found = scaled_candidates(product, gpu)
    if isinstance(found, NoKernel):
        return found
    best, *_ = ranked = sorted(found, key=lambda x: x.cycles)
    return best.plan(gpu) if product.epilogue is None else fused_plan(ranked, gpu)


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
    ours, xla = choose(workload.of_product(plain), found, gpu).predicted_us
    if ours is None or xla is None:
        return math.inf
    # What the policy knows of a product holds for a pair: kernels are compared by their estimates.
    # The pass reads two arrays and writes one.
    combining = copy_cycles(3 * _result_bytes(product) // 2, gpu)
    return 2 * found[0].cycles * xla / ours + combining


def _result_bytes(product: PairProduct) -> int:
    geometry = product.geometry
    return math.prod(geometry.batch) * geometry.m * geometry.n * product.out_dtype.itemsize


def _plain(product: PairProduct) -> Product:
    """Return one of the products, without an epilogue."""
    return Product(product.geometry, *product.dtypes, product.arithmetic)
