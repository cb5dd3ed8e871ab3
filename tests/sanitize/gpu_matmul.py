"""Small products of every arithmetic on the GPU, to be run under compute-sanitizer.

See ``.ci/sanitize``. Operands come from NumPy and results go back to it, so nearly every kernel
that runs is one of the package's.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import sys

import jax
import ml_dtypes
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jax_tilekern as jtk
from jax_tilekern import ffi
from jax_tilekern.compiler import compile_source
from jax_tilekern.plans.gpu import current_gpu, gpu_target
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan
from jax_tilekern.plans.matmul import ARITHMETICS

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
BF16 = ml_dtypes.bfloat16
# By the planner's name of the arithmetic: operands, result and precision that lead to it.
CALLS = {
    "bf16": (BF16, BF16, BF16, None),
    "f16": (np.float16, np.float16, np.float32, None),
    "tf32": (np.float32, np.float32, np.float32, None),
    "f32": (np.float32, np.float32, np.float32, lax.Precision.HIGHEST),
    "f64": (np.float64, np.float64, np.float64, None),
    "int8": (np.int8, np.int8, np.int32, None),
    "fp8": (E4M3, E5M2, np.float32, None),
    "fp8_fast": (
        E5M2, E4M3, BF16, lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM,
    ),
}  # fmt: skip
MAJORS = ("bmk,bkn", "bkm,bkn", "bmk,bnk", "bkm,bnk")
# (b, m, n, k), and whether to plan for a GPU of one multiprocessor, which takes the largest tile.
# Rows of whole vectors, then odd ones; less than a tile and more. Together they take all tiles.
SHAPES = [((2, 64, 96, 160), False), ((3, 29, 30, 83), False), ((1, 256, 512, 160), True),
          ((1, 131, 261, 129), True)]  # fmt: skip


def compile_call(name: str, majors: str, shape: tuple[int, ...], large: bool):
    """Return the compiled product and its operands."""
    lhs, rhs, out, precision = CALLS[name]
    left, right = majors.split(",")
    sizes = dict(zip("bmnk", shape, strict=True))
    rng = np.random.default_rng([*shape, MAJORS.index(majors)])
    # Small integers: every sum is exact in every arithmetic, and 16-bit results hold it.
    a = rng.integers(-1, 2, [sizes[x] for x in left]).astype(lhs)
    b = rng.integers(-1, 2, [sizes[x] for x in right]).astype(rhs)
    dims = (((left.index("k"),), (right.index("k"),)), ((0,), (0,)))

    def product(a, b):
        return jtk.dot_general(a, b, dims, precision, preferred_element_type=out)

    gpu = current_gpu()
    with gpu_target(dataclasses.replace(gpu, multiprocessors=1) if large else gpu):
        (choice,) = jtk.explain(product, a, b)
        assert (choice.kernel or "").split()[-1:] == [name], choice
        compiled = jax.jit(product).lower(a, b).compile()
    expected = np.einsum(f"{majors}->bmn", a.astype(np.float64), b.astype(np.float64))
    return compiled, a, b, expected


def check_products() -> int:
    """Run every product; return how many arithmetics failed."""
    capability = current_gpu().compute_capability
    names = [name for name in CALLS if ARITHMETICS[name].min_capability <= capability]
    calls = [
        (name, majors, shape, large)
        for name in names
        for majors in MAJORS
        for shape, large in SHAPES
    ]
    # NVRTC compiles on as many cores as there are; under a sanitizer all of it is cached.
    with jax.enable_x64(True), concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = dict(zip(calls, pool.map(compile_in_x64, calls), strict=True))
        failed = 0
        for name in names:
            wrong = []
            for call in [call for call in calls if call[0] == name]:
                run, a, b, expected = compiled[call]
                got = np.asarray(run(a, b)).astype(np.float64)
                # bfloat16 results beyond 256 are rounded.
                if not np.allclose(got, expected, rtol=2.0**-8, atol=0):
                    wrong.append(call[1:])
            total = len(MAJORS) * len(SHAPES)
            print(f"{name}: {total - len(wrong)} of {total} products right {wrong or ''}")
            failed += bool(wrong)
    print(f"{len(names) - failed} passed, {failed} failed", flush=True)
    return failed


def compile_in_x64(call: tuple) -> tuple:
    """Compile in a thread of the pool, where the context of the caller does not hold."""
    with jax.enable_x64(True):
        return compile_call(*call)


PLANTED = """
namespace tilekern {
// Far beyond: the allocator rounds a buffer's size up.
__global__ void planted_memcheck(int* x) { x[(1 << 28) + threadIdx.x] = threadIdx.x; }
__global__ void planted_racecheck(int* x) {
  __shared__ int tile[128];
  tile[threadIdx.x] = x[threadIdx.x] + threadIdx.x;
  // No barrier: the other warp's element may not be there yet.
  x[threadIdx.x] = tile[(threadIdx.x + 32) % 128];
}
}  // namespace tilekern
"""


def run_planted(tool: str) -> None:
    """Run a kernel with a fault that ``tool`` should see."""
    gpu = current_gpu()
    name = f"tilekern::planted_{tool}"
    compiled = compile_source(PLANTED, [name], arch=gpu.arch)
    launch = Launch(compiled.entry(name), (1, 1, 1), (128, 1, 1), (Buffer(0),))
    plan = LaunchPlan(name, gpu, compiled.cubin, (launch,), (4,))
    primitive = Primitive("planted")
    primitive.def_abstract_eval(lambda: jax.core.ShapedArray((256,), np.dtype(np.int32)))
    mlir.register_lowering(primitive, lambda ctx: ffi.cuda_launch(ctx, [], plan), platform="cuda")
    print(np.asarray(jax.jit(primitive.bind)())[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--planted", choices=["memcheck", "racecheck"])
    planted = parser.parse_args().planted
    sys.exit(run_planted(planted) if planted else check_products())
