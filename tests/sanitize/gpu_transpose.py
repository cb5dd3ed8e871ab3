"""Small transposes by every kernel on the GPU, to be run under compute-sanitizer.

See ``.ci/sanitize``.
"""

from __future__ import annotations

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk

DTYPES = [np.uint8, np.uint16, np.uint32, np.uint64, np.complex128]
# Whole and broken tiles, rows that start anywhere, several dimensions.
CASES = [
    ((256, 272), (1, 0)),
    ((129, 65), (1, 0)),
    ((77, 1003), (1, 0)),
    ((3, 264, 528), (0, 2, 1)),
    ((40000, 40), (1, 0)),
    ((5, 4, 30, 2, 40), (4, 1, 0, 3, 2)),
]


def check_transposes() -> int:
    """Run the kernel of every case; return how many were wrong."""
    rng = np.random.default_rng(0)
    kinds, wrong = set(), []
    for dtype in map(np.dtype, DTYPES):
        for shape, axes in CASES:
            x = rng.integers(0, 256, [*shape, dtype.itemsize], np.uint8).view(dtype)[..., 0]
            transpose = partial(jtk.transpose, axes=axes)
            (choice,) = jtk.explain(transpose, x)
            if choice.kernel is None:
                continue
            out = np.asarray(jax.jit(transpose)(jnp.asarray(x)))
            kinds.add((dtype, choice.kernel))
            if out.tobytes() != np.ascontiguousarray(x.transpose(axes)).tobytes():
                wrong.append(f"{dtype} {shape} to {axes} by {choice.kernel}")
    print(f"transposes: {len(kinds)} kinds, {len(wrong)} wrong {wrong or ''}", flush=True)
    return len(wrong)


if __name__ == "__main__":
    with jax.enable_x64(True), jtk.policy("kernels"):
        sys.exit(check_transposes())
