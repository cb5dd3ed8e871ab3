"""Small additions of every type and kind of broadcasting on the GPU, under compute-sanitizer.

See ``.ci/sanitize``.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from jax_tilekern.plans.add import ADDED_DTYPES

# One dimension, rows that are repeated, an operand that repeats an element.
SHAPES = [((4099,), (4099,)), ((33, 64), (64,)), ((33, 63), (63,)), ((33, 1), (1, 130)),
          ((2, 3, 1, 8), (3, 7, 1)), ((1000,), ())]  # fmt: skip


def check_additions() -> int:
    """Run every type and shape; return how many were wrong."""
    rng = np.random.default_rng(0)
    wrong = []
    for dtype in ADDED_DTYPES:
        for shapes in SHAPES:
            # Small integers, whose sums every type holds.
            x, y = (rng.integers(0, 50, shape).astype(dtype) for shape in shapes)
            (choice,) = jtk.explain(jtk.add, x, y)
            out = np.asarray(jtk.add(jnp.asarray(x), jnp.asarray(y)))
            if choice.kernel is None or not np.array_equal(out, x + y):
                wrong.append(f"{dtype} {shapes}: {choice.kernel or choice.reason}")
    print(
        f"additions: {len(ADDED_DTYPES) * len(SHAPES)}, {len(wrong)} wrong {wrong or ''}",
        flush=True,
    )
    return len(wrong)


if __name__ == "__main__":
    with jax.enable_x64(True), jtk.policy("kernels"):
        sys.exit(check_additions())
