"""Candidates for products of a matrix and a vector, and of two vectors.

Such a product reads its matrix once and does next to nothing with it, so it is a
:class:`~jax_tilekern.plans.reduction.problem.Reduction`: memory is what counts, not tensor cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.plans.candidate import CostedCandidate
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, LaunchPlan
from jax_tilekern.plans.reduction.passes import Passes, reduction_passes
from jax_tilekern.plans.reduction.problem import Reduction

_F32, _F64, _UINT32 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.uint32)

# Types of the sums. Plain float32 is more accurate than TF32, and memory does not wait for it.
SUM_DTYPES: dict[str, np.dtype[Any]] = {
    "tf32": _F32,
    "f32": _F32,
    "f32_emulated": _F32,
    "f64": _F64,
    "bf16": _F32,
    "f16": _F32,
    "int8": _UINT32,
}


@dataclass(frozen=True)
class VectorProductCandidate(CostedCandidate):
    """A reduction for a product, not compiled yet.

    Attributes
    ----------
    product
        What it computes.
    passes
        The launches.
    swapped
        Whether the matrix is ``rhs``.
    cycles
        The estimated cost.
    """

    product: Product
    passes: Passes
    swapped: bool
    cycles: float

    @property
    def key(self) -> str:
        """The kernel, its threads and its splits."""
        return self.passes.key

    def plan(self, gpu: Gpu) -> LaunchPlan:
        """Compile it."""
        product, passes = self.product, self.passes
        compiled = passes.compile(gpu)
        operands = (Buffer(1), Buffer(0)) if self.swapped else (Buffer(0), Buffer(1))
        return LaunchPlan(
            name=f"vector_product {product.arithmetic}",
            gpu=gpu,
            launches=passes.launches(compiled, operands, Buffer(2)),
            alignments=(*(passes.operand_alignment,) * 2, product.out_dtype.itemsize),
            workspace_bytes=passes.workspace_bytes,
            reason=passes.reason,
        )


def vector_product_candidates(product: Product, gpu: Gpu) -> list[VectorProductCandidate]:
    """Return the ways to compute a product with a vector; none if neither operand is one."""
    geometry = product.geometry
    sum_dtype = SUM_DTYPES.get(product.arithmetic)
    if min(geometry.m, geometry.n) != 1 or sum_dtype is None:
        return []
    *lhs_batch, lhs_m, lhs_k = geometry.lhs_strides
    *rhs_batch, rhs_k, rhs_n = geometry.rhs_strides
    *out_batch, out_m, out_n = geometry.out_strides
    swapped = geometry.n > 1
    if swapped:
        lines, out_line = geometry.n, out_n
        matrix, vector = (*rhs_batch, rhs_n, rhs_k), (*lhs_batch, lhs_k)
    else:
        lines, out_line = geometry.m, out_m
        matrix, vector = (*lhs_batch, lhs_m, lhs_k), (*rhs_batch, rhs_k)
    reduction = Reduction(
        batch=geometry.batch,
        lines=lines,
        k=geometry.k,
        lhs_strides=matrix,
        rhs_strides=vector,
        out_strides=(*out_batch, out_line),
        dtype=product.lhs_dtype,
        sum_dtype=sum_dtype,
        out_dtype=product.out_dtype,
    )
    return [
        VectorProductCandidate(product, passes, swapped, passes.cycles)
        for passes in reduction_passes(reduction, gpu)
    ]
