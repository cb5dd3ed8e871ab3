"""The ladder of a matrix times a vector, in either order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern
from benchmarks.ladder.rung import Ladder, Problem, Rung, Sizes, blocks, kernel, multiples


def _by_rows(source: str, block: Any, rows: int, piece: int = 1) -> Any:
    """Return a kernel for a @ x whose blocks take some rows each, in pieces of elements."""
    return kernel(
        source,
        out=lambda a, x: jax.ShapeDtypeStruct(a.shape[:1], a.dtype),
        grid=lambda a, x: blocks(a.shape[0], rows),
        block=block,
        scalars=lambda a, x: (np.int32(a.shape[0]), np.int32(a.shape[1] // piece)),
        alignment=16,
    )


def _by_columns(source: str, block: Any, columns: int) -> Any:
    """Return a kernel for x @ a whose blocks take some columns each."""
    return kernel(
        source,
        out=lambda x, a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype),
        grid=lambda x, a: blocks(a.shape[1], columns),
        block=block,
        scalars=lambda x, a: (np.int32(a.shape[0]), np.int32(a.shape[1])),
    )


_ROWS = (
    Rung(
        "row per thread",
        (_by_rows("matvec/01_row_per_thread.cu", 128, 128),),
        "matvec/01_row_per_thread.cu",
    ),
    Rung(
        "row per warp",
        (_by_rows("matvec/02_row_per_warp.cu", (32, 8), 8),),
        "matvec/02_row_per_warp.cu",
    ),
    Rung(
        "row per warp, float4",
        (_by_rows("matvec/03_vectorised.cu", (32, 8), 8, piece=4),),
        "matvec/03_vectorised.cu",
        multiples(columns=4),
    ),
    Rung("jax_tilekern.matvec", (jax_tilekern.matvec,)),
)

_COLUMNS = (
    Rung(
        "column per thread",
        (_by_columns("matvec/04_column_per_thread.cu", 128, 128),),
        "matvec/04_column_per_thread.cu",
    ),
    Rung(
        "32 columns per block",
        (_by_columns("matvec/05_columns_per_block.cu", (32, 32), 32),),
        "matvec/05_columns_per_block.cu",
    ),
    Rung("jax_tilekern.vecmat", (jax_tilekern.vecmat,)),
)


def _problems(sizes: Sizes) -> tuple[Problem, ...]:
    rows, columns = sizes
    a, of_rows, of_columns = (
        jax.ShapeDtypeStruct(shape, np.dtype(np.float32))
        for shape in ((rows, columns), (rows,), (columns,))
    )
    named = {"rows": rows, "columns": columns}
    # One pass over the matrix; the vectors hardly count.
    bytes_ = 4 * (rows * columns + rows + columns)
    return (
        Problem(
            f"a @ x, a {rows}x{columns} float32",
            named,
            (a, of_columns),
            _ROWS,
            (Rung("jnp.matmul", (jnp.matmul,)),),
            bytes=bytes_,
            bound="read",
            sums=True,
        ),
        Problem(
            f"x @ a, a {rows}x{columns} float32",
            named,
            (of_rows, a),
            _COLUMNS,
            (Rung("jnp.matmul", (jnp.matmul,)),),
            bytes=bytes_,
            bound="read",
            sums=True,
        ),
    )


LADDER = Ladder(
    (("rows", "columns"),),
    ("1024x1024", "8192x8192"),
    _problems,
)
