"""cuDNN's attention, by JAX's own primitives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array

from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp, nn

# Features of a head are a multiple of this, and at most so many.
_FEATURES, _MOST_FEATURES = 8, 128


def covers(query: Any, key: Any, value: Any) -> bool:
    """Whether cuDNN has a plain or causal call of these types, on every GPU that has it."""
    features = query.shape[-1]
    return (
        str(query.dtype) in ("bfloat16", "float16")
        and features == value.shape[-1]
        and features % _FEATURES == 0
        and features <= _MOST_FEATURES
        and min(query.size, key.size) > 0
    )


def attention(
    query: Array, key: Array, value: Array, *, scale: float, is_causal: bool
) -> tuple[Array, Array]:
    """Return the result, and the log of the sum of exponentials ``(batch, heads, queries)``."""
    out, lse = nn.dot_product_attention(
        query, key, value, scale=scale, is_causal=is_causal, implementation="cudnn",
        return_residual=True,
    )  # fmt: skip
    return out, lse.transpose(0, 2, 1).astype(np.float32)


def attention_gradient(
    operands: Sequence[Array], *, scale: float, is_causal: bool
) -> Sequence[Array]:
    """Return the gradients of query, key and value.

    ``operands`` are these, the result, the log of the sum of exponentials of each query, and the
    cotangent of the result.
    """
    query, key, value, out, lse, d_out = operands
    return compat.cudnn_attention_gradient(
        [query, key, value, *[jnp.zeros(0, query.dtype)] * 7, lse, out, d_out], scale, is_causal
    )
