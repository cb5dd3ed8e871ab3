"""The ladder of a matrix times a vector, in either order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern
from benchmarks.ladder import Problem, Rung, Sizes, blocks, multiples, rung_of

RANKS = (2,)
SIZES = ("1024x1024", "8192x8192")


def _by_rows(file: str, name: str, block: Any, rows: int, piece: int = 1) -> Rung:
    """Return a rung of a @ x whose blocks take some rows each, in pieces of elements."""
    return rung_of(
        file, name, multiples(columns=piece), block=block,
        out=lambda a, x: jax.ShapeDtypeStruct(a.shape[:1], a.dtype),
        grid=lambda a, x: blocks(a.shape[0], rows),
        scalars=lambda a, x: (np.int32(a.shape[0]), np.int32(a.shape[1] // piece)),
    )  # fmt: skip


def _by_columns(file: str, name: str, block: Any, columns: int) -> Rung:
    """Return a rung of x @ a whose blocks take some columns each."""
    return rung_of(
        file, name, block=block,
        out=lambda x, a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype),
        grid=lambda x, a: blocks(a.shape[1], columns),
        scalars=lambda x, a: (np.int32(a.shape[0]), np.int32(a.shape[1])),
    )  # fmt: skip


_ROWS = (
    _by_rows("matvec/01_row_per_thread.cu", "row per thread", 128, 128),
    _by_rows("matvec/02_row_per_warp.cu", "row per warp", (32, 8), 8),
    _by_rows("matvec/03_vectorised.cu", "row per warp, float4", (32, 8), 8, piece=4),
    Rung("jax_tilekern.matvec", (jax_tilekern.matvec,)),
)
_COLUMNS = (
    _by_columns("matvec/04_column_per_thread.cu", "column per thread", 128, 128),
    _by_columns("matvec/05_columns_per_block.cu", "32 columns per block", (32, 32), 32),
    Rung("jax_tilekern.vecmat", (jax_tilekern.vecmat,)),
)


def problems(sizes: Sizes) -> tuple[Problem, ...]:
    rows, columns = sizes
    a, row_vector, column_vector = (
        jax.ShapeDtypeStruct(shape, np.dtype(np.float32))
        for shape in ((rows, columns), (rows,), (columns,))
    )
    # One pass over the matrix; the vectors hardly count.
    of_all = {
        "sizes": {"rows": rows, "columns": columns}, "bound": "read", "sums": True,
        "peers": (Rung("jnp.matmul", (jnp.matmul,)),), "bytes": 4 * (a.size + rows + columns),
    }  # fmt: skip
    sides: dict[str, Any] = {
        "a @ x": {"operands": (a, column_vector), "rungs": _ROWS},
        "x @ a": {"operands": (row_vector, a), "rungs": _COLUMNS},
    }
    return tuple(
        Problem(f"{name}, a {rows}x{columns} float32", **side, **of_all)
        for name, side in sides.items()
    )
