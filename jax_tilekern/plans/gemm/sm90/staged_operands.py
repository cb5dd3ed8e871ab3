"""Which operands of an epilogue come through the stages of the mainloop.

See ``gemm/sm90/staged_operands.cuh``. They are matrices and rows that TMA can load, of kernels
whose consumers wait for what an epilogue reads: ping-pong consumers hide that behind each other.
Rows for reductions gained nothing (docs/tuning-log.md).
"""

from __future__ import annotations

from jax_tilekern.plans.gemm.epilogue import Epilogue, EpilogueArray, Staging
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.sm90.config import WgmmaInstance
from jax_tilekern.plans.gemm.sm90.launch import staged_map

# Columns that a stage may have beside all of the tile's.
_COLUMNS = (128, 64, 32)
_ROW_BYTES = 128
_MATRIX_ROW_BYTES = 32


def staging_of(
    instance: WgmmaInstance, epilogue: Epilogue, geometry: MatmulGeometry, out_buffer: int
) -> Staging | None:
    """Return the operands that are staged, or ``None``.

    Parameters
    ----------
    instance
        The kernel.
    epilogue
        The epilogue of the product as the kernel computes it.
    geometry
        The product before any swap.
    out_buffer
        The buffer of the first result.
    """
    rows_are_adjacent = instance.out_m_major
    excluded = instance.ragged or instance.pair or rows_are_adjacent or epilogue.reductions
    if not instance.cooperative or excluded:
        return None
    staged = {i: x for i, x in enumerate(epilogue.operands) if x.fits_tma}
    for columns in (instance.block_n, *_COLUMNS):
        if staged and instance.block_n % columns == 0 and _fits(staged, columns, instance):
            first = out_buffer - len(epilogue.operands)
            sizes = (*geometry.batch, geometry.m, geometry.n)
            maps = {
                i: staged_map(x, first + i, sizes, columns, instance.block_m)
                for i, x in staged.items()
            }
            return Staging(maps, instance.block_m, columns)
    return None


def _fits(staged: dict[int, EpilogueArray], columns: int, instance: WgmmaInstance) -> bool:
    nbytes = 0
    for array in staged.values():
        row_bytes = columns * array.dtype.itemsize
        matrix = array.strides[-2] != 0
        if row_bytes % (_MATRIX_ROW_BYTES if matrix else _ROW_BYTES):
            return False
        if matrix and row_bytes > _ROW_BYTES and row_bytes % _ROW_BYTES:
            return False
        nbytes += row_bytes * (instance.block_m if matrix else 1)
    return nbytes <= instance.stage_bytes
