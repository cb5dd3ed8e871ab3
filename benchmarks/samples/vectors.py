"""Random products with vectors: matrices of models by vectors, small batches, dot products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.samples.draw import Draw

_TYPES: Mapping[tuple[str, str | None], float] = {
    ("float32", None): 30,
    ("bfloat16", None): 25,
    ("float16", None): 15,
    ("int8", "int32"): 12,
    ("float64", None): 10,
}
_VECTORS: Mapping[str, float] = {
    "float32": 40, "bfloat16": 20, "float16": 10, "float64": 15, "complex64": 10
}  # fmt: skip
_LENGTHS = {"cpu": (1_000, 10_000_000), "gpu": (100_000, 200_000_000)}


def matvec(draw: Draw) -> dict[str, Any]:
    """Draw a product of a matrix and a vector, of either major order, alone or of a batch."""
    group = draw.weighted({"layer": 4, "small batch": 3, "heads": 2, "odd": 3})
    kind, result = draw.weighted(_TYPES)
    sizes = _SIZES[group](draw)
    matrix, vector, out = draw.one(("mk", "km")), "k", "m"
    if "b" in sizes:
        matrix, vector, out = f"b{matrix}", f"b{vector}", f"b{out}"
    lhs, rhs = matrix, vector
    if draw.often(0.3):
        # From the left, where the matrix has columns and no rows.
        lhs, rhs, out = (x.replace("m", "n") for x in (vector, matrix, out))
        sizes["n"] = sizes.pop("m")
    return {
        "group": group, "type": kind, "result": result, "lhs": lhs, "rhs": rhs, "out": out,
        "sizes": sizes,
    }  # fmt: skip


def _layer(draw: Draw) -> dict[str, int]:
    m, k = draw.weights()
    return {"m": m, "k": k}


def _heads(draw: Draw) -> dict[str, int]:
    """One query of each head against its keys, or what it makes of the values."""
    heads, head = draw.head()
    keys = draw.tokens()
    batch = heads * draw.one((1, 1, 2, 8, 32))
    m, k = (keys, head) if draw.often(0.5) else (head, keys)
    return {"b": batch, "m": m, "k": k}


def _small_batch(draw: Draw) -> dict[str, int]:
    return {"b": draw.size(2, 16384), "m": draw.size(2, 512), "k": draw.size(2, 512)}


def _odd(draw: Draw) -> dict[str, int]:
    return {"m": draw.size(2, 65536), "k": draw.size(2, 65536)}


_SIZES = {"layer": _layer, "heads": _heads, "small batch": _small_batch, "odd": _odd}


def vdot(draw: Draw) -> dict[str, Any]:
    """Draw a dot product of two vectors, or those of many."""
    least, most = _LENGTHS[draw.device]
    kind = draw.weighted(_VECTORS)
    if draw.often(0.5):
        sizes = {"k": draw.size(least, most)}
        return {"group": "vectors", "type": kind, "lhs": "k", "rhs": "k", "out": "", "sizes": sizes}
    b, k = draw.shape(2, least, most)
    lhs, rhs = draw.one((("bk", "bk"), ("bk", "bk"), ("bk", "k"), ("kb", "kb")))
    return {
        "group": "many", "type": kind, "lhs": lhs, "rhs": rhs, "out": "b", "sizes": {"b": b, "k": k}
    }  # fmt: skip
