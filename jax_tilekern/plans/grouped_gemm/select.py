"""The choice of a kernel for a grouped GEMM, among what the families of kernels offer.

``sm80/`` plans for the tensor cores of sm_80 and later and for CUDA cores, ``sm90/`` for Hopper's
tensor cores.
"""

from __future__ import annotations

from jax_tilekern.plans.candidate import CostedCandidate, fused_plan, ranked_candidates
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.grouped_gemm.problem import (
    GroupedPair,
    GroupedProduct,
    GroupedScaledProduct,
)
from jax_tilekern.plans.grouped_gemm.sm80.candidates import GROUPED_MMA
from jax_tilekern.plans.grouped_gemm.sm90.candidates import GROUPED_WGMMA
from jax_tilekern.plans.launch import LaunchPlan, NoKernel

_FAMILIES = (GROUPED_WGMMA, GROUPED_MMA)


def candidates(product: GroupedProduct, gpu: Gpu) -> list[CostedCandidate] | NoKernel:
    """Return the ways to compute a grouped GEMM, best first by the cost model."""
    return ranked_candidates(_FAMILIES, product, gpu)


def plan_grouped_gemm(product: GroupedProduct, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan and compile a grouped GEMM.

    The plan's buffers are ``lhs``, ``rhs``, the groups' bounds, the operands of the epilogue, the
    output and the epilogue's further results.

    Raises
    ------
    NvrtcNotFound
        If there is no NVRTC to compile the kernel with.
    """
    hopper_alone = isinstance(product, GroupedPair | GroupedScaledProduct)
    found = ranked_candidates((GROUPED_WGMMA,) if hopper_alone else _FAMILIES, product, gpu)
    if isinstance(found, NoKernel):
        return found
    return found[0].plan(gpu) if product.epilogue is None else fused_plan(found, gpu)
