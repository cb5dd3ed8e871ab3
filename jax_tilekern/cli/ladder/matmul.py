"""The ladder of the matrix product, from global memory to the tensor cores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern
from jax_tilekern.cli.ladder.rung import Ladder, Problem, Rung, Sizes, blocks, kernel, multiples


def _product(
    source: str, entry: str, block: Any, tile: Callable[[Any], tuple[int, int]], **settings: Any
) -> Any:
    def grid(a: Any, b: Any) -> tuple[int, int]:
        rows, columns = tile(a)
        return blocks(b.shape[1], columns), blocks(a.shape[0], rows)

    return kernel(
        source,
        name=lambda a, b: f"{entry}<{jax_tilekern.cxx_type(a.dtype)}>",
        out=lambda a, b: jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype),
        grid=grid,
        block=block,
        scalars=lambda a, b: tuple(map(np.int32, (a.shape[0], b.shape[1], a.shape[1]))),
        alignment=16,
        **settings,
    )


def _piece(a: Any) -> int:
    """Return how many elements 16 bytes hold."""
    return 16 // int(a.dtype.itemsize)


def _wide_tile(a: Any) -> tuple[int, int]:
    return 32 * _piece(a), 32 * _piece(a)


def _stages_bytes(a: Any, b: Any) -> int:
    """Return the shared memory of three stages of padded tiles, as 06_tensor_cores.cu has them."""
    stages, depth, tile = 3, 16, 32 * _piece(a)
    elements = tile * (depth + 4) + depth * (tile + 2 * _piece(a))
    return stages * elements * int(a.dtype.itemsize)


_NAIVE = _product("matmul/01_naive.cu", "naive", (32, 8), lambda a: (8, 32))
_SHARED = _product("matmul/02_shared_tiles.cu", "shared_tiles", (32, 32), lambda a: (32, 32))
_REGISTERS = _product("matmul/03_register_tiles.cu", "register_tiles", 256, lambda a: (64, 64))
_COLUMN = _product(
    "matmul/04_column_in_registers.cu",
    "column_in_registers",
    128,
    lambda a: (256 // a.dtype.itemsize, 128),
)
_BUFFERED = _product("matmul/05_double_buffered.cu", "double_buffered", 256, _wide_tile)
_TENSOR_CORES = _product(
    "matmul/06_tensor_cores.cu",
    "tensor_cores",
    256,
    _wide_tile,
    shared_memory_bytes=_stages_bytes,
)


def _rungs(dtype: np.dtype[Any]) -> tuple[Rung, ...]:
    whole_pieces = multiples(n=16 // dtype.itemsize, k=16 // dtype.itemsize)
    # What the library and XLA do by default with float32 is the tensor cores' TF32.
    tf32 = "TF32" if dtype == np.float32 else None
    highest = partial(jax_tilekern.matmul, precision="highest")
    return (
        Rung("from global memory", (_NAIVE,), "matmul/01_naive.cu"),
        Rung("shared tiles", (_SHARED,), "matmul/02_shared_tiles.cu"),
        Rung("register tiles", (_REGISTERS,), "matmul/03_register_tiles.cu"),
        Rung("column of b in registers", (_COLUMN,), "matmul/04_column_in_registers.cu"),
        Rung("double-buffered", (_BUFFERED,), "matmul/05_double_buffered.cu", whole_pieces),
        Rung(
            "tensor cores",
            (_TENSOR_CORES,),
            "matmul/06_tensor_cores.cu",
            whole_pieces,
            arithmetic=tf32,
        ),
        *([Rung("jax_tilekern.matmul, highest", (highest,))] if tf32 else []),
        Rung("jax_tilekern.matmul", (jax_tilekern.matmul,), arithmetic=tf32),
    )


def _peers(dtype: np.dtype[Any]) -> tuple[Rung, ...]:
    highest = Rung("jnp.matmul, highest", (partial(jnp.matmul, precision="highest"),))
    if dtype != np.float32:
        return (Rung("jnp.matmul", highest.stages),)
    return highest, Rung("jnp.matmul", (jnp.matmul,), arithmetic="TF32")


def _problem(sizes: Sizes, dtype: np.dtype[Any]) -> Problem:
    m, n, k = sizes
    return Problem(
        f"matrix product of {m}x{n}x{k} {dtype}",
        {"m": m, "n": n, "k": k},
        (jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((k, n), dtype)),
        _rungs(dtype),
        _peers(dtype),
        bytes=dtype.itemsize * (m * k + k * n + m * n),
        flops=2 * m * n * k,
        bound="arithmetic",
        arithmetic=str(dtype),
        sums=True,
    )


def _problems(sizes: Sizes) -> tuple[Problem, ...]:
    return tuple(_problem(sizes, np.dtype(t)) for t in (np.float32, np.float64))


LADDER = Ladder((("m", "n", "k"),), ("4096x4096x4096",), _problems)
