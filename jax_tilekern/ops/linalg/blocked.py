"""Inverses and systems of large matrices, in blocks: products do most of the arithmetic.

The blocks of a triangle's diagonal are inverted, and each solution is refined once, because the
error of a product with an inverse alone grows with the condition number of the block (Higham,
Accuracy and Stability of Numerical Algorithms, section 8.2). Columns are halved recursively, so
that most of the arithmetic is in few, large products.

Arrays have any leading dimensions. Callers pass ``invert``, which inverts lower triangles of
``SMALLEST`` rows; an extent of blocks is a power of two times that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from jax import Array, lax

from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.products.matmul import matmul

SMALLEST = 64

Invert = Callable[[Array], Array]

_product = functools.partial(matmul, precision=lax.Precision.HIGHEST)


def inverse(factors: Array, permutation: Array, *, block: int, invert: Invert) -> Array:
    """Invert, by the inverse of the lower factor and a system with the upper one."""
    lower = _System(_lower(factors, unit_diagonal=True), block, invert).inverse()
    upper = _System(jnp.triu(factors).mT, block, invert, transposed=True)
    places = jnp.argsort(permutation, axis=-1)
    x = upper.solve(lower)
    return jnp.take_along_axis(x, places[..., None, :], axis=-1, mode="promise_in_bounds")


def triangular_solve(
    a: Array,
    b: Array,
    *,
    left_side: bool,
    lower: bool,
    transpose: bool,
    unit_diagonal: bool,
    block: int,
    invert: Invert,
) -> Array:
    """Solve ``a @ x = b``, or ``x @ a = b``, with one triangle of ``a``."""
    triangle = _lower(a if lower else a.mT, unit_diagonal=unit_diagonal)
    system = _System(triangle, block, invert, left_side, transposed=transpose == lower)
    return system.solve(b)


@dataclass
class _System:
    """Systems ``t @ x = b``, or ``x @ t = b``, with a lower triangle ``t`` or its transpose."""

    triangle: Array
    block: int
    invert: Invert
    left_side: bool = True
    transposed: bool = False

    def __post_init__(self) -> None:
        self._inverses = self._inverted(self._diagonal_blocks())

    def solve(self, b: Array) -> Array:
        return self._solve(b, 0, self.triangle.shape[-1])

    def inverse(self) -> Array:
        return self._inverse(0, self.triangle.shape[-1])

    def _solve(self, b: Array, start: int, end: int) -> Array:
        """Solve with the part of the triangle from a row to another."""
        if end - start <= self.block:
            inverse, part = self._inverse(start, end), self._part(start, end, start, end)
            x = self._apply(inverse, b)
            return x + self._apply(inverse, b - self._apply(part, x))
        middle = start + _half(end - start, self.block)
        axis = -2 if self.left_side else -1
        first, last = jnp.split(b, [middle - start], axis=axis)
        off_diagonal = self._part(middle, end, start, middle)
        # The transpose is an upper triangle if it is applied from the left.
        if self.transposed != self.left_side:
            first = self._solve(first, start, middle)
            last = self._solve(last - self._apply(off_diagonal, first), middle, end)
        else:
            last = self._solve(last, middle, end)
            first = self._solve(first - self._apply(off_diagonal, last), start, middle)
        return jnp.concatenate([first, last], axis=axis)

    def _apply(self, part: Array, x: Array) -> Array:
        part = part.mT if self.transposed else part
        return _product(part, x) if self.left_side else _product(x, part)

    def _part(self, start: int, end: int, first: int, last: int) -> Array:
        return self.triangle[..., start:end, first:last]

    def _inverse(self, start: int, end: int) -> Array:
        size = end - start
        if size <= self.block:
            return self._inverses[..., start // self.block, :size, :size]
        middle = start + _half(size, self.block)
        first, last = self._inverse(start, middle), self._inverse(middle, end)
        return _joined(first, self._part(middle, end, start, middle), last)

    def _diagonal_blocks(self) -> Array:
        """Return blocks of one size; the last is continued by an identity."""
        n, block = self.triangle.shape[-1], self.block
        parts = [self._part(i, i + block, i, i + block) for i in range(0, n, block)]
        missing = block - parts[-1].shape[-1]
        padding = [(0, 0)] * (self.triangle.ndim - 2) + [(0, missing)] * 2
        ones = jnp.where(jnp.arange(block) >= block - missing, 1, 0).astype(self.triangle.dtype)
        parts[-1] = jnp.pad(parts[-1], padding) + jnp.diag(ones)
        return jnp.stack(parts, axis=-3)

    def _inverted(self, blocks: Array) -> Array:
        """Invert lower triangles, whose sizes are a power of two times that of the smallest."""
        inverses = self.invert(_on_diagonal(blocks, SMALLEST))
        size = SMALLEST
        while size < self.block:
            off_diagonal = _on_diagonal(blocks, 2 * size)[..., size:, :size]
            first, last = inverses[..., 0::2, :, :], inverses[..., 1::2, :, :]
            inverses = _joined(first, off_diagonal, last)
            size *= 2
        return inverses[..., 0, :, :]


def _joined(first: Array, off_diagonal: Array, last: Array) -> Array:
    """Return the inverse of a lower triangle from those of its halves."""
    below = -_product(last, _product(off_diagonal, first))
    zeros = (first.shape[-1], 0)
    right = jnp.pad(last, [(0, 0)] * (last.ndim - 2) + [zeros, (0, 0)])
    return jnp.concatenate([jnp.concatenate([first, below], axis=-2), right], axis=-1)


def _on_diagonal(blocks: Array, size: int) -> Array:
    """Return the blocks of a smaller size on the diagonals, in a dimension before the last two."""
    parts = blocks.shape[-1] // size
    split = blocks.reshape(*blocks.shape[:-2], parts, size, parts, size)
    return jnp.moveaxis(jnp.diagonal(split, axis1=-4, axis2=-2), -1, -3)


def _lower(a: Array, *, unit_diagonal: bool) -> Array:
    """Return the lower triangle, which has a diagonal of ones if that of ``a`` is not read."""
    if unit_diagonal:
        return jnp.tril(a, -1) + jnp.eye(a.shape[-1], dtype=a.dtype)
    return jnp.tril(a)


def _half(size: int, block: int) -> int:
    """Return about half of a size, in whole blocks."""
    blocks = -(-size // block)
    return (blocks + 1) // 2 * block
