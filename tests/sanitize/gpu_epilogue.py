"""Small products with epilogues of every kind on the GPU, under compute-sanitizer.

See ``.ci/sanitize``.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import jax_tilekern as jtk
from jax_tilekern.plans.gpu import planning_beside_collectives

TYPES = (ml_dtypes.bfloat16, np.float16, np.float32, np.float64, np.int8)
# (b, m, n, k): whole tiles, odd rows and columns, several tiles with a rest, a k to split.
SHAPES = [(1, 256, 512, 160), (3, 29, 31, 83), (1, 131, 262, 129), (1, 80, 72, 2100)]


def every_operand(y, scalar, bias, scale, residual):
    """Read a number, a row, a column and a matrix; return a second matrix."""
    return y * scale + bias + residual + scalar, y


def check_epilogues() -> int:
    """Run every type and shape under both tile schedulers; return how many were wrong."""
    rng = np.random.default_rng(0)
    wrong, count = [], 0
    for dtype in TYPES:
        for b, m, n, k in SHAPES:
            # Small integers: every sum is exact in every arithmetic.
            shapes = (b, m, k), (b, k, n), (), (n,), (m, 1), (b, m, n)
            lhs, rhs, *operands = (rng.integers(-1, 2, shape).astype(dtype) for shape in shapes)
            exact = [x.astype(np.float64) for x in (lhs, rhs, *operands)]
            expected = every_operand(exact[0] @ exact[1], *exact[2:])
            for scheduler in (nullcontext, planning_beside_collectives):
                fused = jax.jit(
                    lambda lhs, rhs, *operands: jtk.matmul(
                        lhs,
                        rhs,
                        precision="highest" if lhs.dtype == np.float32 else None,
                        preferred_element_type=np.int32 if lhs.dtype == np.int8 else None,
                        epilogue=every_operand,
                        operands=operands,
                    )
                )
                with scheduler():
                    got = fused(*map(jnp.asarray, (lhs, rhs, *operands)))
                count += 1
                # 16-bit results beyond 256 are rounded.
                close = (
                    np.allclose(np.asarray(x, np.float64), y, rtol=2.0**-8, atol=0)
                    for x, y in zip(got, expected, strict=True)
                )
                if not all(close):
                    wrong.append(f"{np.dtype(dtype)} {b}x{m}x{n}x{k} {scheduler.__name__}")
    print(f"epilogues: {count}, {len(wrong)} wrong {wrong or ''}", flush=True)
    return len(wrong)


def reductions(y, column, label):
    """Return every reduction of rows, beside the product."""
    return y, jtk.row_sum(y), jtk.row_max(y), jtk.row_logsumexp(jnp.where(column == label, y, -y))


def check_row_reductions() -> int:
    """Run the types that wgmma kernels have, with the product stored and not."""
    rng = np.random.default_rng(0)
    wrong, count = [], 0
    for dtype in TYPES[:3]:
        for b, m, n, k in SHAPES[:3]:
            shapes = (b, m, k), (b, k, n)
            lhs, rhs = (rng.integers(-1, 2, shape).astype(dtype) for shape in shapes)
            column, label = np.arange(n), rng.integers(0, n, (m, 1))
            y = lhs.astype(np.float64) @ rhs.astype(np.float64)
            exponents = np.where(column == label, y, -y)
            top = exponents.max(-1)
            lse = top + np.log(np.exp(exponents - top[..., None]).sum(-1))
            expected = y, y.sum(-1), y.max(-1), lse
            for first in (0, 1):
                fused = jax.jit(
                    lambda lhs, rhs, *operands, first=first: jtk.matmul(
                        lhs,
                        rhs,
                        precision="default",
                        epilogue=lambda *elements: reductions(*elements)[first:],
                        operands=operands,
                    )
                )
                got = fused(*map(jnp.asarray, (lhs, rhs, column, label)))
                count += 1
                close = (
                    np.allclose(np.asarray(x, np.float64), y, rtol=2.0**-8, atol=1e-5)
                    for x, y in zip(got, expected[first:], strict=True)
                )
                if not all(close):
                    wrong.append(f"{np.dtype(dtype)} {b}x{m}x{n}x{k} from result {first}")
    print(f"reductions of rows: {count}, {len(wrong)} wrong {wrong or ''}", flush=True)
    return len(wrong)


def check_pairs() -> int:
    """Run both products of a gated linear unit in one kernel, with and without a rest of a tile."""
    rng = np.random.default_rng(0)
    wrong = []
    shapes = [(256, 512, 512), (131, 264, 576), (1024, 2048, 128)]
    types = TYPES[:2]
    for dtype in types:
        for m, n, k in shapes:
            x, gate, up = (
                rng.integers(-1, 2, shape).astype(dtype) for shape in ((m, k), (k, n), (k, n))
            )
            arrays = [jnp.asarray(a) for a in (x, gate, up)]
            (choice,) = jtk.explain(jtk.gated_linear, *arrays)
            got = np.asarray(jax.jit(jtk.gated_linear)(*arrays), np.float64)
            of_gate, of_up = (x.astype(np.float64) @ w.astype(np.float64) for w in (gate, up))
            expected = of_gate / (1 + np.exp(-of_gate)) * of_up
            if "pair" not in str(choice) or not np.allclose(got, expected, rtol=2.0**-7, atol=1e-5):
                wrong.append(f"{np.dtype(dtype)} {m}x{n}x{k} {choice}")
    print(f"pairs: {len(types) * len(shapes)}, {len(wrong)} wrong {wrong or ''}", flush=True)
    return len(wrong)


if __name__ == "__main__":
    with jax.enable_x64(True), jtk.policy("kernels"):
        sys.exit(check_epilogues() + check_row_reductions() + check_pairs() > 0)
