"""The plan for elementwise addition (``add.cuh``): sizes and a GPU in, a launch plan out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import VECTOR_BYTES, Gpu
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, NoKernel, Scalars
from jax_tilekern.plans.policy.setting import current_policy

_MAX_DIMS = 6
_THREADS = 256
_MAX_ELEMENTS = 2**32 - _THREADS * VECTOR_BYTES

# Element types that kernels add, on every platform.
_NAMES = "f2 f4 f8 i1 i2 i4 i8 u1 u2 u4 u8"
ADDED_DTYPES = tuple(np.dtype(t) for t in (*_NAMES.split(), ml_dtypes.bfloat16))


class AddedDims(NamedTuple):
    """The fewest dimensions that describe how two row-major arrays are broadcast and added."""

    sizes: tuple[int, ...]  # of the result, at least one
    lhs_strides: tuple[int, ...]  # in elements; 0 where the operand is broadcast, and last 0 or 1
    rhs_strides: tuple[int, ...]

    @classmethod
    def of(cls, lhs: Sequence[int], rhs: Sequence[int]) -> AddedDims:
        """Merge neighbouring dimensions of two shapes of one rank, whose sizes are equal or 1."""
        strides = zip(_row_major(lhs), _row_major(rhs), strict=True)
        dims: list[tuple[int, int, int]] = []
        for size, (left, right) in zip(map(max, lhs, rhs), strides, strict=True):
            if size == 1:
                continue
            if dims and dims[-1][1:] == (left * size, right * size):
                dims[-1] = dims[-1][0] * size, left, right
            else:
                dims.append((size, left, right))
        return cls(*zip(*(dims or [(1, 1, 1)]), strict=True))

    def __str__(self) -> str:
        return f"sizes {self.sizes}, strides {self.lhs_strides} and {self.rhs_strides}"


def _row_major(shape: Sequence[int]) -> list[int]:
    """Return strides in elements, 0 for dimensions of size 1."""
    return [0 if size == 1 else math.prod(shape[i + 1 :]) for i, size in enumerate(shape)]


def plan_add(dims: AddedDims, dtype: np.dtype[Any], gpu: Gpu) -> LaunchPlan | NoKernel:
    if current_policy() != "kernels":
        return NoKernel("XLA fuses an addition with what surrounds it")
    elements, unused = math.prod(dims.sizes), _MAX_DIMS - len(dims.sizes)
    if unused < 0 or elements > _MAX_ELEMENTS:
        return NoKernel(f"{dims}: more than {_MAX_DIMS} dimensions, or {_MAX_ELEMENTS} elements")
    shape = Scalars.pack(
        f"{2 * _MAX_DIMS}q{_MAX_DIMS + 1}I",
        *(stride for strides in dims[1:] for stride in (*(0,) * unused, *strides)),
        *(*(1,) * unused, *dims.sizes),
        elements,
    )
    # The vector of a thread lies in one row.
    vector = math.gcd(VECTOR_BYTES // dtype.itemsize, dims.sizes[-1])
    kernel = add_kernel(dtype, vector)
    launch = Launch(
        entry=compile_kernels(kernel, arch=gpu.arch).entry(kernel.name),
        grid=(math.ceil(elements / (_THREADS * vector)), 1, 1),
        block=(_THREADS, 1, 1),
        parameters=(Buffer(0), Buffer(1), Buffer(2), shape),
    )
    return LaunchPlan(
        name=f"add {dtype}",
        gpu=gpu,
        launches=(launch,),
        alignments=(vector * dtype.itemsize,) * 3,
        reason=str(dims),
    )


def add_kernel(dtype: np.dtype[Any], vector: int) -> Kernel:
    """Return the kernel whose threads add vectors; signed integers wrap as unsigned."""
    if dtype.kind == "i":
        dtype = np.dtype(f"u{dtype.itemsize}")
    return Kernel("add.cuh", f"tilekern::add<{CXX_TYPES[dtype]}, {vector * dtype.itemsize}>")
