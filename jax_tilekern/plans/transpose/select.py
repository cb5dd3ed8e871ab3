"""The plan for transposes on CUDA, in the terms of ``transpose/transpose.cuh``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.candidate import Candidate
from jax_tilekern.plans.gpu import VECTOR_BYTES, Gpu
from jax_tilekern.plans.launch import MAX_INT32, Buffer, Launch, LaunchPlan, NoKernel, Scalars
from jax_tilekern.plans.policy import current_policy, plan_choice
from jax_tilekern.plans.policy.workload import transpose_workload
from jax_tilekern.plans.transpose.permutation import Permutation

_THREADS = 256
_MAX_OUTER_DIMS = 6
# The granularity of memory accesses.
_SECTOR_BYTES = 32
# A matrix fills more than this share of its tiles.
_MIN_FILLED = 1 / 4


@dataclass(frozen=True)
class TransposeCandidate(Candidate):
    """The way to compute a transpose, not compiled yet."""

    permutation: Permutation  # reduced and widened; its innermost dimension moves

    @property
    def key(self) -> str:
        return "tiles {}x{}".format(*self.tile)

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        edge = 256 // self.permutation.itemsize
        return edge, min(edge, 128)

    @property
    def rows_and_columns(self) -> tuple[int, int]:
        """Sizes of the result's and of the source's innermost dimension."""
        return self.permutation.sizes[self.permutation.order[-1]], self.permutation.sizes[-1]

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of the tiles of a matrix, which shift along rows by up to a sector."""
        (rows, columns), tile = self.rows_and_columns, self.tile
        halo = _SECTOR_BYTES // self.permutation.itemsize - 1
        return math.ceil((rows + halo) / tile[0]), math.ceil(columns / tile[1])

    @property
    def band(self) -> int:
        """Columns of tiles that CTAs walk down side by side: more if L2 would not keep them."""
        rows, columns = self.tiles
        return min(columns, max(2, rows // 128))

    @property
    def ctas(self) -> int:
        """Tiles of all matrices."""
        elements = math.prod(self.permutation.sizes)
        return elements // math.prod(self.rows_and_columns) * math.prod(self.tiles)

    @property
    def kernel(self) -> Kernel:
        aligned = str(self.permutation.row_bytes % VECTOR_BYTES == 0).lower()
        name = f"tilekern::transpose_tiles<{self.permutation.itemsize}, {aligned}>"
        return Kernel("transpose/transpose.cuh", name)

    def plan(self, gpu: Gpu) -> LaunchPlan:
        permutation, itemsize = self.permutation, self.permutation.itemsize
        row, column = permutation.order[-1], len(permutation.order) - 1
        outer = [dim for dim in permutation.order if dim not in (row, column)]
        source, result = permutation.source_strides, permutation.result_strides
        unused = _MAX_OUTER_DIMS - len(outer)
        tile_rows, tile_columns = self.tile
        # Unaligned rows have the source's remainder by 16 bytes. Aligned rows have 16 bytes of
        # padding after the bytes of a vector.
        pitch = tile_columns * itemsize + VECTOR_BYTES + source[row] % VECTOR_BYTES
        loaded_rows = tile_rows + _SECTOR_BYTES // itemsize - 1
        shape = Scalars.pack(
            f"{2 * _MAX_OUTER_DIMS + 5}q{_MAX_OUTER_DIMS + 4}I",
            *((0,) * unused + tuple(source[dim] for dim in outer)),
            *((0,) * unused + tuple(result[dim] for dim in outer)),
            *self.rows_and_columns,
            source[row],
            result[column],
            permutation.size_bytes,
            *((1,) * unused + tuple(permutation.sizes[dim] for dim in outer)),
            *self.tiles,
            self.band,
            pitch,
        )
        launch = Launch(
            entry=compile_kernels(self.kernel, arch=gpu.arch).entry(self.kernel.name),
            grid=(self.ctas, 1, 1),
            block=(_THREADS, 1, 1),
            parameters=(Buffer(0), Buffer(1), shape),
            shared_memory_bytes=loaded_rows * pitch + VECTOR_BYTES,
        )
        return LaunchPlan(
            name="transpose",
            gpu=gpu,
            launches=(launch,),
            alignments=(VECTOR_BYTES, VECTOR_BYTES),
            reason=f"{self.ctas} tiles of {tile_rows}x{tile_columns}",
        )


def plan_transpose(permutation: Permutation, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Compile the kernel of a reduced permutation of two dimensions or more, if it is chosen."""
    found = transpose_candidate(permutation)
    if isinstance(found, NoKernel):
        return found
    rows, _ = found.rows_and_columns
    if rows * found.permutation.itemsize % _SECTOR_BYTES == 0 and current_policy() != "kernels":
        return NoKernel("XLA is as fast where all rows of the result start at sectors")
    return plan_choice(transpose_workload(permutation), [found], gpu)


def transpose_candidate(permutation: Permutation) -> TransposeCandidate | NoKernel:
    """Return the way to compute a reduced permutation, or why there is none."""
    permutation = permutation.widened
    if permutation.keeps_innermost:
        return NoKernel(f"rows of {permutation.row_bytes} bytes stay whole")
    if len(permutation.sizes) - 2 > _MAX_OUTER_DIMS:
        return NoKernel(f"{len(permutation.sizes)} dimensions are moved, more than a kernel takes")
    found = TransposeCandidate(permutation)
    rows, columns = found.rows_and_columns
    filled = rows * columns / (math.prod(found.tiles) * math.prod(found.tile))
    if filled <= _MIN_FILLED:
        return NoKernel(f"matrices of {rows}x{columns} items fill {filled:.0%} of their tiles")
    if found.ctas > MAX_INT32:
        return NoKernel(f"{permutation.size_bytes} bytes take more blocks than a launch has")
    return found
