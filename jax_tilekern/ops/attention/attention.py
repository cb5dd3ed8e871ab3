"""``attention``: a softmax of any function of products of queries and keys, times values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from jax_tilekern.interop import compat, cudnn
from jax_tilekern.interop.global_modes import mode_independent
from jax_tilekern.interop.originals import jnp
from jax_tilekern.interop.patch import replace_function
from jax_tilekern.ops.arguments import integer, number
from jax_tilekern.ops.attention import primitives
from jax_tilekern.ops.attention.blocks import score_type
from jax_tilekern.ops.attention.choice import has_kernels
from jax_tilekern.ops.attention.index_functions import traced
from jax_tilekern.ops.attention.residual import logsumexp
from jax_tilekern.ops.attention.scores import Scores
from jax_tilekern.ops.jitted import MOST_FUNCTIONS, jitted
from jax_tilekern.plans.gpu import NoGpu, current_gpu

ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]
MaskMod = Callable[[Any, Any, Any, Any], Any]


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    precision: lax.PrecisionLike = None,
    return_residual: bool = False,
) -> Any:
    r"""Attention of any score function, with the parameters of ``jax.nn.dot_product_attention``.

    For each head, ``softmax(score_mod(scale * query @ key.T + bias)) @ value`` over the keys that a
    query sees: those that ``mask``, ``is_causal``, the lengths, the window and ``mask_mod`` all
    allow, and whose score is not ``-inf``. A query that sees no key gives zeros, with zero
    derivatives.

    The scores are never in memory as a whole: memory is linear in both lengths, for the value and
    all derivatives.

    Parameters
    ----------
    query
        Array of shape ``(batch, queries, heads, features)``, or without the batch; of a
        floating-point type.
    key
        Array of shape ``(batch, keys, key_heads, features)``. ``heads`` is a multiple of
        ``key_heads``, and the head ``n`` of the query reads ``n // (heads // key_heads)``.
    value
        Array of shape ``(batch, keys, key_heads, value_features)``.
    bias
        Added to the scaled products: an array that broadcasts to ``(batch, heads, queries, keys)``.
    mask
        Booleans that broadcast to the same shape, true where a query sees a key.
    scale
        Factor of the products; ``1 / sqrt(features)`` by default.
    is_causal
        Whether a query sees no key of a larger index.
    query_seq_lengths, key_value_seq_lengths
        Integers of shape ``(batch,)``: queries and keys from there on are none.
    local_window_size
        By how much the index of a key may be smaller, and larger, than that of the query; one
        number for both.
    score_mod
        ``score_mod(score, batch, head, query_index, key_index)`` returns the score of a query and a
        key from the product with scale and bias. It is a function of scalars, and may read arrays
        by closure and index them. ``score`` is a float32, or a float64 where the operands are;
        indices are int32.
    mask_mod
        ``mask_mod(batch, head, query_index, key_index)`` says whether a query sees a key. It may
        read arrays as well.
    precision
        Of the products, as of :func:`jax_tilekern.matmul`.
    return_residual
        Whether to return the logarithms, too.

    Returns
    -------
    out
        Array of shape ``(batch, queries, heads, value_features)``, or without the batch, of the
        type of ``query``.
    residual
        With ``return_residual``, the logarithm of the sum of the exponentials of each query's
        scores, of shape ``(batch, queries, heads)``; float32, or float64. It is ``-inf`` where the
        query sees no key, and has derivatives as the result does.

    Raises
    ------
    TypeError
        If an array is not of such a type, a function is none of such scalars, or the number of
        features is symbolic and there is no ``scale``.
    ValueError
        If shapes or types do not go together, or a window is negative.

    See Also
    --------
    linear_cross_entropy : the loss after the last layer.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> x = jnp.ones((1, 4, 2, 8))
    >>> slopes = jnp.array([0.5, 0.25])
    >>> jtk.attention(
    ...     x, x, x, is_causal=True,
    ...     score_mod=lambda score, b, h, q, k: score - slopes[h] * (q - k),
    ... ).shape
    (1, 4, 2, 8)
    """
    required = dict(zip(_ARRAYS[:3], (query, key, value), strict=True))
    optional = bias, mask, query_seq_lengths, key_value_seq_lengths
    given = required | compat.given(**dict(zip(_ARRAYS[3:], optional, strict=True)))
    compat.check_arraylike("attention", **given)
    arrays = {name: jnp.asarray(x) for name, x in given.items()}
    check(arrays)
    scores, read = described(
        arrays, scale=scale, is_causal=is_causal, local_window_size=local_window_size,
        score_mod=score_mod, mask_mod=mask_mod, precision=precision,
    )  # fmt: skip
    first = [arrays[name] for name in _ARRAYS[:3]]
    out, residual = _attention(first[0], first[1], first[2], read, scores=scores)
    return (out, residual) if return_residual else out


def described(
    arrays: dict[str, Array], *, scale: float | None, is_causal: bool,
    local_window_size: int | tuple[int, int] | None, score_mod: ScoreMod | None,
    mask_mod: MaskMod | None, precision: lax.PrecisionLike,
) -> tuple[Scores, list[Array]]:  # fmt: skip
    """Return the description of a call, and the arrays that scores and masks read."""
    features = arrays["query"].shape[-1]
    if scale is None and not isinstance(features, int):
        raise TypeError(
            f"attention: the number of features, {features}, is symbolic, and scale is "
            "1 / sqrt(features) by default; pass it as a number"
        )
    factor = 1 / np.sqrt(max(1, features)) if scale is None else scale
    if isinstance(factor, jax.core.Tracer):
        raise TypeError(
            "attention: scale is traced; it is a number that a program is compiled for. Multiply "
            "the score by it in score_mod, which has derivatives by it"
        )
    wide = score_type(arrays["query"])
    score, of_score = (None, []) if score_mod is None else traced(score_mod, "score_mod", wide)
    visible, of_mask = (None, []) if mask_mod is None else traced(mask_mod, "mask_mod", None)
    named = {name: arrays[own] for name, own in _NAMED.items() if own in arrays}
    scores = _first(
        Scores(
            scale=number("attention", "scale", factor),
            named=tuple((name, None) for name in named),
            score_mod=score,
            mask_mod=visible,
            is_causal=bool(is_causal),
            window=_window(local_window_size),
            precision=compat.canonicalize_precision(precision),
        )
    )
    return scores, scores.in_order(named, of_score, of_mask)


@compat.cached(max_size=MOST_FUNCTIONS)
def _first(scores: Scores) -> Scores:
    """Return the first description of those that are equal."""
    return scores


_NAMED = {
    "bias": "bias",
    "mask": "mask",
    "query_lengths": "query_seq_lengths",
    "key_lengths": "key_value_seq_lengths",
}
_ARRAYS = (
    "query", "key", "value", "bias", "mask", "query_seq_lengths", "key_value_seq_lengths"
)  # fmt: skip

_MOST = np.iinfo(np.int32).max
_LARGEST_WINDOW = 1 << 30


def _window(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    sizes = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(sizes) != 2:
        raise ValueError(f"attention: local_window_size is {size!r}; it is an integer or two")
    before, after = (integer("attention", "local_window_size", x) for x in sizes)
    if before < 0 or after < 0:
        raise ValueError(f"attention: local_window_size is {size!r}; it is not negative")
    # The sum of an index and a window is an int32.
    return min(before, _LARGEST_WINDOW), min(after, _LARGEST_WINDOW)


def check(arrays: dict[str, Array]) -> None:
    """Raise the error about operands whose types or shapes do not go together."""
    query, key, value = (arrays[name] for name in _ARRAYS[:3])
    types = ", ".join(f"{name} {x.dtype}{[*x.shape]}" for name, x in arrays.items())
    for name in _ARRAYS[:3]:
        x = arrays[name]
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
            raise TypeError(
                f"attention: {name} must be bfloat16, float16, float32 or float64: {types}"
            )
        if x.dtype != query.dtype:
            raise ValueError(f"attention: query, key and value must have one type: {types}")
        if x.ndim not in (3, 4) or x.ndim != query.ndim:
            raise ValueError(
                "attention: query, key and value must have dimensions (batch, length, heads, "
                f"features), or all of them lack the batch: {types}"
            )
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"attention: key and value differ in more than the last dimension: {types}"
        )
    if query.shape[:-3] != key.shape[:-3] or query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"attention: query and key must have one size of batch and of features: {types}"
        )
    heads, key_heads = query.shape[-2], key.shape[-2]
    if key_heads == 0:
        raise ValueError(f"attention: key and value must have a head at least: {types}")
    if heads % key_heads:
        raise ValueError(
            f"attention: the heads of query, {heads}, must be a multiple of those of key, "
            f"{key_heads}: {types}"
        )
    batch = query.shape[0] if query.ndim == 4 else 1
    whole = (batch, heads, query.shape[-3], key.shape[-3])
    for name in {"bias", "mask"} & arrays.keys():
        shape = arrays[name].shape
        padded = (1,) * (4 - len(shape)) + shape
        if len(padded) > 4 or any(x not in (1, y) for x, y in zip(padded, whole, strict=True)):
            raise ValueError(
                f"attention: {name} must broadcast to (batch, heads, queries, keys), {whole}: "
                f"{types}"
            )
    if "bias" in arrays and not jnp.issubdtype(arrays["bias"].dtype, jnp.floating):
        raise TypeError(
            f"attention: bias must have a floating-point type; booleans are a mask: {types}"
        )
    if "mask" in arrays and arrays["mask"].dtype != np.bool_:
        raise ValueError(f"attention: mask must be of booleans; pass numbers as bias: {types}")
    for name in {"query_seq_lengths", "key_value_seq_lengths"} & arrays.keys():
        if not jnp.issubdtype(arrays[name].dtype, jnp.integer):
            raise TypeError(f"attention: {name} must be integers: {types}")
        if arrays[name].shape != (batch,):
            raise ValueError(
                f"attention: {name} must have a number for each element of the batch, ({batch},): "
                f"{types}"
            )


@jitted(functions=("scores",))
@mode_independent
def _attention(
    query: Array, key: Array, value: Array, arrays: Sequence[Array], scores: Scores
) -> tuple[Array, Array]:
    def four_dims(x: Array) -> Array:
        return jnp.expand_dims(x, tuple(range(4 - x.ndim)))

    own = []
    for kind, x in zip(scores.kinds, arrays, strict=True):
        if kind in ("bias", "mask"):
            x = four_dims(x)
        elif kind in ("query_lengths", "key_lengths"):
            if np.iinfo(x.dtype).max > _MOST:
                x = jnp.clip(x, 0, _MOST)
            x = x.astype(np.int32)
        own.append(x)
    operands = map(four_dims, (query, key, value))
    out, *logarithm = primitives.attention(*operands, *own, scores=scores)
    lse = jnp.transpose(logsumexp(*logarithm), (0, 2, 1))
    return (out, lse) if query.ndim == 4 else (out[0], lse[0])


def _in_place_of_jax(
    query: Array, key: Array, value: Array, bias: Any, mask: Any, *, scale: Any,
    q_seqlen: Any, kv_seqlen: Any, return_residual: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """Compute what the function does that ``jax.nn.dot_product_attention`` calls."""
    window = options.get("local_window_size")
    is_number = isinstance(scale, int | float | np.number)
    is_float = bias is None or jnp.issubdtype(bias.dtype, jnp.floating)
    is_window = window is None or min(window) >= 0
    others = bias, mask, q_seqlen, kv_seqlen, window
    # Causal calls of cuDNN's have as many queries as keys.
    has_order = not options["is_causal"] or query.shape[1] == key.shape[1]
    is_plain = has_order and all(x is None for x in others)
    if not (is_number and is_float and is_window and _is_never_slower(query, key, value, is_plain)):
        return NotImplemented
    out, residual = attention(
        query, key, value, bias, mask, scale=scale, query_seq_lengths=q_seqlen,
        key_value_seq_lengths=kv_seqlen, return_residual=True, **options,
    )  # fmt: skip
    if not return_residual:
        return out
    return out, lax.stop_gradient(residual.astype(key.dtype))


def _is_never_slower(query: Array, key: Array, value: Array, is_plain: bool) -> bool:
    """Whether a call and its gradient have kernels or cuDNN's, or it runs on a CPU.

    Blocks on a GPU compute scores again in a gradient, where JAX's keeps them in memory.
    """
    try:
        gpu = current_gpu()
    except NoGpu:
        return jax.default_backend() == "cpu" and query.dtype.itemsize > 1
    if has_kernels(query, key, value):
        return True
    return is_plain and cudnn.covers(gpu.compute_capability, query, key, value)


replace_function(compat.ATTENTION, _in_place_of_jax)
