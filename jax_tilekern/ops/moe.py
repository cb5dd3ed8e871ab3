"""A mixture-of-experts layer: routing, and the experts as grouped GEMMs.

Tokens are sorted by expert, multiplied by the experts' matrices, and summed to tokens in a fixed
order. The weights of the mixture multiply the hidden values, before the last product: so the sum
over a token's experts is linear, no result of an expert is saved for the backward pass, and the
derivative of a weight is a sum over the hidden values (SonicMoE, arXiv:2512.14080).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.interop import compat
from jax_tilekern.ops.contraction import contract
from jax_tilekern.ops.expert_rows import combine_rows, spread_rows
from jax_tilekern.ops.expert_sharding import on_devices
from jax_tilekern.ops.fp8_experts import Fp8Products, Sorted
from jax_tilekern.ops.fp8_recipe import Fp8Recipe, check_quantizable
from jax_tilekern.ops.fused_contraction import contract_with_epilogue, labelled_operands
from jax_tilekern.ops.groups import checked_offset
from jax_tilekern.ops.labelled_operands import common_type
from jax_tilekern.ops.pair_contraction import contract_pair
from jax_tilekern.ops.ragged_dot import rows_by_matrices
from jax_tilekern.ops.segments.explicit import by_automatic_axes, spec_of
from jax_tilekern.ops.segments.keys import clipped
from jax_tilekern.ops.segments.order import order_and_places
from jax_tilekern.ops.segments.plan import is_too_large
from jax_tilekern.ops.segments.top_k import top_k
from jax_tilekern.ops.shared_contractions import contract_each

# What the backward pass does not compute again: the first products, and the order of tokens.
_SAVED = "jax_tilekern.moe"
_saved = functools.partial(checkpoint_name, name=_SAVED)


class Routing(NamedTuple):
    """The experts of each token.

    Attributes
    ----------
    weights
        Weight of each chosen expert, shape ``(tokens, k)``.
    indices
        The chosen experts, int32 of the same shape.
    """

    weights: Array
    indices: Array


def route(
    logits: ArrayLike,
    k: int,
    *,
    score_function: Literal["softmax", "sigmoid"] = "softmax",
    bias: ArrayLike | None = None,
    num_groups: int | None = None,
    chosen_groups: int | None = None,
    normalize: bool = True,
) -> Routing:
    """Choose experts for tokens.

    Parameters
    ----------
    logits
        The router's output, shape ``(tokens, experts)``. It is computed with in float32 at least.
    k
        Experts of a token.
    score_function
        What makes scores of logits: ``"softmax"`` over all experts, or ``"sigmoid"``.
    bias
        Added to the scores of experts when they are chosen, and not to their weights, shape
        ``(experts,)`` (balancing without an auxiliary loss, DeepSeek-V3, arXiv:2412.19437).
    num_groups, chosen_groups
        Experts are in so many groups of equal size, and each token takes its experts from the
        ``chosen_groups`` whose two highest scores have the largest sum (DeepSeek-V3).
    normalize
        Whether the weights of a token are divided by their sum.

    Returns
    -------
    Routing
        Weights, of the logits' type, and experts, those of the highest scores first. Weights have
        derivatives, choices have none.

    Raises
    ------
    TypeError
        If the logits are no floats.
    ValueError
        If shapes do not fit, ``k`` exceeds the experts to choose from, or groups do not divide
        them.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> jtk.route(jnp.array([[0.0, 2.0, 1.0]]), 2).indices
    Array([[1, 2]], dtype=int32)
    """
    logits = jnp.asarray(logits)
    if logits.ndim != 2:
        raise ValueError(f"route: logits of shape {logits.shape}; they are (tokens, experts)")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"route: logits are floats, not {logits.dtype}")
    if score_function not in ("softmax", "sigmoid"):
        raise ValueError(f"route: no score function {score_function!r}")
    experts = allowed = logits.shape[1]
    if bias is not None:
        bias = jnp.asarray(bias)
        if bias.shape != (experts,):
            raise ValueError(f"route: a bias of shape {bias.shape} for {experts} experts")
    if (num_groups is None) != (chosen_groups is None):
        raise ValueError("route: num_groups and chosen_groups are given together")
    groups = None
    if num_groups is not None and chosen_groups is not None:
        if num_groups < 1 or experts % num_groups:
            raise ValueError(f"route: num_groups is {num_groups}, which does not divide {experts}")
        if not 1 <= chosen_groups <= num_groups:
            raise ValueError(f"route: chosen_groups is {chosen_groups}, of {num_groups} groups")
        groups = num_groups, chosen_groups
        allowed = experts // num_groups * chosen_groups
    if not 0 <= k <= allowed:
        raise ValueError(f"route: k is {k}, and a token has {allowed} experts to choose from")

    def routed(operands: tuple[Array, Array | None]) -> list[Array]:
        logits, bias = operands
        wide = logits.astype(jnp.promote_types(logits.dtype, np.float32))
        if bias is None and groups is None:
            # Scores have the order of the logits.
            chosen, indices = top_k(logits if logits.dtype.itemsize > 1 else wide, k)
            chosen = chosen.astype(wide.dtype)
        else:
            functions = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}
            indices = _chosen(functions[score_function](wide), bias, k, groups)
            chosen = jnp.take_along_axis(wide, indices, 1)
        if normalize:
            # Chosen scores over their sum, where all may be tiny.
            softmax = score_function == "softmax"
            weights = jax.nn.softmax(chosen if softmax else jax.nn.log_sigmoid(chosen))
        elif score_function == "softmax":
            weights = jnp.exp(chosen - jax.nn.logsumexp(wide, 1, keepdims=True))
        else:
            weights = jax.nn.sigmoid(chosen)
        return [weights.astype(logits.dtype), indices]

    spec = (spec_of(logits)[0], None)
    return Routing(*by_automatic_axes(routed, (logits, bias), lambda: [spec, spec]))


def _chosen(scores: Array, bias: Array | None, k: int, groups: tuple[int, int] | None) -> Array:
    """Return the experts of the highest scores, which have no derivatives."""
    ranked = lax.stop_gradient(scores)
    if bias is not None:
        ranked = ranked + lax.stop_gradient(bias)
    if groups is not None:
        count, chosen = groups
        tokens, experts = ranked.shape
        by_group = ranked.reshape(tokens, count, experts // count)
        best, _ = top_k(by_group, min(2, by_group.shape[2]))
        _, inside = top_k(best.sum(-1), chosen)
        is_inside = jax.nn.one_hot(inside, count, dtype=np.bool_).any(1)
        ranked = jnp.where(is_inside[:, :, None], by_group, -jnp.inf).reshape(tokens, experts)
    return top_k(ranked, k)[1]


def moe(
    x: ArrayLike,
    w_up: ArrayLike,
    w_down: ArrayLike,
    indices: ArrayLike,
    weights: ArrayLike,
    *,
    w_gate: ArrayLike | None = None,
    b_up: ArrayLike | None = None,
    b_gate: ArrayLike | None = None,
    b_down: ArrayLike | None = None,
    activation: Callable[[Any], Any] = jax.nn.silu,
    group_offset: ArrayLike | None = None,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    save: Literal["hidden", "inputs"] = "hidden",
    recipe: Fp8Recipe | None = None,
) -> Array:
    """Compute a mixture-of-experts layer.

    For each token it is the sum over its experts of
    ``weight * (activation(x @ w_gate) * (x @ w_up)) @ w_down``, or of
    ``weight * activation(x @ w_up) @ w_down`` without ``w_gate``. No token is dropped, and none is
    padded for. The sum has a fixed order, in float32 at least.

    Parameters
    ----------
    x
        Tokens, shape ``(tokens, features)``.
    w_up, w_gate
        Matrices of the experts, shape ``(experts, features, hidden)``.
    w_down
        Matrices of the experts, shape ``(experts, hidden, features)``.
    indices
        The experts of each token, integers of shape ``(tokens, k)``, as :func:`route` returns them.
        One out of bounds adds nothing.
    weights
        Their weights, of the same shape.
    b_up, b_gate, b_down
        Biases of the experts, shapes ``(experts, hidden)`` and ``(experts, features)``.
    activation
        Any elementwise JAX function.
    group_offset
        The first expert that the matrices have, 0 by default: a device that has some of the
        experts computes their part of the sum.
    precision, preferred_element_type
        As in :func:`ragged_dot`; the result has ``preferred_element_type``, by default that of
        ``x`` and the matrices after promotion. With a recipe the precision is that of the gradients
        of the matrices.
    save
        What the backward pass has beside the operands: ``"hidden"``, the results of the first
        products; ``"inputs"``, nothing, so that it computes these again.
    recipe
        Compute the products of tokens and of hidden values with the matrices, and their gradients
        by both, in 8-bit floats, as :func:`fp8_dot_general` computes products. The gradients of the
        matrices are products of operands as they are, because blocks of 128 rows would have rows
        of several experts. There is no second derivative, and no ``jvp``. With
        ``save="hidden"`` the backward pass has the quantised matrices, too.

    Returns
    -------
    Array
        Shape ``(tokens, features)``.

    Raises
    ------
    TypeError
        If the indices are no integers, the recipe does not quantise a type, or a second derivative
        is taken with a recipe.
    ValueError
        If shapes do not fit.

    See Also
    --------
    route : chooses the experts.
    ragged_dot : the products.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> x, up, down = jnp.ones((5, 4)), jnp.ones((3, 4, 8)), jnp.ones((3, 8, 4))
    >>> weights, indices = jtk.route(jnp.zeros((5, 3)), 2)
    >>> jtk.moe(x, up, down, indices, weights, activation=jax.nn.relu)[0, 0]
    Array(32., dtype=float32)
    """
    given: dict[str, Any] = {
        "x": x, "w_up": w_up, "w_gate": w_gate, "w_down": w_down, "b_up": b_up, "b_gate": b_gate,
        "b_down": b_down, "indices": indices, "weights": weights,
    }  # fmt: skip
    arrays = {name: jnp.asarray(value) for name, value in given.items() if value is not None}
    _check_shapes(arrays)
    if save not in ("hidden", "inputs"):
        raise ValueError(f"moe: save={save!r} is neither 'hidden' nor 'inputs'")
    if not jnp.issubdtype(arrays["indices"].dtype, jnp.integer):
        raise TypeError(f"moe: indices are integers, not {arrays['indices'].dtype}")
    if "b_gate" in arrays and "w_gate" not in arrays:
        raise ValueError("moe: b_gate without w_gate")
    if recipe is not None:
        if not isinstance(recipe, Fp8Recipe):
            raise TypeError(f"moe: recipe is a jax_tilekern.Fp8Recipe, not {recipe!r}")
        factors = {k: x for k, x in arrays.items() if k == "x" or k.startswith("w_")}
        check_quantizable("moe with a recipe", **factors)
    out_dtype = np.dtype(
        jnp.result_type(arrays["x"], w_up, w_down)
        if preferred_element_type is None
        else preferred_element_type
    )
    offset = checked_offset("moe", group_offset)
    policy = jax.checkpoint_policies.save_only_these_names(*([_SAVED] if save == "hidden" else []))

    def layer(arrays: dict[str, Array], offset: Array | None, dtype: np.dtype[Any]) -> Array:
        part = functools.partial(
            _layer, activation=activation, precision=precision, out_dtype=dtype, recipe=recipe
        )
        result: Array = jax.checkpoint(part, policy=policy)(arrays, offset)
        return result

    return on_devices(layer, arrays, offset, _DIMS, out_dtype)


_DIMS = {
    "x": ("tokens", "features"), "w_up": ("experts", "features", "hidden"),
    "w_gate": ("experts", "features", "hidden"), "w_down": ("experts", "hidden", "features"),
    "b_up": ("experts", "hidden"), "b_gate": ("experts", "hidden"),
    "b_down": ("experts", "features"), "indices": ("tokens", "k"), "weights": ("tokens", "k"),
}  # fmt: skip


def _check_shapes(arrays: dict[str, Array]) -> None:
    """Raise an error that names every argument where one does not fit."""
    sizes: dict[str, int] = {}
    for name, array in arrays.items():
        dims = _DIMS[name]
        fits = len(dims) == array.ndim and all(
            sizes.setdefault(dim, size) == size for dim, size in zip(dims, array.shape, strict=True)
        )
        if not fits:
            shapes = ", ".join(
                f"{each} {found.shape} ({', '.join(_DIMS[each])})" for each, found in arrays.items()
            )
            raise ValueError(f"moe: {name} does not fit: {shapes}")


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


def _layer(
    arrays: dict[str, Array],
    offset: Array | None,
    *,
    activation: Callable[[Any], Any],
    precision: Any,
    out_dtype: np.dtype[Any],
    recipe: Fp8Recipe | None,
) -> Array:
    x, w_up = arrays["x"], arrays["w_up"]
    if 0 in (x.shape[0], arrays["indices"].shape[1]):
        return jnp.zeros(x.shape, out_dtype)
    by_expert = jax.tree.map(_saved, _sort(arrays["indices"], offset, w_up.shape[0]))
    dtype = jnp.result_type(x, w_up)
    chosen = arrays["weights"].astype(dtype).reshape(-1, 1)
    (weights,) = spread_rows(chosen, by_expert.places.reshape(-1, 1), by_expert.pairs)
    precision = compat.canonicalize_precision(precision)
    products: _Products | Fp8Products
    if recipe is None:
        products = _Products(by_expert.bounds, precision)
        # A copy for each product whose cotangent adds to that of the rows.
        copies = 1 if "w_gate" not in arrays or _has_one_cotangent(arrays) else 2
        rows = spread_rows(x, by_expert.places, by_expert.tokens, copies)
        hidden = _hidden(activation, products, rows, weights, arrays)
    else:
        products = Fp8Products(by_expert, precision, recipe, _saved)
        hidden = _fp8_hidden(activation, products, x, weights, arrays)
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


def _has_one_cotangent(arrays: dict[str, Array]) -> bool:
    """Whether the cotangents of both first products' rows are one, the sum of two products.

    Otherwise each product has its own, and they are added as they are summed to tokens.
    """
    return not {"b_up", "b_gate"} & arrays.keys()


class _Products(NamedTuple):
    """Products of the rows of pairs, which are sorted by expert, with the matrices of experts.

    Attributes
    ----------
    bounds
        As of :class:`Sorted`.
    precision
        Canonical.
    """

    bounds: Array
    precision: Any

    def _call(self) -> dict[str, Any]:
        return {"contraction": rows_by_matrices(), "precision": self.precision}

    def plain(self, rows: Array, w: Array, dtype: Any) -> Array:
        """Multiply the rows."""
        return contract(rows, w, self.bounds, **self._call(), out_dtype=dtype)

    def each(self, rows: Array, first: Array, second: Array, dtype: Any) -> list[Array]:
        """Multiply the rows by the matrices of two arrays."""
        rows, first = common_type(rows, first, dtype, self.precision)
        second = compat.as_type(second, first.dtype)
        return contract_each(rows, first, second, self.bounds, **self._call(), out_dtype=dtype)

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
        result: Array = contract_with_epilogue(
            rows,
            w,
            self.bounds,
            **self._call(),
            product=dtype,
            shape=(rows.shape[0], w.shape[2]),
            epilogue=epilogue,
            operands=operands,
            group_operands=of_experts,
        )
        return result

    def of_pair(
        self,
        rows: Array,
        first: Array,
        second: Array,
        dtype: Any,
        function: Callable[..., Any],
        operands: Sequence[Array],
        of_experts: Sequence[Array],
    ) -> Array:
        """Multiply the rows by the matrices of two arrays; combine both elements by a function."""
        rows, first = common_type(rows, first, dtype, self.precision)
        read = labelled_operands(
            operands,
            of_experts,
            self.bounds,
            contraction=rows_by_matrices(),
            shape=(rows.shape[0], first.shape[2]),
        )
        result: Array = contract_pair(
            rows,
            first,
            compat.as_type(second, first.dtype),
            self.bounds,
            **self._call(),
            product=dtype,
            function=function,
            operands=read,
        )
        return result


def _first_products(arrays: dict[str, Array]) -> list[str]:
    """Return the names of the products of tokens, in the order of :func:`_value`."""
    return [name for name in ("gate", "up") if f"w_{name}" in arrays]


def _value(
    activation: Callable[[Any], Any], dtype: np.dtype[Any], weight: Any, *values: Any
) -> Any:
    """Return a hidden value times its weight, given the first products."""
    acted = functools.reduce(operator.mul, (activation(values[0]), *values[1:]))
    return (acted * weight).astype(dtype)


def _fp8_hidden(
    activation: Callable[[Any], Any],
    products: Fp8Products,
    x: Array,
    weights: Array,
    arrays: dict[str, Array],
) -> Array:
    """Return the hidden values of each pair, times its weight, of products in 8-bit floats."""
    dtype, names = np.dtype(jnp.result_type(x, arrays["w_up"])), _first_products(arrays)
    values = products.of_tokens(x, [arrays[f"w_{name}"] for name in names], dtype)
    values = [
        products.applied(jnp.add, y, (), (arrays[f"b_{name}"],)) if f"b_{name}" in arrays else y
        for name, y in zip(names, map(_saved, values), strict=True)
    ]
    result: Array = _value(activation, dtype, weights, *values)
    return result


def _hidden(
    activation: Callable[[Any], Any],
    products: _Products,
    rows: Sequence[Array],
    weights: Array,
    arrays: dict[str, Array],
) -> Array:
    """Return the hidden values of each pair, times its weight.

    One kernel computes the products and the function. Where the call is differentiated, the
    products are computed by themselves, because the derivative has them, and the function is
    computed again.
    """
    dtype, precision = np.dtype(jnp.result_type(rows[0], arrays["w_up"])), products.precision
    names = _first_products(arrays)
    biased = [f"b_{name}" in arrays for name in names]
    value = functools.partial(_value, activation, dtype)

    def of_accumulators(*values: Any) -> Any:
        accumulators, (weight, *others) = values[: len(names)], values[len(names) :]
        biases = iter(others)
        added = zip(accumulators, biased, strict=True)
        return value(weight, *(y + next(biases) if has_bias else y for y, has_bias in added))

    @jax.custom_jvp
    def hidden(bounds: Array, rows: Any, matrices: Any, weights: Array, biases: Any) -> Array:
        products = _Products(bounds, precision)
        if len(matrices) == 1:
            return products.with_epilogue(
                rows[0], matrices[0], dtype, of_accumulators, (weights,), biases
            )
        return products.of_pair(
            rows[0], matrices[0], matrices[1], dtype, of_accumulators, (weights,), biases
        )

    def unfused(
        products: _Products, rows: Any, matrices: Any, weights: Array, biases: Any
    ) -> Array:
        if len(rows) < len(matrices):
            values = products.each(rows[0], matrices[0], matrices[1], dtype)
        else:
            left = iter(biases)
            values = [
                products.with_epilogue(x, w, dtype, jnp.add, (), (next(left),))
                if has_bias
                else products.plain(x, w, dtype)
                for x, w, has_bias in zip(rows, matrices, biased, strict=True)
            ]
        result: Array = value(weights, *map(_saved, values))
        return result

    @hidden.defjvp
    def _jvp(primals: Any, tangents: Any) -> Any:
        bounds, *moving = primals
        return jax.jvp(
            functools.partial(unfused, _Products(bounds, precision)), moving, [*tangents[1:]]
        )

    matrices = [arrays[f"w_{name}"] for name in names]
    biases = [arrays[f"b_{name}"] for name, own in zip(names, biased, strict=True) if own]
    result: Array = hidden(products.bounds, rows, matrices, weights, biases)
    return result
