"""Small products of every arithmetic on the GPU, to be run under compute-sanitizer.

See ``.ci/sanitize``. Operands come from NumPy and results go back to it, so nearly every kernel
that runs is one of the package's.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import math
import sys
from collections import Counter

import jax
import ml_dtypes
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jax_tilekern as jtk
from jax_tilekern.compilation.compiler import Kernel, Source, compile_kernels
from jax_tilekern.interop import ffi
from jax_tilekern.plans.candidate import Candidate
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.select import candidates
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, NoKernel

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
BF16 = ml_dtypes.bfloat16
# Types of operands and result by arithmetic.
TYPES = {
    "bf16": (BF16, BF16, BF16),
    "f16": (np.float16, np.float16, np.float32),
    "tf32": (np.float32, np.float32, np.float32),
    "f32": (np.float32, np.float32, np.float32),
    "f64": (np.float64, np.float64, np.float64),
    "int8": (np.int8, np.int8, np.int32),
    "fp8": (E4M3, E5M2, np.float32),
    "fp8_fast": (E5M2, E4M3, BF16),
}
MAJORS = ("bmk,bkn", "bkm,bkn", "bmk,bnk", "bkm,bnk")
# (b, m, n, k): rows of whole vectors, then odd ones; less than a tile and more; a k to split.
SHAPES = [(2, 64, 96, 160), (3, 29, 30, 83), (1, 256, 512, 160), (1, 131, 261, 129),
          (1, 80, 72, 2100)]  # fmt: skip

Call = tuple[str, str, tuple[int, ...]]


def product_of(name: str, majors: str, shape: tuple[int, ...]) -> Product:
    """Return the product of dense arrays in row-major order."""
    sizes = dict(zip("bmnk", shape, strict=True))

    def strides(labels: str, order: str) -> tuple[int, ...]:
        return tuple(math.prod(sizes[x] for x in labels[labels.index(i) + 1 :]) for i in order)

    lhs, rhs = majors.split(",")
    b, m, n, k = shape
    geometry = MatmulGeometry(
        (b,), m, n, k, strides(lhs, "bmk"), strides(rhs, "bkn"), strides("bmn", "bmn")
    )
    return Product(geometry, *map(np.dtype, TYPES[name]), name)


def choices(calls: list[Call]) -> list[tuple[Call, Candidate]]:
    """Choose kernels for each call: of every family the one that was chosen least so far."""
    gpu = current_gpu()
    used: Counter[str] = Counter()
    chosen: list[tuple[Call, Candidate]] = []
    for call in calls:
        name = call[0]
        found = candidates(product_of(*call), gpu)
        if isinstance(found, NoKernel):
            continue
        # By arithmetic first, then by all of them.
        found.sort(key=lambda choice, name=name: (used[f"{name} {choice.key}"], used[choice.key]))
        for choice in {type(choice): choice for choice in reversed(found)}.values():
            used.update((f"{name} {choice.key}", choice.key))
            chosen.append((call, choice))
    return chosen


def operands_and_result(name: str, majors: str, shape: tuple[int, ...]):
    """Return small integers: every sum is exact in every arithmetic, and 16 bits hold it."""
    sizes = dict(zip("bmnk", shape, strict=True))
    rng = np.random.default_rng([*shape, MAJORS.index(majors)])
    arrays = [rng.integers(-1, 2, [sizes[x] for x in labels]) for labels in majors.split(",")]
    expected = np.einsum(f"{majors}->bmn", *(array.astype(np.float64) for array in arrays))
    return *(x.astype(t) for x, t in zip(arrays, TYPES[name], strict=False)), expected


def lower_candidate(call: Call, candidate: Candidate):
    """Compile a kernel's plan and lower a call of it, in 64-bit mode even in a pool's thread."""
    plan = candidate.plan(current_gpu())
    primitive = Primitive(f"product_{call[0]}")
    lhs, rhs, expected = operands_and_result(*call)
    out = jax.core.ShapedArray(expected.shape, np.dtype(TYPES[call[0]][2]))
    primitive.def_abstract_eval(lambda *_: out)
    mlir.register_lowering(
        primitive, lambda ctx, *operands: ffi.cuda_launch(ctx, operands, plan), platform="cuda"
    )
    with jax.enable_x64(True):
        return jax.jit(primitive.bind).trace(lhs, rhs).lower(lowering_platforms=("cuda",))


def check_products() -> int:
    """Run every product; return how many arithmetics failed."""
    calls = [(name, majors, shape) for name in TYPES for majors in MAJORS for shape in SHAPES]
    work = choices(calls)
    # NVRTC compiles on as many cores as there are; under a sanitizer all of it is cached.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        lowered = list(pool.map(lower_candidate, *zip(*work, strict=True)))
    total: Counter[str] = Counter()
    wrong: dict[str, list[str]] = {}
    for (call, candidate), program in zip(work, lowered, strict=True):
        lhs, rhs, expected = operands_and_result(*call)
        with jax.enable_x64(True):
            got = np.asarray(program.compile()(lhs, rhs)).astype(np.float64)
        total[call[0]] += 1
        # bfloat16 results beyond 256 are rounded.
        if not np.allclose(got, expected, rtol=2.0**-8, atol=0):
            wrong.setdefault(call[0], []).append(f"{call[1:]} by {candidate.key}")
    for name, count in total.items():
        failures = wrong.get(name, [])
        print(f"{name}: {count - len(failures)} of {count} products right {failures or ''}")
    kernels = len({candidate.key for _, candidate in work})
    print(f"{len(total) - len(wrong)} passed, {len(wrong)} failed; {kernels} kinds", flush=True)
    return len(wrong)


def check_complex_products() -> int:
    """Run complex products, whose kernels read pairs in place; return how many are wrong."""
    wrong = []
    with jtk.policy("kernels"):
        for precision in (None, "highest"):
            for _, m, n, k in SHAPES:
                rng = np.random.default_rng([m, n, k])
                lhs, rhs = (
                    (rng.integers(-1, 2, shape) + 1j * rng.integers(-1, 2, shape))
                    for shape in ((m, k), (k, n))
                )
                product = jax.jit(functools.partial(jtk.matmul, precision=precision))
                got = np.asarray(product(*(x.astype(np.complex64) for x in (lhs, rhs))))
                if not np.array_equal(got, lhs @ rhs):
                    wrong.append(f"{m}x{n}x{k} at {precision}")
    print(f"complex64: {len(wrong)} wrong {wrong or ''}", flush=True)
    return len(wrong)


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
    compiled = compile_kernels(Kernel(Source(PLANTED), name), arch=gpu.arch)
    launch = Launch(compiled.entry(name), (1, 1, 1), (128, 1, 1), (Buffer(0),))
    plan = LaunchPlan(name, gpu, (launch,), (4,))
    primitive = Primitive("planted")
    primitive.def_abstract_eval(lambda: jax.core.ShapedArray((256,), np.dtype(np.int32)))
    mlir.register_lowering(primitive, lambda ctx: ffi.cuda_launch(ctx, [], plan), platform="cuda")
    print(np.asarray(jax.jit(primitive.bind)())[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--planted", choices=["memcheck", "racecheck"])
    planted = parser.parse_args().planted
    if planted:
        run_planted(planted)
    else:
        sys.exit(check_products() + check_complex_products() > 0)
