"""Random matrix products: layers and their gradients, attention, small batches, odd sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.samples.draw import Draw

# Type of lhs, of rhs and of the result, and the precision; how often each is drawn.
_Types = tuple[str, str | None, str | None, str | None]
_GPU_TYPES: Mapping[_Types, float] = {
    ("bfloat16", None, None, None): 30,
    ("bfloat16", None, "float32", None): 5,
    ("float16", None, None, None): 13,
    ("float16", None, "float32", None): 2,
    ("float32", None, None, None): 15,
    ("float32", None, None, "highest"): 8,
    ("int8", None, "int32", None): 10,
    ("float8_e4m3fn", None, "bfloat16", None): 5,
    ("float8_e4m3fn", None, "float32", None): 3,
    ("float8_e4m3fn", "float8_e5m2", "bfloat16", None): 2,
    ("float8_e5m2", "float8_e4m3fn", "float16", None): 2,
    ("float64", None, None, None): 5,
}
_CPU_TYPES: Mapping[_Types, float] = {
    ("float32", None, None, None): 45,
    ("float64", None, None, None): 15,
    ("bfloat16", None, None, None): 15,
    ("bfloat16", None, "float32", None): 5,
    ("float16", None, None, None): 8,
    ("int8", None, "int32", None): 8,
    ("float8_e4m3fn", None, "float32", None): 4,
}
_TYPES = {"gpu": _GPU_TYPES, "cpu": _CPU_TYPES}


def matmul(draw: Draw) -> dict[str, Any]:
    """Draw a matrix product, in any of the major orders NN, NT, TN and TT."""
    group = draw.weighted({"layer": 4, "attention": 2, "small batch": 2, "odd": 2})
    sizes = _SIZES[group](draw)
    lhs, rhs = draw.one(("mk", "km")), draw.one(("kn", "nk"))
    if "b" in sizes:
        lhs, rhs = _batched(draw, lhs), _batched(draw, rhs)
    kind, rhs_type, result, precision = draw.weighted(_TYPES[draw.device])
    return {
        "group": group, "lhs": lhs, "rhs": rhs, "sizes": sizes,
        "type": kind, "rhs_type": rhs_type, "result": result, "precision": precision,
    }  # fmt: skip


def decode(draw: Draw) -> dict[str, Any]:
    """Draw a layer's product of 1 to 256 tokens, as where a model generates."""
    features, more = draw.weights()
    size = draw.size(1, 256)
    kind, rhs_type, result, precision = draw.weighted(_TYPES[draw.device])
    return {
        "group": "decode", "lhs": "mk", "rhs": draw.one(("kn", "nk")),
        "sizes": {"m": draw.one((size, 1 << round(math.log2(size)))), "n": more, "k": features},
        "type": kind, "rhs_type": rhs_type, "result": result, "precision": precision,
    }  # fmt: skip


def _batched(draw: Draw, matrix: str) -> str:
    """Put the batch first or, as often as heads lie beside their tokens, second."""
    return f"b{matrix}" if draw.often(0.75) else f"{matrix[0]}b{matrix[1]}"


def _layer(draw: Draw) -> dict[str, int]:
    """Tokens are the rows of a layer's product, or contracted by its weights' gradient."""
    features, more = draw.weights()
    if draw.often(0.7):
        return {"m": draw.tokens(), "n": more, "k": features}
    return {"m": features, "n": more, "k": draw.tokens(least=64)}


def _attention(draw: Draw) -> dict[str, int]:
    """Scores of queries and keys, or the values that they weigh."""
    heads, head = draw.head()
    batch = heads * draw.one((1, 1, 2, 4, 8))
    keys = draw.tokens(most=4096)
    queries = keys if draw.often(0.6) else draw.tokens(most=4096)
    if draw.often(0.5):
        return {"b": batch, "m": queries, "n": keys, "k": head}
    return {"b": batch, "m": queries, "n": head, "k": keys}


def _small_batch(draw: Draw) -> dict[str, int]:
    return {"b": draw.size(2, 4096)} | {x: draw.size(4, 512) for x in "mnk"}


def _odd(draw: Draw) -> dict[str, int]:
    return {x: draw.size(8, 16384) for x in "mnk"}


_SIZES = {
    "layer": _layer,
    "attention": _attention,
    "small batch": _small_batch,
    "odd": _odd,
}
