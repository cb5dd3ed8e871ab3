"""The ladder of the sum of two arrays: vectors and matrices, by elements and by float4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern
from benchmarks.ladder import Problem, Rung, Sizes, blocks, multiples, rung_of

RANKS = (1, 2)
SIZES = (str(1 << 20), str(1 << 26), "1024x1024", "8192x8192")


def _vector(file: str, name: str, per_thread: int) -> Rung:
    return rung_of(
        file, name, out=lambda x, y: x, grid=lambda x, y: blocks(x.size, 256 * per_thread),
        block=256, scalars=lambda x, y: (np.int64(x.size),),
    )  # fmt: skip


def _matrix(
    file: str, name: str, grid: Callable[[int, int], Any], piece: int = 1, cannot: Any = None
) -> Rung:
    """Return a rung of blocks of 32x8 threads, with a grid of the rows and columns."""
    return rung_of(
        file, name, cannot, out=lambda x, y: x, grid=lambda x, y: grid(*x.shape), block=(32, 8),
        scalars=lambda x, y: (np.int32(x.shape[0]), np.int32(x.shape[1] // piece)),
    )  # fmt: skip


_LIBRARY = Rung("jax_tilekern.add", (jax_tilekern.add,))
_VECTOR = (
    _vector("add/01_vector.cu", "vector", 1),
    _vector("add/02_vector_float4.cu", "vector, float4", 4),
    _LIBRARY,
)
_MATRIX = (
    _matrix(
        "add/03_matrix_down.cu", "matrix, warps down the columns",
        lambda rows, columns: (blocks(rows, 32), blocks(columns, 8)),
    ),
    _matrix(
        "add/04_matrix.cu", "matrix", lambda rows, columns: (blocks(columns, 32), blocks(rows, 8))
    ),
    _matrix(
        "add/05_matrix_float4.cu", "matrix, float4",
        lambda rows, columns: (blocks(columns, 128), blocks(rows, 8)), 4, multiples(columns=4),
    ),
    _vector("add/02_vector_float4.cu", "matrix as a vector, float4", 4),
    _LIBRARY,
)  # fmt: skip


def problems(sizes: Sizes) -> tuple[Problem, ...]:
    names = ("size",) if len(sizes) == 1 else ("rows", "columns")
    array = jax.ShapeDtypeStruct(sizes, np.dtype(np.float32))
    kind = "vectors" if len(sizes) == 1 else "matrices"
    title = f"sum of two {kind} of {'x'.join(map(str, sizes))} float32"
    return (
        Problem(
            title, dict(zip(names, sizes, strict=True)), (array, array),
            _VECTOR if len(sizes) == 1 else _MATRIX, (Rung("jnp.add", (jnp.add,)),),
            bytes=3 * 4 * array.size,
        ),
    )  # fmt: skip
