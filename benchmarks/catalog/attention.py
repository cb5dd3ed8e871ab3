"""Attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.catalog.bounds import (
    BF16,
    F16,
    F32,
    F64,
    NARROW,
    UNIT_ROUNDOFF,
    compared,
    operand_rounding,
    unit,
    wide,
)
from benchmarks.catalog.call import Call, describe
from benchmarks.catalog.draw import Draw, text_of
from benchmarks.catalog.oracles import ORACLES


def attention(draw: Draw, name: str) -> Call:
    """Draw sizes and options, or a score function that reads an array and is causal."""
    dtype = draw.type(F32, BF16, F16, F64)
    batch, queries, keys = draw.size(4), draw.size(200), draw.size(200)
    key_heads, group = (2, draw.one(1, 2)) if draw.only else (draw.one(1, 2), draw.one(1, 1, 3))
    features, value_features = max(1, draw.size(70)), max(1, draw.size(70))
    heads = key_heads * group
    operands: tuple[Any, ...] = (
        draw.operand((batch, queries, heads, features), dtype),
        draw.operand((batch, keys, key_heads, features), dtype),
        draw.operand((batch, keys, key_heads, value_features), dtype),
    )
    options = draw.options(operands, element_type=False)
    has_function = name != "attention"
    if has_function:
        options["is_causal"] = True
        operands = *operands, draw.operand((heads,), F64 if dtype == F64 else F32)
    else:
        options |= _masks(draw, batch, queries, keys)
        shape = tuple(draw.one(1, x) for x in (batch, heads, queries, keys))
        operands = *operands, draw.operand(shape, dtype)

    def call(m: Any, query: Any, key: Any, value: Any, other: Any) -> Any:
        if not has_function:
            return m.attention(query, key, value, other, **options)

        def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return 5 * jnp.tanh((score - other[h] * (q - k).astype(score.dtype)) / 5)

        return m.attention(query, key, value, score_mod=score_mod, **options)

    def errors(result: Any, *arrays: Any) -> Any:
        own = [wide(x) for x in arrays]
        query, key, _, other = own
        with jax.enable_x64(True):
            exact = [x.astype(np.float64) for x in own]
            expected = np.asarray(call(ORACLES, *exact))
            # The largest weights of the values: those of a softmax are at most as large.
            exact[2] = np.abs(exact[2])
            size = np.asarray(call(ORACLES, *exact))
        u = unit(dtype)
        share = (features + 8) * u + operand_rounding([dtype], options.get("precision"))
        repeated = np.repeat(np.abs(key), group, 2)
        products = np.einsum("btnh,bsnh->bnts", np.abs(query), repeated) / np.sqrt(features)
        added = np.abs(other).max(initial=0) * (max(queries, keys) if has_function else 1)
        # Errors of a score, twice: the normalisation has them, too.
        of_score = 2 * (share * products.max(initial=0) + 8 * u * (added + 5))
        # Weights and values of 16 bits are rounded on a GPU.
        of_sum = (keys + 16) * u + operand_rounding([dtype], options.get("precision"))
        of_sum += 2 * UNIT_ROUNDOFF[dtype] if dtype in NARROW else 0
        return [compared(result, expected, (np.expm1(of_score) + of_sum) * size)]

    return Call(
        name,
        f"{group=}, {text_of(options)}",
        operands,
        call,
        errors,
        is_plain=False,
    )


def _masks(draw: Draw, batch: int, queries: int, keys: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if draw.chance(0.4):
        options["is_causal"] = True
    if draw.chance(0.3):
        options["local_window_size"] = draw.one(1, 5, 40), draw.one(0, 3)
    if draw.chance(0.3):
        options["mask"] = draw.rng.random((1, 1, queries, keys)) < 0.7
    for name, most in (("query_seq_lengths", queries), ("key_value_seq_lengths", keys)):
        # A mapped batch would have lengths of its own.
        if draw.only is None and draw.chance(0.2):
            options[name] = draw.rng.integers(0, most + 1, batch).astype(np.int32)
    return options


DESCRIPTIONS = describe(attention, "attention", "attention, score function")
