"""Kernels of attention on the GPU, under compute-sanitizer; see ``.ci/sanitize``."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk

sys.path.insert(0, str(Path(__file__).parent.parent.parent))  # For benchmarks.
from benchmarks.catalog.oracles import ORACLES

SLOPES = np.array([0.1, 0.3], np.float32)


def slopes(x: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s - x[h] * (q - k)


def alternating(x: Any, s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + x[(q - k) % 2]


BF16, F32 = jnp.bfloat16, np.float32
# A type, sizes of (batch, queries, keys, heads, key heads, features, value features), the shape of
# a bias, and options.
CALLS: list[tuple[Any, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    (BF16, (2, 300, 500, 2, 1, 64, 72), (), {}),
    (BF16, (2, 300, 504, 2, 1, 128, 128), (1, 2, 300, 504), {}),
    (
        BF16, (1, 500, 500, 2, 2, 128, 128), (1, 1, 1, 500),
        {"score_mod": slopes, "is_causal": True},
    ),
    (BF16, (2, 300, 500, 2, 1, 64, 72), (), {"score_mod": alternating}),
    (F32, (2, 300, 500, 2, 1, 64, 72), (), {}),
    (F32, (1, 300, 300, 2, 2, 128, 128), (), {"score_mod": slopes, "is_causal": True}),
    (F32, (1, 200, 300, 2, 1, 96, 64), (), {"precision": jax.lax.Precision.HIGHEST}),
]  # fmt: skip


def everything(m: Any, options: dict[str, Any], operands: Any, d_out: Any, dots: Any) -> Any:
    """Return the result, the gradients and a tangent."""

    def attention(*x: Any) -> Any:
        if "score_mod" not in options:
            return m.attention(*x, **options)
        # The last operand is what the function reads.
        score_mod = functools.partial(options["score_mod"], x[-1])
        return m.attention(*x[:-1], **options | {"score_mod": score_mod})

    out, back = jax.vjp(attention, *operands)
    return out, *back(d_out), jax.jvp(attention, operands, dots)[1]


def check_attention() -> int:
    """Run every call, its gradients and a tangent; return how many results were wrong."""
    wrong, rng = 0, np.random.default_rng(0)
    for dtype, (b, t, s, n, k, h, d), bias, options in CALLS:
        shapes = (b, t, n, h), (b, s, k, h), (b, s, k, d), *([bias] if bias else [])
        operands, dots = (
            tuple(jnp.asarray(rng.standard_normal(x), dtype) for x in shapes) for _ in range(2)
        )
        if "score_mod" in options:
            operands, dots = (*operands, jnp.asarray(SLOPES)), (*dots, jnp.asarray(SLOPES))
        d_out = jnp.asarray(rng.standard_normal((b, t, n, d)), dtype)
        results = {}
        for name, m, precision in (("ours", jtk, None), ("exact", ORACLES, "highest")):
            given = operands, d_out, dots
            if name == "exact":
                given = jax.tree.map(lambda x: x.astype(np.float32), given)
            with jtk.policy("kernels"), jax.default_matmul_precision(precision):
                results[name] = jax.jit(functools.partial(everything, m, options))(*given)
        for x, y in zip(results["ours"], results["exact"], strict=True):
            x, y = (np.asarray(z, np.float64) for z in (x, y))
            wrong += not np.linalg.norm(x - y) <= 1e-2 * np.linalg.norm(y)
    print(f"attention: {len(CALLS)} calls, {wrong} wrong", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(check_attention() > 0)
