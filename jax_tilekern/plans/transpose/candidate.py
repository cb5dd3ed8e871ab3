"""Ways to compute a transpose: kernels of ``transpose/rows.cuh`` and ``transpose/tiles.cuh``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.candidate import Candidate
from jax_tilekern.plans.cxx import cxx_config
from jax_tilekern.plans.gpu import VECTOR_BYTES, Gpu
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, Scalars
from jax_tilekern.plans.transpose.permutation import Permutation
from jax_tilekern.plans.transpose.shape import (
    DIVISOR,
    SECTOR_BYTES,
    Matrices,
    OuterDims,
    TileGrid,
    divisor,
)

THREADS = 256


@dataclass(frozen=True)
class TransposeCandidate(Candidate):
    """One way to compute a transpose, in one launch; not compiled yet.

    Attributes
    ----------
    kernel
        What the compiler compiles.
    form
        What is moved: rows, or tiles of a size.
    reason
        What the kernel does, in words for ``explain``.
    count
        Vectors of rows, or tiles, which the kernel numbers.
    counts_per_block
        How many of them a CTA takes.
    layout, values
        The kernel's last parameter, as ``Scalars.pack`` takes it.
    shared_memory_bytes
        Of a CTA.
    """

    kernel: Kernel
    form: str
    reason: str
    count: int
    counts_per_block: int
    layout: str
    values: tuple[int, ...]
    shared_memory_bytes: int = 0

    @property
    def key(self) -> str:
        """The form."""
        return self.form

    @property
    def name(self) -> str:
        """The kernel's name in ``explain``."""
        return self.kernel.text.file.removesuffix(".cu")

    def plan(self, gpu: Gpu) -> LaunchPlan:
        """Compile it.

        Raises
        ------
        NvrtcNotFound
            If there is no NVRTC to compile the kernel with.
        """
        compiled = compile_kernels(self.kernel, arch=gpu.arch)
        launch = Launch(
            entry=compiled.entry(self.kernel.name),
            grid=(math.ceil(self.count / self.counts_per_block), 1, 1),
            block=(THREADS, 1, 1),
            parameters=(Buffer(0), Buffer(1), Scalars.pack(self.layout, *self.values)),
            shared_memory_bytes=self.shared_memory_bytes,
        )
        return LaunchPlan(
            name=self.name,
            gpu=gpu,
            launches=(launch,),
            alignments=(VECTOR_BYTES, VECTOR_BYTES),
            reason=self.reason,
        )


def row_transpose(permutation: Permutation) -> TransposeCandidate:
    """Return what copies rows to other places, by vectors of 16 bytes of the result."""
    row_bytes = permutation.row_bytes
    outer = OuterDims.of(permutation, (len(permutation.sizes) - 1,))
    # Rows start at multiples of a unit, and their length is one. Below 16 bytes, vectors are
    # assembled from rows that start anywhere.
    unit = math.gcd(row_bytes, VECTOR_BYTES)
    if unit < VECTOR_BYTES:
        unit = min(unit, 4)
    # The copies of a thread, which are all in flight at once.
    copies = 2 if unit == VECTOR_BYTES else 4
    # A row that starts off the vectors' grid may touch one vector more.
    row_vectors = -(-(row_bytes + VECTOR_BYTES - unit) // VECTOR_BYTES)
    vectors = outer.count * row_vectors
    config = cxx_config("RowTransposeConfig", unit_bytes=unit, copies=copies)
    return TransposeCandidate(
        kernel=Kernel("transpose/rows.cuh", f"tilekern::transpose_rows<{config}>"),
        form="rows",
        reason=f"{outer.count} rows of {row_bytes} bytes",
        count=vectors,
        counts_per_block=THREADS * copies,
        layout=f"{DIVISOR}Iq{OuterDims.LAYOUT}",
        values=(*divisor(row_vectors), vectors, row_bytes, *outer.values),
    )


# By element size: the edge of a tile, in elements.
_EDGES = {1: 128, 2: 128, 4: 64, 8: 32, 16: 16}


def tile_transpose(matrices: Matrices) -> TransposeCandidate:
    """Return what moves tiles through shared memory."""
    rows, columns = _tile(matrices)
    # Where rows of the result start anywhere, tiles shift to a sector, and read so many rows more.
    halo = 0 if matrices.result_aligned else SECTOR_BYTES // matrices.itemsize - 1
    grid = TileGrid(-(-(matrices.rows + halo) // rows), -(-matrices.columns // columns))
    tiles = grid.count * matrices.outer.count
    # Rows that start anywhere are as far beyond a multiple of 16 bytes as in the source.
    pitch = columns * matrices.itemsize + VECTOR_BYTES + matrices.row_stride % VECTOR_BYTES
    if matrices.source_aligned:
        vector = VECTOR_BYTES // matrices.itemsize
        chunks = columns * matrices.itemsize // VECTOR_BYTES
        chunks += chunks % 2 if vector == 1 else 0
        shared_bytes = VECTOR_BYTES * ((rows + halo) * chunks + (rows + halo) // vector + 1)
    else:
        shared_bytes = (rows + halo) * pitch + VECTOR_BYTES
    config = cxx_config(
        "TileConfig",
        item_bytes=matrices.itemsize,
        rows=rows,
        columns=columns,
        source_aligned=matrices.source_aligned,
        result_aligned=matrices.result_aligned,
    )
    return TransposeCandidate(
        kernel=Kernel("transpose/tiles.cuh", f"tilekern::transpose_tiles<{config}>"),
        form=f"tiles {rows}x{columns}",
        reason=f"{tiles} tiles of {rows}x{columns}",
        count=tiles,
        counts_per_block=1,
        layout=f"{TileGrid.LAYOUT}I5q{OuterDims.LAYOUT}",
        values=(
            *grid.values,
            pitch,
            matrices.rows,
            matrices.columns,
            matrices.row_stride,
            matrices.column_stride,
            matrices.source_bytes,
            *matrices.outer.values,
        ),
        shared_memory_bytes=shared_bytes,
    )


def _tile(matrices: Matrices) -> tuple[int, int]:
    """Return the tile's rows and columns."""
    vector = VECTOR_BYTES // matrices.itemsize
    edge = _EDGES[matrices.itemsize]
    wide = matrices.itemsize == 1 and not matrices.result_aligned
    rows = 2 * edge if wide else edge
    # A short dimension takes less of the tile, and leaves the other more.
    columns = max(4, vector, min(edge, _power_of_two(matrices.columns)))
    rows = min(rows * edge // columns, 256, _power_of_two(matrices.rows))
    return max(8 * vector, rows), columns


def _power_of_two(size: int) -> int:
    return int(1 << (size - 1).bit_length())
