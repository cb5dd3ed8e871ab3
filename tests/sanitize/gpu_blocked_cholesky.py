"""Cholesky factors in blocks on the GPU, under compute-sanitizer.

    gpu_blocked_cholesky.py size

See ``.ci/sanitize``.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_tilekern.interop import ffi
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.linalg.blocked_cholesky import plan_cholesky


def check(size: int) -> bool:
    """Return whether the factor is wrong. Sizes are below those that are planned for."""
    plan = plan_cholesky(1, size, True, current_gpu())
    assert not isinstance(plan, NoKernel), plan.reason
    planned = Primitive("tilekern_blocked_cholesky")
    planned.def_abstract_eval(lambda a: a)
    mlir.register_lowering(planned, lambda ctx, *xs: ffi.cuda_launch(ctx, xs, plan))
    root = np.random.default_rng(0).standard_normal((size, size))
    a = (root @ root.T + size * np.eye(size)).astype(np.float32)
    result: Any = jax.jit(planned.bind)(jnp.asarray(a))
    x = np.asarray(result, np.float64)
    error = (np.abs(x @ x.T - a) / (np.abs(x) @ np.abs(x.T))).max()
    print(f"{plan.name}: {error:.1e}", flush=True)
    return not error <= size * np.finfo(np.float32).eps / 2


if __name__ == "__main__":
    sys.exit(check(int(sys.argv[1])))
