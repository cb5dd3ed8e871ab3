"""The kernels of operations on square matrices: what a planner returns for each platform.

Matrices up to ``MAX_SIZE`` have a kernel each. On a GPU larger ones are computed in blocks, or
inverted, solved and factored by a plan of several kernels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import Array

from jax_tilekern.interop import ffi
from jax_tilekern.ops.planned_kernel import planned_kernel
from jax_tilekern.partitioning import xla
from jax_tilekern.partitioning.xla import Place
from jax_tilekern.plans.cpu import current_cpu
from jax_tilekern.plans.gpu import NoGpu, current_gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.linalg import blocked_cholesky, blocked_lu_plans
from jax_tilekern.plans.linalg import small_matrices as plans
from jax_tilekern.plans.linalg.blocked import LargeMatrices, plan_blocks
from jax_tilekern.plans.linalg.decompositions import Decomposition, plan_decomposition
from jax_tilekern.plans.linalg.small_matrices import MAX_SIZE, Columns, SmallMatrices
from jax_tilekern.plans.policy import current_policy
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Outcome,
    PlannedKernel,
    Rewrite,
    obstacle,
)

TOO_LARGE = f"kernels are for matrices of up to {MAX_SIZE}x{MAX_SIZE}"
# A vector has one lane per matrix. Up to 16x16 the handler is as fast as LAPACK for one matrix too,
# and a matrix has the same bits in every batch.
_CPU_FEWEST = 4
_CPU_SMALL = 16
_CPU_MOST_COLUMNS = 64
# A matrix of the batch for so many rows, and a lane for so many rows, are as fast as LAPACK.
_CPU_ROWS_FOR_A_MATRIX = {ffi.CPU_MATRIX_SVD: 4, ffi.CPU_MATRIX_EIGH: 4, ffi.CPU_MATRIX_QR: 16}
_CPU_JACOBI_ROWS_FOR_A_LANE = 8
# Template arguments of the CUDA kernels behind the sizes.
_FLAGS = {
    "svd": ("vectors", "full"),
    "eigh": ("vectors", "lower", "symmetrize"),
    "qr": ("vectors", "full"),
}


def refusal(size: Any, dtype: Any) -> str | None:
    """Return why no kernel takes matrices of a size and type, or ``None`` if one may."""
    if dtype not in plans.DTYPES:
        return f"no kernel for matrices of {dtype}"
    if not isinstance(size, int):
        return "a plan needs every size, and this shape is symbolic"
    if xla.is_traced_partly_manual():
        # No kernel would run, and JAX's derivatives reuse the factors that it has gathered.
        return obstacle(Place.PARTLY_MANUAL, ())
    return None


def refused(a: Any, *avals: Any, **params: Any) -> Fallback | None:
    """Return why a call has no kernel, or ``None`` if it may have one."""
    why = refusal(a.shape[-1], a.dtype)
    return None if why is None else Fallback(why)


def has_solve_kernel(a: Any) -> bool:
    """Return whether a GPU may have a kernel or a plan for systems with matrices like ``a``."""
    matrices = _matrices(a)
    return matrices.size <= MAX_SIZE or blocked_lu_plans.covers(*dataclasses.astuple(matrices))


def _matrices(aval: Any) -> SmallMatrices:
    return SmallMatrices(math.prod(aval.shape[:-2]), aval.shape[-1], aval.dtype)


def _columns(aval: Any, left_side: bool) -> Columns:
    return Columns(aval.shape[-1 if left_side else -2], contiguous=not left_side)


def in_blocks(
    name: str, function: Callable[..., Any], operands: Sequence[Operand], **params: Any
) -> Rewrite | Fallback:
    (*leading, size, _), dtype = operands[0].aval.shape, operands[0].aval.dtype
    columns = size
    if name == "triangular_solve":
        columns = operands[1].aval.shape[-1 if params["left_side"] else -2]
    matrices = LargeMatrices(name, math.prod(leading), size, columns, dtype)
    try:
        block = plan_blocks(matrices, current_gpu())
    except NoGpu as error:
        return Fallback(str(error))
    if isinstance(block, NoKernel):
        return Fallback(block.reason)

    def computed(*values: Array) -> tuple[Array, ...]:
        return (function(*values, block=block, **params),)

    return Rewrite(f"products of blocks of {block} columns", computed)


def inverse_of_large(
    in_blocks: Callable[..., Rewrite | Fallback], operands: Sequence[Operand]
) -> Outcome:
    """Plan an inverse: in one plan, or in blocks for the sizes that have none."""
    (a,) = operands
    matrices = _matrices(a.aval)
    if not blocked_lu_plans.covers(*dataclasses.astuple(matrices)):
        return in_blocks(operands)
    return planned_kernel((a.value,), blocked_lu_plans.plan_inverse, matrices.size, matrices.dtype)


def cholesky_of_large(operands: Sequence[Operand], *, symmetrize: bool) -> Outcome:
    (a,) = operands
    matrices = _matrices(a.aval)
    if not blocked_cholesky.covers(*dataclasses.astuple(matrices)):
        return Fallback(f"{TOO_LARGE}, and for {blocked_cholesky.COVERED}")
    problem = matrices.count, matrices.size, symmetrize
    return planned_kernel((a.value,), blocked_cholesky.plan_cholesky, *problem)


def solution_of_large(
    transposed: Callable[..., Any], operands: Sequence[Operand], *, transpose: bool, **_: bool
) -> Outcome:
    """Plan a solution; ``transposed`` solves a transposed system."""
    a, b = operands
    matrices = _matrices(a.aval)
    if not blocked_lu_plans.covers(*dataclasses.astuple(matrices)):
        sizes = f"{blocked_lu_plans.MIN_ROWS} to {blocked_lu_plans.MAX_ROWS}"
        return Fallback(f"{TOO_LARGE}, and for one matrix of {sizes} rows")
    if transpose:
        return Rewrite("the transposed matrix", transposed)
    columns = b.aval.shape[-1]
    if columns > blocked_lu_plans.MAX_COLUMNS:
        return Fallback(f"{columns} right-hand sides (at most {blocked_lu_plans.MAX_COLUMNS})")
    problem = matrices.size, columns, matrices.dtype
    return planned_kernel((a.value, b.value), blocked_lu_plans.plan_solution, *problem)


def matrix_on_cuda(
    kernel: Callable[..., plans.MatrixKernel],
    large: Callable[..., Outcome],
    operands: Sequence[Operand],
    results: Sequence[Any],
    **params: Any,
) -> Outcome:
    """Plan the kernel for small matrices of one operand, or what ``large`` plans."""
    (a,) = operands
    if a.aval.shape[-1] > MAX_SIZE:
        return large(operands, **params)
    chosen = kernel(_matrices(a.aval), **params)
    return planned_kernel((a.value,), plans.plan_matrices, chosen, len(results))


def system_on_cuda(
    kernel: Callable[..., plans.MatrixKernel],
    large: Callable[..., Outcome],
    operands: Sequence[Operand],
    _: Any,
    *,
    left_side: bool = True,
    transpose: bool,
    **params: Any,
) -> Outcome:
    """Plan the kernel for small systems of equations, or what ``large`` plans."""
    a, b = operands
    if a.aval.shape[-1] > MAX_SIZE:
        return large(operands, left_side=left_side, transpose=transpose, **params)
    columns = _columns(b.aval, left_side)
    # x @ a = b is a system with the transposed matrix, whose right-hand sides are the rows of b.
    chosen = kernel(_matrices(a.aval), columns, transpose=transpose == left_side, **params)
    return planned_kernel((a.value, b.value), plans.plan_columns, chosen, columns)


def matrix_on_cpu(
    target: str, operands: Sequence[Operand], _: Any, **params: bool
) -> PlannedKernel | Fallback:
    """Plan the handler for the matrices of one operand."""
    (a,) = operands
    return _cpu_kernel(target, _matrices(a.aval), (a.value,), **params)


def system_on_cpu(
    operands: Sequence[Operand],
    _: Any,
    *,
    left_side: bool = True,
    transpose: bool,
    lower: bool | None = None,
    unit_diagonal: bool = False,
) -> PlannedKernel | Fallback:
    """Plan the handler for systems of equations."""
    a, b = operands
    columns = _columns(b.aval, left_side)
    if columns.count > _CPU_MOST_COLUMNS:
        return Fallback(f"{columns.count} right-hand sides (at most {_CPU_MOST_COLUMNS} on a CPU)")
    return _cpu_kernel(
        ffi.CPU_MATRIX_SOLVE,
        _matrices(a.aval),
        (a.value, b.value),
        triangle=0 if lower is None else 1 if lower else 2,
        contiguous=columns.contiguous,
        transpose=transpose == left_side,
        unit_diagonal=unit_diagonal,
    )


def decomposition_on_cpu(
    target: str, operands: Sequence[Operand], _: Any, **params: bool
) -> PlannedKernel | Fallback:
    """Plan the handler that decomposes the matrices of one operand."""
    (a,) = operands
    *leading, rows, columns = a.aval.shape
    count, dtype = math.prod(leading), a.aval.dtype
    why = _why_lapack_is_faster(target, count, min(rows, columns), dtype.itemsize)
    if why is not None and current_policy() != "kernels":
        return Fallback(why)
    return PlannedKernel(
        f"{target.removeprefix('jax_tilekern_')} {dtype}",
        f"{count} matrices {rows}x{columns}, a vector lane each",
        ffi.CpuCall(target, {name: int(value) for name, value in params.items()}),
        (a.value,),
    )


def decomposition_on_cuda(
    name: str, operands: Sequence[Operand], results: Sequence[Any], **params: bool
) -> Outcome:
    """Plan the kernel that decomposes the matrices of one operand."""
    (a,) = operands
    *leading, rows, columns = a.aval.shape
    flags = tuple(bool(params[flag]) for flag in _FLAGS[name])
    problem = Decomposition(name, math.prod(leading), rows, columns, a.aval.dtype, flags)
    # A kernel that computes no vectors has the parameters of one that does.
    buffers = range(3 if name == "svd" else 2)
    written = tuple(buffers) if params["vectors"] else (0,) * len(buffers)
    return planned_kernel((a.value,), plan_decomposition, problem, written)


def _why_lapack_is_faster(target: str, count: int, size: int, itemsize: int) -> str | None:
    """Return why LAPACK decomposes matrices as fast as the handler, if it does.

    The handler takes as long for one matrix as for a vector of matrices. Jacobi's method takes
    several times as many operations as LAPACK's.
    """
    each = _CPU_ROWS_FOR_A_MATRIX[target]
    if count * each < size:
        fewest = math.ceil(size / each)
        return f"fewer than {fewest} matrices of this size leave most lanes of a vector empty"
    lanes = current_cpu().vector_bytes // itemsize
    if target != ffi.CPU_MATRIX_QR and size > _CPU_JACOBI_ROWS_FOR_A_LANE * lanes:
        return f"a vector has {lanes} lanes, and LAPACK is faster for larger matrices"
    return None


def _cpu_kernel(
    target: str, matrices: SmallMatrices, values: Sequence[Any], **attributes: int
) -> PlannedKernel | Fallback:
    if matrices.size > MAX_SIZE:
        return Fallback(TOO_LARGE)
    if matrices.count < _CPU_FEWEST and matrices.size > _CPU_SMALL:
        return Fallback(
            f"fewer than {_CPU_FEWEST} matrices of more than {_CPU_SMALL} rows leave most lanes of "
            "a vector empty"
        )
    return PlannedKernel(
        f"{target.removeprefix('jax_tilekern_')} {matrices.dtype}",
        f"{matrices.count} matrices {matrices.size}x{matrices.size}, a vector lane each",
        ffi.CpuCall(target, {name: int(value) for name, value in attributes.items()}),
        values,
    )
