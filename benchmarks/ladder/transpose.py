"""The ladder of the transpose, from an element a thread to the library's kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern
from benchmarks.ladder import Problem, Rung, Sizes, blocks, multiples, rung_of
from jax_tilekern import TensorMap

RANKS = (2,)
SIZES = ("2048x512", "1024x1024", "8192x8192")

Block = tuple[int, int]


def _rung(
    name: str, file: str, entry: str, block: Block, tile: Block, *, along_reads: bool = True,
    cannot: Callable[..., str | None] | None = None,
) -> Rung:  # fmt: skip
    """Return a rung whose blocks of (x, y) threads move tiles of (x, y) elements each.

    Blocks and tiles have their x along the columns of the operand, or along its rows if not
    ``along_reads``.
    """

    def grid(x: Any) -> Block:
        along, across = x.shape[::-1] if along_reads else x.shape
        return blocks(along, tile[0]), blocks(across, tile[1])

    return rung_of(
        f"transpose/{file}", name, cannot, name=entry,
        out=lambda x: jax.ShapeDtypeStruct(x.shape[::-1], x.dtype),
        grid=grid, block=block,
        scalars=lambda x: (np.int32(x.shape[0]), np.int32(x.shape[1])),
    )  # fmt: skip


def _small(most: int) -> Callable[..., str | None]:
    """Return a :attr:`Rung.cannot` of a rung that takes seconds for more elements."""

    def cannot(rows: int, columns: int) -> str | None:
        return (
            f"would take seconds for more than {most} elements" if rows * columns > most else None
        )

    return cannot


# A tile that covers any matrix.
_EVERYTHING = (1 << 31, 1 << 31)
# A block's threads along x and y, as the sources have them.
_NAIVE_SHAPES = ((64, 8), (32, 32), (32, 8), (16, 16), (8, 8), (8, 4), (4, 8))


def _naive(shape: Block, *, along_reads: bool) -> Rung:
    width, height = shape
    return _rung(
        f"naive {width}x{height}, along {'reads' if along_reads else 'writes'}",
        "03_naive.cu",
        f"naive<{str(along_reads).lower()}>",
        shape,
        shape,
        along_reads=along_reads,
    )


def _pass_through(width: int, height: int) -> Rung:
    return _rung(
        f"pass-through {width}x{height}",
        "04_pass_through.cu",
        f"pass_through<{width}, {height}>",
        (width, height),
        (width, height),
    )


def _tile(name: str, layout: str, thread_rows: int = 8) -> Rung:
    return _rung(name, "05_tile.cu", f"tile<{layout}, {thread_rows}>", (32, thread_rows), (32, 32))


def _shape(width: int, height: int) -> Rung:
    return _rung(
        f"padded {width}x{height}",
        "06_block_shapes.cu",
        f"block_shape<{width}, {height}>",
        (width * height, 1),
        (width, height),
    )


def _vectors(width: int, block: Block, form: str = "kRowByRow") -> Rung:
    how = {"kStraight": " straight", "kRowByRow": "", "kRowsFirst": " rows first"}[form]
    return _rung(
        f"float{width}{how}, {block[0]}x{block[1]}",
        "08_vectors.cu",
        f"vectors<{width}, {form}>",
        block,
        (width * block[0], width * block[1]),
        cannot=multiples(rows=width, columns=width),
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


_TMA = rung_of(
    "transpose/09_tma.cu", "TMA", multiples(rows=4, columns=4), compute_capability=(9, 0),
    out=lambda x: jax.ShapeDtypeStruct(x.shape[::-1], x.dtype),
    grid=lambda x: (blocks(x.shape[1], 32), blocks(x.shape[0], 32)),
    block=64, tensor_maps=_boxes,
)  # fmt: skip

_RUNGS = (
    _rung("serial", "01_serial.cu", "serial", (1, 1), _EVERYTHING, cannot=_small(1 << 20)),
    _rung(
        "row per thread", "02_row_per_thread.cu", "row_per_thread", (32, 1), (32, _EVERYTHING[1]),
        along_reads=False,
    ),
    *(_naive(shape, along_reads=True) for shape in _NAIVE_SHAPES),
    *(_naive(shape, along_reads=False) for shape in _NAIVE_SHAPES),
    _pass_through(32, 32),
    _pass_through(8, 8),
    _tile("tile of 1024 threads", "Plain", thread_rows=32),
    _tile("tile", "Plain"),
    _tile("padded", "Padded"),
    _tile("swizzled", "Swizzled"),
    *(_shape(*shape) for shape in ((8, 8), (8, 4), (32, 32), (64, 8))),
    _rung(
        "one row by two columns", "07_one_by_two.cu", "one_by_two", (4, 64), (8, 64),
        cannot=multiples(columns=2),
    ),
    *(_vectors(2, block) for block in ((8, 8), (16, 16), (4, 64))),
    *(_vectors(4, (8, 8), form) for form in ("kStraight", "kRowByRow", "kRowsFirst")),
    *(_vectors(4, block) for block in ((32, 32), (8, 4), (4, 64))),
    _TMA,
    Rung("jax_tilekern.transpose", (jax_tilekern.transpose,)),
)  # fmt: skip


def problems(sizes: Sizes) -> tuple[Problem, ...]:
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
