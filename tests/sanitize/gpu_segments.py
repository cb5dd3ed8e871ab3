"""Small sorts, reductions to segments and top_k on the GPU, under compute-sanitizer.

See ``.ci/sanitize``.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_tilekern as jtk

# Edges, columns and segments: few edges that are scanned, few segments in shared memory, lanes of
# every number, several tiles of columns, sorts of one digit and of two.
SIZES = [
    (300, 1, 24), (5000, 3, 4), (5000, 8, 700), (3000, 33, 400), (2000, 256, 2000), (2000, 520, 40),
]  # fmt: skip
DTYPES = [np.float32, ml_dtypes.bfloat16, np.int32, np.int8]


def check_segments() -> int:
    """Run every type and size; return how many were wrong."""
    rng = np.random.default_rng(0)
    wrong, calls = [], 0

    def check(what: str, found: jax.Array, wanted: np.ndarray) -> None:
        nonlocal calls
        calls += 1
        if not np.array_equal(np.asarray(found).astype(np.float64), wanted):
            wrong.append(what)

    for edges, columns, segments in SIZES:
        ids = rng.integers(-1, segments + 1, edges).astype(np.int32)
        ids = np.where(rng.random(edges) < 0.3, segments // 2, ids)
        inside = (ids >= 0) & (ids < segments)
        for dtype in DTYPES:
            # Sums of few ones, which every type holds.
            x = (rng.random((edges, columns)) < 20 / edges).astype(dtype)
            for is_sorted in (False, True):
                own = np.sort(ids) if is_sorted else ids
                plan = jtk.segment_plan(own, segments, indices_are_sorted=is_sorted)
                kept = (own >= 0) & (own < segments)
                sums = np.zeros((segments, columns))
                np.add.at(sums, own[kept], x[kept].astype(np.float64))
                what = f"{np.dtype(dtype)} {edges} {columns} {segments} {is_sorted}"
                check(f"sum {what}", jtk.segment_sum(jnp.asarray(x), plan), sums)
                largest = np.zeros((segments, columns))
                np.maximum.at(largest, own[kept], x[kept].astype(np.float64))
                found = jtk.segment_max(jnp.asarray(x), plan)
                check(f"max {what}", jnp.maximum(found, jnp.zeros_like(found)), largest)
        table = rng.integers(-3, 4, (50, columns)).astype(np.float32)
        weights, rows = rng.integers(0, 2, edges).astype(np.float32), rng.integers(0, 50, edges)
        sums = np.zeros((segments, columns))
        np.add.at(sums, ids[inside], (table[rows] * weights[:, None])[inside])
        found = jtk.segment_reduce(
            lambda x, w: x * w, table, weights,
            segment_ids=ids, num_segments=segments, gather=(rows, None),
        )  # fmt: skip
        check(f"function {edges} {columns} {segments}", found, sums)
    for dtype in DTYPES:
        for rows, columns, k in ((9, 100, 7), (5, 512, 64), (3, 4000, 20)):
            x = rng.integers(-40, 40, (rows, columns)).astype(dtype)
            _, found = jtk.top_k(jnp.asarray(x), k)
            order = np.argsort(-x.astype(np.float64), axis=1, kind="stable")
            check(f"top_k {np.dtype(dtype)} {columns}", found, order[:, :k])
    print(f"segments: {calls} calls, {len(wrong)} wrong {wrong or ''}", flush=True)
    return len(wrong)


if __name__ == "__main__":
    with jtk.policy("kernels"):
        sys.exit(check_segments())
