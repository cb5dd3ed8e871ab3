"""Plans for transposes on CUDA: which kernel moves a permutation's elements, and by which tile.

In the kernels, the dimension that is innermost in the source numbers *columns*, the one that is
innermost in the result numbers *rows*, and all others are *outer*. A permutation that keeps the
innermost dimension copies rows (``transpose/rows.cuh``). Another one moves tiles of any alignment
(``transpose/tiles.cuh``), if its rows and columns have 32 bytes and more.
"""

from __future__ import annotations

from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel
from jax_tilekern.plans.policy import plan_choice
from jax_tilekern.plans.policy.workload import transpose_workload
from jax_tilekern.plans.transpose.candidate import TransposeCandidate, row_transpose, tile_transpose
from jax_tilekern.plans.transpose.permutation import Permutation
from jax_tilekern.plans.transpose.shape import MAX_OUTER_DIMS, SECTOR_BYTES, Matrices

# Smaller matrices leave threads of a CTA without work.
_MIN_MATRIX_BYTES = 2048
# The maximum number of CTAs, and of what kernels divide.
_MAX_COUNT = 2**31 - 1


def plan_transpose(permutation: Permutation, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Compile the kernel of a permutation, if the policy chooses it.

    Parameters
    ----------
    permutation
        Reduced, of at least two dimensions.
    gpu
        The one to plan for.

    Raises
    ------
    NvrtcNotFound
        If there is no NVRTC to compile the kernel with.
    """
    found = transpose_candidate(permutation)
    if isinstance(found, NoKernel):
        return found
    return plan_choice(transpose_workload(permutation), [found], gpu)


def transpose_candidate(permutation: Permutation) -> TransposeCandidate | NoKernel:
    """Return the way to compute a reduced permutation, or why there is none."""
    permutation = permutation.widened
    dims = len(permutation.sizes)
    if dims - (1 if permutation.keeps_innermost else 2) > MAX_OUTER_DIMS:
        return NoKernel(f"{dims} dimensions are moved, more than kernels take")
    if permutation.keeps_innermost:
        shortest, found = permutation.row_bytes, row_transpose(permutation)
    else:
        matrices = Matrices.of(permutation)
        rows, columns = matrices.rows * matrices.itemsize, matrices.columns * matrices.itemsize
        if rows * matrices.columns < _MIN_MATRIX_BYTES:
            return NoKernel(f"matrices of {rows * matrices.columns} bytes are too small for tiles")
        shortest, found = min(rows, columns), tile_transpose(matrices)
    if shortest < SECTOR_BYTES:
        return NoKernel(f"rows of {shortest} bytes are too short")
    if found.count > _MAX_COUNT:
        return NoKernel(f"{permutation.size_bytes} bytes take more blocks than a launch has")
    return found
