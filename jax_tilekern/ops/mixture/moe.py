"""A mixture-of-experts layer: routing, and the public function of the experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.array_sources import source_of
from jax_tilekern.interop.global_modes import by_types, mode_independent, with_current_modes
from jax_tilekern.ops.arguments import check_choice, integer
from jax_tilekern.ops.element_types import clipped
from jax_tilekern.ops.explicit import by_automatic_axes, spec_of
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.mixture.activation import named, traced_activation
from jax_tilekern.ops.mixture.call import is_one_call, one_call
from jax_tilekern.ops.mixture.layer import DIMS, expert_layer
from jax_tilekern.ops.mixture.sharding import on_devices
from jax_tilekern.ops.products.groups import checked_offset
from jax_tilekern.ops.products.quantized_weights import QuantizedWeights
from jax_tilekern.ops.selection.top_k import top_k
from jax_tilekern.plans.gemm.arithmetic import accumulator_dtype
from jax_tilekern.plans.quantize import QUANTIZED_DTYPES

# The arrays that are multiplied, whose types are promoted.
_FACTORS = "x", "w_up", "w_gate", "w_down"


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
        If the logits are no floats, ``bias`` is complex, or ``k`` or a number of groups is no
        integer.
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
    compat.check_arraylike("route", logits, **compat.given(bias=bias))
    logits = jnp.asarray(logits)
    if logits.ndim != 2:
        raise ValueError(f"route: logits of shape {logits.shape}; they are (tokens, experts)")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"route: logits are floats, not {logits.dtype}")
    check_choice("route", "score_function", score_function, ("softmax", "sigmoid"))
    experts = allowed = logits.shape[1]
    if bias is not None:
        bias = jnp.asarray(bias)
        if bias.shape != (experts,):
            raise ValueError(f"route: a bias of shape {bias.shape} for {experts} experts")
        if jnp.issubdtype(bias.dtype, jnp.complexfloating):
            raise TypeError(f"route: a bias of {bias.dtype} has no order; it is added to scores")
    k = integer("route", "k", k)
    if (num_groups is None) != (chosen_groups is None):
        raise ValueError("route: num_groups and chosen_groups are given together")
    groups = None
    if num_groups is not None and chosen_groups is not None:
        num_groups = integer("route", "num_groups", num_groups)
        chosen_groups = integer("route", "chosen_groups", chosen_groups)
        if num_groups < 1 or experts % num_groups:
            raise ValueError(f"route: num_groups is {num_groups}, which does not divide {experts}")
        if not 1 <= chosen_groups <= num_groups:
            raise ValueError(f"route: chosen_groups is {chosen_groups}, of {num_groups} groups")
        groups = num_groups, chosen_groups
        allowed = experts // num_groups * chosen_groups
    if not 0 <= k <= allowed:
        raise ValueError(f"route: k is {k}, and a token has {allowed} experts to choose from")

    @mode_independent
    def routed(operands: tuple[Array, Array | None]) -> list[Array]:
        logits, bias = operands
        wide = logits.astype(accumulator_dtype(logits.dtype))
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
    weights: ArrayLike | Routing,
    indices: ArrayLike | None = None,
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
        Matrices of the experts, shape ``(experts, features, hidden)``, or
        :class:`QuantizedWeights`.
    w_down
        Matrices of the experts, shape ``(experts, hidden, features)``, or
        :class:`QuantizedWeights`. On one device and without biases, products are
        :func:`scaled_ragged_dot` of those; elsewhere they are dequantised first.
    weights
        Weight of each of a token's experts, shape ``(tokens, k)``, or a :class:`Routing`, as
        :func:`route` returns it, which has both weights and indices. Weights multiply the hidden
        values, so an infinite one gives NaN where the last product has terms of both signs.
    indices
        These experts, integers of the same shape. One out of bounds adds nothing.
    b_up, b_gate, b_down
        Biases of the experts, shapes ``(experts, hidden)`` and ``(experts, features)``.
    activation
        Any elementwise JAX function. A call is traced once for each function object and the values
        of the variables that it reads.
    group_offset
        The first expert that the matrices have, 0 by default: a device that has some of the
        experts computes their part of the sum.
    precision, preferred_element_type
        As in :func:`ragged_dot`; the result has ``preferred_element_type``, by default that of
        ``x`` and the matrices after promotion.
    save
        What the backward pass has beside the operands: ``"hidden"``, the results of the first
        products; ``"inputs"``, nothing, so that it computes these again. That is also done in a
        ``scan`` over automatic axes in a process with several devices.

    Returns
    -------
    Array
        Shape ``(tokens, features)``.

    Raises
    ------
    TypeError
        If the indices are no integers, the weights or the biases have a type of another kind than
        the first products, such as floats for integers, a type is an 8-bit float, or the
        activation is not a function of one scalar.
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
    >>> routing = jtk.route(jnp.zeros((5, 3)), 2)
    >>> jtk.moe(x, up, down, routing, activation=jax.nn.relu)[0, 0]
    Array(32., dtype=float32)
    """
    if isinstance(weights, Routing):
        if indices is not None:
            raise TypeError("moe: weights is a Routing, which has the indices; pass no others")
        weights, indices = weights
    elif isinstance(weights, tuple):
        raise TypeError(
            "moe: weights is a pair of arrays; pass both by themselves, or a Routing, which route "
            "returns"
        )
    given: dict[str, Any] = {
        "x": x, "w_up": w_up, "w_gate": w_gate, "w_down": w_down, "b_up": b_up, "b_gate": b_gate,
        "b_down": b_down, "weights": weights, "indices": indices,
    }  # fmt: skip
    for name, value in given.items():
        if value is None and name not in ("w_gate", "b_up", "b_gate", "b_down"):
            raise TypeError(f"moe: {name} is None; it is an array ({', '.join(DIMS[name])})")
    arrays: dict[str, Any] = {
        name: source_of(value) for name, value in given.items() if value is not None
    }
    small = {name: x for name, x in arrays.items() if isinstance(x, QuantizedWeights)}
    plain = {name: given[name] for name in arrays if name not in small}
    compat.check_arraylike("moe", **plain)
    arrays |= {name: jnp.asarray(value) for name, value in plain.items()}
    _check_shapes(arrays)
    check_choice("moe", "save", save, ("hidden", "inputs"))
    if not jnp.issubdtype(arrays["indices"].dtype, jnp.integer):
        raise TypeError(f"moe: indices are integers, not {arrays['indices'].dtype}")
    if "b_gate" in arrays and "w_gate" not in arrays:
        raise ValueError("moe: b_gate without w_gate")
    _check_types(arrays)
    out_dtype = np.dtype(
        jnp.result_type(*(arrays[name] for name in _FACTORS if name in arrays))
        if preferred_element_type is None
        else compat.canonicalize_dtype(preferred_element_type, "moe")
    )
    offset = checked_offset("moe", group_offset)
    if small and not _can_multiply(arrays, out_dtype):
        arrays |= {name: weights.array() for name, weights in small.items()}
    if "w_gate" in arrays and arrays["w_gate"].dtype != arrays["w_up"].dtype:
        # Both first products have the type of the wider matrices.
        pair = {name: arrays[name] for name in ("w_up", "w_gate")}
        both = jnp.result_type(*pair.values())
        arrays |= {name: array.astype(both) for name, array in pair.items()}
    return _experts(
        arrays,
        offset,
        activation=activation,
        as_one_call=is_one_call(arrays),
        out_dtype=out_dtype,
        precision=compat.canonicalize_precision(precision),
        save=save,
    )


def _can_multiply(arrays: dict[str, Any], out_dtype: np.dtype[Any]) -> bool:
    """Whether products take quantised weights as they are: on one device, and without biases."""
    dtypes = {np.dtype(arrays[name].dtype) for name in _FACTORS if name in arrays}
    return (
        not any(name.startswith("b_") for name in arrays)
        and {np.dtype(jnp.result_type(*dtypes))} == dtypes <= {*QUANTIZED_DTYPES}
        and jnp.issubdtype(out_dtype, jnp.floating)
        and all(compat.explicit_sharding(jax.typeof(x)) is None for x in jax.tree.leaves(arrays))
        and not is_one_call(arrays)
    )


@jitted("as_one_call", "out_dtype", "precision", "save", functions=["activation"])
def _experts(
    arrays: dict[str, Array],
    offset: Array | None,
    *,
    activation: Callable[[Any], Any],
    as_one_call: bool,
    out_dtype: np.dtype[Any],
    precision: Any,
    save: str,
) -> Array:
    """Compute a layer of checked operands, as one call if the activation is plain data."""
    dtype = np.dtype(jnp.result_type(arrays["x"], arrays["w_up"]))
    with by_types(dtype):
        wide = np.dtype(jnp.promote_types(dtype, np.float32))
    traced, read = traced_activation(activation, (dtype, wide))
    arrays = arrays | named(read)
    as_given = with_current_modes(activation)
    params: dict[str, Any] = {"precision": precision, "save": save}
    with by_types(arrays, offset, out_dtype):
        if offset is not None:
            # A device adds the position of its experts. A narrow type would overflow.
            experts = arrays["w_up"].shape[0]
            offset = clipped(offset, -experts, 2**31 - 1 - experts)
        if traced is not None and as_one_call:
            return one_call(arrays, offset, activation=traced, out_dtype=out_dtype, **params)
        params["activation"] = traced if read else as_given
        # JAX differentiates a function that closes over values where it stands alone.
        params["differentiated"] = traced is None

        def layer(arrays: dict[str, Array], offset: Array | None, dtype: np.dtype[Any]) -> Array:
            return expert_layer(arrays, offset, out_dtype=dtype, **params)

        dims = {name: DIMS.get(name, ()) for name in arrays}
        return on_devices(layer, arrays, offset, dims, out_dtype)


def _check_types(arrays: dict[str, Array]) -> None:
    """Raise an error where a type has no promotion, or where an array would lose its values."""
    kinds = (np.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    rank: dict[str, int] = {}
    for name in (each for each in arrays if each != "indices"):
        dtype = arrays[name].dtype
        found = [i for i, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)]
        if not found:
            raise TypeError(f"moe: {name} is {dtype}; it is an array of numbers")
        (rank[name],) = found
        if dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.floating) and name != "weights":
            raise TypeError(
                f"moe: {name} is {dtype}: cast it to bfloat16 or wider; "
                "jax_tilekern.scaled_ragged_dot multiplies 8-bit floats with scales"
            )
    # Weights and biases are computed with in the type of the first products.
    first = [name for name in ("x", "w_up", "w_gate") if name in arrays]
    for name in ("weights", "b_up", "b_gate", "b_down"):
        if name in arrays and rank[name] > max(rank[each] for each in first):
            types = ", ".join(f"{each} {arrays[each].dtype}" for each in (name, *first))
            raise TypeError(f"moe: {name} does not fit: {types}; cast x to {arrays[name].dtype}")


def _check_shapes(arrays: dict[str, Array]) -> None:
    """Raise an error that names every argument where one does not fit."""
    sizes: dict[str, int] = {}
    for name, array in arrays.items():
        dims = DIMS[name]
        fits = len(dims) == array.ndim and all(
            sizes.setdefault(dim, size) == size for dim, size in zip(dims, array.shape, strict=True)
        )
        if not fits:
            shapes = ", ".join(
                f"{each} {found.shape} ({', '.join(DIMS[each])})" for each, found in arrays.items()
            )
            raise ValueError(f"moe: {name} does not fit: {shapes}")
