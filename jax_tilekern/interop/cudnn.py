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


def covers(query: Any, key: Any, value: Any) -> bool:
    """Whether cuDNN has calls without functions, of these types, on every GPU that has it."""
    features = query.shape[-1]
    return (
        str(query.dtype) in ("bfloat16", "float16")
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
    """

    scale: float
    is_causal: bool
    window: int


def attention(query: Array, key: Array, value: Array, *, options: Options) -> Sequence[Array]:
    """Return the result, and the log of the sum of exponentials ``(batch, heads, queries)``."""
    operands = query, key, value, *_unused(query)
    out, lse = compat.cudnn_attention(operands, **dataclasses.asdict(options))
    return out, lse


def attention_gradient(operands: Sequence[Array], options: Options) -> Sequence[Array]:
    """Return the gradients of query, key and value.

    ``operands`` are these, the result, the log of the sum of exponentials of each query, and the
    cotangent of the result.
    """
    query, key, value, out, lse, d_out = operands
    given = query, key, value, *_unused(query), lse, out, d_out
    return compat.cudnn_attention(given, **dataclasses.asdict(options))


def _unused(query: Array) -> list[Array]:
    """Return operands of JAX's primitives that a call does not use: biases, lengths and pages."""
    return [jnp.zeros(0, query.dtype)] * 7
