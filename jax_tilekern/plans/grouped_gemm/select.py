"""The choice of a kernel for a ragged matrix product, among what the families of kernels offer.

``sm80.py`` plans for the tensor cores of sm_80 and later and for CUDA cores, ``sm90.py`` for
Hopper's tensor cores.
"""

from __future__ import annotations

from jax_tilekern.plans.gemm.problem import Candidate
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.grouped_gemm import sm80 as ragged_mma
from jax_tilekern.plans.grouped_gemm import sm90 as ragged_wgmma
from jax_tilekern.plans.grouped_gemm.problem import RaggedProduct
from jax_tilekern.plans.launch import LaunchPlan, NoKernel


def candidates(product: RaggedProduct, gpu: Gpu) -> list[Candidate] | NoKernel:
    """Return the ways to compute a ragged product, best first by the cost model."""
    found = ragged_mma.candidates(product, gpu)
    # It knows every type, and what it refuses no other family takes.
    if isinstance(found, NoKernel):
        return found
    everything: list[Candidate] = [*ragged_wgmma.candidates(product, gpu), *found]
    # sorted() keeps the order of equals.
    return sorted(everything, key=lambda candidate: candidate.cycles)


def plan_ragged_matmul(product: RaggedProduct, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan and compile a ragged matrix product.

    The plan's buffers are ``lhs``, ``rhs``, the groups' bounds and the output.

    Raises
    ------
    NvrtcNotFound
        If there is no NVRTC to compile the kernel with.
    """
    found = candidates(product, gpu)
    return found if isinstance(found, NoKernel) else found[0].plan(gpu)
