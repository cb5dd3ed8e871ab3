"""cuDNN's attention, by JAX's own primitives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import Array

from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp

# Features of a head are a multiple of this, and at most so many.
_FEATURES, _MOST_FEATURES = 8, 128
_LEAST_CAPABILITY = (8, 0)


def covers(capability: tuple[int, int], query: Any, key: Any, value: Any, *biases: Any) -> bool:
    """Whether cuDNN has calls without functions, of these types, on GPUs of a capability."""
    features, queries, keys = query.shape[-1], query.shape[1], key.shape[1]
    return (
        capability >= _LEAST_CAPABILITY
        and all(
            x.dtype == query.dtype
            and x.shape == (1, query.shape[2], queries, keys)
            and queries % 2 == keys % 2 == 0
            for x in biases
        )
        and str(query.dtype) in ("bfloat16", "float16")
        and features == value.shape[-1]
        and features % _FEATURES == 0
        and features <= _MOST_FEATURES
        and min(query.size, key.size) > 0
    )


@dataclass(frozen=True)
class Options:
    """A call of cuDNN's.

    Attributes
    ----------
    scale
        Factor of the products.
    is_causal
        Whether a query sees no key of a larger index.
    window
        How many keys a query of a causal call sees, itself and those before it; 0 for all.
    has_bias
        Whether the last operand is a bias ``(1, heads, queries, keys)``.
    """

    scale: float
    is_causal: bool
    window: int
    has_bias: bool


def attention(
    query: Array, key: Array, value: Array, *biases: Array, options: Options
) -> Sequence[Array]:
    """Return the result, and the log of the sum of exponentials ``(batch, heads, queries)``."""
    operands = query, key, value, *_others(query, biases)
    out, lse = compat.cudnn_attention(operands, **dataclasses.asdict(options))
    return out, lse


def attention_gradient(
    operands: Sequence[Array], options: Options, *, of_bias: bool
) -> Sequence[Array]:
    """Return the gradients of query, key and value, and of the bias if it is asked for.

    ``operands`` are the first three, the result, the log of the sum of exponentials of each query,
    the cotangent of the result, and the bias.
    """
    query, key, value, out, lse, d_out, *biases = operands
    given = query, key, value, *_others(query, biases), lse, out, d_out
    return compat.cudnn_attention(given, **dataclasses.asdict(options), of_bias=of_bias)


def _others(query: Array, biases: Sequence[Array]) -> list[Array]:
    """Return the bias, lengths and pages of JAX's primitives; what a call lacks has no elements."""
    return [*biases, *[jnp.zeros(0, query.dtype)] * (7 - len(biases))]
