"""Plans for decompositions of batches of small matrices, on ``linalg/matrix_{svd,eigh,qr}.cuh``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.candidate import Candidate
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import Gpu, power_of_two
from jax_tilekern.plans.launch import MAX_GRID, Buffer, Launch, LaunchPlan, NoKernel, Scalars
from jax_tilekern.plans.policy.choice import plan_choice
from jax_tilekern.plans.policy.workload import Workload, matrices_workload

_WARP = 32
# ``kThreadRows``: a thread holds a matrix of up to so many rows and columns.
_THREAD_ROWS = 4
_VECTOR_BYTES = 16


@dataclass(frozen=True)
class Decomposition:
    """A decomposition of a batch of contiguous matrices."""

    name: str  # "svd", "eigh" or "qr"
    count: int
    rows: int
    columns: int
    dtype: np.dtype[Any]
    # Further template arguments: whether vectors are computed, and whether bases are full, or which
    # triangle of a symmetric matrix is read.
    flags: tuple[bool, ...]

    @property
    def kernel(self) -> Kernel:
        sizes = (self.rows,) if self.name == "eigh" else (self.rows, self.columns)
        listed = ", ".join(map(str, (CXX_TYPES[self.dtype], *sizes, *map(int, self.flags))))
        return Kernel(f"linalg/matrix_{self.name}.cuh", f"tilekern::matrix_{self.name}<{listed}>")

    @property
    def workload(self) -> Workload:
        sizes = self.count, self.rows, self.columns
        return matrices_workload(self.name, sizes, 0, self.dtype, vectors=self.flags[0])

    @property
    def lanes(self) -> int:
        """Lanes that share a matrix: ``group_lanes`` of ``matrix_group.cuh``."""
        m, n = self.rows, self.columns
        if max(m, n) <= _THREAD_ROWS:
            return 1
        busy = {
            "svd": math.ceil(min(m, n) / 2),
            "eigh": math.ceil(n / 4),
            "qr": max(n, self._order),
        }[self.name]
        return min(_WARP, max(2, power_of_two(busy)))

    @property
    def blocks(self) -> int:
        return math.ceil(self.count / (_WARP // self.lanes))

    @property
    def shared_memory_bytes(self) -> int:
        """Bytes of shared memory of a warp: ``kElements`` of the kernel's sizes."""
        if self.lanes == 1:
            return _WARP * (_THREAD_ROWS**2 | 1) * self.dtype.itemsize
        size = _odd_multiple(self._elements, self._vector)
        return _WARP // self.lanes * size * self.dtype.itemsize

    @property
    def _vector(self) -> int:
        """Elements of a vector of shared memory."""
        return 1 if self.name == "qr" else _VECTOR_BYTES // self.dtype.itemsize

    @property
    def _order(self) -> int:
        """How many columns the orthogonal factor has."""
        return self.rows if self.flags[1] else min(self.rows, self.columns)

    @property
    def _elements(self) -> int:
        m, n, vectors = self.rows, self.columns, self.flags[0]
        short, long = sorted((m, n))
        short_stride, long_stride = (_odd_multiple(k, self._vector) for k in (short, long))
        if self.name == "eigh":
            return n * long_stride + 4 * math.ceil(n / self._vector) * self._vector
        if self.name == "qr":
            return (n + vectors * self._order) * _odd_multiple(m, self._vector) + short
        count = long if self.flags[1] else short
        square = short * short_stride
        reduced = short * long_stride if long > short else 0
        return reduced + square + vectors * (square + count * long_stride) + 5 * short


def plan_decomposition(
    problem: Decomposition, results: Sequence[int], gpu: Gpu
) -> LaunchPlan | NoKernel:
    """Plan and compile a decomposition.

    ``results`` has the position of the call's result for each result of the kernel; for one that
    the kernel does not write, it has that of another.
    """
    if problem.blocks > MAX_GRID[0]:
        return NoKernel(
            f"{problem.count} matrices take {problem.blocks} CTAs (at most {MAX_GRID[0]})"
        )
    shared = problem.shared_memory_bytes
    if shared > gpu.shared_memory_bytes:
        return NoKernel(
            f"matrices of {problem.rows}x{problem.columns} take {shared} bytes of shared memory "
            f"(at most {gpu.shared_memory_bytes} on {gpu.name})"
        )
    return plan_choice(problem.workload, [_Candidate(problem, tuple(results))], gpu)


@dataclass(frozen=True)
class _Candidate(Candidate):
    """The kernel, and where its results go."""

    problem: Decomposition
    results: tuple[int, ...]

    @property
    def key(self) -> str:
        return self.problem.name

    def plan(self, gpu: Gpu) -> LaunchPlan:
        return _plan(self.problem, self.results, gpu)


def _plan(problem: Decomposition, results: Sequence[int], gpu: Gpu) -> LaunchPlan:
    kernel = problem.kernel
    compiled = compile_kernels(kernel, arch=gpu.arch)
    launch = Launch(
        entry=compiled.entry(kernel.name),
        grid=(problem.blocks, 1, 1),
        block=(_WARP, 1, 1),
        shared_memory_bytes=problem.shared_memory_bytes,
        parameters=(
            Buffer(0),
            *(Buffer(1 + result) for result in results),
            Scalars.pack("q", problem.count),
        ),
    )
    lanes = f"{problem.lanes} lanes" if problem.lanes > 1 else "a thread"
    return LaunchPlan(
        name=f"matrix_{problem.name} {problem.dtype} {problem.rows}x{problem.columns}",
        gpu=gpu,
        launches=(launch,),
        alignments=(problem.dtype.itemsize,) * (2 + max(results)),
        reason=f"{problem.count} matrices, {lanes} each",
    )


def _odd_multiple(count: int, of: int) -> int:
    """Return ``odd_multiple`` of ``matrix_group.cuh``."""
    return (math.ceil(count / of) | 1) * of
