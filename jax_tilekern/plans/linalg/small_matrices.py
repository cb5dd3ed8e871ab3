"""Plans for batches of small square matrices, on the kernels of ``linalg/matrix_*.cuh``."""

from __future__ import annotations

import dataclasses
import math
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

# Element types and the maximum size of kernels, on every platform.
DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
MAX_SIZE = 64

_VECTOR_BYTES = 16
_MAX_COLUMNS = 8  # right-hand sides of a thread at a time
# With more right-hand sides than this, several CTAs factor the same matrices and divide the sides,
# if there are too few matrices for the GPU.
_SHARED_COLUMNS = 64
_ENOUGH_WAVES = 4
# Fewer CTAs leave SMs idle.
_FEW_CTAS = 128
_WARP = 32
# A thread solves a system of at most so many rows by itself, with few right-hand sides.
_THREAD_ROWS = 8
_THREAD_COLUMNS = 2


@dataclass(frozen=True)
class SmallMatrices:
    """A batch of contiguous square matrices."""

    count: int  # number of matrices
    size: int  # rows and columns of each, at most MAX_SIZE
    dtype: np.dtype[Any]  # one of DTYPES

    def kernel(self, file: str, name: str, *arguments: int) -> Kernel:
        """Return a kernel for these matrices, with more template arguments."""
        listed = ", ".join(map(str, (CXX_TYPES[self.dtype], self.size, *map(int, arguments))))
        return Kernel(f"linalg/{file}.cuh", f"tilekern::{name}<{listed}>")

    def with_row_lanes(self, name: str, file: str, *arguments: int) -> MatrixKernel:
        """Return the kernel ``matrix_{name}``, whose lanes hold one row each."""
        lanes = max(2, power_of_two(self.size))
        threads = 128 if lanes <= _WARP else lanes
        kernel = self.kernel(file, f"matrix_{name}", *arguments)
        return MatrixKernel(name, self, kernel, lanes, threads)

    def workload(self, name: str, sides: int) -> Workload:
        return matrices_workload(name, (self.count, self.size, self.size), sides, self.dtype)


@dataclass(frozen=True)
class MatrixKernel:
    """A kernel, and how it divides matrices among threads."""

    name: str  # such as "inverse"
    matrices: SmallMatrices
    kernel: Kernel
    lanes: int  # lanes that share a matrix, a power of two
    threads: int = _WARP  # of a CTA
    # Right-hand sides at a time where CTAs share matrices without factoring them, or 0.
    columns: int = 0

    @property
    def blocks(self) -> int:
        return math.ceil(self.matrices.count / (self.threads // self.lanes))

    @property
    def alignment(self) -> int:
        """Alignment of the matrices that threads which synchronise load at once, in bytes."""
        together = max(_WARP, self.lanes) // self.lanes
        elements = together * self.matrices.size**2
        return math.gcd(_VECTOR_BYTES, elements * self.matrices.dtype.itemsize)


@dataclass(frozen=True)
class Columns:
    """Right-hand sides of each matrix of a batch."""

    count: int  # of each matrix
    contiguous: bool = False  # whether each is contiguous, and not a column of a row-major matrix


def inverse_kernel(matrices: SmallMatrices) -> MatrixKernel:
    return matrices.with_row_lanes("inverse", "matrix_inverse")


def lu_kernel(matrices: SmallMatrices) -> MatrixKernel:
    return matrices.with_row_lanes("lu", "matrix_lu")


def cholesky_kernel(matrices: SmallMatrices, *, symmetrize: bool) -> MatrixKernel:
    kernel = matrices.kernel("matrix_cholesky", "matrix_cholesky", symmetrize)
    size = matrices.size
    rows = min(size, 2 if size > 16 else _VECTOR_BYTES // matrices.dtype.itemsize)  # of a lane
    return MatrixKernel("cholesky", matrices, kernel, power_of_two(math.ceil(size / rows)))


def solve_kernel(matrices: SmallMatrices, columns: Columns, *, transpose: bool) -> MatrixKernel:
    if matrices.size <= _THREAD_ROWS and columns.count <= _THREAD_COLUMNS:
        kernel = matrices.kernel("matrix_solve_thread", "thread_matrix_solve", transpose)
        return MatrixKernel("solve", matrices, kernel, lanes=1)
    at_once = columns_at_once(columns)
    return matrices.with_row_lanes("solve", "matrix_solve", at_once, transpose)


def triangular_solve_kernel(
    matrices: SmallMatrices,
    columns: Columns,
    *,
    lower: bool,
    transpose: bool,
    unit_diagonal: bool,
) -> MatrixKernel:
    def kernel(at_once: int) -> MatrixKernel:
        choices = (at_once, lower, transpose, unit_diagonal)
        found = matrices.with_row_lanes("triangular_solve", "matrix_solve", *choices)
        return dataclasses.replace(found, columns=at_once)

    # A thread divides one side after the other, so few matrices have more CTAs of fewer sides.
    at_once = columns_at_once(columns)
    while at_once > 1 and kernel(1).blocks * columns.count < _FEW_CTAS * at_once:
        at_once //= 2
    return kernel(at_once)


def columns_at_once(columns: Columns) -> int:
    """Return how many right-hand sides a thread has at a time, a power of two."""
    return min(_MAX_COLUMNS, power_of_two(columns.count))


def plan_matrices(kernel: MatrixKernel, results: int, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan and compile a kernel of matrices; results after the first are of integers."""
    integers = (np.dtype(np.int32).itemsize,) * (results - 1)
    scalars = Scalars.pack("q", kernel.matrices.count)
    alignments = (kernel.alignment, kernel.alignment, *integers)
    return _choice(_Candidate(kernel, 1, scalars, alignments), 0, gpu)


def plan_columns(kernel: MatrixKernel, columns: Columns, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan and compile a kernel of matrices and right-hand sides, whose shape the result has."""
    if columns.count >= 2**31:
        return NoKernel(f"{columns.count} right-hand sides (at most {2**31 - 1})")
    matrices = kernel.matrices
    each = columns_per_block(kernel, columns, gpu)
    strides = (1, matrices.size) if columns.contiguous else (columns.count, 1)
    itemsize = matrices.dtype.itemsize
    parts = math.ceil(columns.count / each)
    scalars = Scalars.pack("qqqii", matrices.count, *strides, columns.count, each)
    alignments = (kernel.alignment, itemsize, itemsize)
    return _choice(_Candidate(kernel, parts, scalars, alignments), columns.count, gpu)


def columns_per_block(kernel: MatrixKernel, columns: Columns, gpu: Gpu) -> int:
    """Return how many right-hand sides of its matrices each CTA solves."""
    share = kernel.blocks / (_ENOUGH_WAVES * gpu.sm_count)
    if share >= 1:
        return columns.count
    if not kernel.columns:
        least = math.ceil(columns.count / MAX_GRID[1] / _MAX_COLUMNS) * _MAX_COLUMNS
        return min(columns.count, max(_SHARED_COLUMNS, least))
    wanted = columns.count * max(share, 1 / MAX_GRID[1])
    return min(columns.count, math.ceil(wanted / kernel.columns) * kernel.columns)


@dataclass(frozen=True)
class _Candidate(Candidate):
    """A kernel with its parameters.

    ``parts`` are CTAs that solve for right-hand sides of the same matrices.
    """

    kernel: MatrixKernel
    parts: int
    scalars: Scalars
    alignments: tuple[int, ...]

    @property
    def key(self) -> str:
        return self.kernel.name

    def plan(self, gpu: Gpu) -> LaunchPlan:
        matrices, kernel, lanes = self.kernel.matrices, self.kernel.kernel, self.kernel.lanes
        compiled = compile_kernels(kernel, arch=gpu.arch)
        launch = Launch(
            entry=compiled.entry(kernel.name),
            grid=(self.kernel.blocks, self.parts, 1),
            block=(self.kernel.threads, 1, 1),
            parameters=(*map(Buffer, range(len(self.alignments))), self.scalars),
        )
        family = kernel.name.removeprefix("tilekern::").partition("<")[0]
        each = f"{lanes} lanes" if lanes > 1 else "a thread"
        return LaunchPlan(
            name=f"{family} {matrices.dtype} {matrices.size}x{matrices.size}",
            gpu=gpu,
            launches=(launch,),
            alignments=self.alignments,
            reason=f"{matrices.count} matrices, {each} each",
        )


def _choice(candidate: _Candidate, sides: int, gpu: Gpu) -> LaunchPlan | NoKernel:
    kernel = candidate.kernel
    if kernel.blocks > MAX_GRID[0]:
        return NoKernel(
            f"{kernel.matrices.count} matrices take {kernel.blocks} CTAs (at most {MAX_GRID[0]})"
        )
    return plan_choice(kernel.matrices.workload(kernel.name, sides), [candidate], gpu)
