"""Attention."""

from __future__ import annotations

import functools
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
        added = np.abs(wide(arrays[3])).max(initial=0)
        added *= max(queries, keys) if has_function else 1
        return [_compared(call, result, arrays, dtype, options.get("precision"), added)]

    return Call(
        name,
        f"{group=}, {text_of(options)}",
        operands,
        call,
        errors,
        is_plain=False,
    )


def _compared(
    call: Any, result: Any, arrays: Any, dtype: Any, precision: Any, added: float, parts: int = 1
) -> Any:
    """Compare a result, merged of those of ``parts``, with at most ``added`` to the products."""
    own = [wide(x) for x in arrays]
    query, key = own[:2]
    *_, heads, features = query.shape
    keys, key_heads = parts * key.shape[-3], key.shape[-2]
    with jax.enable_x64(True):
        exact = [x.astype(np.float64) for x in own]
        expected = np.asarray(call(ORACLES, *exact))
        # The largest weights of the values: those of a softmax are at most as large.
        exact[2] = np.abs(exact[2])
        size = np.asarray(call(ORACLES, *exact))
    u = unit(dtype)
    share = (features + 8) * u + operand_rounding([dtype], precision)
    repeated = np.repeat(np.abs(key), heads // key_heads, -2)
    of_parts = (x.reshape(parts, *x.shape[-4:]) for x in (np.abs(query), repeated))
    products = np.einsum("ibtnh,jbsnh->ijbnts", *of_parts) / np.sqrt(features)
    largest = products.max(initial=0)
    # Errors of a score, twice: the normalisation has them, too.
    of_score = 2 * (share * largest + 8 * u * (added + 5))
    # Weights of parts are exponentials of rounded logarithms.
    of_score += 4 * (parts - 1) * u * (largest + added + 5 + np.log(max(1, keys)))
    # Weights and values of 16 bits are rounded on a GPU, and so are results of parts.
    of_sum = (keys + 16 * parts) * u + operand_rounding([dtype], precision)
    of_sum += (2 + (parts > 1)) * UNIT_ROUNDOFF[dtype] if dtype in NARROW else 0
    return compared(result, expected, (np.expm1(of_score) + of_sum) * size)


def ring_attention(draw: Draw, name: str) -> Call:
    """Draw parts of a sequence, and which keys a query sees."""
    dtype, axis = draw.type(F32, BF16, F16, F64), draw.one(1, 2, 4)
    batch, queries, keys = draw.size(3), draw.size(40), draw.size(40)
    key_heads, group, features = draw.one(1, 2), draw.one(1, 1, 3), max(1, draw.size(40))
    operands = tuple(
        draw.operand((axis, batch, length, heads, features), dtype)
        for length, heads in ((queries, key_heads * group), (keys, key_heads), (keys, key_heads))
    )
    options = draw.options(operands, element_type=False)
    if draw.chance(0.4):
        options["is_causal"] = True
    if draw.chance(0.3):
        options["local_window_size"] = draw.one(1, 5, 40), draw.one(0, 3)

    def call(m: Any, *operands: Any) -> Any:
        part = functools.partial(m.ring_attention, axis_name="i", **options)
        return jax.vmap(part, axis_name="i")(*operands)

    def errors(result: Any, *arrays: Any) -> Any:
        return [_compared(call, result, arrays, dtype, options.get("precision"), 0, axis)]

    return Call(
        name,
        f"{axis} devices, {group=}, {text_of(options)}",
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


DESCRIPTIONS = [
    *describe(attention, "attention", "attention, score function"),
    *describe(ring_attention, "ring_attention", derivatives=1),
]
