"""Kernels of products with weights of 4 and 8 bits, emulated on a CPU."""

import dataclasses
import itertools

import emulated_plans
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from emulated_gpu import emulated_gpu
from jax import lax
from nvrtc_mark import needs_emulator
from products import BF16, F16, F32, H100

import jax_tilekern as jtk
from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.interop.gpu_target import gpu_target
from jax_tilekern.plans.gemm.sm90.weight_only import WeightOnlyProduct
from jax_tilekern.plans.gemm.sm90.weight_only_few_rows import few_rows, plan_few_rows
from jax_tilekern.plans.gemm.sm90.weight_only_few_rows import kernel_of as kernel_of_few_rows
from jax_tilekern.plans.gemm.sm90.weight_only_launches import (
    kernel_of,
    plan_tiles,
    plan_weight_only,
)
from jax_tilekern.plans.gemm.sm90.weight_only_tiles import tile_of
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.policy import policy

pytestmark = needs_emulator

INTEGERS = {4: np.dtype(ml_dtypes.int4), 8: np.dtype(np.int8)}


E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)


def as_bytes(weights):
    """Return weights as they lie in memory, by JAX's definition of a bit-cast."""
    if weights.dtype.itemsize == 1 and weights.dtype != INTEGERS[4]:
        return weights.view(np.uint8)
    pairs = weights.reshape(*weights.shape[:-1], -1, 2)
    return np.asarray(lax.bitcast_convert_type(jnp.asarray(pairs), jnp.uint8))


def drawn(rng, problem):
    """Return operands of a plan, and in float64 the weights and their slopes in the integers."""
    info = ml_dtypes.iinfo(INTEGERS[problem.bits])
    batch = problem.batch if problem.weights_batched else 1
    shape = (batch, problem.n, problem.k)
    of_scales = (batch, -(-problem.n // problem.row_block), problem.groups)
    weights = rng.integers(info.min, info.max + 1, shape).astype(INTEGERS[problem.bits])
    if problem.float8:
        weights = weights.view(problem.float8)
        weights = np.where(np.isfinite(weights), weights, 0).astype(problem.float8)
    scales = np.exp2(rng.uniform(-8, 0, of_scales))
    scales = scales.astype(problem.scale_dtype)
    zeros = rng.uniform(info.min, info.max, scales.shape)
    zeros = np.where(rng.integers(2, size=scales.shape), np.rint(zeros), zeros)
    zeros = zeros.astype(problem.zero_dtype or F32)
    rows = (problem.batch if problem.x_batched else 1, problem.m, problem.k)
    x = rng.standard_normal(rows).astype(problem.dtype)
    has_zeros = problem.zero_dtype is not None
    operands = [as_bytes(weights), x, scales, *([zeros] if has_zeros else [])]

    def of_elements(groups):
        rows = np.repeat(np.float64(groups), problem.row_block, axis=1)[:, : problem.n]
        return np.repeat(rows, problem.group, axis=-1)[..., : problem.k]

    exact = np.float64(weights.astype(F32)) - has_zeros * of_elements(zeros)
    slopes = of_elements(scales)
    return operands, x, exact * slopes, slopes


def check(rng, problem, gpu=H100, planner=plan_tiles, **how):
    operands, x, weights, slopes = drawn(rng, problem)
    with emulated_plans.record() as recorded:
        plan = planner(problem, gpu)
    assert not isinstance(plan, NoKernel), plan
    results = [((problem.batch, problem.m, problem.n), problem.out_dtype)]
    (found,) = emulated_plans.run_plan(plan, recorded, operands, results, **how)
    x = np.float64(x.astype(np.float32))
    expected = np.einsum("bmk,bnk->bmn", x, weights)
    terms = np.einsum("bmk,bnk->bmn", np.abs(x), np.abs(weights))
    # Sums in float32, and the rounding of the result.
    bound = (problem.k + 1) * np.finfo(np.float32).eps * terms
    if problem.zero_dtype is not None:
        # The rest of a zero point is at most a half, and rounded; so is the difference to it.
        halves = np.einsum("bmk,bnk->bmn", np.abs(x), slopes) / 2
        bound += ml_dtypes.finfo(problem.dtype).eps / 2 * (terms + 2 * halves)
    bound += ml_dtypes.finfo(problem.out_dtype).eps / 2 * (np.abs(expected) + bound)
    assert (np.abs(np.float64(found.astype(np.float32)) - expected) <= bound).all()
    return plan


CALLS = {
    "one row": WeightOnlyProduct(1, 200, 640, 4, 128, BF16, BF16),
    "zeros": WeightOnlyProduct(9, 70, 544, 4, 32, BF16, BF16, BF16, F32),
    "many rows": WeightOnlyProduct(150, 130, 320, 4, 64, BF16, BF16, zero_dtype=F16),
    "whole rows": WeightOnlyProduct(20, 136, 672, 4, 672, F16, F32),
    "bytes": WeightOnlyProduct(3, 65, 400, 8, 128, BF16, F32, row_block=65),
    "bytes, zeros": WeightOnlyProduct(33, 129, 272, 8, 32, BF16, BF16, zero_dtype=F32),
    "bytes of float16": WeightOnlyProduct(8, 64, 1040, 8, 64, F16, F16, F16, row_block=30),
    "bytes in tiles of 16": WeightOnlyProduct(12, 70, 656, 8, 128, BF16, BF16, zero_dtype=BF16),
    "bytes of many rows": WeightOnlyProduct(75, 130, 528, 8, 64, BF16, F32),
    "zeros of several tiles": WeightOnlyProduct(17, 66, 800, 4, 128, BF16, F32, zero_dtype=F32),
    "zeros of float16": WeightOnlyProduct(3, 70, 352, 4, 32, F16, F16, F16, F16),
    "bytes, zeros of float16": WeightOnlyProduct(11, 70, 272, 8, 64, F16, F32, zero_dtype=F32),
    "bytes in large groups": WeightOnlyProduct(2, 70, 1040, 8, 256, F16, F16),
    "batches": WeightOnlyProduct(5, 70, 288, 4, 64, BF16, BF16, F32, BF16, 64, 3),
    "one x": WeightOnlyProduct(5, 70, 288, 8, 64, BF16, BF16, batch=2, x_batched=False),
    "one matrix": WeightOnlyProduct(5, 70, 288, 8, 32, BF16, BF16, batch=2, weights_batched=False),
    "floats": WeightOnlyProduct(5, 70, 400, 8, 128, BF16, BF16, float8=E4M3),
    "wide floats": WeightOnlyProduct(2, 70, 272, 8, 32, BF16, F32, float8=E5M2),
    "floats by float16": WeightOnlyProduct(11, 70, 400, 8, 64, F16, F32, float8=E4M3),
    "wide floats of many rows": WeightOnlyProduct(40, 70, 272, 8, 272, F16, F32, float8=E5M2),
    "floats of many rows": WeightOnlyProduct(140, 70, 400, 8, 128, BF16, BF16, float8=E4M3),
    "parts of k": WeightOnlyProduct(4, 64, 4096, 4, 128, BF16, BF16, F32, F32, batch=2),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.one_in(3)
def test_values(rng, name):
    plan = check(rng, CALLS[name], backwards=bool(rng.integers(2)))
    assert len(plan.launches) == 2 + ("parts" in plan.reason)


FEW_ROWS = {
    name: call for name, call in CALLS.items() if few_rows(call, H100) is not None
} | {
    "one long row": WeightOnlyProduct(1, 90, 2048, 4, 128, BF16, BF16),
    "rows of one group": WeightOnlyProduct(4, 70, 1152, 4, 1152, F16, F16, F16, BF16),
    "two MMAs": WeightOnlyProduct(15, 40, 1024, 4, 256, BF16, F32, row_block=20),
    "two MMAs of bytes": WeightOnlyProduct(9, 16, 1152, 8, 64, F16, F16, F32, F16),
}  # fmt: skip


@pytest.mark.parametrize("name", FEW_ROWS)
@pytest.mark.one_in(3)
def test_values_of_few_rows(rng, name):
    """Teams of warps have several tiles in turn, and some warps have no k-tile."""

    def planner(problem, gpu):
        return plan_few_rows(problem, few_rows(problem, gpu), gpu)

    one_sm = dataclasses.replace(H100, sm_count=1)
    how = {"backwards": bool(rng.integers(2)), "held": int(rng.integers(1, 2**31))}
    plan = check(rng, FEW_ROWS[name], one_sm, planner, **how)
    assert len(plan.launches) == 1


@pytest.mark.parametrize("late", [("reads",), ("writes",), ("reads", "writes")])
@pytest.mark.parametrize("name", ["zeros", "bytes, zeros"])
@pytest.mark.one_in(6)
def test_asynchronous_copies_are_waited_for(rng, name, late):
    check(rng, CALLS[name], late=late)


# Consumers that alternate k-tiles, and those that share them.
@pytest.mark.parametrize("m", [4, 40])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.one_in(4)
def test_no_warp_relies_on_the_turns_of_others(rng, m, bits):
    problem = WeightOnlyProduct(m, 64, 2048 * 8 // bits, bits, 128, BF16, BF16)
    for seed in rng.integers(1, 2**31, 4).tolist():
        check(rng, problem, dataclasses.replace(H100, sm_count=1), late=("writes",), held=seed)


@pytest.mark.parametrize("m", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("weights", [4, 8, E4M3])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("zeros", [None, F32])
@pytest.mark.one_in(4)
def test_kernels_neither_spill_nor_serialize(rng, m, weights, group, zeros):
    dtype = (BF16, F16)[rng.integers(2)]
    bits, float8 = (8, weights) if weights == E4M3 else (weights, None)
    problem = WeightOnlyProduct(m, 14336, 4096, bits, group, dtype, dtype, F32, zeros)
    if float8:
        problem = dataclasses.replace(problem, float8=float8, zero_dtype=None)
    for out in (dtype, F32):
        compiled = compile_kernels(kernel_of(problem, tile_of(problem, H100), out), arch=H100.arch)
        (entry,) = compiled.entries
        assert entry.spill_bytes == entry.stack_bytes == 0
        assert compiled.log == ""


@pytest.mark.parametrize("m", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("weights", [4, 8, E4M3])
@pytest.mark.parametrize("zeros", [None, F32])
@pytest.mark.parametrize("k", [4096, 4224])
@pytest.mark.one_in(4)
def test_kernels_of_few_rows_do_not_spill(rng, m, weights, zeros, k):
    dtype = (BF16, F16)[rng.integers(2)]
    bits, float8 = (8, weights) if weights == E4M3 else (weights, None)
    problem = WeightOnlyProduct(m, 4096, k, bits, 128, dtype, dtype, F32, zeros)
    if float8:
        problem = dataclasses.replace(problem, float8=float8, zero_dtype=None)
    kernel = kernel_of_few_rows(problem, few_rows(problem, H100))
    (entry,) = compile_kernels(kernel, arch=H100.arch).entries
    assert entry.spill_bytes == entry.stack_bytes == 0


def test_which_kernel_is_faster():
    def launches(m, n, k):
        return len(plan_weight_only(WeightOnlyProduct(m, n, k, 4, 128, BF16, BF16), H100).launches)

    assert launches(1, 4096, 4096) == 1
    assert launches(8, 2048, 1024) == 1
    assert launches(16, 4096, 4096) == 1
    # There, columns of two MMAs take longer than those of wgmma.
    assert launches(16, 14336, 4096) > 1
    assert launches(32, 4096, 4096) > 1
    # Groups of 32 share no MMA.
    assert few_rows(WeightOnlyProduct(1, 4096, 4096, 4, 32, BF16, BF16), H100) is None


def test_decode_has_ctas_for_a_gpu():
    plan = plan_tiles(WeightOnlyProduct(1, 4096, 14336, 4, 128, BF16, BF16), H100)
    assert np.prod(plan.launches[1].grid) > H100.sm_count
    assert "parts" in plan.reason


@pytest.mark.parametrize(
    ("problem", "gpu", "why"),
    [
        (CALLS["one row"], known_gpu("sm_80"), "Hopper"),
        (WeightOnlyProduct(1, 8, 64, 4, 64, F32, F32), H100, "not float32"),
        (WeightOnlyProduct(1, 8, 64, 4, 64, BF16, F16), H100, "no float16 of bfloat16"),
        (WeightOnlyProduct(1, 8, 48, 4, 64, BF16, BF16), H100, "rows of 48 elements"),
        (WeightOnlyProduct(1, 8, 96, 4, 48, BF16, BF16), H100, "not 48"),
        (WeightOnlyProduct(0, 8, 64, 4, 64, BF16, BF16), H100, "nothing to multiply"),
    ],
)
def test_what_no_kernel_covers(problem, gpu, why):
    assert why in plan_weight_only(problem, gpu).reason


def float64(x):
    return np.asarray(x, np.float64)


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.one_in(2)
def test_scaled_matmul(rng, dtype, symmetric):
    """A product with an epilogue, mapped over rows of x and over matrices."""
    symmetric = symmetric or dtype == jnp.float8_e4m3fn
    k, n = 256, 70
    x = jnp.asarray(rng.standard_normal((2, 3, k)), BF16)
    w = jnp.asarray(rng.standard_normal((2, n, k)), F32)
    values, scales, *zeros = jtk.quantize(w, block=(1, 64), dtype=dtype, symmetric=symmetric)

    def product(x, values, scales, *zeros):
        return jtk.scaled_matmul(
            x, values, None, scales, rhs_zeros=zeros[0] if zeros else None,
            preferred_element_type=F32, epilogue=lambda y: 2 * y,
        )  # fmt: skip

    with emulated_gpu() as ran:
        found = jax.jit(jax.vmap(product))(x, values, scales, *zeros)
        of_first = jax.jit(jax.vmap(product, (0, *[None] * (2 + len(zeros)))))(
            x, *(each[0] for each in (values, scales, *zeros))
        )
    assert len(ran) == 2
    exact = float64(values.astype(F32))
    if zeros:
        exact -= np.repeat(float64(zeros[0]), 64, axis=-1)
    exact *= np.repeat(float64(scales), 64, axis=-1)
    for result, weights in ((found, exact), (of_first, exact[:1])):
        wide, weights = float64(x.astype(F32)), np.broadcast_to(weights, exact.shape)
        expected = 2 * np.einsum("bmk,bnk->bmn", wide, weights)
        terms = 2 * np.einsum("bmk,bnk->bmn", np.abs(wide), np.abs(weights))
        assert (np.abs(result - expected) <= (k + 1) * np.finfo(np.float32).eps * terms).all()


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("of", [BF16, F16])
@pytest.mark.parametrize("m", [2, 20])
@pytest.mark.one_in(2)
def test_floats_that_are_not_finite(dtype, of, m):
    """NaN and, where the type has them, infinite weights reach their columns alone."""
    w = jnp.ones((64, 128), dtype).at[3, 5].set(jnp.nan).at[7, 9].set(-jnp.inf)
    with emulated_gpu() as ran:
        found = jtk.scaled_matmul(jnp.ones((m, 128), of), w, None, jnp.ones((64, 1)), F32)
    assert len(ran) == 1
    expected = np.full((m, 64), 128.0)
    expected[:, 3] = np.nan
    expected[:, 7] = float(w[7, 9].astype(F32))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize(("m", "k"), [(5, 4096), (20, 256), (20, 4096)])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.one_in(2)
def test_epilogue(rng, batch, m, k, zeros):
    """A kernel, or the one that adds parts of k, applies a function that reads arrays."""
    n = 70
    x = jnp.asarray(rng.standard_normal((*batch, m, k)), BF16)
    w = jnp.asarray(rng.standard_normal((*batch, n, k)), F32)
    values, *scales = jtk.quantize(w, block=(1, 128), dtype=jnp.int4, symmetric=not zeros)
    bias = jnp.asarray(rng.standard_normal(n), F32)
    of_rows = jnp.asarray(rng.standard_normal((m, 1)), F32)
    residual = jnp.asarray(rng.standard_normal((*batch, m, n)), BF16)

    def product(epilogue=None, *operands):
        return jtk.scaled_matmul(
            x, values, None, scales[0], rhs_zeros=scales[1] if zeros else None,
            preferred_element_type=F32, epilogue=epilogue, operands=operands,
        )  # fmt: skip

    def function(y, bias, of_rows, residual):
        return (y + bias) * of_rows + residual.astype(F32), y

    def with_sums(*read):
        return product(function, *read)

    def loss(bias):
        return product(lambda y, bias: jnp.tanh(y + bias), bias).sum()

    with emulated_gpu() as ran:
        found, sums = jax.jit(with_sums)(bias, of_rows, residual)
        plain = jax.jit(product)()
        gradient = jax.jit(jax.grad(loss))(bias)
    last = [plan.launches[-1].entry.name for plan in ran]
    assert ["Epilogue" in name for name in last] == [True, False, True]
    assert [len(plan.launches) for plan in ran] == [1 if m < 17 else 2 + (k > 256)] * 3
    np.testing.assert_array_equal(sums, plain)
    terms = [float64(x.astype(F32)) for x in (plain, bias, of_rows, residual)]
    y, b, r, z = terms
    size = (np.abs(y) + np.abs(b)) * np.abs(r) + np.abs(z)
    assert (np.abs(found - ((y + b) * r + z)) <= 3 * np.finfo(np.float32).eps * size).all()
    slopes = 1 - np.tanh(y + b) ** 2
    axes = tuple(range(y.ndim - 1))
    bound = 1e-5 * np.prod(y.shape[:-1])
    np.testing.assert_allclose(gradient, slopes.sum(axes), rtol=0, atol=bound)


@pytest.mark.defaults
def test_what_is_dequantised_first():
    values, scales = jtk.quantize(jnp.ones((64, 256)), dtype=jnp.int4)
    x = jnp.ones((4, 256), BF16)

    def reason(x, values, scales=scales):
        return " ".join(x.reason for x in jtk.explain(jtk.scaled_matmul, x, values, None, scales))

    def of_sizes(m, n, k):
        structs = [((m, k), BF16), ((n, k), jnp.int4), ((n, k // 128), F32)]
        return reason(*itertools.starmap(jax.ShapeDtypeStruct, structs))

    with gpu_target("H200"):
        assert "predicted faster than XLA" in of_sizes(1, 4096, 4096)
        assert "predicted faster than XLA" in of_sizes(256, 14336, 4096)
        assert "dequantised first: XLA is predicted as fast" in of_sizes(4096, 14336, 4096)
        assert "dequantised first: XLA is predicted as fast" in of_sizes(4, 64, 256)
        # XLA sums a row of the small matrix by one kernel, and multiplies two rows by several.
        assert "dequantised first: XLA is predicted as fast" in of_sizes(1, 2048, 1536)
        assert "predicted faster than XLA" in of_sizes(2, 2048, 1536)
    with gpu_target("H100"), policy("kernels"):
        assert "not float32" in reason(x.astype(F32), values)
        assert "a kernel reads" in reason(x, values)
        assert "a kernel reads" in reason(x, values.astype(jnp.float8_e4m3fn))
