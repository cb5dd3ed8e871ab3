"""The choice of a kernel for a matrix product, among what the families of kernels offer.

``sm80/candidates.py`` plans for the tensor cores of sm_80 and later and for CUDA cores,
``sm90/candidates.py`` for Hopper's tensor cores, ``sm90/emulated.py`` for float32 on those, and
``vector_product.py`` where one operand is a vector. Where a product was tuned, the measured choice
of ``plans/tuned.py`` replaces that of the cost model; ``xla.py`` lists what is left to XLA.
"""

from __future__ import annotations

from jax_tilekern.plans.gemm import vector_product
from jax_tilekern.plans.gemm.problem import Candidate, Product
from jax_tilekern.plans.gemm.sm80 import candidates as mma
from jax_tilekern.plans.gemm.sm80 import config as mma_kernel
from jax_tilekern.plans.gemm.sm90 import candidates as wgmma
from jax_tilekern.plans.gemm.sm90 import emulated
from jax_tilekern.plans.gemm.xla import left_to_xla
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel
from jax_tilekern.plans.tuned import tuned_plan


def candidates(product: Product, gpu: Gpu) -> list[Candidate] | NoKernel:
    """Return the ways to compute a product, best first by the cost model."""
    vectors = vector_product.candidates(product, gpu)
    if vectors:
        # Memory is what counts, and tensor cores gain nothing.
        return [*vectors]
    if product.geometry.m == product.geometry.n == 1 and product.arithmetic == "tf32":
        return NoKernel("vectors that are no rows have no kernel, and XLA does not round to TF32")
    others = mma.candidates(product, gpu)
    # It knows every type; only products of pieces go by a name of their own.
    if isinstance(others, NoKernel) and product.arithmetic in mma_kernel.ARITHMETICS:
        return others
    found: list[Candidate] = [
        *wgmma.candidates(product, gpu),
        *emulated.candidates(product, gpu),
        *([] if isinstance(others, NoKernel) else others),
    ]
    if not found:
        assert isinstance(others, NoKernel)
        return others
    # sorted() keeps the order of equals.
    return sorted(found, key=lambda candidate: candidate.cycles)


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
    tuned = tuned_plan(product, gpu, found)
    if tuned is not None:
        return tuned
    reason = left_to_xla(product, gpu)
    return NoKernel(reason) if reason else found[0].plan(gpu)
