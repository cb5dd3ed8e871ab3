"""The plans for small square matrices (``matrix_*.cuh``): sizes and a GPU in, a launch plan out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import MAX_GRID, Buffer, Launch, LaunchPlan, NoKernel, Scalars

# What kernels take, on every platform.
DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
MAX_SIZE = 64

# The first architecture that reduces integers over a warp in one instruction.
_MIN_COMPUTE_CAPABILITY = (8, 0)
_VECTOR_BYTES = 16
_MAX_COLUMNS = 8  # right-hand sides that a thread has at once
# Beyond so many right-hand sides, blocks share them and factor the same matrices again, where
# there are too few matrices for the GPU.
_SHARED_COLUMNS = 64
_ENOUGH_WAVES = 4


@dataclass(frozen=True)
class SmallMatrices:
    """A batch of square matrices that lie one after another.

    Attributes
    ----------
    count
        How many there are.
    size
        Rows and columns of each, at most ``MAX_SIZE``.
    dtype
        Of their elements, one of ``DTYPES``.
    """

    count: int
    size: int
    dtype: np.dtype[Any]

    @property
    def lanes(self) -> int:
        """Lanes that share a matrix, one row each."""
        return max(2, 1 << (self.size - 1).bit_length())

    @property
    def team(self) -> int:
        """Threads that synchronise with each other."""
        return max(32, self.lanes)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 if self.team == 32 else self.team

    @property
    def blocks(self) -> int:
        """Blocks that have all of the matrices."""
        return math.ceil(self.count / (self.threads // self.lanes))

    @property
    def alignment(self) -> int:
        """Bytes to which a team's first matrix is aligned: what it loads and stores at once."""
        elements = self.team // self.lanes * self.size**2
        return math.gcd(_VECTOR_BYTES, elements * self.dtype.itemsize)

    def kernel(self, file: str, name: str, *arguments: int) -> Kernel:
        """Return a kernel for these matrices, with further template arguments."""
        listed = ", ".join(map(str, (CXX_TYPES[self.dtype], self.size, *map(int, arguments))))
        return Kernel(file, f"tilekern::{name}<{listed}>")


@dataclass(frozen=True)
class Columns:
    """Right-hand sides of each matrix of a batch.

    Attributes
    ----------
    count
        How many each matrix has.
    contiguous
        Whether each is a run of memory, and not a column of a row-major matrix.
    """

    count: int
    contiguous: bool = False


def inverse_kernel(matrices: SmallMatrices) -> Kernel:
    """Return the kernel that inverts."""
    return matrices.kernel("linalg/matrix_inverse.cuh", "matrix_inverse")


def lu_kernel(matrices: SmallMatrices) -> Kernel:
    """Return the kernel that factors with partial pivoting."""
    return matrices.kernel("linalg/matrix_factor.cuh", "matrix_lu")


def cholesky_kernel(matrices: SmallMatrices, *, symmetrize: bool) -> Kernel:
    """Return the kernel that factors positive definite matrices."""
    return matrices.kernel("linalg/matrix_factor.cuh", "matrix_cholesky", symmetrize)


def solve_kernel(matrices: SmallMatrices, columns: Columns, *, transpose: bool) -> Kernel:
    """Return the kernel that solves with partial pivoting."""
    at_once = columns_at_once(columns)
    return matrices.kernel("linalg/matrix_solve.cuh", "matrix_solve", at_once, transpose)


def triangular_solve_kernel(
    matrices: SmallMatrices,
    columns: Columns,
    *,
    lower: bool,
    transpose: bool,
    unit_diagonal: bool,
) -> Kernel:
    """Return the kernel that solves with one triangle."""
    choices = (columns_at_once(columns), lower, transpose, unit_diagonal)
    return matrices.kernel("linalg/matrix_solve.cuh", "matrix_triangular_solve", *choices)


def columns_at_once(columns: Columns) -> int:
    """Return how many right-hand sides a thread has at once, a power of two."""
    return min(_MAX_COLUMNS, 1 << (columns.count - 1).bit_length())


def plan_matrices(
    matrices: SmallMatrices, kernel: Kernel, results: int, gpu: Gpu
) -> LaunchPlan | NoKernel:
    """Plan and compile a kernel of matrices alone.

    Parameters
    ----------
    matrices
        The operand, and the kernel's first result.
    kernel
        One of those above.
    results
        How many there are; those after the first are of integers.
    gpu
        The GPU at hand.

    Raises
    ------
    NvrtcNotFound
        If there is no NVRTC to compile the kernel with.
    """
    integers = (np.dtype(np.int32).itemsize,) * (results - 1)
    return _plan(
        matrices,
        kernel,
        gpu,
        (matrices.blocks, 1, 1),
        Scalars.pack("q", matrices.count),
        (matrices.alignment, matrices.alignment, *integers),
    )


def plan_columns(
    matrices: SmallMatrices, columns: Columns, kernel: Kernel, gpu: Gpu
) -> LaunchPlan | NoKernel:
    """Plan and compile a kernel of matrices and right-hand sides, whose result is as the latter.

    Raises
    ------
    NvrtcNotFound
        If there is no NVRTC to compile the kernel with.
    """
    if columns.count >= 2**31:
        return NoKernel(f"{columns.count} right-hand sides (at most {2**31 - 1})")
    each = columns_per_block(matrices, columns, gpu)
    strides = (1, matrices.size) if columns.contiguous else (columns.count, 1)
    itemsize = matrices.dtype.itemsize
    return _plan(
        matrices,
        kernel,
        gpu,
        (matrices.blocks, math.ceil(columns.count / each), 1),
        Scalars.pack("qqqii", matrices.count, *strides, columns.count, each),
        (matrices.alignment, itemsize, itemsize),
    )


def columns_per_block(matrices: SmallMatrices, columns: Columns, gpu: Gpu) -> int:
    """Return how many right-hand sides of its matrices a block takes."""
    if matrices.blocks >= _ENOUGH_WAVES * gpu.sm_count:
        return columns.count
    least = math.ceil(columns.count / MAX_GRID[1] / _MAX_COLUMNS) * _MAX_COLUMNS
    return min(columns.count, max(_SHARED_COLUMNS, least))


def _plan(
    matrices: SmallMatrices,
    kernel: Kernel,
    gpu: Gpu,
    grid: tuple[int, int, int],
    scalars: Scalars,
    alignments: tuple[int, ...],
) -> LaunchPlan | NoKernel:
    if gpu.compute_capability < _MIN_COMPUTE_CAPABILITY:
        return NoKernel(f"{gpu.arch} is older than sm_80")
    if grid[0] > MAX_GRID[0]:
        return NoKernel(f"{matrices.count} matrices take {grid[0]} blocks (at most {MAX_GRID[0]})")
    compiled = compile_kernels(kernel, arch=gpu.arch)
    launch = Launch(
        entry=compiled.entry(kernel.name),
        grid=grid,
        block=(matrices.threads, 1, 1),
        parameters=(*map(Buffer, range(len(alignments))), scalars),
    )
    family = kernel.name.removeprefix("tilekern::").partition("<")[0]
    size = matrices.size
    return LaunchPlan(
        name=f"{family} {matrices.dtype} {size}x{size}",
        gpu=gpu,
        launches=(launch,),
        alignments=alignments,
        reason=f"{matrices.count} matrices, {matrices.lanes} lanes each",
    )
