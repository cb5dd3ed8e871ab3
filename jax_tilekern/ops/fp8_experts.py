"""Products of a mixture of experts in 8-bit floats.

Rows and matrices are quantised along the contraction of each product, forward and for the gradient
of the rows. The gradient of the matrices contracts the rows of each expert, and is a product of
operands as they are: blocks of 128 rows would have to begin where an expert's rows do, and 8-bit
tensor cores read rows of whole 16 bytes along the contraction, so every expert's rows would be
copied to places of their own first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_tilekern.epilogue.scalar_function import trace_scalars
from jax_tilekern.interop import compat
from jax_tilekern.interop.custom_rules import custom_vjp
from jax_tilekern.ops.contraction import contract
from jax_tilekern.ops.expert_rows import combine_rows, spread_rows
from jax_tilekern.ops.fp8_recipe import Fp8Recipe, differentiated_once
from jax_tilekern.ops.fused_contraction import labelled_operands
from jax_tilekern.ops.groups import over_groups
from jax_tilekern.ops.quantize import quantize
from jax_tilekern.ops.ragged_dot import rows_by_matrices
from jax_tilekern.ops.scaled_ragged_dot import scaled_rows_by_matrices
from jax_tilekern.plans.quantize import BLOCK, QUANTIZED_DTYPES


class Sorted(NamedTuple):
    """Pairs of a token and an expert, sorted by expert.

    Attributes
    ----------
    bounds
        Where the pairs of each expert begin, and where those of the last one end.
    pairs
        The number of each pair, ``token * k + choice``.
    places
        The row of each token's pairs.
    """

    bounds: Array
    pairs: Array
    places: Array

    @property
    def tokens(self) -> Array:
        """The token of each pair."""
        return self.pairs // self.places.shape[1]


class _Call(NamedTuple):
    """How rows are multiplied.

    Attributes
    ----------
    recipe
        How they are quantised.
    precision
        Of the gradient of the matrices.
    dtype
        Type of the result.
    saved
        Names what the backward pass does not compute again.
    of_tokens
        Whether the rows are those of tokens, each of which has several pairs.
    """

    recipe: Fp8Recipe
    precision: Any
    dtype: np.dtype[Any]
    saved: Callable[[Array], Array]
    of_tokens: bool


class Fp8Products(NamedTuple):
    """Products of the rows of pairs, which are sorted by expert, with the matrices of experts.

    Attributes
    ----------
    by_expert
        The pairs.
    precision
        Of the gradients of the matrices, canonical.
    recipe
        How rows are quantised.
    saved
        Names what the backward pass does not compute again.
    """

    by_expert: Sorted
    precision: Any
    recipe: Fp8Recipe
    saved: Callable[[Array], Array]

    def of_tokens(self, x: Array, matrices: Sequence[Array], dtype: Any) -> list[Array]:
        """Multiply the row of each pair's token by the matrices of each array."""
        return self._multiplied(x, matrices, dtype, of_tokens=True)

    def plain(self, rows: Array, w: Array, dtype: Any) -> Array:
        """Multiply the rows."""
        (result,) = self._multiplied(rows, [w], dtype, of_tokens=False)
        return result

    def with_epilogue(
        self,
        rows: Array,
        w: Array,
        dtype: Any,
        epilogue: Callable[..., Any],
        operands: Sequence[Array],
        of_experts: Sequence[Array],
    ) -> Array:
        """Multiply the rows, and apply a function to each element."""
        return self.applied(epilogue, self.plain(rows, w, dtype), operands, of_experts)

    def applied(
        self,
        function: Callable[..., Any],
        values: Array,
        operands: Sequence[Array],
        of_experts: Sequence[Array],
    ) -> Array:
        """Apply a function to each element of what has rows of pairs."""
        bounds, labels = self.by_expert.bounds, rows_by_matrices()
        read = labelled_operands(
            operands, of_experts, bounds, contraction=labels, shape=values.shape
        )
        dtypes = [x.dtype for x, _ in read]
        traced = trace_scalars(function, values.dtype, values.dtype, dtypes)
        call = over_groups(traced.function, labels, [own for _, own in read])
        result: Array = traced.nested(call(values, bounds, *(x for x, _ in read)))
        return result

    def _multiplied(
        self, x: Array, matrices: Sequence[Array], dtype: Any, of_tokens: bool
    ) -> list[Array]:
        call = _Call(self.recipe, self.precision, np.dtype(dtype), self.saved, of_tokens)
        x, *others = compat.unify_varying(x, *matrices, *self.by_expert)
        count = len(matrices)
        return list(_products(call, x, tuple(others[:count]), Sorted(*others[count:])))


@functools.partial(custom_vjp, nondiff_argnums=(0,))
def _products(
    call: _Call, x: Array, matrices: tuple[Array, ...], by_expert: Sorted
) -> tuple[Array, ...]:
    results, _ = _forward(call, x, matrices, by_expert)
    return results


def _forward(
    call: _Call, x: Array, matrices: tuple[Array, ...], by_expert: Sorted
) -> tuple[tuple[Array, ...], Any]:
    x, *matrices_once = differentiated_once(x, *matrices)
    values, scales = quantize(x, (1, BLOCK), power_of_two=call.recipe.power_of_two)
    of_rows = scales.T
    if call.of_tokens:
        # A token is quantised once, and its 8-bit row is copied to its pairs.
        (values,) = spread_rows(values, by_expert.places, by_expert.tokens)
        of_rows = of_rows.at[:, by_expert.tokens].get(mode="promise_in_bounds")
    results, kept = [], []
    for w in matrices_once:
        last, transposed = quantize(
            w, (BLOCK, BLOCK), power_of_two=call.recipe.power_of_two, both=True
        )
        of_product = (values, transposed[0], of_rows, transposed[1])
        results.append(scaled_rows_by_matrices(*of_product, by_expert.bounds, call.dtype))
        # Residuals are arrays, so an empty one tells the type of the matrices.
        kept.append((*map(call.saved, last), jnp.empty((0,), w.dtype)))
    return tuple(results), (x, kept, by_expert)


def _backward(
    call: _Call, residuals: Any, cotangents: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...], None]:
    x, kept, by_expert = residuals
    cotangents = differentiated_once(*cotangents)
    rows, recipe, c = x, call.recipe, rows_by_matrices()
    of_matrices_labels = dataclasses.replace(c, rhs=c.out, out=c.rhs)
    if call.of_tokens:
        (rows,) = spread_rows(x, by_expert.places, by_expert.tokens)
    of_rows, of_matrices = [], []
    for cotangent, (weights, of_weights, like) in zip(cotangents, kept, strict=True):
        dy = cotangent
        if dy.dtype not in QUANTIZED_DTYPES:
            dy = dy.astype(np.float32)
        values, scales = quantize(
            dy, (1, BLOCK), recipe.gradient_dtype, power_of_two=recipe.power_of_two
        )
        of_rows.append(
            scaled_rows_by_matrices(
                values, weights, scales.T, of_weights, by_expert.bounds, x.dtype
            )
        )
        of_matrices.append(
            contract(
                rows, cotangent, by_expert.bounds,
                contraction=of_matrices_labels, precision=call.precision, out_dtype=like.dtype,
            )
        )  # fmt: skip
    if call.of_tokens:
        of_x = combine_rows(*of_rows, places=by_expert.places, tokens=by_expert.tokens)
    else:
        (of_x,) = of_rows
    return of_x, tuple(of_matrices), None


_products.defvjp(_forward, _backward)
