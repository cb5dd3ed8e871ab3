"""Small sums and products with a vector by every kernel on the GPU, under compute-sanitizer.

See ``.ci/sanitize``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from candidate_calls import jitted

from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.reduction.passes import reduction_candidate
from jax_tilekern.plans.reduction.problem import Reduction, SummedDims
from jax_tilekern.plans.reduction.select import sum_candidate

DTYPES = [np.float32, np.float64, ml_dtypes.bfloat16, np.float16]
# Whole vectors and odd strides.
SUMS = [((200, 640), (0,)), ((199, 321), (0,)), ((5, 300, 96), (1,)), ((65, 1003), (1,))]
# Lines, elements of each, and whether the elements rather than the lines are neighbours.
PRODUCTS = [(65, 1024, True), (7, 20_003, True), (96, 1000, False), (33, 2001, False)]


def check_reductions() -> int:
    """Run every case; return how many were wrong."""
    gpu, rng, kinds, wrong = current_gpu(), np.random.default_rng(0), 0, []
    for dtype in map(np.dtype, DTYPES):
        total = np.dtype(np.float64 if dtype == np.float64 else np.float32)
        for shape, axes in SUMS:
            # Small integers, whose sums float32 holds; those of 16 bits are left in float32.
            x = rng.integers(-4, 5, shape).astype(dtype)
            expected = x.astype(np.float64).sum(axes)
            found = sum_candidate(SummedDims.of(shape, axes), dtype, total, gpu)
            assert not isinstance(found, NoKernel), found
            out = np.asarray(jitted(found.plan(gpu), expected.shape, total)(x))
            kinds += 1
            if not np.array_equal(out, expected):
                wrong.append(f"{dtype} {shape} over {axes}")
        for lines, k, by_rows in PRODUCTS:
            matrix = rng.integers(-4, 5, (lines, k) if by_rows else (k, lines)).astype(dtype)
            vector = rng.integers(-4, 5, k).astype(dtype)
            expected = (matrix if by_rows else matrix.T).astype(np.float64) @ vector.astype(
                np.float64
            )
            strides = (k, 1) if by_rows else (1, lines)
            reduction = Reduction((), lines, k, strides, (1,), (1,), dtype, total, total)
            candidate = reduction_candidate(reduction, gpu, "vector_product")
            assert candidate is not None
            out = np.asarray(jitted(candidate.plan(gpu), (lines,), total)(matrix, vector))
            kinds += 1
            if not np.array_equal(out, expected):
                wrong.append(f"{dtype} {lines} x {k}")
    print(f"reductions: {kinds} kinds, {len(wrong)} wrong {wrong or ''}", flush=True)
    return len(wrong)


if __name__ == "__main__":
    with jax.enable_x64(True):
        sys.exit(check_reductions() > 0)
