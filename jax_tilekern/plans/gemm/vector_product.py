"""Products of a matrix and a vector, and of two vectors: reductions, bound by reading a matrix."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.reduction.passes import ReductionCandidate, reduction_candidate
from jax_tilekern.plans.reduction.problem import Reduction

_F32, _F64, _UINT32 = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.uint32)

# Accumulator types. Plain float32 is more accurate than TF32, and memory remains the limit.
SUM_DTYPES: dict[str, np.dtype[Any]] = {"f64": _F64, "int8": _UINT32}
SUM_DTYPES |= dict.fromkeys(("tf32", "f32", "f32_emulated", "bf16", "f16"), _F32)


def vector_product_candidate(product: Product, gpu: Gpu) -> ReductionCandidate | None:
    """Return the way to compute a product with a vector; ``None`` if there is none."""
    geometry = product.geometry
    sum_dtype = SUM_DTYPES.get(product.arithmetic)
    if min(geometry.m, geometry.n) != 1 or sum_dtype is None:
        return None
    *lhs_batch, lhs_m, lhs_k = geometry.lhs_strides
    *rhs_batch, rhs_k, rhs_n = geometry.rhs_strides
    *out_batch, out_m, out_n = geometry.out_strides
    swapped = geometry.n > 1
    lhs, rhs = (*lhs_batch, lhs_m, lhs_k), (*rhs_batch, rhs_n, rhs_k)
    matrix, (*vector_batch, _, vector_k) = (rhs, lhs) if swapped else (lhs, rhs)
    reduction = Reduction(
        geometry.batch,
        outputs=max(geometry.m, geometry.n),
        k=geometry.k,
        lhs_strides=matrix,
        rhs_strides=(*vector_batch, vector_k),
        out_strides=(*out_batch, out_n if swapped else out_m),
        dtype=product.lhs_dtype,
        sum_dtype=sum_dtype,
        out_dtype=product.out_dtype,
    )
    name = f"vector_product {product.arithmetic}"
    return reduction_candidate(reduction, gpu, name, swapped=swapped)
