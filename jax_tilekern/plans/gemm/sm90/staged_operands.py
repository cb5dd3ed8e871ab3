"""Which operands of an epilogue come through the stages of the mainloop.

See ``gemm/sm90/staged_operands.cuh``. They are matrices that TMA can load, of kernels whose
consumers wait for what an epilogue reads: ping-pong consumers hide that behind each other.
"""

from __future__ import annotations

from jax_tilekern.plans.gemm.epilogue import Epilogue, Staging
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.sm90.config import TILE_ROW_BYTES, WgmmaInstance
from jax_tilekern.plans.gemm.sm90.launch import staged_map

# Columns that a stage may have: the rows of a tile in shared memory are 32 bytes at least.
_COLUMNS = (128, 64, 32)


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
    if not instance.cooperative or instance.ragged or rows_are_adjacent or epilogue.reductions:
        return None
    staged = {i: x for i, x in enumerate(epilogue.operands) if x.fits_tma}
    element_bytes = sum(x.dtype.itemsize for x in staged.values())
    if not staged:
        return None
    for columns in _COLUMNS:
        fits = instance.block_m * columns * element_bytes <= instance.stage_bytes
        # A chunk of columns is 32 bytes of each row at least.
        wide = columns * min(x.dtype.itemsize for x in staged.values()) >= 32
        if fits and wide and instance.block_n % columns == 0:
            maps = {
                i: staged_map(
                    array,
                    out_buffer - len(epilogue.operands) + i,
                    (*geometry.batch, geometry.m, geometry.n),
                    (min(columns, TILE_ROW_BYTES // array.dtype.itemsize), instance.block_m),
                )
                for i, array in staged.items()
            }
            return Staging(maps, instance.block_m, columns, instance.block_n)
    return None
