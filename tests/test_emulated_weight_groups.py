"""Kernels of grouped GEMMs with weights of 4 and 8 bits, emulated on a CPU."""

import dataclasses
import itertools

import emulated_plans
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from emulated_gpu import emulated_gpu
from nvrtc_mark import needs_emulator
from products import BF16, F16, F32, H100
from test_emulated_weight_only import drawn

import jax_tilekern as jtk
from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.interop.gpu_target import gpu_target
from jax_tilekern.plans.gemm.sm90.weight_only import WeightOnlyProduct
from jax_tilekern.plans.gemm.sm90.weight_only_launches import kernel_of, plan_weight_only
from jax_tilekern.plans.gemm.sm90.weight_only_tiles import tile_of
from jax_tilekern.plans.launch import NoKernel

pytestmark = needs_emulator


# Its CTAs have all tiles of a product, two side by side.
ONE_SM = dataclasses.replace(H100, sm_count=1)


def ragged(m, n, k, bits, group, groups, *types, **others):
    return WeightOnlyProduct(
        m, n, k, bits, group, *types, batch=groups, x_batched=False, ragged=True, **others
    )


# Problems, and the rows of their groups; rows that are left belong to none.
CALLS = {
    "a row": (ragged(1, 70, 288, 4, 32, 3, BF16, BF16), [0, 1, 0]),
    "empty groups": (ragged(11, 200, 640, 4, 128, 5, BF16, BF16), [0, 3, 0, 8, 0]),
    "rows of no group": (ragged(30, 70, 544, 4, 64, 3, BF16, F32), [2, 9, 5]),
    "all rows of one": (ragged(40, 130, 320, 4, 64, 4, F16, F16), [0, 0, 40, 0]),
    "no rows at all": (ragged(5, 66, 288, 8, 32, 2, BF16, BF16), [0, 0]),
    "zeros": (ragged(23, 129, 272, 8, 32, 3, BF16, BF16, zero_dtype=F32), [7, 0, 16]),
    "many rows": (ragged(150, 70, 320, 4, 64, 2, BF16, BF16, zero_dtype=BF16), [90, 60]),
    "bytes": (ragged(20, 136, 656, 8, 656, 4, BF16, F32, F16), [1, 2, 3, 14]),
    "a pair": (ragged(20, 70, 544, 4, 64, 3, BF16, BF16, pair=True), [3, 0, 13]),
    "a pair with zeros": (
        ragged(9, 64, 272, 8, 32, 3, BF16, F32, zero_dtype=F32, pair=True),
        [1, 8, 0],
    ),
    "shared scales": (ragged(9, 65, 800, 4, 128, 3, F16, F16, row_block=65), [4, 1, 4]),
}


def check(rng, problem, sizes, gpu=H100, **how):
    """Run a plan. Groups without rows have NaN scales."""
    operands, x, weights, slopes = drawn(rng, problem)
    bounds = np.cumsum([0, *sizes]).astype(np.int32)
    has_zeros = problem.zero_dtype is not None
    operands[2][np.array(sizes) == 0] = np.nan
    matrices = [(weights, slopes)]
    if problem.pair:
        (values, _, *others), _, *of_second = drawn(rng, problem)
        operands += [values, *others]
        matrices.append(of_second)
    operands.append(bounds)
    with emulated_plans.record() as recorded:
        plan = plan_weight_only(problem, gpu)
    assert not isinstance(plan, NoKernel), plan
    results = [((problem.m, problem.columns), problem.out_dtype)]
    (found,) = emulated_plans.run_plan(plan, recorded, operands, results, **how)
    x = np.float64(x[0].astype(np.float32))
    weights, slopes = (np.concatenate(each, 1) for each in zip(*matrices, strict=True))
    expected, bound = np.zeros((2, problem.m, problem.columns))
    for group, (begin, end) in enumerate(itertools.pairwise(bounds)):
        rows = x[begin:end]
        expected[begin:end] = rows @ weights[group].T
        terms = np.abs(rows) @ np.abs(weights[group]).T
        own = (problem.k + 1) * np.finfo(np.float32).eps * terms
        if has_zeros:
            halves = np.abs(rows) @ slopes[group].T / 2
            own += ml_dtypes.finfo(problem.dtype).eps / 2 * (terms + 2 * halves)
        bound[begin:end] = own
    bound += ml_dtypes.finfo(problem.out_dtype).eps / 2 * (np.abs(expected) + bound)
    assert (np.abs(np.float64(found.astype(np.float32)) - expected) <= bound).all()
    return found


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.one_in(3)
def test_values(rng, name):
    check(rng, *CALLS[name], backwards=bool(rng.integers(2)))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.one_in(3)
def test_a_cta_has_several_tiles(name):
    found = [check(np.random.default_rng(0), *CALLS[name], gpu) for gpu in (ONE_SM, H100)]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("late", [("reads",), ("writes",), ("reads", "writes")])
@pytest.mark.parametrize("name", ["empty groups", "zeros", "many rows"])
@pytest.mark.one_in(3)
def test_asynchronous_copies_are_waited_for(rng, name, late):
    check(rng, *CALLS[name], ONE_SM, late=late, held=int(rng.integers(1, 2**31)))


@pytest.mark.parametrize("m", [8, 512, 1024, 2048, 16384])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [None, F32])
@pytest.mark.one_in(4)
def test_kernels_neither_spill_nor_serialize(m, bits, zeros):
    problem = ragged(m, 768, 2048, bits, 128, 128, BF16, BF16, F32, zeros)
    compiled = compile_kernels(kernel_of(problem, tile_of(problem, H100), BF16), arch=H100.arch)
    (entry,) = compiled.entries
    assert entry.spill_bytes == entry.stack_bytes == 0
    assert compiled.log == ""


def operands(rng, m=20, n=70, k=256, groups=3, symmetric=True):
    x = jnp.asarray(rng.standard_normal((m, k)), BF16)
    w = jnp.asarray(rng.standard_normal((groups, n, k)), F32)
    weights = jtk.quantize(w, block=(1, 64), dtype=jnp.int4, symmetric=symmetric)
    return x, weights, jnp.array([3, 0, 13])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.one_in(2)
def test_scaled_ragged_dot(rng, symmetric):
    """The product, and derivatives of it by x and by scales."""
    x, (values, scales, *zeros), sizes = operands(rng, symmetric=symmetric)

    def product(x, scales):
        zero = zeros[0] if zeros else None
        return jtk.scaled_ragged_dot(x, values, sizes, None, scales, rhs_zeros=zero)

    def loss(x, scales):
        return (product(x, scales) ** 2).sum()

    with emulated_gpu() as ran:
        found = jax.jit(product)(x, scales)
        value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, scales)
    assert [plan.name for plan in ran][:2] == ["weight_only_matmul int4 bfloat16"] * 2
    expected = product(x, scales)
    # The dequantised weights are rounded to bfloat16.
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.3)
    assert not found[16:].any()
    np.testing.assert_allclose(value, (np.float64(found) ** 2).sum(), rtol=1e-5)
    for own, other in zip(gradients, jax.grad(loss, (0, 1))(x, scales), strict=True):
        scale = np.abs(np.float64(other)).max()
        np.testing.assert_allclose(np.float64(own) / scale, np.float64(other) / scale, atol=0.02)


@pytest.mark.defaults
def test_the_policy_takes_the_kernel_where_models_decode():
    def reason(rows):
        structs = [
            jax.ShapeDtypeStruct(*each)
            for each in (
                ((rows, 2048), BF16), ((128, 768, 2048), jnp.int4), ((128,), np.int32),
                ((128, 768, 16), F32),
            )
        ]  # fmt: skip
        calls = jtk.explain(
            lambda x, w, sizes, scales: jtk.scaled_ragged_dot(x, w, sizes, None, scales), *structs
        )
        return " ".join(call.reason for call in calls)

    with gpu_target("H200"):
        assert all("predicted faster than XLA" in reason(rows) for rows in (8, 128, 512))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.one_in(2)
def test_moe(rng, gated):
    """Experts without tokens have NaN scales; a token has an expert out of bounds."""
    tokens, features, hidden, experts = 5, 64, 96, 4
    shapes = {
        "w_up": (features, hidden),
        "w_gate": (features, hidden),
        "w_down": (hidden, features),
    }
    if not gated:
        del shapes["w_gate"]
    arrays = {
        name: jnp.asarray(rng.standard_normal((experts, *shape)) / 8, BF16)
        for name, shape in shapes.items()
    }
    small = jtk.quantize_weights(arrays, lambda *_: True, block=(1, 32))
    exact = {name: weights.array() for name, weights in small.items()}
    idle = {
        name: dataclasses.replace(weights, scales=weights.scales.at[2].set(np.nan))
        for name, weights in small.items()
    }
    x = jnp.asarray(rng.standard_normal((tokens, features)), BF16)
    weights = jnp.asarray(rng.uniform(size=(tokens, 2)), BF16)
    indices = jnp.array([[0, 1], [1, 3], [3, 0], [0, 4], [1, 0]])

    def layer(x, weights, matrices):
        up, down, *gate = (matrices[name] for name in ("w_up", "w_down", "w_gate")[: len(matrices)])
        return jtk.moe(x, up, down, weights, indices, w_gate=gate[0] if gate else None)

    def loss(x, weights, matrices):
        return (layer(x, weights, matrices).astype(F32) ** 2).sum()

    wanted = layer(x, weights, exact), *jax.grad(loss, (0, 1))(x, weights, exact)
    with emulated_gpu() as ran:
        value = layer(x, weights, idle)
        of_value = len(ran)
        found = value, *jax.grad(loss, (0, 1))(x, weights, idle)
    # The first products have one kernel.
    by_weights = [plan.name.startswith("weight_only") for plan in ran]
    assert sum(by_weights[:of_value]) == 2
    assert sum(by_weights[of_value:]) >= len(shapes)
    for own, other in zip(found, wanted, strict=True):
        scale = np.abs(np.float64(other)).max()
        np.testing.assert_allclose(np.float64(own) / scale, np.float64(other) / scale, atol=0.03)
