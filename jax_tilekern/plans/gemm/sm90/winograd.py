"""Plans for a level of Strassen's algorithm over float32, emulated on Hopper's 16-bit tensor cores.

The passes that split the operands read sums of blocks, so that these cost no pass of their own, and
the seven products are one batch. A last pass makes the result of them (Winograd's form).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.passes.split_float32 import DECIDE_KERNEL
from jax_tilekern.plans.gemm.passes.winograd import (
    COMBINE_KERNEL,
    LHS_TERMS,
    PRODUCTS,
    RHS_TERMS,
    SUM_KERNEL,
    BlockSumSplitPass,
    combine_launch,
)
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.sm90.emulated import (
    EmulatedCandidate,
    EmulationBuffers,
    emulated_candidates,
    guarded_name,
    workspace_bytes,
)
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, LaunchPlan, NoKernel
from jax_tilekern.plans.strided_rows import StridedOperand

_F32 = np.dtype(np.float32)
# The sizes are multiples of this: blocks of the result are written as vectors.
MULTIPLES = (2, 8, 2)


def plan_winograd(m: int, n: int, k: int, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan and compile a product of row-major float32 matrices.

    Raises
    ------
    NvrtcNotFound
        If there is no NVRTC to compile the kernels with.
    """
    if any(size % multiple for size, multiple in zip((m, n, k), MULTIPLES, strict=True)):
        return NoKernel("sizes are not multiples of 2, 8 and 2")
    lhs = BlockSumSplitPass.of(StridedOperand((), m, k, (), k, 1), LHS_TERMS, gpu)
    rhs = BlockSumSplitPass.of(StridedOperand((), n, k, (), 1, n), RHS_TERMS, gpu)
    product = _products(m // 2, n // 2, k // 2, lhs.k_padded)
    found = emulated_candidates(product, gpu)
    if isinstance(found, NoKernel):
        return found
    return _plan(min(found, key=lambda candidate: candidate.cycles), lhs, rhs, gpu)


def _products(m: int, n: int, k: int, row: int) -> Product:
    """Return the seven products of sums, as they are in memory in float32 arithmetic."""
    geometry = MatmulGeometry(
        (PRODUCTS,), m, n, k, (m * row, row, 1), (n * row, 1, row), (m * n, n, 1)
    )
    return Product(geometry, _F32, _F32, _F32, "f32")


def _plan(
    candidate: EmulatedCandidate, lhs: BlockSumSplitPass, rhs: BlockSumSplitPass, gpu: Gpu
) -> LaunchPlan:
    geometry = candidate.product.geometry
    kernel = candidate.instance.kernel
    plain = candidate.plain
    plain_kernel = dataclasses.replace(
        plain.instance.kernel, name=guarded_name(plain.instance.kernel.name)
    )
    kernels = (
        lhs.kernel, rhs.kernel, DECIDE_KERNEL, kernel, SUM_KERNEL, plain_kernel, COMBINE_KERNEL
    )  # fmt: skip
    compiled = compile_kernels(*dict.fromkeys(kernels), arch=gpu.arch)
    out = Buffer(2)
    buffers = EmulationBuffers.of(3)
    products = Buffer(3 + len(buffers))
    # Float32 sums take the place of the parts of the sums, which are of the same size.
    sums = (buffers.lhs_parts, buffers.rhs_parts)
    return LaunchPlan(
        name="split_float16_winograd f32",
        gpu=gpu,
        launches=(
            *candidate.split_launches(compiled, lhs, rhs, buffers),
            candidate.product_launch(compiled, lhs, rhs, buffers, products, gpu, kernel),
            lhs.sums_launch(compiled, buffers.flag, Buffer(0), sums[0]),
            rhs.sums_launch(compiled, buffers.flag, Buffer(1), sums[1]),
            plain.launch(compiled, buffers.flag, *sums, products, kernel=plain_kernel),
            combine_launch(compiled, geometry.m, geometry.n, products, out, gpu),
        ),
        alignments=(4, 4, 16),
        workspace_bytes=(
            *workspace_bytes(lhs, rhs),
            PRODUCTS * geometry.m * geometry.n * _F32.itemsize,
        ),
        reason=f"{candidate.tile}, seven products of sums of blocks, which the passes that split "
        "operands into hi and lo float16 parts add",
    )
