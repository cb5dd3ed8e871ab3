"""Random grouped GEMMs: the experts of published mixtures, forward and both gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.calls.ragged_row import PRODUCTS
from benchmarks.samples.draw import MIXTURES, Draw

_GPU_TYPES: Mapping[tuple[str, str | None], float] = {
    ("bfloat16", None): 50,
    ("float16", None): 15,
    ("float32", None): 15,
    ("int8", "int32"): 8,
    ("float8_e4m3fn", "bfloat16"): 12,
}
_CPU_TYPES: Mapping[tuple[str, str | None], float] = {
    ("float32", None): 60,
    ("bfloat16", None): 20,
    ("float16", None): 10,
    ("int8", "int32"): 10,
}
_TYPES = {"gpu": _GPU_TYPES, "cpu": _CPU_TYPES}
# A CPU gets models that are narrower by this.
_NARROWER = {"gpu": 1, "cpu": 8}


def ragged_dot(draw: Draw) -> dict[str, Any]:
    """Draw a product of a mixture's experts, in either direction of its layer."""
    hidden, intermediate, experts, chosen = draw.one([*MIXTURES.values()])
    k, n = draw.one(((hidden, intermediate), (hidden, 2 * intermediate), (intermediate, hidden)))
    narrower = _NARROWER[draw.device]
    lhs, rhs, out = draw.one(PRODUCTS)
    kind, result = draw.weighted(_TYPES[draw.device])
    return {
        # The peer, one dense product, is a bound. What users have instead is JAX's own function.
        "target": 0.0, "others": {"lax": 1.0},
        "group": {"mn": "forward", "mk": "rows' gradient", "gkn": "weights' gradient"}[out],
        "type": kind, "result": result, "lhs": lhs, "rhs": rhs, "out": out,
        "split": draw.one(("balanced", "multinomial", "multinomial", "zipf", "one-hot")),
        "sizes": {
            "g": experts, "m": chosen * draw.tokens(), "k": k // narrower, "n": n // narrower
        },
    }  # fmt: skip
