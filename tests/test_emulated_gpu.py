"""Calls and plans whose kernels are emulated: values, gradients, orders and layouts."""

import dataclasses
import math
import random

import emulated_plans
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_gpu import emulated_gpu
from jax import lax
from nvrtc_mark import needs_emulator
from products import H100, product_of, ragged_product_of, taken
from small_products import ACROSS_K, SIZES_ACROSS_K, SPECS, TYPES, bound, random_product
from small_products import SIZES as SMALL_SIZES

import jax_tilekern as jtk
from jax_tilekern.interop.gpu_target import gpu_target
from jax_tilekern.ops.segments.order import order_and_places, order_by_key
from jax_tilekern.plans.gemm.sm90.candidates import WGMMA
from jax_tilekern.plans.gemm.sm90.config import WGMMA_ARITHMETICS
from jax_tilekern.plans.gemm.small.candidates import small_candidates
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.grouped_gemm.sm90.candidates import GROUPED_WGMMA

pytestmark = needs_emulator

SIZES = np.array([37, 0, 91, 72], np.int32)
IDS = np.arange(600, dtype=np.int32) * 7 % 50
BF16, F32 = jnp.bfloat16, jnp.float32


def regular(x):
    return x + x.shape[-1] ** 0.5 * jnp.eye(x.shape[-1], dtype=x.dtype)


def definite(x):
    return x @ x.mT + jnp.eye(x.shape[-1], dtype=x.dtype)


def layer_by_experts(x, up, down, gate, logits):
    """Every expert computes every token."""
    top, indices = lax.top_k(logits, 2)
    weights = jnp.zeros(logits.shape).at[jnp.arange(len(x))[:, None], indices].set(
        jax.nn.softmax(top, -1)
    )  # fmt: skip
    hidden = jax.nn.silu(jnp.einsum("td,edi->tei", x, gate)) * jnp.einsum("td,edi->tei", x, up)
    return jnp.einsum("tei,eid,te->td", hidden, down, weights)


def layer(x, up, down, gate, logits):
    routing = jtk.route(logits, 2)
    return jtk.moe(x, up, down, routing, w_gate=gate)


def reduced(name):
    return tuple(lambda x, m=module: getattr(m, name)(x, IDS, 50) for module in (jtk, jax.ops))


# What is computed, the same by JAX, shapes, their type, and names of plans that run.
OPERATIONS = {
    "linear": (
        lambda x, w, b: jtk.linear(x, w, b, jax.nn.gelu),
        lambda x, w, b: jax.nn.gelu(x @ w + b),
        [(264, 128), (128, 256), (256,)], BF16, ["wgmma_matmul bf16"],
    ),
    "gated_linear": (
        jtk.gated_linear,
        lambda x, gate, up: jax.nn.silu(x @ gate) * (x @ up),
        [(264, 128), (128, 256), (128, 256)], BF16, ["wgmma_matmul bf16"],
    ),
    "ragged_dot": (
        lambda x, w: jtk.ragged_dot(x, w, SIZES),
        lambda x, w: lax.ragged_dot(x, w, SIZES),
        [(200, 136), (4, 136, 264)], BF16, ["ragged_wgmma_matmul bf16"],
    ),
    "moe": (
        layer, layer_by_experts,
        [(96, 64), (4, 64, 128), (4, 128, 64), (4, 64, 128), (96, 4)], BF16,
        ["combine rows of bfloat16", "ragged_wgmma_matmul bf16", "spread rows of bfloat16"],
    ),
    "matvec": (
        jtk.matvec, jnp.matvec, [(300, 257), (257,)], F32, ["vector_product tf32"],
    ),
    "transpose": (
        lambda x: jtk.transpose(x, (1, 2, 0)), lambda x: jnp.transpose(x, (1, 2, 0)),
        [(33, 70, 96)], F32, ["transpose"],
    ),
    "add": (jtk.add, jnp.add, [(70, 96), (70, 96)], F32, ["add float32"]),
    "segment_sum": (
        *reduced("segment_sum"), [(600, 96)], F32, ["segment_sum float32, few edges"],
    ),
    "segment_max": (
        *reduced("segment_max"), [(600, 33)], F32, ["segment_max float32, few edges"],
    ),
    "segment_reduce": (
        lambda x, w: jtk.segment_reduce(
            jnp.multiply, x, w, segment_ids=IDS, num_segments=50, gather=(IDS % 50 - 25, None)
        ),
        lambda x, w: jax.ops.segment_sum(x[IDS % 50 - 25] * w, IDS, 50),
        [(50, 33), (600, 33)], F32, ["segment_sum float32, few edges"],
    ),
    "take": (
        lambda x: jtk.take(x, IDS, 0), lambda x: x[IDS],
        [(50, 64)], F32, ["segment_sum float32, few edges"],
    ),
    "top_k": (
        lambda x: jtk.top_k(x, 8)[0], lambda x: lax.top_k(x, 8)[0],
        [(40, 256)], F32, ["top_k float32"],
    ),
    "sort": (
        lambda x: jtk.sort(x), lambda x: jnp.sort(x), [(9, 300)], F32, ["sort float32"],
    ),
    "inv": (
        lambda x: jtk.linalg.inv(regular(x)), lambda x: jnp.linalg.inv(regular(x)),
        [(9, 8, 8)], F32, ["matrix_inverse float32 8x8"],
    ),
    "solve": (
        lambda x, b: jtk.linalg.solve(regular(x), b),
        lambda x, b: jnp.linalg.solve(regular(x), b),
        [(9, 16, 16), (9, 16, 3)], F32, ["matrix_solve float32 16x16"],
    ),
    "cholesky": (
        lambda x: jtk.linalg.cholesky(definite(x)), lambda x: jnp.linalg.cholesky(definite(x)),
        [(200, 200)], F32, ["blocked_cholesky float32 200x200"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.one_in(21)
def test_values_and_gradients(name):
    ours, theirs, shapes, dtype, plans = OPERATIONS[name]
    generator = np.random.default_rng(len(name))
    operands = [jnp.asarray(generator.normal(size=shape), dtype) for shape in shapes]
    weights = generator.normal(size=jax.eval_shape(ours, *operands).shape)

    def with_gradients(function):
        def total(*operands):
            result = function(*operands)
            return (result * weights.astype(result.dtype)).astype(F32).sum(), result

        every = tuple(range(len(operands)))
        return jax.jit(jax.value_and_grad(total, every, has_aux=True))

    wide = [x.astype(F32) for x in operands]
    with jax.default_matmul_precision("highest"):
        (_, value), gradients = with_gradients(theirs)(*wide)
    # Sums of squares of operands are about 1 per element.
    tolerance = 2**-5 if dtype == BF16 else 2**-8
    for how in ({"late": ["reads"], "backwards": True}, {"late": ["writes"]}):
        with emulated_gpu(**how) as ran:
            (_, ours_value), ours_gradients = with_gradients(ours)(*operands)
        assert set(plans) <= {plan.name for plan in ran}
        results = zip((ours_value, *ours_gradients), (value, *gradients), strict=True)
        for found, expected in results:
            error = np.abs(np.asarray(found, np.float32) - np.asarray(expected))
            assert error.max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("precision", ["default", "highest"])
@pytest.mark.thorough
def test_complex_products(precision):
    generator = np.random.default_rng(3)
    a, b, weights = (
        jnp.asarray(generator.normal(size=shape) + 1j * generator.normal(size=shape), jnp.complex64)
        for shape in ((136, 72), (72, 264), (136, 264))
    )

    def with_cotangents(matmul):
        return jax.jit(lambda a, b: (matmul(a, b), jax.vjp(matmul, a, b)[1](weights)))

    expected = with_cotangents(lambda a, b: jnp.matmul(a, b, precision="highest"))(a, b)
    with emulated_gpu(late=["writes"]) as ran:
        found = with_cotangents(lambda a, b: jtk.matmul(a, b, precision=precision))(a, b)
    names = {"default": "wgmma_matmul tf32", "highest": "split_float16_matmul f32"}
    assert {plan.name for plan in ran} == {names[precision]}
    tolerance = {"default": 2**-9, "highest": 2**-18}[precision]
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("rows", "bins", "kernels"),
    [
        (1, 3, 1), (31, 3, 1), (1000, 66, 1), (1024, 130, 1), (1025, 130, 2), (5000, 66, 2),
        (5000, 2, 2), (5000, 512, 2), (40_000, 512, 4), (3000, 513, 7),
    ],
)  # fmt: skip
@pytest.mark.one_in(6)
def test_orders_places_and_bounds(rng, rows, bins, kernels):
    keys = rng.integers(-2, bins, rows).astype(np.int32)
    keys[rng.random(rows) < 0.3] = 0
    clipped = np.clip(keys, -1, bins - 2)
    order = np.argsort(clipped, kind="stable")
    places = np.argsort(order)
    bounds = np.searchsorted(clipped[order], np.arange(-1, bins))
    bounds[-1] = rows
    wanted = order, places, bounds[:-1], order, bounds
    for how in ({}, {"backwards": True}):
        with emulated_gpu(**how) as ran:
            found = jax.jit(lambda k: order_and_places(k, bins=bins))(keys)
            plain = jax.jit(lambda k: order_by_key(k, bins=bins))(keys)
        for a, b in zip((*found, *plain), wanted, strict=True):
            np.testing.assert_array_equal(a, b)
        assert [len(plan.launches) for plan in ran] == [kernels] * 2


# Types whose elements are packed to words.
PACKED = [types for types in TYPES if types[0] not in ("float32", "float64")]
# Emulation takes a millisecond and more for a CTA.
MOST_CTAS = 64


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("sizes", SMALL_SIZES, ids=str)
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.one_in(51)
def test_kernels_compute_the_product(types, sizes, rng):
    _check_product(types, sizes, rng, SPECS)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("sizes", SIZES_ACROSS_K, ids=str)
@pytest.mark.parametrize("types", PACKED, ids=str)
@pytest.mark.thorough
def test_kernels_pack_elements_across_k(types, sizes, rng):
    _check_product(types, sizes, rng, ACROSS_K)


def _check_product(types, sizes, rng, specs):
    numbers = random.Random(int(rng.integers(2**32)))
    # There are no tensor cores for 8-bit floats before sm_89.
    gpu = known_gpu("sm_90" if "float8" in types[0] else numbers.choice(("sm_80", "sm_90")))
    with gpu_target(gpu):
        product, operands, exact, scale = random_product(numbers, types, sizes, 3, specs)
    found = small_candidates(product, gpu)
    few = [candidate for candidate in found if candidate.instance.ctas <= MOST_CTAS]
    candidate = numbers.choice(few or sorted(found, key=lambda x: x.instance.ctas)[:1])
    with emulated_plans.record() as recorded:
        plan = candidate.plan(gpu)
    results = [(exact.shape, product.out_dtype)]
    # Copies of parts of a vector read nothing beyond an operand.
    (got,) = emulated_plans.run_plan(
        plan, recorded, operands, results, options=emulated_plans.SANITIZED
    )
    error = np.linalg.norm(got.astype(np.float64) - exact) / scale
    assert error <= bound(product), (candidate.key, product)


# Few CTAs have several tiles each.
GPU = dataclasses.replace(H100, sm_count=4)
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(1, 14))]
BOUNDS = ("random", "gaps", "empty", "one-hot")


def view(buffer, shape, strides):
    """The elements of an array with the strides, in float64."""
    indices = np.ix_(*map(np.arange, shape))
    return buffer[sum(i * stride for i, stride in zip(indices, strides, strict=True))].astype(
        np.float64
    )


def stored(rng, shape, strides, dtype):
    """Random numbers in an array with the strides, and what lies in memory."""
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    numbers = rng.integers(-9, 10, count) if dtype.kind in "iu" else rng.normal(size=count)
    buffer = numbers.astype(dtype)
    return buffer, view(buffer, shape, strides)


def drawn(rng, family, make):
    """A product that the kernels take, and one of its candidates."""
    while True:
        arithmetic = str(rng.choice(sorted(WGMMA_ARITHMETICS)))
        types = WGMMA_ARITHMETICS[arithmetic].types
        operands, results = list(types.operands), list(types.results)
        lhs, rhs = (operands[rng.integers(len(operands))] for _ in range(2))
        product = make(arithmetic, types=(lhs, rhs, results[rng.integers(len(results))]))
        found = list(taken(family, product, GPU))
        if found:
            return product, found[rng.integers(len(found))]


def check(rng, product, candidate, operands, shape, strides, expected, magnitudes):
    with emulated_plans.record() as recorded:
        plan = candidate.plan(GPU)
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    how = {"late": [("reads", "writes")[rng.integers(2)]], "backwards": bool(rng.integers(2))}
    (buffer,) = emulated_plans.run_plan(
        plan, recorded, operands, [((count,), product.out_dtype)], **how
    )
    found = view(buffer, shape, strides)
    # bfloat16 and TF32 round operands or results; integers are exact.
    is_float = jnp.issubdtype(product.out_dtype, jnp.floating)
    unit = 2**-10 + float(jnp.finfo(product.out_dtype).eps) if is_float else 0
    slack = unit * magnitudes + (2**-24 if is_float else 0)
    assert (np.abs(found - expected) <= slack).all(), (candidate.key, product)


def size(rng):
    return int(rng.choice([1, rng.integers(1, 40), 8 * rng.integers(1, 24)]))


@pytest.mark.parametrize("seed", SEEDS)
def test_products(seed):
    rng = np.random.default_rng(seed)

    def make(arithmetic, types):
        return product_of(
            arithmetic, size(rng), size(rng), int(rng.choice([size(rng), 1000])),
            rng.integers(1, 4, rng.integers(3)).tolist(), types=types,
            lhs_k_major=bool(rng.integers(2)), rhs_k_major=bool(rng.integers(2)),
            padding=int(rng.choice([0, 0, 1, 8])), broadcast=set(rng.integers(0, 3, 1).tolist()),
        )  # fmt: skip

    product, candidate = drawn(rng, WGMMA, make)
    g = product.geometry
    lhs, a = stored(rng, (*g.batch, g.m, g.k), g.lhs_strides, product.lhs_dtype)
    rhs, b = stored(rng, (*g.batch, g.k, g.n), g.rhs_strides, product.rhs_dtype)
    shape = (*g.batch, g.m, g.n)
    check(rng, product, candidate, [lhs, rhs], shape, g.out_strides, a @ b, np.abs(a) @ np.abs(b))


def bounds_of(rng, groups, rows):
    """Where the groups of a batch begin and end."""
    kind = rng.choice(BOUNDS)
    if kind == "empty":
        return np.full(groups + 1, rng.integers(rows + 1))
    if kind == "one-hot":
        return np.where(np.arange(groups + 1) > rng.integers(groups), rows, 0)
    bounds = np.sort(rng.integers(0, rows + 1, groups + 1))
    return bounds if kind == "gaps" else np.array([0, *bounds[1:-1], rows])


@pytest.mark.parametrize("ragged", ["m", "k"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.one_in(2)
def test_groups(seed, ragged):
    rng = np.random.default_rng([seed, ragged == "m"])

    def make(arithmetic, types):
        return ragged_product_of(
            arithmetic, ragged, int(rng.integers(1, 6)), size(rng), size(rng), size(rng),
            batch=rng.integers(1, 3, rng.integers(2)).tolist(), types=types,
            lhs_k_major=ragged == "m", rhs_k_major=ragged == "m" and bool(rng.integers(2)),
            padding=int(rng.choice([0, 0, 8])),
        )  # fmt: skip

    product, candidate = drawn(rng, GROUPED_WGMMA, make)
    grouped = g = product.groups
    batch = (*g.outer_batch, g.groups)
    lhs, a = stored(rng, (*batch, g.m, g.k), g.lhs_strides, product.lhs_dtype)
    rhs, b = stored(rng, (*batch, g.k, g.n), g.rhs_strides, product.rhs_dtype)
    batches = math.prod(g.outer_batch)
    bounds = np.array([bounds_of(rng, g.groups, grouped.rows) for _ in range(batches)], np.int32)
    expected, magnitudes = np.zeros((2, batches, g.groups, g.m, g.n))
    a, b = (x.reshape(batches, *x.shape[-3:]) for x in (a, b))
    for i, group in np.ndindex(batches, g.groups):
        rows = slice(*bounds[i, group : group + 2])
        if ragged == "m":
            # Rows have one place, whatever their group.
            own = a[i, group, rows], b[i, group]
            expected[i, :, rows] = own[0] @ own[1]
            magnitudes[i, :, rows] = np.abs(own[0]) @ np.abs(own[1])
        else:
            own = a[i, group, :, rows], b[i, group, rows]
            expected[i, group], magnitudes[i, group] = (
                own[0] @ own[1],
                np.abs(own[0]) @ np.abs(own[1]),
            )
    shape = (*batch, g.m, g.n)
    check(
        rng, product, candidate, [lhs, rhs, bounds.ravel()], shape, g.out_strides,
        expected.reshape(shape), magnitudes.reshape(shape),
    )  # fmt: skip


def test_operands_of_64_bits_reach_kernels_on_all_threads(rng):
    """XLA's threads call back, which lack the contexts of the thread that calls the function."""
    x = rng.standard_normal((40, 57))
    with jax.enable_x64(True), emulated_gpu() as ran:
        found = jax.jit(lambda x: [jtk.transpose(i * x, (1, 0)) for i in range(1, 25)])(x)
    assert len(ran) == 24
    for i, result in enumerate(found, 1):
        np.testing.assert_array_equal(result, i * x.T, strict=True)
