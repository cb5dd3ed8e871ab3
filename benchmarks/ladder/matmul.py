"""The ladder of the matrix product, from global memory to Hopper's tensor cores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_tilekern
from benchmarks.ladder import Problem, Rung, Sizes, blocks, multiples, rung_of
from jax_tilekern import TensorMap
from jax_tilekern.plans.gpu import current_gpu

RANKS = (3,)
SIZES = ("1024x1024x1024", "4096x4096x4096")

Tile = tuple[int, int]
_BFLOAT16 = np.dtype(jnp.bfloat16)
_FLOAT32 = np.dtype(np.float32)
_FLOAT64 = np.dtype(np.float64)


def _sizes(a: Any, b: Any, *_: Any) -> tuple[np.generic, ...]:
    """Return m, n and k, the last parameters of every kernel."""
    return tuple(map(np.int32, (a.shape[0], b.shape[1], a.shape[1])))


def _tiles(a: Any, b: Any, tile: Tile) -> Tile:
    """Return how many tiles of (rows, columns) cover the result, along columns first."""
    return blocks(b.shape[1], tile[1]), blocks(a.shape[0], tile[0])


def _rung(
    name: str, file: str, entry: str, block: Any, tile: Tile, dtype: np.dtype[Any],
    **settings: Any,
) -> Rung:  # fmt: skip
    """Return a rung of threads that load their operands themselves; a block computes a tile."""
    return rung_of(
        f"matmul/{file}", name, settings.pop("cannot", None),
        before=(_with_zeros,) if "aliases" in settings else (),
        name=f"{entry}<{jax_tilekern.cxx_type(dtype)}>",
        out=lambda a, b, *_: jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype),
        grid=lambda a, b, *_: _tiles(a, b, tile), block=block, scalars=_sizes, **settings,
    )  # fmt: skip


def _with_zeros(a: Array, b: Array) -> tuple[Array, ...]:
    return a, b, jnp.zeros((a.shape[0], b.shape[1]), a.dtype)


def _simt_rungs(dtype: np.dtype[Any]) -> tuple[Rung, ...]:
    """Return the rungs of float32 and float64, up to ``mma.sync``."""
    size = dtype.itemsize
    chunk = 16 // size
    wide = 32 * chunk, 32 * chunk
    cannot = multiples(n=chunk, k=chunk)
    return (
        _rung("from global memory", "01_naive.cu", "naive", (32, 8), (8, 32), dtype),
        _rung(
            "sums in global memory", "02_sums_in_memory.cu", "sums_in_memory", (32, 32), (32, 32),
            dtype, aliases={2: 0},
        ),
        _rung(
            "shared tiles", "03_shared_tiles.cu", "shared_tiles", (32, 32), (32, 32), dtype
        ),
        _rung(
            "register tiles", "04_register_tiles.cu", "register_tiles", 256, (64, 64), dtype
        ),
        _rung("four sums a thread", "05_four_sums.cu", "four_sums", 512, (64, 32), dtype),
        _rung(
            "column of b in registers", "06_column_in_registers.cu", "column_in_registers", 128,
            (256 // size, 128), dtype,
        ),
        _rung(
            "double-buffered", "07_double_buffered.cu", "double_buffered", 256, wide, dtype,
            cannot=cannot,
        ),
        _rung(
            "warp tiles", "08_warp_tiles.cu", "warp_tiles", 256, (128, 128), dtype, cannot=cannot,
            # Three stages of 128x16 of both operands, rows of a padded by 16 bytes.
            shared_memory_bytes=3 * 128 * (16 + chunk + 16) * size,
        ),
        _rung(
            "tensor cores", "09_tensor_cores.cu", "tensor_cores", 256, wide, dtype, cannot=cannot,
            # What the library and XLA do by default with float32 is the tensor cores' TF32.
            arithmetic="TF32" if dtype == _FLOAT32 else None,
            # Three stages of padded tiles 16 deep.
            shared_memory_bytes=3 * (wide[0] * 20 + 16 * (wide[1] + 2 * chunk)) * size,
        ),
    )  # fmt: skip


def _matrix_map(buffer: int, matrix: Any, box: Tile) -> TensorMap:
    """Return the map of a bfloat16 matrix in boxes of (rows, columns), swizzled by 128 bytes."""
    rows, columns = matrix.shape
    pitch = 2 * columns
    # Five dimensions, as load_box takes them; three of them have size 1.
    return TensorMap(
        buffer,
        "bfloat16",
        (columns, rows, 1, 1, 1),
        (pitch, *(rows * pitch,) * 3),
        box=(box[1], box[0], 1, 1, 1),
        swizzle=128,
    )


def _hopper_rung(
    name: str, file: str, threads: int, tile: Tile, stages: int, *, persistent: bool = False,
    subtiles: int = 0, cannot: Callable[..., str | None],
) -> Rung:  # fmt: skip
    """Return a rung whose operands come by TMA, in stages of 64 of k.

    Parameters
    ----------
    subtiles
        Of 64x64 elements that the epilogue stages for TMA to store; 0 if threads store.
    """

    def grid(a: Any, b: Any) -> Any:
        x, y = _tiles(a, b, tile)
        return min(x * y, current_gpu().sm_count) if persistent else (x, y)

    def maps(a: Any, b: Any) -> tuple[TensorMap, ...]:
        out = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype)
        operands = _matrix_map(0, a, (tile[0], 64)), _matrix_map(1, b, (64, 64))
        return (*operands, _matrix_map(2, out, (64, 64))) if subtiles else operands

    return rung_of(
        f"matmul/{file}",
        name,
        cannot,
        compute_capability=(9, 0),
        out=lambda a, b: jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype),
        grid=grid,
        block=threads,
        scalars=_sizes,
        tensor_maps=maps,
        # Barriers of 8 bytes: a full and an empty one for each stage, and two turns at most.
        shared_memory_bytes=128 * (stages * sum(tile) + 64 * subtiles) + 8 * (2 * stages + 2),
    )


def _bfloat16_rungs() -> tuple[Rung, ...]:
    """Return the rungs of bfloat16, each with one idea of Hopper more."""
    cannot = multiples(n=8, k=8)
    mma_sync = rung_of(
        "matmul/10_mma_sync.cu",
        "mma.sync",
        cannot,
        out=lambda a, b: jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype),
        grid=lambda a, b: _tiles(a, b, (128, 128)),
        block=256,
        scalars=_sizes,
        # Three stages of 128x64 and 64x128, rows padded by 16 bytes.
        shared_memory_bytes=3 * 2 * (128 * 72 + 64 * 136),
    )
    hopper = partial(_hopper_rung, cannot=cannot)
    return (
        mma_sync,
        hopper("TMA", "11_tma.cu", 256, (128, 128), 3),
        hopper("wgmma", "12_wgmma.cu", 256, (128, 256), 4),
        hopper("producer warp", "13_producer_warp.cu", 384, (128, 256), 4),
        hopper("persistent grid", "14_persistent_grid.cu", 384, (128, 256), 4, persistent=True),
        hopper("ping-pong", "15_ping_pong.cu", 384, (128, 192), 4, persistent=True),
        hopper(
            "overlapped epilogue", "16_overlapped_epilogue.cu", 384, (128, 192), 4,
            persistent=True, subtiles=4,
        ),
    )  # fmt: skip


def _rungs(dtype: np.dtype[Any]) -> tuple[Rung, ...]:
    if dtype == _BFLOAT16:
        return (*_bfloat16_rungs(), Rung("jax_tilekern.matmul", (jax_tilekern.matmul,)))
    if dtype == _FLOAT64:
        return (*_simt_rungs(dtype), Rung("jax_tilekern.matmul", (jax_tilekern.matmul,)))
    highest = partial(jax_tilekern.matmul, precision="highest")
    return (
        *_simt_rungs(dtype),
        Rung("jax_tilekern.matmul, highest", (highest,)),
        Rung("jax_tilekern.matmul", (jax_tilekern.matmul,), arithmetic="TF32"),
    )


def _peers(dtype: np.dtype[Any]) -> tuple[Rung, ...]:
    default = Rung("jnp.matmul", (jnp.matmul,), arithmetic="TF32" if dtype == _FLOAT32 else None)
    if dtype != _FLOAT32:
        return (default,)
    return Rung("jnp.matmul, highest", (partial(jnp.matmul, precision="highest"),)), default


def _rounded_once(a: Array, b: Array) -> Array:
    """Return the product of bfloat16 matrices with float32 sums that are rounded at the end."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(a.dtype)


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
        truth=_rounded_once if dtype == _BFLOAT16 else None,
    )


def problems(sizes: Sizes) -> tuple[Problem, ...]:
    return tuple(_problem(sizes, dtype) for dtype in (_FLOAT32, _FLOAT64, _BFLOAT16))
