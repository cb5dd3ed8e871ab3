"""Factorizations and solutions of small systems in a lane, as JAX functions of their elements."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_tilekern.epilogue.understood import Untranslatable, all_of
from jax_tilekern.interop import compat
from jax_tilekern.ops.kernel.translation.arrays import Places
from jax_tilekern.ops.kernel.translation.values import Value
from jax_tilekern.ops.kernel.translation.writer import LaneWriter, rule

# Loops over rows and columns are unrolled.
_MAX_SIZE = 16

Rows = list[list[Any]]


def matrix_rule(
    name: str, cores: tuple[int, ...], parameters: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that makes a JAX function of matrices the rule of a primitive.

    ``cores`` has the number of dimensions of each operand's matrix or vector; the others are
    batches.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @rule(name, **all_of(parameters))
        def write(writer: LaneWriter, eqn: Any, operands: list[Value], __: Places) -> list[Value]:
            shapes = [
                x.shape[len(x.shape) - dims :] for x, dims in zip(operands, cores, strict=True)
            ]
            if max((size for shape in shapes for size in shape), default=0) > _MAX_SIZE:
                sizes = " and ".join("x".join(map(str, shape)) for shape in shapes)
                raise Untranslatable(f"no CUDA for {name} of {sizes}, only up to {_MAX_SIZE}")
            means = functools.partial(function, **eqn.params)
            for _ in range(len(operands[0].shape) - cores[0]):
                means = jax.vmap(means)
            return writer.meaning(means, eqn, operands)

        write.__module__ = function.__module__
        return function

    return register


def _rows(x: Any) -> Rows:
    return [[x[i, j] for j in range(x.shape[1])] for i in range(x.shape[0])]


def _matrix(rows: Rows, shape: tuple[int, ...]) -> Any:
    elements = [x for row in rows for x in row]
    return jnp.stack(elements).reshape(shape) if elements else jnp.zeros(shape)


@matrix_rule("cholesky", (2,))
def _cholesky(x: Any) -> Any:
    a, n = _rows(x), x.shape[0]
    zero = jnp.zeros((), x.dtype)
    found = [[zero] * n for _ in range(n)]
    definite = jnp.array(True)
    for j in range(n):
        for i in range(j, n):
            rest = a[i][j]
            for k in range(j):
                rest = rest - found[i][k] * found[j][k]
            if i == j:
                definite = definite & (rest > 0)
            found[i][j] = jnp.sqrt(rest) if i == j else rest / found[j][j]
    return jnp.where(definite, _matrix(found, x.shape), jnp.nan).astype(x.dtype)


@matrix_rule("lu", (2,))
def _lu(x: Any) -> Any:
    a, (m, n) = _rows(x), x.shape
    order, pivots = [jnp.int32(i) for i in range(m)], []
    for k in range(min(m, n)):
        largest, pivot = jnp.abs(a[k][k]), jnp.int32(k)
        for i in range(k + 1, m):
            size = jnp.abs(a[i][k])
            pivot = jnp.where(size > largest, i, pivot)
            largest = jnp.maximum(size, largest)
        pivots.append(pivot)
        for i in range(k + 1, m):
            here = pivot == i
            a[k], a[i] = _exchanged(here, a[k], a[i])
            (order[k],), (order[i],) = _exchanged(here, [order[k]], [order[i]])
        for i in range(k + 1, m):
            factor = jnp.where(a[k][k] != 0, a[i][k] / a[k][k], a[i][k])
            rest = [y - factor * x for x, y in zip(a[k][k + 1 :], a[i][k + 1 :], strict=True)]
            a[i] = [*a[i][:k], factor, *rest]
    return _matrix(a, x.shape), jnp.stack(pivots), jnp.stack(order)


def _exchanged(here: Any, row: list[Any], other: list[Any]) -> tuple[list[Any], list[Any]]:
    pairs = list(zip(row, other, strict=True))
    return [jnp.where(here, y, x) for x, y in pairs], [jnp.where(here, x, y) for x, y in pairs]


@matrix_rule("lu_pivots_to_permutation", (1,), "permutation_size")
def _permutation(pivots: Any, *, permutation_size: int) -> Any:
    order = jnp.arange(permutation_size, dtype=pivots.dtype)
    for k in range(pivots.shape[0]):
        i = pivots[k]
        here, there = order[k], order[i]
        order = order.at[k].set(there).at[i].set(here)
    return order


@matrix_rule("qr", (2,), "pivoting full_matrices use_magma")
def _qr(x: Any, *, pivoting: bool, full_matrices: bool, **_: Any) -> Any:
    if pivoting:
        raise Untranslatable("no CUDA for qr with pivoting")
    a, (m, n) = _rows(x), x.shape
    zero, one = jnp.zeros((), x.dtype), jnp.ones((), x.dtype)
    reflections = []
    for k in range(min(m, n)):
        below = sum((a[i][k] * a[i][k] for i in range(k + 1, m)), zero)
        is_zero = below == 0
        length = jnp.sqrt(a[k][k] * a[k][k] + below)
        beta = jnp.where(is_zero, a[k][k], jnp.where(a[k][k] >= 0, -length, length))
        factor = jnp.where(is_zero, zero, (beta - a[k][k]) / beta)
        divisor = jnp.where(is_zero, one, a[k][k] - beta)
        v = [one, *(a[i][k] / divisor for i in range(k + 1, m))]
        reflections.append((k, factor, v))
        a[k][k] = beta
        for i in range(k + 1, m):
            a[i][k] = zero
        _reflect(a, k, factor, v, range(k + 1, n))
    columns = m if full_matrices else min(m, n)
    q = [[one if i == j else zero for j in range(columns)] for i in range(m)]
    for k, factor, v in reversed(reflections):
        _reflect(q, k, factor, v, range(k, columns))
    rows = columns
    return _matrix(q, (m, columns)), _matrix(a[:rows], (rows, n))


def _reflect(a: Rows, k: int, factor: Any, v: list[Any], columns: range) -> None:
    """Apply a Householder reflection to columns of the rows from ``k`` on."""
    for j in columns:
        product = sum((x * row[j] for x, row in zip(v[1:], a[k + 1 :], strict=True)), a[k][j])
        for x, row in zip(v, a[k:], strict=True):
            row[j] = row[j] - factor * product * x


@matrix_rule("triangular_solve", (2, 2), "left_side lower transpose_a conjugate_a unit_diagonal")
def _triangular_solve(
    a: Any,
    b: Any,
    *,
    left_side: bool,
    lower: bool,
    transpose_a: bool,
    unit_diagonal: bool,
    **_: Any,
) -> Any:
    # x a = b is aᵀ xᵀ = bᵀ.
    matrix, right = (a, b) if left_side else (a.T, b.T)
    if transpose_a:
        matrix = matrix.T
    from_top = lower ^ transpose_a ^ (not left_side)
    rows, found, n = _rows(matrix), _rows(right), a.shape[0]
    order = range(n) if from_top else range(n - 1, -1, -1)
    for i in order:
        known = range(i) if from_top else range(i + 1, n)
        for j in range(right.shape[1]):
            rest = found[i][j]
            for k in known:
                rest = rest - rows[i][k] * found[k][j]
            found[i][j] = rest if unit_diagonal else rest / rows[i][i]
    x = _matrix(found, right.shape).astype(b.dtype)
    return x if left_side else x.T


@rule("custom_linear_solve", **all_of("const_lengths jaxprs"))
def _linear_solve(
    writer: LaneWriter, eqn: Any, operands: list[Value], places: Places
) -> list[Value]:
    """Solve as the user's ``solve`` does."""
    before = eqn.params["const_lengths"]
    start = before.matvec + before.vecmat
    right = operands[sum(before) :]
    known = operands[start : start + before.solve]
    solve = compat.closed_jaxpr(eqn.params["jaxprs"].solve)
    return writer.jaxpr(solve, [*known, *right], places)
