"""Products of arrays in page-locked host memory inside ``jit``, in loops over blocks.

A block of the result takes whole rows of ``a`` and whole columns of ``b``. The blocks of the same
rows are collected on the device, because XLA copies to part of a row in host memory at a twentieth
of the speed of whole rows. The loops are pipelined: an iteration multiplies the blocks of one step,
copies those of the next to the device, and a share of the rows before to the host, which XLA does
at the same time.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.interop.custom_rules import custom_vjp
from jax_tilekern.ops.matmul import matmul as device_matmul
from jax_tilekern.out_of_core.plan import LEAST, WholeProduct, extents

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


class Blocks(NamedTuple):
    """Rows and columns of a block of the result."""

    rows: int
    columns: int


class _Settings(NamedTuple):
    """What a product and its derivatives have in common."""

    precision: Any
    sums: np.dtype[Any]
    out: np.dtype[Any]
    memory_limit: int


def matmul(
    a: Any,
    b: Any,
    problem: WholeProduct,
    *,
    precision: lax.PrecisionLike,
    memory_limit: int | None,
) -> Array:
    """Return the product, in host memory, of matrices of which either may be there."""
    if memory_limit is None:
        raise ValueError(
            "inside jit a call needs a memory_limit: the memory that will be free when the program "
            "runs is not known"
        )
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, Array):
            raise TypeError(
                f"{name} is {type(operand).__name__}, which inside jit would become a constant of "
                "the program: pass a JAX array"
            )
    settings = _Settings(precision, problem.sums, problem.out, memory_limit)
    a, b = jnp.asarray(a, problem.lhs), jnp.asarray(b, problem.rhs)
    result: Array = _product(a, b, settings, (False, False))
    return result


@functools.partial(custom_vjp, nondiff_argnums=(2, 3))
def _product(a: Array, b: Array, settings: _Settings, transposed: tuple[bool, bool]) -> Array:
    """Return ``a @ b`` in host memory, with either of them transposed."""
    (m, k), n = _shape(a, transposed[0]), _shape(b, transposed[1])[1]
    result: Array = jax.device_put(jnp.zeros((m, n), settings.out), _HOST)
    if 0 in (m, n, k):
        return result
    types = (np.dtype(t) for t in (a.dtype, b.dtype, settings.out, settings.sums))
    blocks = choose_blocks(WholeProduct(m, n, k, *types), settings.memory_limit)
    grid = math.ceil(m / blocks.rows), math.ceil(n / blocks.columns)

    def start(index: Any, extent: int, size: int) -> Any:
        # The last block begins early enough to be whole, and computes some elements again.
        return jnp.minimum(index * extent, size - extent)

    def lhs(i: Any) -> Array:
        return _part(a, 0, start(i, blocks.rows, m), blocks.rows, transposed[0])

    def rhs(j: Any) -> Array:
        return _part(b, 1, start(j, blocks.columns, n), blocks.columns, transposed[1])

    # With x64 enabled, numbers and loops' indices are int64.
    zero = jnp.int32(0)
    # Each step copies so many of the rows before, of which the last may be copied again.
    share = math.ceil(blocks.rows / grid[1])

    def share_of(strips: Array, i: Any, j: Any) -> tuple[Array, Any]:
        """Return rows of the strip of block ``i``, and their place in the result."""
        first = start(j, share, blocks.rows)
        rows: Array = lax.dynamic_slice(strips, (i % 2, first, zero), (1, share, n))[0]
        return rows, first + start(i, blocks.rows, m)

    def written(result: Array, rows: Array, place: Any) -> Array:
        return lax.dynamic_update_slice(result, jax.device_put(rows, _HOST), (place, zero))

    def row(i: Any, x: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        i = jnp.int32(i)

        def column(j: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            j = jnp.int32(j)
            y, rows, place, strips, result = carry
            next_y = rhs(jnp.where(j + 1 < grid[1], j + 1, 0))
            product = device_matmul(
                x, y, precision=settings.precision, preferred_element_type=settings.sums
            )
            result = written(result, rows, place)
            block = product.astype(settings.out)[None]
            strips = lax.dynamic_update_slice(
                strips, block, (i % 2, zero, start(j, blocks.columns, n))
            )
            # Before there is a strip, what there is of the first is copied, and replaced later.
            return next_y, *share_of(strips, jnp.maximum(i - 1, 0), j), strips, result

        found: tuple[Any, ...] = lax.fori_loop(0, grid[1], column, carry)
        return found

    def row_before_last(i: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        x, others = carry
        return lhs(i + 1), row(i, x, others)

    last = grid[0] - 1
    strips = jnp.zeros((2, blocks.rows, n), settings.out)
    carry = lhs(zero), (rhs(zero), *share_of(strips, zero, zero), strips, result)
    # No block of `a` is copied beside the last row, since none comes after it.
    _, rows, place, strips, result = row(last, *lax.fori_loop(0, last, row_before_last, carry))
    result = written(result, rows, place)
    return written(result, strips[last % 2], start(jnp.int32(last), blocks.rows, m))


def _forward(
    a: Array, b: Array, settings: _Settings, transposed: tuple[bool, bool]
) -> tuple[Array, tuple[Array, Array]]:
    return _product(a, b, settings, transposed), (a, b)


def _backward(
    settings: _Settings, transposed: tuple[bool, bool], operands: tuple[Array, Array], g: Array
) -> tuple[Any, ...]:
    (a, b), (of_a, of_b) = operands, transposed

    def product(x: Array, y: Array, like: Array, transposed: tuple[bool, bool]) -> Array:
        found = _product(x, y, settings._replace(out=like.dtype), transposed)
        moved: Array = jax.device_put(found, jax.typeof(like).memory_space)
        return moved

    return (
        product(b, g, a, (of_b, True)) if of_a else product(g, b, a, (False, not of_b)),
        product(g, a, b, (True, of_a)) if of_b else product(a, g, b, (not of_a, False)),
    )


_product.defvjp(_forward, _backward)


def _part(x: Array, axis: int, start: Any, extent: int, transposed: bool) -> Array:
    """Return rows or columns of a matrix, or of a transposed one, on the device."""
    sliced = lax.dynamic_slice_in_dim(x, start, extent, 1 - axis if transposed else axis)
    part: Array = jax.device_put(sliced, _DEVICE)
    return part.T if transposed else part


def _shape(x: Array, transposed: bool) -> tuple[int, int]:
    rows, columns = x.shape
    return (columns, rows) if transposed else (rows, columns)


def choose_blocks(problem: WholeProduct, memory_limit: int) -> Blocks:
    """Return the blocks that copy the fewest bytes to the device within a limit."""
    for least in LEAST:
        # Rows are copied once, and columns for each block of rows.
        columns = extents(problem.n, least)[-1]
        for rows in extents(problem.m, least):
            if memory_bytes(problem, rows, columns) <= memory_limit:
                return Blocks(rows, columns)
    smallest = min(LEAST[-1], problem.m), min(LEAST[-1], problem.n)
    raise ValueError(
        f"a memory_limit of {memory_limit} bytes is too small: inside jit, blocks of "
        f"{smallest[0]}x{smallest[1]}, {problem.k} deep, need {memory_bytes(problem, *smallest)} "
        "bytes"
    )


def memory_bytes(problem: WholeProduct, rows: int, columns: int) -> int:
    """Return the memory of two blocks of each operand, of accumulators, and of the result's rows.

    What a product's kernel takes beside them is not counted, nor are transposed copies of blocks.
    """
    lhs, rhs, out, sums = (dtype.itemsize for dtype in problem[3:])
    operands = problem.k * (rows * lhs + columns * rhs)
    # A block of the result, then its rows twice; as many elements as a block's are being copied.
    block = rows * columns * (sums + 2 * out)
    return 2 * operands + block + 2 * rows * problem.n * out
