"""Kernels with an epilogue."""

from __future__ import annotations

from jax_tilekern.compilation.compiler import Kernel, Source
from jax_tilekern.plans.gemm.epilogue import Epilogue, Staging
from jax_tilekern.plans.gemm.epilogue_text import FUNCTOR, functor_text


def kernel_with_epilogue(
    plain: Kernel,
    epilogue: Epilogue,
    *,
    columns: int,
    within_rows: bool,
    within_columns: bool,
    tile_columns: int,
    staging: Staging | None = None,
) -> Kernel:
    """Return a kernel with an epilogue.

    Parameters
    ----------
    plain
        The kernel with the identity.
    epilogue
        The epilogue, with the rows and columns of the kernel's matrices.
    columns
        The columns of the output.
    within_rows, within_columns
        Whether no tile reaches beyond the rows, and beyond the columns, of the output.
    tile_columns
        The columns of a tile.
    staging
        Operands that come through stages of the mainloop, if there are any.
    """
    assert isinstance(plain.source, str)
    functor = functor_text(
        epilogue,
        within_rows=within_rows and epilogue.ragged != "rows",
        within_columns=within_columns and epilogue.ragged != "columns",
        columns=columns,
        tile_columns=tile_columns,
        staging=staging,
    )
    text = f'#include "{plain.source}"\n{functor}'
    types = ", ".join((FUNCTOR, *epilogue.parameter_types(staging)))
    name = f"{plain.name.removesuffix('>')}, {types}>"
    file = plain.source.removesuffix(".cuh") + "_with_epilogue.cu"
    return Kernel(Source(text, file), name, plain.options)
