"""The plan for elementwise addition (``add.cuh``): sizes and a GPU in, a launch plan out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, NoKernel, Scalars
from jax_tilekern.plans.policy.setting import current_policy

MAX_DIMS = 6
_THREADS = 256
_MAX_THREADS = 2**32 - _THREADS
_VECTOR_BYTES = 16
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

# Element types that kernels add, on every platform.
DTYPES = tuple(
    np.dtype(t)
    for t in (
        np.float64, np.float32, ml_dtypes.bfloat16, np.float16, np.int64, np.int32, np.int16,
        np.int8, np.uint64, np.uint32, np.uint16, np.uint8,
    )
)  # fmt: skip


class AddedDims(NamedTuple):
    """The fewest dimensions that describe how two row-major arrays are broadcast and added.

    Attributes
    ----------
    sizes
        Sizes of the result; there is at least one.
    lhs_strides, rhs_strides
        Elements between neighbours in each dimension; 0 where an operand is broadcast. The last
        ones are 0 or 1.
    """

    sizes: tuple[int, ...]
    lhs_strides: tuple[int, ...]
    rhs_strides: tuple[int, ...]

    @classmethod
    def of(cls, lhs: Sequence[int], rhs: Sequence[int]) -> AddedDims:
        """Merge the dimensions of two shapes of one rank, whose sizes are equal or 1.

        Neighbouring dimensions are merged where they are contiguous in both operands.
        """
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


def plan_add(dims: AddedDims, dtype: np.dtype[Any], gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan and compile a sum of two arrays of one type.

    Raises
    ------
    NvrtcNotFound
        If there is no NVRTC to compile the kernel with.
    """
    if current_policy() != "kernels":
        return NoKernel("XLA fuses an addition with what surrounds it")
    if len(dims.sizes) > MAX_DIMS:
        return NoKernel(f"{len(dims.sizes)} separate dimensions (at most {MAX_DIMS})")
    *outer, columns = dims.sizes
    vector = vector_length(dims, dtype.itemsize)
    vectors = math.ceil(columns / vector)
    threads = math.prod(outer) * vectors
    if threads > _MAX_THREADS:
        return NoKernel(f"{threads} threads (at most {_MAX_THREADS})")

    unused = MAX_DIMS - len(dims.sizes)
    shape = Scalars.pack(
        f"{2 * MAX_DIMS + 1}q{MAX_DIMS + 1}I",
        *(*(0,) * unused, *dims.lhs_strides),
        *(*(0,) * unused, *dims.rhs_strides),
        columns,
        *(*(1,) * unused, *outer),
        vectors,
        threads,
    )
    kernel = add_kernel(dtype, vector)
    compiled = compile_kernels(kernel, arch=gpu.arch)
    launch = Launch(
        entry=compiled.entry(kernel.name),
        grid=(math.ceil(threads / _THREADS), 1, 1),
        block=(_THREADS, 1, 1),
        parameters=(Buffer(0), Buffer(1), Buffer(2), shape),
    )
    aligned = vector * dtype.itemsize
    return LaunchPlan(
        name=f"add {dtype}, {aligned}-byte vectors",
        gpu=gpu,
        launches=(launch,),
        alignments=(
            aligned if dims.lhs_strides[-1] else dtype.itemsize,
            aligned if dims.rhs_strides[-1] else dtype.itemsize,
            aligned,
        ),
        reason=str(dims),
    )


def add_kernel(dtype: np.dtype[Any], vector: int) -> Kernel:
    """Return the kernel that adds ``vector`` elements at once; signed integers wrap as unsigned."""
    if dtype.kind == "i":
        dtype = np.dtype(_UNSIGNED[dtype.itemsize])
    return Kernel("add.cuh", f"tilekern::add<{CXX_TYPES[dtype]}, {vector}>")


def vector_length(dims: AddedDims, itemsize: int) -> int:
    """Return how many elements a thread loads at once: 16 bytes if all rows are aligned.

    A single row may end with part of a vector.
    """
    widest = _VECTOR_BYTES // itemsize
    *outer, columns = dims.sizes
    if not outer and columns >= widest:
        return widest
    # A kernel reads single elements of an operand that is broadcast along rows.
    read = [strides[:-1] for strides in dims[1:] if strides[-1]]
    return math.gcd(widest, columns, *itertools.chain(*read))


def _row_major(shape: Sequence[int]) -> list[int]:
    """Return the strides of a dense array, 0 for dimensions of size 1."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return [0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True)]
