"""Products with a symmetric result on the GPU, under compute-sanitizer: every tile, and epilogues.

With the argument ``claimed``: the tiles that CTAs claim beside collectives. See ``.ci/sanitize``.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_tilekern as jtk
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.sm90.candidates import wgmma_candidates
from jax_tilekern.plans.gpu import Gpu, current_gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.tuning.product_timing import ArrayProduct

PARTS = ["", "claimed"]
BF16 = ml_dtypes.bfloat16
TYPES = {
    "bf16": (BF16, BF16), "f16": (np.float16, np.float32), "tf32": (np.float32, np.float32),
    "int8": (np.int8, np.int32), "fp8": (ml_dtypes.float8_e4m3fn, np.float32),
}  # fmt: skip
# Matrices, rows and k: part of a tile, several tiles with a rest.
SHAPES = [(1, 72, 80), (2, 520, 208)]


def check_tiles(gpu: Gpu) -> int:
    """Run every tile of every type; return how many were wrong."""
    rng = np.random.default_rng(0)
    wrong, count = [], 0
    for arithmetic, types in TYPES.items():
        dtype, out = map(np.dtype, types)
        for batch, m, k in SHAPES:
            geometry = MatmulGeometry(
                (batch,), m, m, k, (m * k, k, 1), (m * k, 1, k), (m * m, m, 1)
            )
            product = Product(geometry, dtype, dtype, out, arithmetic, symmetric=True)
            found = wgmma_candidates(product, gpu)
            if isinstance(found, NoKernel):
                print(f"{arithmetic}: {found.reason}", flush=True)
                continue
            # Small integers: every sum is exact in every arithmetic.
            x = rng.integers(-1, 2, (batch, m, k))
            expected = x @ x.swapaxes(-1, -2)
            with ThreadPoolExecutor() as pool:
                plans = [*pool.map(lambda candidate: candidate.plan(gpu), found)]
            for candidate, plan in zip(found, plans, strict=True):
                run = jax.jit(functools.partial(ArrayProduct.of(product).by_plan, plan))
                operand = jnp.asarray(x.astype(dtype).squeeze(0) if batch == 1 else x.astype(dtype))
                got = np.asarray(run(operand, operand), np.float64).reshape(expected.shape)
                count += 1
                # bfloat16 results beyond 256 are rounded.
                if not np.allclose(got, expected, rtol=2.0**-8, atol=0):
                    wrong.append(f"{arithmetic} {batch}x{m}x{k} {candidate.key}")
    print(f"symmetric tiles: {count}, {len(wrong)} wrong {wrong or ''}", flush=True)
    return len(wrong)


def cubic(y, scale, x, row, column):
    """Read a number, a matrix, a row and a column."""
    return scale * y - x + jnp.where(row == column, scale, 0)


def check_epilogues() -> int:
    """Run products of symmetric matrices with matrices in the epilogue, and an iteration."""
    rng = np.random.default_rng(0)
    wrong = []
    for dtype in (BF16, np.float16):
        for n in (264, 1160):
            x = rng.integers(-1, 2, (2, n, n))
            x = np.tril(x) + np.tril(x, -1).swapaxes(-1, -2)
            index = np.arange(n)
            product = jax.jit(
                lambda x, *operands: jtk.symmetric_matmul(
                    x, x, epilogue=cubic, operands=(2.0, x, *operands)
                )
            )
            got = product(jnp.asarray(x.astype(dtype)), index[:, None], index)
            expected = 2 * x @ x - x + 2 * np.eye(n)
            if not np.allclose(np.asarray(got, np.float64), expected, rtol=2.0**-7, atol=0):
                wrong.append(f"{np.dtype(dtype)} {n}")
    a = jnp.asarray(rng.normal(size=(2, 264, 520)), np.float32)
    reference = jtk.linalg.newton_schulz(a, method="standard", precision="highest")
    for method in ("standard", "gram"):
        got = jtk.linalg.newton_schulz(a.astype(np.float16), method=method)
        if not np.abs(np.asarray(got, np.float32) - np.asarray(reference)).max() < 5e-3:
            wrong.append(method)
    print(f"symmetric epilogues: {len(wrong)} wrong {wrong or ''}", flush=True)
    return len(wrong)


if __name__ == "__main__":
    with jtk.policy("kernels"):
        own = current_gpu()
        if sys.argv[1:] == ["claimed"]:
            # Each CTA has several tiles.
            reserved = own.sm_count - 2
            own = dataclasses.replace(own, beside_collectives=True, reserved_sms=reserved)
            sys.exit(check_tiles(own) > 0)
        sys.exit(check_tiles(own) + check_epilogues() > 0)
