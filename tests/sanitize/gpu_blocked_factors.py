"""Factors in blocks on the GPU, under compute-sanitizer: inverses, solutions and Cholesky factors.

    gpu_blocked_factors.py type size columns    no columns for an inverse
    gpu_blocked_factors.py cholesky size

See ``.ci/sanitize``. Sizes are below those that are planned for.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from candidate_calls import jitted

from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.linalg.blocked_cholesky import plan_cholesky
from jax_tilekern.plans.linalg.blocked_lu_plans import plan_inverse, plan_solution

PARTS = [
    *(f"{dtype} {x}" for dtype in ("float32", "float64") for x in ("300 0", "600 5", "2100 40")),
    *(f"cholesky {size}" for size in (128, 300, 1001)),
]


def result_of(plan: Any, *operands: np.ndarray) -> np.ndarray:
    """Return what a plan makes of operands, of the last one's shape and type, in float64."""
    assert not isinstance(plan, NoKernel), plan.reason
    last = operands[-1]
    return np.asarray(jitted(plan, last.shape, last.dtype)(*operands), np.float64)


def is_wrong(plan: Any, error: float, size: int, dtype: Any) -> bool:
    """Print a plan's error, and return whether it exceeds the bound."""
    print(f"{plan.name}: {error:.1e}", flush=True)
    return not error <= size * np.finfo(dtype).eps / 2


def check_lu(dtype: np.dtype[Any], size: int, columns: int) -> bool:
    """Return whether an inverse or a solution is wrong."""
    gpu, rng = current_gpu(), np.random.default_rng(0)
    operands = [rng.standard_normal((size, size)).astype(dtype)]
    if columns:
        plan = plan_solution(size, columns, dtype, gpu)
        operands.append(rng.standard_normal((size, columns)).astype(dtype))
    else:
        plan = plan_inverse(size, dtype, gpu)
    x = result_of(plan, *operands)
    a, *b = (x.astype(np.float64) for x in operands)
    expected = b[0] if b else np.eye(size)
    error = (np.abs(a @ x - expected) / (np.abs(a) @ np.abs(x)).max(0)).max()
    return is_wrong(plan, error, size, dtype)


def check_cholesky(size: int) -> bool:
    """Return whether the factor is wrong."""
    plan = plan_cholesky(1, size, True, current_gpu())
    root = np.random.default_rng(0).standard_normal((size, size))
    a = (root @ root.T + size * np.eye(size)).astype(np.float32)
    x = result_of(plan, a)
    error = (np.abs(x @ x.T - a) / (np.abs(x) @ np.abs(x.T))).max()
    return is_wrong(plan, error, size, np.float32)


if __name__ == "__main__":
    kind, *sizes = sys.argv[1:]
    with jax.enable_x64(True):
        if kind == "cholesky":
            sys.exit(check_cholesky(*map(int, sizes)) > 0)
        sys.exit(check_lu(np.dtype(kind), *map(int, sizes)) > 0)
