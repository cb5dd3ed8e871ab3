"""Small transposes by every kernel on the GPU, to be run under compute-sanitizer.

See ``.ci/sanitize``.
"""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jax_tilekern.interop import ffi
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel
from jax_tilekern.plans.transpose.permutation import Permutation
from jax_tilekern.plans.transpose.select import transpose_candidate

DTYPES = [np.uint8, np.uint16, np.uint32, np.uint64, np.complex128]
# Whole and broken tiles, rows that start anywhere, rows that stay, several dimensions.
CASES = [
    ((256, 272), (1, 0)),
    ((129, 65), (1, 0)),
    ((77, 1003), (1, 0)),
    ((3, 264, 528), (0, 2, 1)),
    ((40000, 40), (1, 0)),
    ((5, 7, 103), (1, 0, 2)),
    ((9, 5, 33), (1, 0, 2)),
    ((2, 5, 6, 64), (2, 0, 1, 3)),
    ((5, 4, 30, 2, 40), (4, 1, 0, 3, 2)),
]


def run(plan: LaunchPlan, x: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return what a plan's kernel makes of ``x``."""
    primitive = Primitive("planned_transpose")
    out = jax.core.ShapedArray(expected.shape, expected.dtype)
    primitive.def_abstract_eval(lambda _: out)
    mlir.register_lowering(
        primitive, lambda ctx, x: ffi.cuda_launch(ctx, (x,), plan), platform="cuda"
    )
    with jax.enable_x64(True):
        return np.asarray(jax.jit(primitive.bind)(x))


def check_transposes() -> int:
    """Run the kernel of every case; return how many were wrong."""
    gpu = current_gpu()
    rng = np.random.default_rng(0)
    keys, wrong = set(), []
    for dtype in map(np.dtype, DTYPES):
        for shape, axes in CASES:
            x = rng.integers(0, 256, [*shape, dtype.itemsize], np.uint8).view(dtype)[..., 0]
            expected = np.ascontiguousarray(x.transpose(axes))
            found = transpose_candidate(Permutation.reduced(shape, axes, dtype.itemsize))
            if isinstance(found, NoKernel):
                continue
            out = run(found.plan(gpu), x, expected)
            keys.add((dtype, found.key))
            if out.tobytes() != expected.tobytes():
                wrong.append(f"{dtype} {shape} to {axes} by {found.key}")
    print(f"transposes: {len(keys)} kinds, {len(wrong)} wrong {wrong or ''}", flush=True)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(check_transposes())
