"""On a GPU: each candidate computes the product, of groups and of small matrices too."""

import math
import random

import jax.numpy as jnp
import numpy as np
import pytest
from candidate_calls import jitted, run, run_twice
from numerics import poison
from nvrtc_mark import require_gpu
from products import product_of, ragged_product_of
from small_products import SIZES, SIZES_ACROSS_K, TYPES, bound, random_product

from jax_tilekern.plans.gemm.select import candidates
from jax_tilekern.plans.gemm.sm90 import emulated
from jax_tilekern.plans.gemm.small.candidates import small_candidates
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.plans.reduction.problem import SummedDims
from jax_tilekern.plans.reduction.select import sum_candidate

require_gpu()

# Several rounds of tiles for every SM, with edges, and a k that no tile divides.
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
    # A vector times a matrix, and two vectors.
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


ORDERS = ("NN", "NT", "TN", "TT")


@pytest.mark.parametrize("order", ORDERS)
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


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n", [184, 183])
@pytest.mark.parametrize(
    ("arithmetic", "batch", "largest"),
    [("f32", (), 1), ("f32", (), 1e30), ("f32", (3,), 1), ("f32_normwise", (), 1)],
)
def test_float32_in_parts_of_k(monkeypatch, order, n, arithmetic, batch, largest):
    """The parts of a long k are added in order, and none where plain float32 takes over."""
    monkeypatch.setattr(emulated, "_SLICE_K", 256)
    monkeypatch.setattr(emulated, "_SLICED_ROUNDS", 0)
    m, k = 200, 650
    rng = np.random.default_rng(n)
    left, right = (rng.standard_normal((*batch, *x), np.float32) for x in ((m, k), (k, n)))
    left[..., ::3, ::7] *= largest
    lhs = jnp.asarray(left if order[0] == "N" else np.ascontiguousarray(left.mT))
    rhs = jnp.asarray(right if order[1] == "N" else np.ascontiguousarray(right.mT))
    exact = left.astype(np.float64) @ right
    bound = BOUNDS["f32"] * (np.abs(left).astype(np.float64) @ np.abs(right))
    product = product_of(
        arithmetic,
        m,
        n,
        k,
        types=(np.dtype(np.float32),) * 3,
        batch=batch,
        lhs_k_major=order[0] == "N",
        rhs_k_major=order[1] == "T",
    )
    gpu, count = current_gpu(), 0
    for candidate in candidates(product, gpu):
        if isinstance(candidate, emulated.EmulatedCandidate):
            count += 1
            plan = candidate.plan(gpu)
            assert "3 parts of k" in plan.reason
            got = run(plan, (lhs, rhs), exact.shape, np.float32)
            assert np.all(np.abs(got - exact) <= bound)
    assert count or gpu.compute_capability[0] != 9


# Arithmetic, types, which dimension is ragged, and the operands' orders.
RAGGED_CASES = [
    *(("bf16", "bfloat16", "bfloat16", ragged, order)
      for ragged in "mk" for order in ("NN", "NT", "TN", "TT")),
    ("bf16", "bfloat16", "float32", "m", "NN"),
    ("bf16", "bfloat16", "float32", "k", "TN"),
    ("f16", "float16", "float32", "m", "NN"),
    ("f16", "float16", "float16", "k", "TN"),
    *((arithmetic, "float32", "float32", ragged, order)
      for arithmetic in ("tf32", "f32") for ragged, order in (("m", "NN"), ("m", "TT"),
                                                              ("k", "TN"), ("k", "NT"))),
    ("f64", "float64", "float64", "m", "NT"),
    ("f64", "float64", "float64", "k", "TN"),
    ("int8", "int8", "int32", "m", "NN"),
    ("int8", "int8", "int32", "m", "NT"),
    ("int8", "int8", "int32", "m", "TN"),
    ("int8", "int8", "int32", "k", "TN"),
    ("int8", "int8", "int32", "k", "NT"),
    ("fp8", "float8_e4m3fn", "bfloat16", "m", "NN"),
    ("fp8", "float8_e4m3fn", "float32", "m", "NT"),
    ("fp8", "float8_e4m3fn", "float32", "k", "TN"),
    ("fp8_fast", "float8_e5m2", "float32", "m", "NT"),
]  # fmt: skip
# More elements than whole vectors, padding of rows in memory, and batch dimensions: rows of whole
# vectors, rows that begin anywhere, and rows of whole vectors of which the last is not all used.
RAGGED_LAYOUTS = [(0, 0, (2,)), (1, 0, (2,)), (-1, 1, (2, 2))]
ROWS, GROUPS = 1500, 13


def bounds_of(kind, rng, batches):
    """Where groups begin and end, in order: of every batch."""
    shape = (batches, GROUPS + 1)
    if kind == "random":
        return np.sort(rng.integers(0, ROWS + 1, shape))
    if kind == "all rows":
        inner = np.sort(rng.integers(0, ROWS + 1, (batches, GROUPS - 1)))
        return np.pad(np.pad(inner, ((0, 0), (1, 0))), ((0, 0), (0, 1)), constant_values=ROWS)
    if kind == "skewed":
        return np.minimum(ROWS * 2 ** np.arange(GROUPS + 1) // 2**GROUPS, ROWS) + np.zeros(
            shape, int
        )
    if kind == "one group":
        return np.where(np.arange(GROUPS + 1) > GROUPS // 2, ROWS, 0) + np.zeros(shape, int)
    if kind == "single rows":
        return rng.integers(0, ROWS - GROUPS, (batches, 1)) + np.arange(GROUPS + 1)
    return np.full(shape, rng.integers(0, ROWS + 1))


def norm(x):
    """By one thread, where every worker's BLAS would start as many as there are cores."""
    return np.sqrt(np.square(x).sum())


BOUND_KINDS = ("random", "all rows", "skewed", "one group", "single rows", "no rows")


def rows_of_no_group(bounds):
    return np.r_[0 : bounds[0], bounds[-1] : ROWS]


def without_rows_of_no_group(x, bounds, dim):
    """An operand with NaN in rows that no group has, which must not matter."""
    x = x.copy()
    if np.issubdtype(x.dtype, np.integer):
        return x
    for b, of_batch in enumerate(bounds):
        np.moveaxis(x[b], dim - 1, 0)[rows_of_no_group(of_batch)] = np.nan
    return x


def in_memory(x, major, padding):
    """An array whose rows are longer by what must not matter."""
    x = x.swapaxes(-1, -2) if major == "T" else x
    beyond = 0 if np.issubdtype(x.dtype, np.integer) else np.nan
    padded = np.full((*x.shape[:-1], x.shape[-1] + padding), beyond, x.dtype)
    padded[..., : x.shape[-1]] = x
    return jnp.asarray(padded)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("layout", RAGGED_LAYOUTS, ids=["whole", "odd", "padded"])
@pytest.mark.parametrize(("arithmetic", "operand", "result", "ragged", "order"), RAGGED_CASES)
def test_every_candidate_computes_each_group(arithmetic, operand, result, ragged, order, layout):
    more, padding, batch = layout
    batches = math.prod(batch)
    n = 528 + more
    m, k = (ROWS, 336 + more) if ragged == "m" else (272 + more, ROWS)
    seed = sum(map(ord, arithmetic + ragged + order)) + more
    rng = np.random.default_rng(seed)
    dtype, out_dtype = jnp.dtype(operand), jnp.dtype(result)
    groups_of_rhs, groups_of_out = ((GROUPS,), ()) if ragged == "m" else ((), (GROUPS,))
    product = ragged_product_of(
        arithmetic,
        ragged,
        GROUPS,
        m,
        n,
        k,
        batch=batch,
        types=(dtype, dtype, out_dtype),
        lhs_k_major=order[0] == "N",
        rhs_k_major=order[1] == "T",
        padding=padding,
    )

    def draw(shape):
        if operand == "int8":
            return rng.integers(-128, 128, shape, np.int8)
        return rng.standard_normal(shape).astype(dtype)

    lhs, rhs = draw((batches, m, k)), draw((batches, *groups_of_rhs, k, n))
    left, right = lhs.astype(np.float64), rhs.astype(np.float64)
    shape = (batches, *groups_of_out, m, n + padding)
    gpu = current_gpu()
    found = candidates(product, gpu)
    if more:
        # The best of each family, for all in each layout take long to compile.
        found = {type(candidate): candidate for candidate in reversed(found)}.values()
    calls = {candidate.key: jitted(candidate.plan(gpu), shape, out_dtype) for candidate in found}
    wrong = {}
    for kind in BOUND_KINDS:
        bounds = np.asarray(bounds_of(kind, rng, batches), np.int32)
        operands = (
            without_rows_of_no_group(lhs, bounds, 1 if ragged == "m" else 2),
            without_rows_of_no_group(rhs, bounds, 1) if ragged == "k" else rhs,
        )
        on_device = [in_memory(x, major, padding) for x, major in zip(operands, order, strict=True)]
        exact = [
            (b, g, rows, left[b, rows] @ right[b, g])
            if ragged == "m"
            else (b, g, rows, left[b, :, rows] @ right[b, rows])
            for b in range(batches)
            for g, rows in enumerate(map(slice, bounds[b, :-1], bounds[b, 1:]))
        ]
        for key, call in calls.items():
            poison(shape, out_dtype)
            got = run_twice(call, (*on_device, jnp.asarray(bounds)), np.s_[..., :n])
            for b, g, rows, product_of_group in exact:
                part = got[b, rows] if ragged == "m" else got[b, g]
                error = norm(part - product_of_group)
                if not error <= BOUNDS[arithmetic] * norm(product_of_group):
                    wrong[key, kind, b, g] = error
            for b in range(batches) if ragged == "m" else ():
                if got[b, rows_of_no_group(bounds[b])].any():
                    wrong[key, kind, b] = "no zeros in rows of no group"
    assert not wrong


@pytest.mark.parametrize("order", ORDERS)
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
        ((2000, 1024), (0,)),
        ((2000, 1021), (0,)),
        ((40, 300, 129), (1,)),
        ((300, 2001), (1,)),
        ((3, 100_003), (0, 1)),
    ],
)
def test_sums(shape, axes, dtype):
    rng = np.random.default_rng(len(shape))
    type_ = jnp.dtype(dtype)
    # Small integers, whose sums are exact in float32, and rounded once.
    x = jnp.asarray(rng.integers(-8, 8, shape), type_)
    exact = np.asarray(x).astype(np.float64).sum(axes)
    gpu = current_gpu()
    plan = sum_candidate(SummedDims.of(shape, axes), type_, type_, gpu).plan(gpu)
    got = run(plan, (x,), exact.shape, type_)
    np.testing.assert_array_equal(got, exact.astype(type_).astype(np.float64))


# So many of the tiles of a product are tried.
TILES = 4


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("sizes", SIZES + SIZES_ACROSS_K, ids=str)
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.one_in(2)
def test_every_kernel_computes_the_product(types, sizes, rng):
    numbers = random.Random(int(rng.integers(2**32)))
    product, operands, exact, scale = random_product(numbers, types, sizes, most_matrices=20)
    gpu = current_gpu()
    found = small_candidates(product, gpu)
    wrong = {}
    for candidate in numbers.sample(found, min(TILES, len(found))):
        call = jitted(candidate.plan(gpu), exact.shape, product.out_dtype)
        poison(exact.shape, product.out_dtype)
        got = run_twice(call, operands)
        error = np.linalg.norm(got - exact) / scale
        if not error <= bound(product):
            wrong[candidate.key] = error
    assert not wrong, product
