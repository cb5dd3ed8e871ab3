"""On a GPU: whatever kernel is chosen for a product, the result is the same product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from numerics import on_gpu
from products import product_of

from jax_tilekern import ffi
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.plans.matmul import candidates
from jax_tilekern.plans.sum import SummedDims, sum_candidates, sum_plan

if not on_gpu():
    pytest.skip("launches kernels, and JAX has no GPU here", allow_module_level=True)

# Some rounds of tiles for every multiprocessor, with edges, and a k that no tile divides.
M, N, K = 2200, 2184, 656

# Relative to the result in the Frobenius norm: the operands' rounding, and that of the result.
BOUNDS = {
    "bf16": 4e-3, "f16": 5e-4, "tf32": 6e-4, "f32": 2e-6, "f32_emulated": 2e-6, "f64": 1e-14,
    "int8": 0, "fp8": 4e-3, "fp8_fast": 4e-3,
}  # fmt: skip
CASES = [
    ("bf16", "bfloat16", "bfloat16", (M, N, K)),
    ("bf16", "bfloat16", "float32", (M, N + 1, K)),
    ("bf16", "bfloat16", "bfloat16", (40, 1000, 12000)),
    ("f16", "float16", "float16", (M, N, K)),
    ("tf32", "float32", "float32", (M, N, K)),
    ("f32", "float32", "float32", (M, N, K)),
    ("int8", "int8", "int32", (M, N, K)),
    ("int8", "int8", "int32", (M + 1, N, K + 1)),
    # Of a vector and a matrix, and of two vectors.
    ("tf32", "float32", "float32", (1, 4096, 3000)),
    ("f32", "float32", "float32", (N, 1, 5001)),
    ("bf16", "bfloat16", "bfloat16", (1, N + 1, 5000)),
    ("f16", "float16", "float16", (4097, 1, 2049)),
    ("int8", "int8", "int32", (1, 4096, 4096)),
    ("int8", "int8", "int32", (4095, 1, 4097)),
    ("int8", "int8", "int32", (1, 1, 1000003)),
    ("fp8", "float8_e4m3fn", "bfloat16", (M, N, K)),
    ("fp8_fast", "float8_e5m2", "float32", (M, N, K)),
]


def run(plan, operands, shape, dtype):
    primitive = Primitive("tilekern_candidate")
    primitive.def_abstract_eval(lambda *_: jax.core.ShapedArray(shape, dtype))
    mlir.register_lowering(primitive, lambda ctx, *xs: ffi.cuda_launch(ctx, xs, plan))
    call = jax.jit(primitive.bind)
    out = call(*operands)
    # Two calls of one kernel are bitwise equal.
    assert np.asarray(out).tobytes() == np.asarray(call(*operands)).tobytes()
    return np.asarray(out).astype(np.float64)


@pytest.mark.parametrize("order", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize(("arithmetic", "operand", "result", "sizes"), CASES)
def test_every_candidate_computes_the_product(arithmetic, operand, result, sizes, order):
    m, n, k = sizes
    rng = np.random.default_rng(m + n + k)
    dtype, out_dtype = jnp.dtype(operand), jnp.dtype(result)

    def draw(shape):
        if operand == "int8":
            return jnp.asarray(rng.integers(-128, 128, shape, np.int8))
        return jnp.asarray(rng.standard_normal(shape), dtype)

    lhs = draw((k, m) if order[0] == "T" else (m, k))
    rhs = draw((n, k) if order[1] == "T" else (k, n))
    left = np.asarray(lhs).astype(np.float64)
    right = np.asarray(rhs).astype(np.float64)
    exact = (left.T if order[0] == "T" else left) @ (right.T if order[1] == "T" else right)
    product = product_of(
        arithmetic,
        m,
        n,
        k,
        types=(dtype, dtype, out_dtype),
        lhs_k_major=order[0] == "N",
        rhs_k_major=order[1] == "T",
    )
    gpu = current_gpu()
    wrong = {}
    for candidate in candidates(product, gpu):
        got = run(candidate.plan(gpu), (lhs, rhs), (m, n), out_dtype)
        error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
        if not error <= BOUNDS[arithmetic]:
            wrong[candidate.key] = error
    assert not wrong


@pytest.mark.parametrize("order", ["NN", "NT", "TN", "TT"])
def test_operands_are_rounded_to_the_nearest_tf32(order):
    """Which products by the unit matrix show; a tensor core by itself would cut bits off."""
    size = 264
    # Odd, so that none lies halfway.
    bits = np.random.default_rng(0).standard_normal((size, size), np.float32).view(np.uint32) | 1
    nearest = ((bits + 0x1000) & 0xFFFFE000).view(np.float32)
    x, unit = bits.view(np.float32), np.eye(size, dtype=np.float32)
    product = product_of(
        "tf32", size, size, size, lhs_k_major=order[0] == "N", rhs_k_major=order[1] == "T"
    )
    gpu = current_gpu()
    for left, right in ((x, unit), (unit, x)):
        lhs = jnp.asarray(left.T if order[0] == "T" else left)
        rhs = jnp.asarray(right.T if order[1] == "T" else right)
        for candidate in candidates(product, gpu):
            got = run(candidate.plan(gpu), (lhs, rhs), (size, size), np.float32)
            np.testing.assert_array_equal(got, nearest, candidate.key)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((1_000_003,), (0,)),
        ((3000, 1024), (1,)),
        ((3000, 1021), (1,)),
        ((70_000, 12), (1,)),
        ((5000, 640), (0,)),
        ((100_000, 3), (0,)),
        ((40, 300, 129), (1,)),
        ((12, 40, 20, 64), (0, 2)),
        ((12, 40, 20, 64), (1, 3)),
    ],
)
def test_every_candidate_computes_the_sum(shape, axes, dtype):
    rng = np.random.default_rng(len(shape))
    type_ = jnp.dtype(dtype)
    # Small integers, whose sums are exact in float32, and rounded once.
    x = jnp.asarray(rng.integers(-8, 8, shape), type_)
    exact = np.asarray(x).astype(np.float64).sum(axes)
    gpu = current_gpu()
    for passes in sum_candidates(SummedDims.of(shape, axes), type_, type_, gpu):
        plan = sum_plan(passes, gpu)
        got = run(plan, (x,), exact.shape, type_)
        np.testing.assert_array_equal(got, exact.astype(type_).astype(np.float64), passes.key)
