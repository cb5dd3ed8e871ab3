"""Plans for sums over axes of an array."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jax_tilekern.plans.candidate import CostedCandidate
from jax_tilekern.plans.gemm.geometry import MAX_BATCH_DIMS
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, LaunchPlan, NoKernel
from jax_tilekern.plans.policy import plan_choice, workload
from jax_tilekern.plans.reduction.passes import Passes, reduction_passes
from jax_tilekern.plans.reduction.problem import Reduction

_Dtype = np.dtype[Any]

_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)
_NARROW_FLOATS = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
# By the real type of their parts.
_COMPLEX: dict[_Dtype, _Dtype] = {np.dtype(np.complex64): _F32, np.dtype(np.complex128): _F64}
# The maximum time of a kernel over that of memory alone, by the cost model.
_MAX_SLOWDOWN = 4


class SummedDims(NamedTuple):
    """Dimensions of a row-major array that is summed over some of them.

    Attributes
    ----------
    sizes
        All above 1.
    reduced
        Whether each is summed over; neighbours differ.
    """

    sizes: tuple[int, ...]
    reduced: tuple[bool, ...]

    @classmethod
    def of(cls, shape: Sequence[int], axes: Collection[int]) -> SummedDims:
        """Merge neighbours that are both summed over or both kept, and drop sizes of 1."""
        sizes: list[int] = []
        reduced: list[bool] = []
        for axis, size in enumerate(shape):
            if size == 1:
                continue
            if reduced and reduced[-1] == (axis in axes):
                sizes[-1] *= size
            else:
                sizes.append(size)
                reduced.append(axis in axes)
        return cls(tuple(sizes), tuple(reduced))


def sum_dtype(dtype: _Dtype, out_dtype: _Dtype) -> _Dtype | None:
    """Return the type that elements are summed in on a GPU; ``None`` if they must be cast first.

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


@dataclass(frozen=True)
class SumCandidate(CostedCandidate):
    """The launches of a sum, not compiled yet.

    Attributes
    ----------
    passes
        The launches.
    cycles
        The estimated cost.
    """

    passes: Passes
    cycles: float

    @property
    def key(self) -> str:
        """The kernel, its threads and its splits."""
        return self.passes.key

    def plan(self, gpu: Gpu) -> LaunchPlan:
        """Compile it."""
        passes = self.passes
        compiled = passes.compile(gpu)
        first, last = passes.passes[0].reduction, passes.passes[-1].reduction
        return LaunchPlan(
            name=f"sum {first.dtype}",
            gpu=gpu,
            launches=passes.launches(compiled, (Buffer(0),), Buffer(1)),
            alignments=(passes.operand_alignment, last.out_dtype.itemsize),
            workspace_bytes=passes.workspace_bytes,
            reason=passes.reason,
        )


def sum_candidates(
    dims: SummedDims, dtype: _Dtype, out_dtype: _Dtype, gpu: Gpu
) -> list[SumCandidate] | NoKernel:
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
    sizes, kept = list(dims.sizes), [not reduced for reduced in dims.reduced]
    if dtype in _COMPLEX:
        # Real and imaginary parts are two columns.
        if kept[-1]:
            sizes[-1] *= 2
        else:
            sizes.append(2)
            kept.append(True)
        dtype = out_dtype = _COMPLEX[dtype]
    reduction = _reduction(sizes, kept, dtype, total, out_dtype)
    if len(reduction.batch) > MAX_BATCH_DIMS:
        return NoKernel(f"{len(sizes)} separate dimensions (at most {MAX_BATCH_DIMS + 2})")
    found = reduction_passes(reduction, gpu)
    if not found:
        return NoKernel(f"sizes {dims.sizes} take more CTAs than a grid has")
    memory = reduction.bytes / gpu.rates.memory_bandwidth
    if found[0].cycles > _MAX_SLOWDOWN * (gpu.rates.launch_cycles + memory):
        return NoKernel("a CTA for each of many short sums is slower than XLA's kernel")
    return [SumCandidate(passes, passes.cycles) for passes in found]


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
    return plan_choice(workload.of_sum(dims, dtype, out_dtype), found, gpu)


def _reduction(
    sizes: Sequence[int], kept: Sequence[bool], dtype: _Dtype, total: _Dtype, out_dtype: _Dtype
) -> Reduction:
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    dims = list(zip(sizes, strides, kept, strict=True))
    # The kernel takes the innermost dimension and the next one, if one is kept and one is not.
    output = dims.pop() if kept[-1] else None
    k, k_stride, _ = dims.pop()
    if output is None:
        output = dims.pop() if dims else (1, k, True)
    batch = [(size, stride) for size, stride, is_kept in dims if is_kept]
    outer = [(size, stride) for size, stride, is_kept in dims if not is_kept]
    out = [output[0] * math.prod(size for size, _ in batch[i + 1 :]) for i in range(len(batch))]
    return Reduction(
        batch=tuple(size for size, _ in (*batch, *outer)),
        outputs=output[0],
        k=k,
        lhs_strides=(*(stride for _, stride in (*batch, *outer)), output[1], k_stride),
        rhs_strides=None,
        out_strides=(*out, *(0,) * len(outer), 1),
        dtype=dtype,
        sum_dtype=total,
        out_dtype=out_dtype,
        outer=len(outer),
    )
