"""Small products of 8-bit floats with scales of blocks, and quantisers, under compute-sanitizer.

    gpu_fp8.py [products] [epilogues] [rows] [groups] [quantizers]    by default all of these

See ``.ci/sanitize``.
"""

from __future__ import annotations

import functools
import itertools
import sys
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from jax_tilekern.plans.gemm.arithmetic import BF16, F32, FP8
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product, Scales
from jax_tilekern.plans.gemm.sm90.candidates import wgmma_candidates
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.plans.grouped_gemm.problem import GroupedGeometry
from jax_tilekern.plans.grouped_gemm.sm90.candidates import grouped_wgmma_candidates
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.tuning.product_timing import by_plan

SIZES = [(1, 1, 1), (300, 200, 400), (70, 129, 131), (257, 136, 1040)]
# Sizes of groups, rows, N and K.
GROUPS = [
    ((100, 0, 7, 161), 300, 136, 400), ((3, 40, 64), 131, 72, 128), ((0, 0), 5, 8, 16),
]  # fmt: skip
SHAPES = [(1, 1), (150, 270), (152, 272), (128, 128), (3, 1000)]


def on_cpu() -> AbstractContextManager[Any]:
    """Compute what is expected, because a sanitizer makes XLA's compiler for GPUs slow."""
    return jax.default_device(jax.devices("cpu")[0])


def dequantized(x: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return values times scales, in float64."""
    for axis in (0, 1):
        if scales.shape[axis] not in (1, x.shape[axis]):
            scales = np.take(np.repeat(scales, 128, axis), range(x.shape[axis]), axis)
    return x.astype(np.float64) * scales


def check_products() -> int:
    """Multiply by every kernel; return how many products were wrong."""
    rng = np.random.default_rng(0)
    wrong, calls = [], 0
    for m, n, k in SIZES:
        blocks = -(-k // 128)
        for rows, columns in ((m, -(-n // 128)), (m, n), (-(-m // 128), n)):
            a, b = (rng.integers(-3, 4, s).astype(FP8[0]) for s in ((m, k), (n, k)))
            s, t = (2.0 ** rng.integers(-2, 3, (r, blocks)) for r in (rows, columns))
            s, t = s.astype(np.float32), t.astype(np.float32)
            padding = -n % 4 if columns == n else 0
            of_columns = np.pad(t.T, ((0, 0), (0, padding)))
            expected = dequantized(a, s) @ dequantized(b, t).T
            for out in (F32, BF16):
                product = Product(
                    MatmulGeometry((), m, n, k, (k, 1), (1, k), (n, 1)), FP8[0], FP8[0], out,
                    "fp8",
                    scales=(
                        Scales(1 if rows == m else 128, (), 1, rows),
                        Scales(
                            1 if columns == n else 128, (), 1, columns + padding,
                            padded=padding > 0,
                        ),
                    ),
                )  # fmt: skip
                found = wgmma_candidates(product, current_gpu())
                for candidate in [] if isinstance(found, NoKernel) else found:
                    plan = candidate.plan(current_gpu())
                    call = jax.jit(lambda *x, p=plan, o=out, mn=(m, n): by_plan(p, mn, o, *x))
                    got = np.asarray(call(a, b, s.T.copy(), of_columns), np.float64)
                    calls += 1
                    error = np.abs(got - expected).max()
                    if not error <= 2.0**-8 * np.abs(expected).max(initial=1):
                        wrong.append(f"{candidate.key} {m}x{n}x{k} {out} {rows} {columns}")
    print(f"scaled products: {calls} calls, {len(wrong)} wrong {wrong or ''}", flush=True)
    return len(wrong)


def check_epilogues() -> int:
    """Multiply with epilogues; return how many results are wrong."""
    rng = np.random.default_rng(2)
    wrong = []
    calls = 0

    def layer(y: jax.Array, bias: jax.Array, residual: jax.Array) -> tuple[jax.Array, object]:
        y = jnp.maximum(y + bias, 0) + residual
        return y, jtk.row_max(y)

    for m, n, k in SIZES:
        a, b = (rng.integers(-3, 4, s).astype(FP8[0]) for s in ((m, k), (n, k)))
        bias, residual = (rng.integers(-9, 9, s).astype(np.float32) for s in ((n,), (m, n)))
        blocks = -(-k // 128)
        for columns in (-(-n // 128), n):
            s, t = (
                (2.0 ** rng.integers(-1, 2, (r, blocks))).astype(np.float32) for r in (m, columns)
            )

            def call(*x: jax.Array) -> object:
                return jtk.scaled_matmul(*x[:4], epilogue=layer, operands=x[4:])

            expected = np.maximum(dequantized(a, s) @ dequantized(b, t).T + bias, 0) + residual
            with jtk.policy("kernels"):
                y, top = jax.jit(call)(a, b, s, t, bias, residual)
            calls += 1
            if (np.asarray(y) != expected).any() or (np.asarray(top) != expected.max(-1)).any():
                wrong.append(f"{m}x{n}x{k} {columns}")
    print(f"epilogues: {calls} calls, {len(wrong)} wrong {wrong or ''}", flush=True)
    return len(wrong)


def check_groups() -> int:
    """Multiply groups of rows by every kernel; return how many products were wrong."""
    rng = np.random.default_rng(2)
    wrong, calls = [], 0
    for sizes, m, n, k in GROUPS:
        groups, blocks = len(sizes), -(-k // 128)
        bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        for columns in (-(-n // 128), n):
            a, b = (rng.integers(-3, 4, s).astype(FP8[0]) for s in ((m, k), (groups, n, k)))
            s, t = (
                (2.0 ** rng.integers(-2, 3, shape)).astype(np.float32)
                for shape in ((m, blocks), (groups, columns, blocks))
            )
            expected = np.zeros((m, n))
            for g, (begin, end) in enumerate(itertools.pairwise(bounds)):
                left = dequantized(a[begin:end], s[begin:end])
                expected[begin:end] = left @ dequantized(b[g], t[g]).T
            geometry = MatmulGeometry((groups,), m, n, k, (0, k, 1), (n * k, 1, k), (0, n, 1))
            for out in (F32, BF16):
                product = Product(
                    GroupedGeometry.of(geometry, "m", ()), FP8[0], FP8[0], out, "fp8",
                    scales=(
                        Scales(1, (0,), 1, m),
                        Scales(
                            1 if columns == n else 128, (columns * blocks,), blocks,
                            int(blocks > 1),
                        ),
                    ),
                )  # fmt: skip
                found = grouped_wgmma_candidates(product, current_gpu())
                for candidate in [] if isinstance(found, NoKernel) else found:
                    plan = candidate.plan(current_gpu())
                    call = jax.jit(lambda *x, p=plan, o=out, mn=(m, n): by_plan(p, mn, o, *x))
                    got = np.asarray(call(a, b, bounds, s.T.copy(), t), np.float64)
                    calls += 1
                    error = np.abs(got - expected).max()
                    if not error <= 2.0**-8 * np.abs(expected).max(initial=1):
                        wrong.append(f"{candidate.key} {sizes} {m}x{n}x{k} {out} {columns}")
    print(f"scaled grouped GEMMs: {calls} calls, {len(wrong)} wrong {wrong or ''}", flush=True)
    return len(wrong)


def check_quantized_rows() -> int:
    """Quantise rows in products' kernels, and behind; return how many results differ."""
    rng = np.random.default_rng(3)
    wrong, calls = [], 0

    def relu(y: jax.Array, bias: jax.Array) -> jax.Array:
        return jnp.maximum(y + bias, 0)

    def fused(y: jax.Array, bias: jax.Array) -> object:
        return jtk.row_quantize(relu(y, bias))

    def both(y: jax.Array, bias: jax.Array) -> object:
        return relu(y, bias), fused(y, bias)

    for m, n, k in [*SIZES, (257, 512, 72)]:
        # Products are exact in 16 bits, to which one of a gated layer's may be rounded.
        x, w = (rng.integers(-1, 2, s) for s in ((m, k), (k, n)))
        bias = rng.integers(-9, 9, n).astype(np.float32)
        bias[::61] = np.nan

        def multiply(epilogue: object, x: jax.Array, w: jax.Array, bias: jax.Array) -> object:
            return jtk.matmul(x, w, epilogue=epilogue, operands=(bias,))

        def scaled(epilogue: object, x: jax.Array, w: jax.Array, bias: jax.Array) -> object:
            x, w = (a.astype(FP8[0]) for a in (x, w.T))
            one = jnp.ones((1, 1), np.float32)
            return jtk.scaled_matmul(x, w, one, one, epilogue=epilogue, operands=(bias,))

        def gated(epilogue: object, x: jax.Array, w: jax.Array, _: jax.Array) -> object:
            quantizes = jtk.row_quantize if epilogue is fused else None
            return jtk.gated_linear(x, w, w, jax.nn.relu, epilogue=quantizes)

        for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
            given = jnp.asarray(x, dtype), jnp.asarray(w, dtype), bias
            for call in (multiply, scaled, gated):
                with jtk.policy("kernels"):
                    y = jax.jit(functools.partial(call, relu))(*given)
                    found = [jax.jit(functools.partial(call, fused))(*given)]
                    if call is not gated:
                        found.append(jax.jit(functools.partial(call, both))(*given)[1])
                with jtk.policy("xla"), on_cpu():
                    expected = jax.tree.leaves(jax.jit(jtk.quantize)(np.asarray(y)))
                for pair in found:
                    calls += 1
                    if any(
                        np.asarray(a).tobytes() != np.asarray(b).tobytes()
                        for a, b in zip(pair, expected, strict=True)
                    ):
                        wrong.append(f"{m}x{n}x{k} {np.dtype(dtype)} {call.__name__}")
    print(f"quantised rows: {calls} calls, {len(wrong)} differ {wrong or ''}", flush=True)
    return len(wrong)


def check_quantizers() -> int:
    """Quantise by the kernel and by XLA; return how many results differ."""
    rng = np.random.default_rng(1)
    wrong, calls = [], 0
    # XLA compiles a program for each: a matrix takes some of the choices, in turn.
    options = ((False, True), (True, True), (False, False))
    choices = itertools.cycle(itertools.product(((1, 128), (128, 128)), FP8, options))
    for shape in SHAPES:
        for dtype in (np.float32, jnp.bfloat16, np.float16):
            x = rng.normal(size=shape) * np.exp(4 * rng.normal(size=shape))
            x.ravel()[::97] = np.nan
            x.ravel()[::89] = np.inf
            x = jnp.asarray(x, dtype)
            for block, q, (power_of_two, both) in itertools.islice(choices, 5):

                def call(x, b=block, q=q, p=power_of_two, both=both):
                    return jtk.quantize(x, b, q, power_of_two=p, both=both)

                with jtk.policy("kernels"):
                    found = jax.tree.leaves(jax.jit(call)(x))
                with jtk.policy("xla"), on_cpu():
                    expected = jax.tree.leaves(jax.jit(call)(np.asarray(x)))
                calls += 1
                if any(
                    np.asarray(a).tobytes() != np.asarray(b).tobytes()
                    for a, b in zip(found, expected, strict=True)
                ):
                    wrong.append(f"{shape} {np.dtype(dtype)} {block} {q} {power_of_two}")
    print(f"quantisers: {calls} calls, {len(wrong)} differ {wrong or ''}", flush=True)
    return len(wrong)


CHECKS = {
    "products": check_products,
    "epilogues": check_epilogues,
    "rows": check_quantized_rows,
    "groups": check_groups,
    "quantizers": check_quantizers,
}
PARTS = list(CHECKS)

if __name__ == "__main__":
    sys.exit(sum(CHECKS[name]() for name in sys.argv[1:] or CHECKS) > 0)
