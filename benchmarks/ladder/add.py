"""The ladder of the sum of two arrays: vectors and matrices, by elements and by float4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern
from benchmarks.ladder.rung import Ladder, Problem, Rung, Sizes, blocks, kernel, multiples


def _vector(source: str, per_thread: int) -> Any:
    return kernel(
        source,
        out=lambda x, y: x,
        grid=lambda x, y: blocks(x.size, 256 * per_thread),
        block=256,
        scalars=lambda x, y: (np.int64(x.size),),
        alignment=16,
    )


def _matrix(source: str, grid: Callable[[Any, Any], Any], piece: int = 1) -> Any:
    return kernel(
        source,
        out=lambda x, y: x,
        grid=grid,
        block=(32, 8),
        scalars=lambda x, y: (np.int32(x.shape[0]), np.int32(x.shape[1] // piece)),
        alignment=16,
    )


_FLOAT4 = _vector("add/02_vector_float4.cu", 4)
_LIBRARY = Rung("jax_tilekern.add", (jax_tilekern.add,))
_PEERS = (Rung("jnp.add", (jnp.add,)),)

_VECTOR = (
    Rung("vector", (_vector("add/01_vector.cu", 1),), "add/01_vector.cu"),
    Rung("vector, float4", (_FLOAT4,), "add/02_vector_float4.cu"),
    _LIBRARY,
)

_MATRIX = (
    Rung(
        "matrix, warps down the columns",
        (
            _matrix(
                "add/03_matrix_down.cu",
                lambda x, y: (blocks(x.shape[0], 32), blocks(x.shape[1], 8)),
            ),
        ),
        "add/03_matrix_down.cu",
    ),
    Rung(
        "matrix",
        (
            _matrix(
                "add/04_matrix.cu", lambda x, y: (blocks(x.shape[1], 32), blocks(x.shape[0], 8))
            ),
        ),
        "add/04_matrix.cu",
    ),
    Rung(
        "matrix, float4",
        (
            _matrix(
                "add/05_matrix_float4.cu",
                lambda x, y: (blocks(x.shape[1], 128), blocks(x.shape[0], 8)),
                piece=4,
            ),
        ),
        "add/05_matrix_float4.cu",
        multiples(columns=4),
    ),
    Rung("matrix as a vector, float4", (_FLOAT4,), "add/02_vector_float4.cu"),
    _LIBRARY,
)


def _problems(sizes: Sizes) -> tuple[Problem, ...]:
    names = ("size",) if len(sizes) == 1 else ("rows", "columns")
    array = jax.ShapeDtypeStruct(sizes, np.dtype(np.float32))
    return (
        Problem(
            f"sum of two {'vectors' if len(sizes) == 1 else 'matrices'} of "
            f"{'x'.join(map(str, sizes))} float32",
            dict(zip(names, sizes, strict=True)),
            (array, array),
            _VECTOR if len(sizes) == 1 else _MATRIX,
            _PEERS,
            bytes=3 * 4 * array.size,
        ),
    )


LADDER = Ladder(
    (("size",), ("rows", "columns")),
    (str(1 << 20), str(1 << 26), "1024x1024", "8192x8192"),
    _problems,
)
