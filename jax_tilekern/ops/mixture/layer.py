"""A layer of experts by sorted tokens and grouped GEMMs, of the experts that one device has.

Tokens are sorted by expert, multiplied by the experts' matrices, and summed to tokens in a fixed
order. The weights of the mixture multiply the hidden values, before the last product: so the sum
over a token's experts is linear, no result of an expert is saved for the backward pass, and the
derivative of a weight is a sum over the hidden values (SonicMoE, arXiv:2512.14080).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jax_tilekern.epilogue.scalar_function import Role
from jax_tilekern.interop import compat
from jax_tilekern.interop.custom_rules import custom_jvp
from jax_tilekern.interop.global_modes import mode_independent
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.element_types import clipped
from jax_tilekern.ops.mixture.activation import closed_over
from jax_tilekern.ops.mixture.rows import combine_rows, spread_rows
from jax_tilekern.ops.products.contraction import contract
from jax_tilekern.ops.products.fused_contraction import (
    contract_with_epilogue,
)
from jax_tilekern.ops.products.quantized_weights import QuantizedWeights, multiply_by
from jax_tilekern.ops.products.ragged_dot import rows_by_matrices
from jax_tilekern.ops.products.weight_pair import is_pair, multiply_by_pair
from jax_tilekern.ops.segments.order import order_and_places
from jax_tilekern.ops.segments.plan import is_too_large

# Names of the dimensions of each array. Values that the activation closes over have none.
DIMS = {
    "x": ("tokens", "features"), "w_up": ("experts", "features", "hidden"),
    "w_gate": ("experts", "features", "hidden"), "w_down": ("experts", "hidden", "features"),
    "b_up": ("experts", "hidden"), "b_gate": ("experts", "hidden"),
    "b_down": ("experts", "features"), "indices": ("tokens", "k"), "weights": ("tokens", "k"),
}  # fmt: skip
# The values that the backward pass does not compute again: the first products, and the order of
# tokens.
SAVED = "jax_tilekern.moe"
_saved = functools.partial(checkpoint_name, name=SAVED)


def _sort(indices: Array, offset: Array | None, experts: int) -> Sorted:
    tokens, k = indices.shape
    ids = clipped(indices.ravel(), -1, 2**31 - 1)
    # The difference may wrap, and is then negative.
    own = ids if offset is None else ids - clipped(offset, -experts, 2**31 - 1)
    # Pairs of no expert are behind the others. The first bin has keys below 0.
    keys = jnp.where((ids >= 0) & (own >= 0) & (own < experts), own, experts) - 1
    if is_too_large(ids, experts):
        raise ValueError(f"moe: {tokens} tokens of {k} experts are more pairs than int32 counts")
    pairs, places, bounds = order_and_places(keys, bins=experts + 1)
    return Sorted(bounds, pairs, places.reshape(tokens, k))


def expert_layer(
    arrays: dict[str, Array], offset: Array | None, *, save: str, **params: Any
) -> Array:
    """Compute the layer of the experts that the arrays have, the first of which is ``offset``.

    The backward pass computes again what ``save`` leaves out; see :func:`jax_tilekern.moe`.
    """
    policy = jax.checkpoint_policies.save_only_these_names(*([SAVED] if save == "hidden" else []))
    layer = jax.checkpoint(functools.partial(_layer, **params), policy=policy)
    result: Array = layer(arrays, offset)
    return result


def _layer(
    arrays: dict[str, Array],
    offset: Array | None,
    *,
    activation: Callable[..., Any],
    precision: Any,
    out_dtype: np.dtype[Any],
    differentiated: bool = False,
) -> Array:
    """Compute the layer, with an activation of an element and of the arrays that it closes over.

    If it is ``differentiated``, it has the kernels of the forward pass of its own derivative.
    """
    x, w_up = arrays["x"], arrays["w_up"]
    if 0 in (x.shape[0], arrays["indices"].shape[1]):
        # A device may have a part of the features of the last matrices.
        return jnp.zeros((x.shape[0], arrays["w_down"].shape[2]), out_dtype)
    by_expert = jax.tree.map(_saved, _sort(arrays["indices"], offset, w_up.shape[0]))
    dtype = jnp.result_type(x, w_up)
    chosen = arrays["weights"].astype(dtype).reshape(-1, 1)
    (weights,) = spread_rows(chosen, by_expert.places.reshape(-1, 1), by_expert.pairs)
    precision = compat.canonicalize_precision(precision)
    products = _Products(by_expert.bounds, precision)
    # A copy for each product: their cotangents are added as they are summed to tokens.
    copies = len(_first_products(arrays))
    rows = spread_rows(x, by_expert.places, by_expert.tokens, copies)
    hidden = _hidden(activation, products, rows, weights, arrays, differentiated)
    w_down, bias = arrays["w_down"], arrays.get("b_down")
    if bias is None:
        results = products.plain(hidden, w_down, out_dtype)
    else:
        results = products.with_epilogue(
            hidden,
            w_down,
            out_dtype,
            lambda y, weight, bias: y + weight * bias,
            (weights,),
            (bias,),
        )
    return combine_rows(results, places=by_expert.places, tokens=by_expert.tokens)


class Sorted(NamedTuple):
    """Pairs of a token and an expert, sorted by expert."""

    bounds: Array  # where the pairs of each expert begin, and where the last one's end
    pairs: Array  # the number of each pair, token * k + choice
    places: Array  # the row of each token's pairs

    @property
    def tokens(self) -> Array:
        return self.pairs // self.places.shape[1]


class _Products(NamedTuple):
    """Products of rows, which are sorted by expert, with the matrices of experts."""

    bounds: Array
    precision: Any

    def _call(self) -> dict[str, Any]:
        return {"contraction": rows_by_matrices(), "precision": self.precision}

    def plain(self, rows: Array, w: Array | QuantizedWeights, dtype: Any) -> Array:
        if isinstance(w, QuantizedWeights):
            shape = rows.shape[0], w.shape[2]
            call: dict[str, Any] = {"out_dtype": dtype, "shape": shape, "role": Role("moe")}
            c, bounds = rows_by_matrices(), [self.bounds]
            result: Array = multiply_by(rows, w, c, bounds, precision=self.precision, **call)
            return result
        return contract(rows, w, self.bounds, **self._call(), out_dtype=dtype)

    def several(self, rows: Sequence[Array], matrices: Sequence[Any], dtype: Any) -> list[Array]:
        """Multiply the rows of each array by its matrices; those of two may have one kernel."""
        if all(isinstance(w, QuantizedWeights) for w in matrices) and len(matrices) == 2:
            first, second = (tuple(jax.tree.leaves(w.factors)) for w in matrices)
            if is_pair(first, second):
                wide = rows[0].astype(jnp.promote_types(rows[0].dtype, matrices[0].dtype))
                call = {"precision": self.precision, "out_dtype": dtype}
                return multiply_by_pair(wide, first, second, self.bounds, **call)
        return [self.plain(x, w, dtype) for x, w in zip(rows, matrices, strict=True)]

    def with_epilogue(
        self,
        rows: Array,
        w: Array,
        dtype: Any,
        epilogue: Callable[..., Any],
        operands: Sequence[Array],
        expert_operands: Sequence[Array],
        second: Array | None = None,
    ) -> Array:
        """Multiply the rows, by two arrays if there is a second; apply a function to elements."""
        result: Array = contract_with_epilogue(
            rows,
            w,
            self.bounds,
            second=second,
            **self._call(),
            product=dtype,
            shape=(rows.shape[0], w.shape[2]),
            epilogue=epilogue,
            operands=operands,
            group_operands=expert_operands,
        )
        return result


def _first_products(arrays: dict[str, Array]) -> list[str]:
    """Return the names of the products of tokens, in the order of :func:`_value`."""
    return [name for name in ("gate", "up") if f"w_{name}" in arrays]


def _value(
    activation: Callable[..., Any],
    dtype: np.dtype[Any],
    read: Sequence[Any],
    weight: Any,
    *values: Any,
) -> Any:
    """Return a hidden value times its weight, given the first products."""
    elementwise = functools.partial(_elementwise, activation)
    acted = functools.reduce(operator.mul, (elementwise(values[0], *read), *values[1:]))
    return (acted * weight).astype(dtype)


def _elementwise(function: Callable[..., Any], x: Any, *scalars: Any) -> Any:
    for _ in range(jnp.ndim(x)):
        function = jax.vmap(function, in_axes=(0, *(None for _ in scalars)))
    return compat.staged(function)(x, *scalars)


def _hidden(
    activation: Callable[..., Any],
    products: _Products,
    rows: Sequence[Array],
    weights: Array,
    arrays: dict[str, Array],
    differentiated: bool,
) -> Array:
    """Return the hidden values of each pair, times its weight.

    One kernel computes the products and the function. Where the call is differentiated, the
    products are computed by themselves, because the derivative has them, and the function is
    computed again. So are products by quantised weights.
    """
    dtype, precision = np.dtype(jnp.result_type(rows[0], arrays["w_up"])), products.precision
    names = _first_products(arrays)
    biased = [f"b_{name}" in arrays for name in names]
    value = functools.partial(_value, activation, dtype)

    @custom_jvp
    def hidden(
        bounds: Array, rows: Any, matrices: Any, weights: Array, biases: Any, read: Any
    ) -> Array:
        def hidden_value(*values: Any) -> Any:
            accumulators, (weight, *others) = values[: len(names)], values[len(names) :]
            biases = iter(others)
            added = zip(accumulators, biased, strict=True)
            sums = (y + next(biases) if has_bias else y for y, has_bias in added)
            return value(read, weight, *sums)

        products = _Products(bounds, precision)
        return products.with_epilogue(
            rows[0], matrices[0], dtype, hidden_value, (weights,), biases, *matrices[1:]
        )

    def unfused(
        products: _Products, rows: Any, matrices: Any, weights: Array, biases: Any, read: Any
    ) -> Array:
        left = iter(biases)
        if any(biased):
            values = [
                products.with_epilogue(x, w, dtype, jnp.add, (), (next(left),))
                if has_bias
                else products.plain(x, w, dtype)
                for x, w, has_bias in zip(rows, matrices, biased, strict=True)
            ]
        else:
            values = products.several(rows, matrices, dtype)
        result: Array = value(read, weights, *map(_saved, values))
        return result

    @hidden.defjvp
    @mode_independent
    def _jvp(primals: Any, tangents: Any) -> Any:
        bounds, *moving = primals
        return jax.jvp(
            functools.partial(unfused, _Products(bounds, precision)), moving, [*tangents[1:]]
        )

    matrices = [arrays[f"w_{name}"] for name in names]
    biases = [arrays[f"b_{name}"] for name, own in zip(names, biased, strict=True) if own]
    operands = rows, matrices, weights, biases, closed_over(arrays)
    if differentiated or any(isinstance(w, QuantizedWeights) for w in matrices):
        return unfused(products, *operands)
    result: Array = hidden(products.bounds, *operands)
    return result
