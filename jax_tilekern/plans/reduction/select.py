"""Plans for sums over one dimension of an array that is not the innermost."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel
from jax_tilekern.plans.policy import plan_choice
from jax_tilekern.plans.policy.workload import sum_workload
from jax_tilekern.plans.reduction.column_sums import column_passes
from jax_tilekern.plans.reduction.passes import ReductionCandidate, best_first, split_pass
from jax_tilekern.plans.reduction.problem import Reduction, SummedDims

_Dtype = np.dtype[Any]

_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)
_NARROW_FLOATS = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
# By the real type of their parts.
_COMPLEX: dict[_Dtype, _Dtype] = {np.dtype(np.complex64): _F32, np.dtype(np.complex128): _F64}
# The maximum time of a kernel over that of memory alone, by the cost model.
_MAX_SLOWDOWN = 2


def sum_dtype(dtype: _Dtype, out_dtype: _Dtype) -> _Dtype | None:
    """Return the type that elements are summed in on a GPU; ``None`` if no kernel sums them.

    Sums of floats are made in float32 at least, and those of integers wrap.
    """
    if dtype in _COMPLEX:
        return _COMPLEX[dtype] if dtype == out_dtype else None
    narrow = (*_NARROW_FLOATS, _F32)
    if out_dtype in narrow:
        return _F32 if dtype in narrow else None
    if out_dtype == _F64:
        return _F64 if dtype in (*narrow, _F64) else None
    if dtype.kind in "iub" and out_dtype.kind in "iu":
        # The type's own, as unsigned sums wrap; 4-bit integers have another kind.
        return np.dtype(np.uint64 if out_dtype.itemsize == 8 else np.uint32)
    return None


def sum_candidates(
    dims: SummedDims, dtype: _Dtype, out_dtype: _Dtype, gpu: Gpu
) -> list[ReductionCandidate] | NoKernel:
    """Return the ways to sum, best first by the cost model.

    Parameters
    ----------
    dims
        At least one of them is summed over.
    dtype, out_dtype
        Types for which there is a :func:`sum_dtype`.
    gpu
        What it is planned for.
    """
    total = sum_dtype(dtype, out_dtype)
    assert total is not None
    sizes, reduced = dims
    if dtype in _COMPLEX:
        # Real and imaginary parts are two columns.
        dtype = out_dtype = _COMPLEX[dtype]
        if reduced[-1]:
            sizes, reduced = (*sizes, 2), (*reduced, False)
        else:
            sizes = (*sizes[:-1], 2 * sizes[-1])
    if reduced[-1]:
        return NoKernel("XLA is as fast where the innermost dimension is summed over")
    if sum(reduced) > 1:
        return NoKernel("XLA is as fast where several separate dimensions are summed over")
    *batch, k, outputs = sizes
    reduction = Reduction(
        batch=tuple(batch),
        outputs=outputs,
        k=k,
        lhs_strides=(*(k * outputs for _ in batch), 1, outputs),
        rhs_strides=None,
        out_strides=(*(outputs for _ in batch), 1),
        dtype=dtype,
        sum_dtype=total,
        out_dtype=out_dtype,
    )
    found = best_first(split_pass(whole, 1, gpu) for whole in column_passes(reduction))
    memory = reduction.bytes / gpu.rates.memory_bandwidth
    if not found or found[0].cycles > _MAX_SLOWDOWN * (gpu.rates.launch_cycles + memory):
        return NoKernel(f"CTAs of sums of {k} elements do not keep the memory busy")
    return [dataclasses.replace(candidate, name=f"sum {dtype}") for candidate in found]


def plan_sum(dims: SummedDims, dtype: _Dtype, out_dtype: _Dtype, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Compile what the policy chooses among the candidates.

    Raises
    ------
    NvrtcNotFound
        If there is no NVRTC to compile the kernels with.
    """
    found = sum_candidates(dims, dtype, out_dtype, gpu)
    if isinstance(found, NoKernel):
        return found
    return plan_choice(sum_workload(dims, dtype, out_dtype), found, gpu)
