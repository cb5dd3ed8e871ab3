"""The choice of a kernel for a matrix product, among what the families of kernels offer.

``gemm/sm80`` and ``grouped_gemm/sm80`` plan for the tensor cores of sm_80 and later and for CUDA
cores, ``gemm/sm90`` and ``grouped_gemm/sm90`` for Hopper's tensor cores and for float32 emulated on
those, ``gemm/small`` for small matrices, and ``vector_product.py`` where one operand is a vector.
Where a product was tuned, the measured choice of ``plans/tuned.py`` replaces that of the policy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jax_tilekern.plans.candidate import (
    CostedCandidate,
    Family,
    fused_plan,
    ranked_candidates,
    with_cycles,
)
from jax_tilekern.plans.gemm.arithmetic import F32, accumulator_dtype
from jax_tilekern.plans.gemm.epilogue import EpilogueArray
from jax_tilekern.plans.gemm.problem import Product, copy_cycles
from jax_tilekern.plans.gemm.sm80.candidates import MMA
from jax_tilekern.plans.gemm.sm90.candidates import WGMMA, wgmma_candidates
from jax_tilekern.plans.gemm.sm90.emulated import EMULATED
from jax_tilekern.plans.gemm.small.candidates import SMALL
from jax_tilekern.plans.gemm.vector_product import vector_product_candidate
from jax_tilekern.plans.gpu import Gpu, xla_pass_us
from jax_tilekern.plans.grouped_gemm.sm80.candidates import GROUPED_MMA
from jax_tilekern.plans.grouped_gemm.sm90.candidates import GROUPED_WGMMA
from jax_tilekern.plans.launch import LaunchPlan, NoKernel, PredictedUs
from jax_tilekern.plans.policy import (
    choose,
    current_policy,
    plan_choice,
    plan_fused,
    predicted_times,
)
from jax_tilekern.plans.policy.workload import Workload, fused_workload, product_workload
from jax_tilekern.plans.reduction.passes import ReductionCandidate
from jax_tilekern.plans.tuned import tuned_plan


def _families(product: Product) -> Sequence[Family]:
    """Return the families of kernels that may compute a product."""
    hopper_alone = product.pair or product.scales is not None
    if product.is_grouped:
        return (GROUPED_WGMMA,) if hopper_alone else (GROUPED_WGMMA, GROUPED_MMA)
    if hopper_alone or product.symmetric:
        return (WGMMA,)
    if product.epilogue is not None and product.epilogue.quantized:
        return (WGMMA, MMA)
    return (WGMMA, EMULATED, SMALL, MMA)


def candidates(product: Product, gpu: Gpu) -> list[CostedCandidate] | NoKernel:
    """Return the ways to compute a product, best first by the cost model."""
    families, g = _families(product), product.geometry
    if min(g.m, g.n) == 1 and product.epilogue is None and SMALL in families:
        vector = vector_product_candidate(product, gpu)
        if vector is not None:
            # Memory is the limit, and tensor cores gain nothing.
            return [vector]
        if g.m == g.n:
            return NoKernel("dot products of vectors that are no rows have no kernel")
    return ranked_candidates(families, product, gpu)


def plan_matmul(product: Product, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan and compile a matrix product.

    Raises
    ------
    NvrtcNotFound
        If there is no NVRTC to compile the kernel with.
    """
    if product.pair and not product.is_grouped:
        return _plan_pair(product, gpu)
    if product.symmetric:
        return _plan_symmetric(product, gpu)
    found = candidates(product, gpu)
    if isinstance(found, NoKernel):
        return found
    # XLA has none of these, and they are not tuned.
    xla_has_none = product.is_grouped or product.scales is not None
    if not xla_has_none:
        # Products are tuned without epilogues, and the choice holds with one.
        tuned = tuned_plan(product.with_epilogue(None), gpu, found)
        if tuned is not None:
            return tuned
    if product.scales is not None and not product.is_grouped:
        return _plan_scaled(product, found, gpu)
    if product.epilogue is not None:
        return fused_plan(found, gpu) if xla_has_none else _plan_fused(product, found, gpu)
    if xla_has_none:
        return found[0].plan(gpu)
    return plan_choice(workload_of(product, found), found, gpu)


def _plan_scaled(
    product: Product, found: Sequence[CostedCandidate], gpu: Gpu
) -> LaunchPlan | NoKernel:
    """Plan and compile a product of scaled operands, which XLA dequantises first.

    One with an epilogue has a kernel where it has one without.
    """
    plain = product.with_epilogue(None)
    candidates_of_plain = candidates(plain, gpu)
    workload = _scaled_workload(plain, gpu)
    if workload is None or isinstance(candidates_of_plain, NoKernel):
        return found[0].plan(gpu) if product.epilogue is None else fused_plan(found, gpu)
    if product.epilogue is None:
        return plan_choice(workload, found, gpu)
    choice = choose(workload, candidates_of_plain, gpu)
    if choice.candidate is None:
        return NoKernel(choice.reason, choice.predicted_us)
    return fused_plan(found, gpu)


def _scaled_workload(product: Product, gpu: Gpu) -> Workload | None:
    """Return the workload of a product of scaled operands, if XLA's time is known."""
    plain = dataclasses.replace(
        product, lhs_dtype=F32, rhs_dtype=F32, out_dtype=F32, arithmetic="f32", scales=None
    )
    others, g = candidates(plain, gpu), product.geometry
    times = None
    if not isinstance(others, NoKernel):
        times = predicted_times(workload_of(plain, others), others, gpu)
    if times is None:
        return None
    sizes = (math.prod(g.batch) * rows * g.k for rows in (g.m, g.n))
    passes = (xla_pass_us(size * (1 + F32.itemsize) // 2, gpu) for size in sizes)
    return dataclasses.replace(
        product_workload(product), operation="scaled product", estimate=times.xla + sum(passes)
    )


def workload_of(product: Product, found: Sequence[CostedCandidate]) -> Workload:
    """Return the workload of a product with these candidates; the kernel of sums has its own."""
    work = product_workload(product)
    is_reduction = isinstance(found[0], ReductionCandidate)
    return dataclasses.replace(work, operation="vector product") if is_reduction else work


def _plan_fused(
    product: Product, found: Sequence[CostedCandidate], gpu: Gpu
) -> LaunchPlan | NoKernel:
    """Plan and compile a product with an epilogue, by what is predicted without it.

    A candidate takes its predicted time, and what the epilogue adds to its estimate. XLA takes the
    time of the accumulators' product, and that of a pass over memory.
    """
    plain = product.with_epilogue(None)
    of_plain = candidates(plain, gpu)
    if isinstance(of_plain, NoKernel):
        return fused_plan(found, gpu)
    times = predicted_times(workload_of(plain, of_plain), of_plain, gpu)
    if times is None:
        return fused_plan(found, gpu)
    rate = gpu.rates.cycles_per_microsecond
    differences = {
        candidate.key: rate * us - candidate.cycles
        for candidate, us in zip(of_plain, times.ours, strict=True)
    }
    adjusted = [with_cycles(x, x.cycles + differences.get(x.key, 0.0)) for x in found]
    if not (product.epilogue and product.epilogue.stores) and not _fits_cache(product, gpu):
        # Reductions of rows promise that memory holds no matrix of accumulators.
        return fused_plan(sorted(adjusted, key=lambda x: x.cycles), gpu)
    return plan_fused(fused_workload(product, _xla_us(product, of_plain, gpu)), adjusted, gpu)


# The share of L2 that accumulators of XLA's product may take before a pass reduces their rows.
_SHARE_OF_L2 = 0.5


def _fits_cache(product: Product, gpu: Gpu) -> bool:
    accumulators = dataclasses.replace(product, out_dtype=accumulator_dtype(product.lhs_dtype))
    return _result_bytes(accumulators) <= _SHARE_OF_L2 * gpu.l2_bytes


def _xla_us(product: Product, of_plain: Sequence[CostedCandidate], gpu: Gpu) -> float:
    """Return the predicted microseconds of XLA's product and of its pass of the epilogue."""
    rounded = None if product.epilogue is None else product.epilogue.rounded
    accumulators = dataclasses.replace(
        product, epilogue=None, out_dtype=rounded or accumulator_dtype(product.lhs_dtype)
    )
    times = predicted_times(workload_of(accumulators, of_plain), of_plain, gpu)
    assert times is not None
    read = _result_bytes(accumulators) + product.epilogue_bytes
    written = _result_bytes(product) if product.epilogue and product.epilogue.stores else 0
    return times.xla + xla_pass_us((read + written) // 2, gpu)


# The time of a kernel that computes half of a product of 16-bit operands, over its estimate: up to
# 1.19 on an H100. Of other types none has been timed, and ``policy("kernels")`` alone chooses them.
_HALF_OVER_ESTIMATE = 1.1


def _plan_symmetric(product: Product, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan and compile a product whose result is symmetric.

    A kernel that computes half of it is compared with the kernels that compute all of it, and
    without an epilogue with XLA's product.
    """
    asked, whole = current_policy() == "kernels", dataclasses.replace(product, symmetric=False)
    if not asked and product.lhs_dtype.itemsize != 2:
        return plan_matmul(whole, gpu)
    halves, wholes = wgmma_candidates(product, gpu), candidates(whole, gpu)
    if isinstance(halves, NoKernel):
        return plan_matmul(whole, gpu)
    slower = 1.0 if asked else _HALF_OVER_ESTIMATE
    costs: list[tuple[float, CostedCandidate]] = [(slower * x.cycles, x) for x in halves]
    if not isinstance(wholes, NoKernel):
        costs += [(x.cycles, x) for x in wholes]
    if product.epilogue is not None:
        return fused_plan([x for _, x in sorted(costs, key=lambda found: found[0])], gpu)
    least, best = min(costs, key=lambda found: found[0])
    if best not in halves:
        return plan_matmul(whole, gpu)
    if asked or isinstance(wholes, NoKernel):
        return best.plan(gpu)
    ours, xla = choose(product_workload(whole), wholes, gpu).predicted_us
    if ours is None or xla is None:
        return plan_matmul(whole, gpu)
    # The ratio of the predicted to the estimated time of the whole product holds for half of it.
    half = least / wholes[0].cycles * ours
    if half > xla:
        return plan_matmul(whole, gpu)
    return dataclasses.replace(best.plan(gpu), predicted_us=PredictedUs(half, xla))


# Bytes of a line of L1, and of L1 beside the shared memory of a kernel.
_LINE_BYTES = 128
_L1_BYTES = 28 << 10
# The share of a kernel's time that scales cost whose lines do not stay in L1: 0.08 to 0.14 on an
# H100 (docs/tuning-log.md).
_SCATTERED_ROWS = 0.08


def copies_rows_first(product: Product, gpu: Gpu) -> bool:
    """Return whether a product is faster after a copy of lhs's scales, with adjacent rows."""
    assert product.scales is not None
    (scales, _), g = product.scales, product.geometry
    if scales.block_rows != 1 or scales.row_stride <= 1:
        return False
    found = wgmma_candidates(product, gpu)
    if isinstance(found, NoKernel):
        return False
    best = min(found, key=lambda candidate: candidate.cycles)
    lines = best.tile.block_m * min(_LINE_BYTES, 4 * scales.row_stride)
    if best.swapped or lines <= _L1_BYTES:
        return False
    count = math.prod(g.batch) * g.m * math.ceil(g.k / best.instance.block_k)
    return _SCATTERED_ROWS * best.cycles > copy_cycles(4 * count, gpu)


# The share of the time of writing a result that kernels took beyond their estimates (H100).
_EXPOSED_STORES = 0.4


def _plan_pair(product: Product, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan and compile two products in one kernel, if that is predicted to be faster.

    It is compared with a kernel for each product, the second of which reads the first one's
    result, and with XLA's products and a pass that combines them.
    """
    found = wgmma_candidates(product, gpu)
    if isinstance(found, NoKernel):
        return found
    limit, what = min(
        (_cycles_of_two_kernels(product, gpu), "two"), (_cycles_of_xla(product, gpu), "XLA's")
    )
    faster = sorted((x for x in found if x.cycles < limit), key=lambda x: x.cycles)
    if not faster:
        ours, limit = (
            x / gpu.rates.cycles_per_microsecond for x in (min(x.cycles for x in found), limit)
        )
        return NoKernel(f"one kernel is predicted to take {ours:.1f} us, {what} {limit:.1f} us")
    return fused_plan(faster, gpu)


def _cycles_of_two_kernels(product: Product, gpu: Gpu) -> float:
    """Return the predicted cycles of a kernel for each product."""
    plain, epilogue = product.plain(product.geometry), product.epilogue
    assert epilogue is not None
    read = EpilogueArray(product.out_dtype, "float", product.geometry.out_strides)
    operands = (read, *epilogue.operands)
    second = plain.with_epilogue(dataclasses.replace(epilogue, operands=operands, products=1))
    found = [candidates(each, gpu) for each in (plain, second)]
    stores = _result_bytes(product) / gpu.rates.memory_bandwidth
    times = (math.inf if isinstance(x, NoKernel) else x[0].cycles for x in found)
    return _EXPOSED_STORES * stores + sum(times)


def _cycles_of_xla(product: Product, gpu: Gpu) -> float:
    """Return the predicted cycles of XLA's products and of the pass that combines them."""
    plain = product.plain(product.geometry)
    found = candidates(plain, gpu)
    if isinstance(found, NoKernel):
        return math.inf
    ours, xla = choose(product_workload(plain), found, gpu).predicted_us
    if ours is None or xla is None:
        return math.inf
    # Kernels of pairs are compared by their estimates, so XLA's time is in the cycles of these.
    # The pass reads two arrays and writes one.
    combining = xla_pass_us(3 * _result_bytes(product) // 2, gpu)
    return found[0].cycles * (2 * xla + combining) / ours


def _result_bytes(product: Product) -> int:
    geometry = product.geometry
    return math.prod(geometry.batch) * geometry.m * geometry.n * product.out_dtype.itemsize
