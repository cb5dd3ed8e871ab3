"""Batches of small matrices of every layout on the GPU, under compute-sanitizer.

    gpu_linalg.py type [size ...]    by default all sizes

See ``.ci/sanitize``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from jax_tilekern import linalg

# Lanes that are all in use and that are not; one, two and many matrices of a warp, and one of a
# thread; 16-byte, 8-byte and single loads; and a last block and a last warp that are not full.
SIZES = (1, 2, 3, 7, 8, 16, 17, 32, 33, 64)
COLUMNS = (1, 2, 11)
COUNT = 37
PARTS = [
    f"{dtype} {sizes}"
    for dtype in ("float32", "float64")
    for sizes in ("1 2", "3 7", "8 16", "17 32", "33 64")
]


def decompositions(
    a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]
) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], np.ndarray[Any, Any]]]:
    """Yield calls whose factors' product is their argument: square, tall and wide matrices."""
    product = functools.partial(jnp.matmul, precision="highest")

    def by_svd(a: Any, full: bool) -> Any:
        u, s, vt = linalg.svd(a, full_matrices=full)
        k = s.shape[-1]
        return product(u[..., :k] * s[..., None, :], vt[..., :k, :])

    def by_qr(a: Any, mode: str) -> Any:
        return product(*linalg.qr(a, mode))

    def by_eigh(a: Any, symmetrize: bool) -> Any:
        w, v = linalg.eigh(a, symmetrize_input=symmetrize)
        return product(v * w[..., None, :], v.mT)

    for x in (a, b, b.swapaxes(-1, -2)):
        for flag in (False, True):
            yield "svd", functools.partial(by_svd, full=flag), (x,), x
            mode = "complete" if flag else "reduced"
            yield "qr", functools.partial(by_qr, mode=mode), (x,), x
        yield "singular values", linalg.svdvals, (x,), np.linalg.svd(x, compute_uv=False)
    for flag in (False, True):
        yield "eigh", functools.partial(by_eigh, symmetrize=flag), (a,), a
    yield "eigenvalues", linalg.eigvalsh, (a,), np.linalg.eigvalsh(a)


def calls(
    a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]
) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...], np.ndarray[Any, Any]]]:
    """Yield names, functions, arguments and results: of positive definite matrices."""
    transposed = b.swapaxes(-1, -2)
    yield "inv", linalg.inv, (a,), np.linalg.inv(a)
    yield "cholesky", linalg.cholesky, (a,), np.linalg.cholesky(a)
    yield "solve", linalg.solve, (a, b), np.linalg.solve(a, b)
    yield "one matrix", linalg.solve, (a[0], b), np.linalg.solve(a[:1], b)

    def solve_transposed(a: Any, b: Any) -> Any:
        (result,) = jax.linear_transpose(functools.partial(linalg.solve, a), b)(b)
        return result

    upper = np.triu(a)
    expected = np.linalg.solve(upper.swapaxes(-1, -2), b)
    yield "solve transposed", solve_transposed, (upper, b), expected

    def rebuilt(a: Any) -> Any:
        p, lower, upper = linalg.lu(a)
        return jnp.matmul(p, jnp.matmul(lower, upper, precision="highest"), precision="highest")

    yield "lu", rebuilt, (a,), a
    yield from decompositions(a, b)
    for lower in (False, True):
        triangle = np.tril(a) if lower else np.triu(a)

        def left(a: Any, b: Any, lower: bool = lower) -> Any:
            return linalg.triangular_solve(a, b, left_side=True, lower=lower)

        def right(a: Any, b: Any, lower: bool = lower) -> Any:
            return linalg.triangular_solve(a, b, lower=lower, transpose_a=True)

        yield f"left {lower}", left, (a, b), np.linalg.solve(triangle, b)
        # x @ T.T = b.T is T @ x.T = b.
        expected = np.linalg.solve(triangle, b).swapaxes(-1, -2)
        yield f"right {lower}", right, (a, transposed), expected


def check_matrices(dtype: np.dtype[Any], sizes: Sequence[int]) -> int:
    """Run every operation on matrices of these sizes; return how many were wrong."""
    rng = np.random.default_rng(0)
    wrong, total = [], 0
    for n in sizes:
        x = rng.standard_normal((COUNT, n, n))
        a = x @ x.swapaxes(-1, -2) / n + 2 * np.eye(n)
        b = rng.standard_normal((COUNT, n, COLUMNS[SIZES.index(n) % len(COLUMNS)]))
        for name, function, args, expected in calls(a, b):
            given = [jnp.asarray(v.astype(dtype)) for v in args]
            kernels = [choice.kernel for choice in jtk.explain(function, *given)]
            out = np.asarray(jax.jit(function)(*given), np.float64)
            error = np.abs(out - expected).max() / np.abs(expected).max()
            total += 1
            # Full bases of 64x1 matrices of float64 do not fit into shared memory.
            has_kernel = None not in kernels or (name, n, dtype) == ("svd", 64, np.float64)
            if not has_kernel or not error <= (1e-4 if dtype == np.float32 else 1e-12):
                wrong.append(f"{name} {n}: {error:.1e} {kernels}")
    print(f"{dtype} matrices {sizes}: {total}, {len(wrong)} wrong {wrong or ''}", flush=True)
    return len(wrong)


if __name__ == "__main__":
    with jax.enable_x64(True), jtk.policy("kernels"):
        chosen = tuple(map(int, sys.argv[2:])) or SIZES
        sys.exit(check_matrices(np.dtype(sys.argv[1]), chosen) > 0)
