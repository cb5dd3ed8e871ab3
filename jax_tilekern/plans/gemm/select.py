"""The choice of a kernel for a matrix product, among what the families of kernels offer.

``sm80/`` plans for the tensor cores of sm_80 and later and for CUDA cores, ``sm90/`` for Hopper's
tensor cores and for float32 emulated on those, and ``vector_product.py`` where one operand is a
vector. Where a product was tuned, the measured choice of ``plans/tuned.py`` replaces that of the
policy.
"""

from __future__ import annotations

from jax_tilekern.plans.candidate import CostedCandidate
from jax_tilekern.plans.gemm.families import ranked_candidates
from jax_tilekern.plans.gemm.fused import fused_plan
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.sm80.candidates import MMA
from jax_tilekern.plans.gemm.sm90.candidates import WGMMA
from jax_tilekern.plans.gemm.sm90.emulated import EMULATED
from jax_tilekern.plans.gemm.small.candidates import SMALL
from jax_tilekern.plans.gemm.vector_product import vector_product_candidates
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel
from jax_tilekern.plans.policy import plan_choice, workload
from jax_tilekern.plans.tuned import tuned_plan

_FAMILIES = (WGMMA, EMULATED, SMALL, MMA)


def candidates(product: Product, gpu: Gpu) -> list[CostedCandidate] | NoKernel:
    """Return the ways to compute a product, best first by the cost model."""
    vectors = vector_product_candidates(product, gpu) if product.epilogue is None else []
    if vectors:
        # Memory is the limit, and tensor cores gain nothing.
        return [*vectors]
    if product.geometry.m == product.geometry.n == 1 and product.epilogue is None:
        return NoKernel("dot products of vectors that are no rows have no kernel")
    return ranked_candidates(_FAMILIES, product, gpu)


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
