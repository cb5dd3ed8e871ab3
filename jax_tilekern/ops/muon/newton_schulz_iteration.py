"""The products of a Newton-Schulz iteration: its forms, and their operands in float16."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.products.matmul import matmul, symmetric_matmul

# The Gram form forms the Gram matrix anew after the second step, and then after every third one.
# Between, rounding errors of the Gram matrix grow by the square of the first coefficient a step.
_RESTARTS = slice(2, None, 3)


def wide_type_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the real type of norms and coefficients."""
    return np.dtype(np.float32) if dtype.itemsize < 4 else np.zeros((), dtype).real.dtype


def iterated(
    x: Array,
    coefficients: Array,
    eps: Array,
    *,
    preconditioning: str,
    method: str,
    precision: Any,
    in_float16: bool = False,
) -> Array:
    """Scale matrices and iterate, with float16 operands of products if this is asked for."""
    *batch, rows, columns = whole_shape = x.shape
    if batch == [1] * len(batch):
        # XLA for GPUs drops such dimensions of some operands of a tall one, and then fails.
        x = x.reshape(rows, columns)
    form = Form(rows <= columns, precision)
    scaled = form.scaled(x, preconditioning, eps)
    if not len(coefficients):
        return scaled.astype(x.dtype).reshape(whole_shape)
    # Eigenvalues of Gram matrices need more than the 8 bits of bfloat16.
    if in_float16 or (method == "gram" and x.dtype.itemsize < 4):
        form = form.in_float16(coefficients)
    else:
        scaled = scaled.astype(x.dtype)
    iterate = form.standard if method == "standard" else form.by_gram_matrix
    return iterate(scaled, coefficients).astype(x.dtype).reshape(whole_shape)


def largest_power_of_two(coefficients: Array) -> Array:
    """Return a power of two whose square times any element of an iteration is at most 2**15.

    The elements are those of ``x`` and of polynomials of its Gram matrix. The largest singular
    values bound them, and follow from the coefficients. The values are scalars, which XLA computes
    in one kernel.
    """
    # The squares of singular values lie between 0 and `end`.
    end = bound = jnp.ones((), coefficients.dtype)
    for a, b, c in lax.stop_gradient(coefficients):
        # Extrema of `b * g + c * g**2`, and of the singular values as functions of their squares g,
        # which are roots of `a + 3 * b * g + 5 * c * g**2`.
        root = -1.5 * b - jnp.copysign(0.5, b) * jnp.sqrt(9 * b * b - 20 * a * c)
        inside = [-b / (2 * c), root / (5 * c), a / root]
        squares = [end, *(jnp.clip(jnp.where(jnp.isnan(g), 0, g), 0, end) for g in inside)]
        polynomials = [b * g + c * g * g for g in squares]
        results = [g * (a + z) ** 2 for g, z in zip(squares, polynomials, strict=True)]
        end = functools.reduce(jnp.maximum, results)
        bound = functools.reduce(jnp.maximum, [bound, end, *map(jnp.abs, polynomials)])
    _, exponent = jnp.frexp(bound)
    return jnp.ldexp(jnp.ones_like(bound), (15 - exponent) // 2)


class Form(NamedTuple):
    """The products of an iteration."""

    is_wide: bool  # whether the rows are the short side
    precision: lax.PrecisionLike
    # A power of two. Operands of products are ``scale * x``. Gram matrices and their polynomials
    # are stored ``scale**2`` times as large, accumulated factors as they are.
    scale: Any = 1.0
    rounds: bool = False  # whether operands of products are float16 and not of the type of x

    def in_float16(self, coefficients: Array) -> Form:
        """Return the form with float16 operands, scaled so that few elements are subnormal."""
        scale = largest_power_of_two(coefficients)
        return self._replace(precision=None, scale=scale, rounds=True)

    def operand(self, x: Array) -> Array:
        """Return matrices as an operand of products."""
        return (self.scale * x).astype(np.float16) if self.rounds else x

    def scaled(self, x: Array, preconditioning: str, eps: Array) -> Array:
        """Return matrices whose singular values are at most about 1, in a wide type."""
        wide_type = jnp.promote_types(x.dtype, eps.dtype)
        if preconditioning in ("frobenius", "spectral"):
            wide = x.astype(wide_type)
            if preconditioning == "frobenius":
                norm = _root(jnp.sum(_square(wide), axis=(-2, -1), keepdims=True))
            else:
                norm = jnp.linalg.norm(wide, ord=2, axis=(-2, -1), keepdims=True)
            return wide / (norm + eps)
        gram = self.gram(x, wide_type)
        if preconditioning == "aol":
            sums = jnp.abs(gram).sum(-1, keepdims=True)
        else:
            sums = _root(jnp.sum(_square(gram), axis=(-2, -1), keepdims=True))
        scale = lax.rsqrt(jnp.maximum(sums, eps))
        return x * (scale if self.is_wide else scale.mT)

    def gram(self, x: Array, out_type: np.dtype | None = None) -> Array:
        """Return the products of the short side's vectors with each other."""
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            # They are Hermitian.
            adjoint = x.conj().mT
            operands = (x, adjoint) if self.is_wide else (adjoint, x)
            return matmul(*operands, precision=self.precision, preferred_element_type=out_type)
        rows = x if self.is_wide else x.mT
        return symmetric_matmul(rows, precision=self.precision, preferred_element_type=out_type)

    def times(self, factor: Array, x: Array, **how: Any) -> Any:
        """Return the product of a factor of the short side with ``x``."""
        operands = (factor, x) if self.is_wide else (x, factor)
        return matmul(*operands, precision=self.precision, **how)

    def gram_product(
        self, first: Array, second: Array | None, epilogue: Callable[..., Array], *operands: Array
    ) -> Array:
        """Return an epilogue's result for the product of two polynomials of a Gram matrix.

        They commute, and real ones are symmetric. Without ``second`` it is the square of a product
        of :meth:`gram`, which is exactly symmetric: a kernel of float32 reads its transpose.
        """
        how: dict[str, Any] = {"precision": self.precision, "epilogue": epilogue}
        if jnp.issubdtype(first.dtype, jnp.complexfloating):
            return matmul(first, first if second is None else second, operands=operands, **how)
        return symmetric_matmul(first, second, operands=operands, **how)

    def standard(self, x: Array, coefficients: Array) -> Array:
        """Iterate on the matrices."""
        operand = self.operand(x)
        for step in coefficients[:-1]:
            x, operand = self._step(operand, x, self.scale**-3, step, is_followed=True)
        for step in coefficients[-1:]:
            x, _ = self._step(operand, x, self.scale**-3, step)
        return x

    def by_gram_matrix(self, x: Array, coefficients: Array) -> Array:
        """Iterate on the Gram matrices, and apply what they accumulate."""
        steps = len(coefficients)
        starts = [0, *range(steps)[_RESTARTS]]
        operand = self.operand(x)
        for start, stop in zip(starts, [*starts[1:], steps], strict=True):
            operand = self._segment(operand, coefficients[start:stop])
        return operand / self.scale if self.rounds else operand

    def _step(
        self, operand: Array, x: Array, scale: Any, step: Array, is_followed: bool = False
    ) -> tuple[Array, Array]:
        """Return a step's result for ``x``, in the type of ``x`` and as an operand of products.

        ``operand`` is ``x`` as an operand, and ``scale`` multiplies products of a polynomial and an
        operand. The second result is computed apart if the step ``is_followed`` by another.
        """
        a, b, c = step
        gram = self.gram(operand)
        z = self.gram_product(gram, None, _combined, c * self.scale**-2, gram, b)
        how: dict[str, Any] = {"preferred_element_type": x.dtype}
        if is_followed and self.rounds:
            operands = (scale, x, a, self.scale)
            both = self.times(z, operand, epilogue=_combined_and_rounded, operands=operands, **how)
            return both[0], both[1]
        result = self.times(z, operand, epilogue=_combined, operands=(scale, x, a), **how)
        return result, result

    def _segment(self, x: Array, coefficients: Array) -> Array:
        inverse = self.scale**-2
        if len(coefficients) < 2:
            return self._step(x, x, inverse, coefficients[0])[0]
        gram = self.gram(x)
        # Each step multiplies x by a + z, and so the Gram matrix by it from both sides. A kernel
        # adds the identity where the row and the column are equal.
        row = jnp.arange(gram.shape[-1])
        (a, b, c), *others = coefficients
        z = self.gram_product(gram, None, _combined, c * inverse, gram, b)
        factor = None
        for next_a, b, c in others:
            right = self.gram_product(gram, z, _combined, inverse, gram, a)
            gram = self.gram_product(z, right, _combined, inverse, right, a)
            next_z = self.gram_product(gram, gram, _combined, c * inverse, gram, b)
            if factor is None:
                operands = (inverse, a, z, next_a, next_z, row[:, None], row)
                factor = self.gram_product(z, next_z, _product_of_sums, *operands)
            else:
                factor = self.gram_product(factor, next_z, _combined, inverse, factor, next_a)
            a, z = next_a, next_z
        assert factor is not None
        result: Array = self.times(factor, x)
        return result


def _combined(product: Array, c: Array, x: Array, b: Array) -> Array:
    return c * product + b * x


def _combined_and_rounded(
    product: Array, c: Array, x: Array, b: Array, scale: Array
) -> tuple[Array, Array]:
    result = _combined(product, c, x, b)
    return result, (scale * result).astype(np.float16)


def _product_of_sums(
    product: Array,
    scale: Array,
    a: Array,
    x: Array,
    b: Array,
    y: Array,
    row: Array,
    column: Array,
) -> Array:
    """Return an element of ``(a + scale * x) @ (b + scale * y)``, given that of ``x @ y``."""
    return scale * (scale * product + a * y + b * x) + jnp.where(row == column, a * b, 0)


def _square(x: Array) -> Array:
    return (x * x.conj()).real


def _root(x: Array) -> Array:
    """Return the square root, with the derivative 0 at 0."""
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), 0)


def orthogonalized_in_loop(
    x: Array, steps: Array, coefficients: Array, *, preconditioning: str, eps: ArrayLike
) -> Array:
    """Iterate in the standard form as often as a value of the program says."""
    wide = wide_type_of(x.dtype)
    form = Form(x.shape[-2] <= x.shape[-1], None)
    scaled = form.scaled(x, preconditioning, jnp.asarray(eps, wide)).astype(x.dtype)
    step = coefficients[None].astype(wide)
    result: Array = lax.fori_loop(0, steps, lambda _, x: form.standard(x, step), scaled)
    return result
