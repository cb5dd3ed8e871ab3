"""Random sums over axes, transposes and additions: activations, heads, images, any axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.samples.draw import Draw

_TYPES: Mapping[str, float] = {
    "float32": 35, "bfloat16": 25, "float16": 10, "int8": 8, "int32": 5, "float64": 10,
    "complex64": 5,
}  # fmt: skip
_LETTERS = "abcde"


def _activations(draw: Draw) -> dict[str, int]:
    """Tokens by the features of a model."""
    return {"a": draw.tokens(), "b": draw.one(draw.weights())}


def _heads(draw: Draw) -> dict[str, int]:
    """Sequences, tokens, heads and the elements of a head."""
    heads, head = draw.head()
    return {"a": draw.one((1, 1, 2, 4, 8, 32)), "b": draw.tokens(most=4096), "c": heads, "d": head}


def _images(draw: Draw) -> dict[str, int]:
    """Images, rows, columns and channels."""
    side, channels = draw.one((7, 14, 28, 32, 56, 112, 224)), draw.one((3, 16, 64, 256, 768))
    return {"a": draw.size(1, 256), "b": side, "c": side, "d": channels}


def _any(draw: Draw) -> dict[str, int]:
    """Any array: its size, then how that divides among one to five dimensions."""
    rank = draw.one((1, 2, 2, 3, 3, 4, 5))
    return dict(zip(_LETTERS, draw.shape(rank, *_ELEMENTS[draw.device]), strict=False))


_ELEMENTS = {"cpu": (1_000, 10_000_000), "gpu": (100_000, 200_000_000)}
_ARRAYS = {"activations": _activations, "heads": _heads, "images": _images, "any": _any}
_WEIGHTS = {"activations": 3.0, "heads": 2.0, "images": 2.0, "any": 3.0}


def _array(draw: Draw, least_rank: int = 1) -> tuple[str, dict[str, int]]:
    """Draw an array of at least a rank: its group, and its dimensions with their sizes."""
    while True:
        group = draw.weighted(_WEIGHTS)
        sizes = _ARRAYS[group](draw)
        if len(sizes) >= least_rank:
            return group, sizes


def sum_over(draw: Draw) -> dict[str, Any]:
    """Draw a sum over some axes, at least one; 16-bit floats are often added up to float32."""
    group, sizes = _array(draw)
    dims = "".join(sizes)
    kept = "".join(draw.some(dims, most=len(dims) - 1))
    kind = draw.weighted(_TYPES)
    result = None
    if kind == "int8":
        result = "int32"
    elif kind in ("bfloat16", "float16") and draw.often(0.3):
        result = "float32"
    return {
        "group": group, "type": kind, "result": result, "lhs": dims, "out": kept, "sizes": sizes
    }  # fmt: skip


def transpose(draw: Draw) -> dict[str, Any]:
    """Draw a permutation that moves something; half of them exchange two neighbours."""
    group, sizes = _array(draw, least_rank=2)
    dims = "".join(sizes)
    out = dims
    while out == dims:
        if draw.often(0.5):
            i = draw.one(range(len(dims) - 1))
            out = dims[:i] + dims[i + 1] + dims[i] + dims[i + 2 :]
        else:
            out = "".join(draw.shuffled(dims))
    return {"group": group, "type": draw.weighted(_TYPES), "lhs": dims, "out": out, "sizes": sizes}


def add(draw: Draw) -> dict[str, Any]:
    """Draw an addition: of equal shapes, of a bias, or of two arrays that lack any dimensions."""
    _, sizes = _array(draw)
    dims = "".join(sizes)
    group = draw.weighted({"same shape": 3, "bias": 3, "broadcast": 4})
    lhs = rhs = dims
    if group == "bias":
        rhs = dims[-1]
    elif group == "broadcast":
        rhs = "".join(draw.some(dims, most=len(dims)))
        lhs = dims if draw.often(0.7) else "".join(draw.some(dims, most=len(dims)))
        # What both lack is no dimension of the result.
        dims = "".join(x for x in dims if x in lhs + rhs)
        sizes = {x: sizes[x] for x in dims}
    if draw.often(0.5):
        lhs, rhs = rhs, lhs
    types = {kind: weight for kind, weight in _TYPES.items() if kind != "complex64"}
    return {
        "group": group, "type": draw.weighted(types), "lhs": lhs, "rhs": rhs, "out": dims,
        "sizes": sizes,
    }  # fmt: skip
