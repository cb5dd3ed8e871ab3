"""LU factors in blocks on the GPU, under compute-sanitizer: inverses and solutions by plans.

    gpu_blocked_lu.py type size columns    no columns for an inverse

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
from jax_tilekern.plans.linalg.blocked_lu_plans import plan_inverse, plan_solution


def check(dtype: np.dtype[Any], size: int, columns: int) -> bool:
    """Return whether the result is wrong. Sizes are below those that are planned for."""
    gpu = current_gpu()
    inverse = not columns
    plan = plan_inverse(size, dtype, gpu) if inverse else plan_solution(size, columns, dtype, gpu)
    assert not isinstance(plan, NoKernel), plan.reason
    planned = Primitive("tilekern_blocked_lu")
    planned.def_abstract_eval(lambda a, *b: b[0] if b else a)
    mlir.register_lowering(planned, lambda ctx, *xs: ffi.cuda_launch(ctx, xs, plan))
    rng = np.random.default_rng(0)
    operands = [rng.standard_normal((size, size)).astype(dtype)]
    if not inverse:
        operands.append(rng.standard_normal((size, columns)).astype(dtype))
    result: Any = jax.jit(planned.bind)(*map(jnp.asarray, operands))
    a, *b = (x.astype(np.float64) for x in operands)
    x = np.asarray(result, np.float64)
    expected = b[0] if b else np.eye(size)
    error = (np.abs(a @ x - expected) / (np.abs(a) @ np.abs(x)).max(0)).max()
    print(f"{plan.name}: {error:.1e}", flush=True)
    return not error <= size * np.finfo(dtype).eps / 2


if __name__ == "__main__":
    with jax.enable_x64(True):
        sys.exit(check(np.dtype(sys.argv[1]), *map(int, sys.argv[2:])))
