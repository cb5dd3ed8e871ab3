"""Plans for sums over dimensions of an array that are neighbours."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from jax_tilekern.plans.cxx import Dtype
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel
from jax_tilekern.plans.policy import plan_choice
from jax_tilekern.plans.policy.workload import sum_workload
from jax_tilekern.plans.reduction.passes import ReductionCandidate, reduction_candidate
from jax_tilekern.plans.reduction.problem import Reduction, SummedDims

_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)
_FLOATS = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), _F32, _F64)
# The real type of a complex number's parts.
_COMPLEX: dict[Dtype, Dtype] = {np.dtype(np.complex64): _F32, np.dtype(np.complex128): _F64}


def sum_dtype(dtype: Dtype, out_dtype: Dtype) -> Dtype | None:
    """Return the type that elements are summed in on a GPU; ``None`` if no kernel sums them.

    Sums of floats are made in float32 at least, and those of integers wrap.
    """
    if dtype in _COMPLEX:
        return _COMPLEX[dtype] if dtype == out_dtype else None
    if out_dtype in _FLOATS:
        total = _F64 if out_dtype == _F64 else _F32
        return total if dtype in _FLOATS and dtype.itemsize <= total.itemsize else None
    if dtype.kind in "iub" and out_dtype.kind in "iu":
        # The type's own, as unsigned sums wrap; 4-bit integers have another kind.
        return np.dtype(np.uint64 if out_dtype.itemsize == 8 else np.uint32)
    return None


def sum_candidate(
    dims: SummedDims, dtype: Dtype, out_dtype: Dtype, gpu: Gpu
) -> ReductionCandidate | NoKernel:
    """Return the way to sum types that have a :func:`sum_dtype`, or why there is none."""
    total = sum_dtype(dtype, out_dtype)
    assert total is not None
    if sum(dims.reduced) > 1:
        return NoKernel("several separate dimensions are summed over")
    axis = dims.reduced.index(True)
    k, outputs = dims.sizes[axis], math.prod(dims.sizes[axis + 1 :])
    if dtype in _COMPLEX:
        # Real and imaginary parts are two columns.
        dtype = out_dtype = _COMPLEX[dtype]
        outputs *= 2
    batch = dims.sizes[:axis]
    reduction = Reduction(
        batch=batch,
        outputs=outputs,
        k=k,
        lhs_strides=(*(k * outputs for _ in batch), 1, outputs),
        rhs_strides=None,
        out_strides=(*(outputs for _ in batch), 1),
        dtype=dtype,
        sum_dtype=total,
        out_dtype=out_dtype,
    )
    found = reduction_candidate(reduction, gpu, f"sum {dtype}")
    return found or NoKernel(f"{reduction.bytes} bytes take more blocks than a launch has")


def plan_sum(dims: SummedDims, dtype: Dtype, out_dtype: Dtype, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Compile the kernels of a sum, if the policy chooses them."""
    found = sum_candidate(dims, dtype, out_dtype, gpu)
    if isinstance(found, NoKernel):
        return found
    return plan_choice(sum_workload(dims, dtype, out_dtype), [found], gpu)
