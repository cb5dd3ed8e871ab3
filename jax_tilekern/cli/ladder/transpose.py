"""The ladder of the transpose, from an element a thread to the library's kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern
from jax_tilekern import TensorMap
from jax_tilekern.cli.ladder.rung import Ladder, Problem, Rung, Sizes, blocks, kernel, multiples


def _rung(
    name: str, source: str, block: Any, grid: Callable[[Any], Any], *, entry: str | None = None,
    cannot: Callable[..., str | None] = lambda **_: None,
) -> Rung:  # fmt: skip
    transpose = kernel(
        source,
        name=entry,
        out=lambda x: jax.ShapeDtypeStruct(x.shape[::-1], x.dtype),
        grid=grid,
        block=block,
        scalars=lambda x: (np.int32(x.shape[0]), np.int32(x.shape[1])),
        alignment=16,
    )
    return Rung(name, (transpose,), source, cannot)


def _tiles(rows: int, columns: int) -> Callable[[Any], Any]:
    """Return a grid of tiles, along the columns first."""
    return lambda x: (blocks(x.shape[1], columns), blocks(x.shape[0], rows))


def _shape(width: int, height: int) -> Rung:
    return _rung(
        f"tile of {width}x{height}",
        "transpose/07_block_shapes.cu",
        width * height,
        _tiles(height, width),
        entry=f"block_shape<{width}, {height}>",
    )


def _boxes(x: Any) -> tuple[TensorMap, TensorMap]:
    def of(buffer: int, rows: int, columns: int) -> TensorMap:
        # Five dimensions, as load_box takes them; three of them have size 1.
        pitch = columns * x.dtype.itemsize
        return TensorMap(
            buffer,
            "float32",
            (columns, rows, 1, 1, 1),
            (pitch, *(rows * pitch,) * 3),
            box=(32, 32, 1, 1, 1),
            swizzle=128,
        )

    rows, columns = x.shape
    return of(0, rows, columns), of(1, columns, rows)


_TMA = Rung(
    "copy engine (TMA)",
    (
        kernel(
            "transpose/13_tma.cu",
            out=lambda x: jax.ShapeDtypeStruct(x.shape[::-1], x.dtype),
            grid=_tiles(32, 32),
            block=64,
            tensor_maps=_boxes,
            alignment=16,
        ),
    ),
    "transpose/13_tma.cu",
    multiples(rows=4, columns=4),
    compute_capability=(9, 0),
)

_RUNGS = (
    _rung("naive, in order of reads", "transpose/01_naive_reads.cu", (32, 8), _tiles(8, 32)),
    _rung(
        "naive, in order of writes",
        "transpose/02_naive_writes.cu",
        (32, 8),
        lambda x: (blocks(x.shape[0], 32), blocks(x.shape[1], 8)),
    ),
    _rung("shared memory to pass through", "transpose/03_pass_through.cu", (32, 8), _tiles(32, 32)),
    _rung("shared tile", "transpose/04_tile.cu", (32, 8), _tiles(32, 32)),
    _rung("padded", "transpose/05_padded.cu", (32, 8), _tiles(32, 32)),
    _rung("swizzled", "transpose/06_swizzled.cu", (32, 8), _tiles(32, 32)),
    _shape(8, 8),
    _shape(8, 4),
    _shape(32, 32),
    _shape(64, 8),
    _rung(
        "one row by two columns",
        "transpose/08_one_by_two.cu",
        (4, 64),
        _tiles(64, 8),
        cannot=multiples(columns=2),
    ),
    _rung(
        "2x2 in registers",
        "transpose/09_two_by_two.cu",
        (4, 64),
        _tiles(128, 8),
        cannot=multiples(rows=2, columns=2),
    ),
    *(
        _rung(name, source, (4, 64), _tiles(256, 16), cannot=multiples(rows=4, columns=4))
        for name, source in (
            ("4x4, written straight away", "transpose/10_four_by_four_straight.cu"),
            ("4x4, written row by row", "transpose/11_four_by_four_by_rows.cu"),
            ("4x4, gathered whole", "transpose/12_four_by_four_whole.cu"),
        )
    ),
    _TMA,
    Rung("jax_tilekern.transpose", (jax_tilekern.transpose,)),
)


def _problems(sizes: Sizes) -> tuple[Problem, ...]:
    rows, columns = sizes
    return (
        Problem(
            f"transpose of {rows}x{columns} float32",
            {"rows": rows, "columns": columns},
            (jax.ShapeDtypeStruct((rows, columns), np.dtype(np.float32)),),
            _RUNGS,
            (Rung("jnp.transpose", (jnp.transpose,)),),
            bytes=2 * 4 * rows * columns,
        ),
    )


LADDER = Ladder((("rows", "columns"),), ("8192x8192", "2048x512"), _problems)
