"""Launch plans with emulated threads and instructions: the values of kernels without a SMALL_H100.

Asynchronous operations take place when they are issued, or when they are waited for, and threads
get their turns forwards or backwards. The results are the same.
"""

import dataclasses

import emulated_plans
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_gpu import HOWS, SMALL_H100, emulated_gpu
from nvrtc_mark import needs_emulator
from products import BF16, F16, F32, INT8, INT32, TYPES, Product, row_major

import jax_tilekern as jtk
from jax_tilekern.ops.mixture import moe
from jax_tilekern.plans.gemm import select
from jax_tilekern.plans.gemm.select import candidates
from jax_tilekern.plans.gemm.sm90 import candidates as kernels
from jax_tilekern.plans.gemm.sm90.candidates import wgmma_candidates
from jax_tilekern.plans.gemm.sm90.config import WgmmaTile
from jax_tilekern.plans.launch import NoKernel

pytestmark = needs_emulator

# The largest error relative to the sum of the magnitudes of the products: that of the result's
# type, or of accumulators of float32 or TF32.
TOLERANCES = {
    "bf16": 2**-8, "f16": 2**-11, "tf32": 2**-10, "f32": 2**-20, "f64": 2**-48, "int8": 0,
    "fp8": 2**-20, "fp8_fast": 2**-8,
}  # fmt: skip


def values(generator, shape, dtype):
    if dtype == INT8:
        return generator.integers(-128, 128, shape).astype(dtype)
    return generator.normal(size=shape).astype(dtype)


def plan_of(product, key):
    """The plan of the candidate with a key, and what its kernels are compiled from."""
    found = candidates(product, SMALL_H100)
    assert not isinstance(found, NoKernel)
    candidate = next(candidate for candidate in found if candidate.key == key)
    with emulated_plans.record() as recorded:
        return candidate.plan(SMALL_H100), recorded


def run_product(kind, shape, key, majors, **how):
    m, n, k = shape
    lhs_type, rhs_type, out_type = TYPES[kind]
    lhs_k_major, rhs_k_major = (major == "k" for major in majors)
    geometry = row_major(m, n, k, lhs_k_major=lhs_k_major, rhs_k_major=rhs_k_major)
    plan, recorded = plan_of(Product(geometry, lhs_type, rhs_type, out_type, kind), key)
    generator = np.random.default_rng(sum(shape))
    lhs = values(generator, (m, k), lhs_type)
    rhs = values(generator, (k, n), rhs_type)
    operands = [lhs if lhs_k_major else lhs.T, rhs.T if rhs_k_major else rhs]
    (out,) = emulated_plans.run_plan(plan, recorded, operands, [((m, n), out_type)], **how)
    wide = [x.astype(np.float64) for x in (lhs, rhs)]
    error = np.abs(out.astype(np.float64) - wide[0] @ wide[1])
    return out, (error / (np.abs(wide[0]) @ np.abs(wide[1]))).max()


@pytest.mark.parametrize(
    ("kind", "shape", "key", "majors"),
    [
        ("bf16", (300, 328, 200), "wgmma 128x256", "kn"),
        ("bf16", (300, 328, 200), "wgmma 128x160 ping-pong swapped", "mk"),
        ("f16", (129, 72, 1000), "wgmma 64x64 by 1", "mn"),
        ("tf32", (300, 328, 200), "wgmma 128x128 ping-pong", "mk"),
        # A turn of a ping-pong consumer is one k-tile.
        ("bf16", (328, 264, 64), "wgmma 64x64 ping-pong", "kn"),
        ("int8", (300, 328, 200), "wgmma 128x128", "mk"),
        ("fp8", (200, 136, 400), "wgmma 128x128", "kk"),
        ("fp8_fast", (200, 136, 400), "wgmma 128x128 swapped", "kk"),
        ("f32", (100, 108, 80), "split float16 128x128 swapped", "kn"),
        ("f32", (100, 108, 80), "simt 64x64", "kn"),
        ("f64", (100, 108, 80), "mma 64x64", "kn"),
        ("bf16", (100, 107, 80), "mma 64x64", "kn"),
    ],
)
@pytest.mark.one_in(6)
def test_products(kind, shape, key, majors):
    out, error = run_product(kind, shape, key, majors)
    assert error <= TOLERANCES[kind]
    for how in (*HOWS[1:], {"backwards": True}):
        again, _ = run_product(kind, shape, key, majors, **how)
        np.testing.assert_array_equal(again, out)


@pytest.mark.parametrize(
    ("kind", "out_type", "rows", "batch", "key"),
    [
        ("bf16", BF16, 648, (), "128x256"),
        ("bf16", F32, 392, (2,), "256x128"),
        ("bf16", BF16, 648, (2,), "128x192"),
        ("f16", F16, 648, (2,), "128x160"),
        ("int8", INT32, 392, (), "128x160"),
        ("f16", F32, 520, (), "64x192 by 1"),
        ("f16", F16, 1160, (), "64x64 ping-pong"),
        ("tf32", F32, 264, (), "128x128 ping-pong"),
        ("int8", INT32, 272, (3,), "128x128"),
        ("fp8", F32, 272, (), "64x128 by 1"),
    ],
)
@pytest.mark.one_in(6)
def test_symmetric_products(kind, out_type, rows, batch, key):
    check_symmetric_product(kind, out_type, rows, batch, key, SMALL_H100)


@pytest.mark.parametrize("key", ["128x160", "128x128 ping-pong"])
@pytest.mark.one_in(2)
def test_symmetric_products_beside_collectives(key):
    gpu = dataclasses.replace(SMALL_H100, beside_collectives=True)
    check_symmetric_product("bf16", BF16, 520, (2,), key, gpu)


def check_symmetric_product(kind, out_type, rows, batch, key, gpu, k=80, hows=HOWS):
    dtype = TYPES[kind][0]
    geometry = row_major(rows, rows, k, batch=batch, rhs_k_major=True)
    product = Product(geometry, dtype, dtype, out_type, kind, symmetric=True)
    found = wgmma_candidates(product, gpu)
    candidate = next(x for x in found if x.key == f"symmetric wgmma {key}")
    assert candidate.instance.dynamic == gpu.beside_collectives
    with emulated_plans.record() as recorded:
        plan = candidate.plan(gpu)
    x = values(np.random.default_rng(rows), (*batch, rows, k), dtype)
    wide = x.astype(np.float64)
    bound = TOLERANCES[kind] * np.abs(wide) @ np.abs(wide).swapaxes(-1, -2)
    results = [((*batch, rows, rows), out_type)]
    for how in hows:
        (out,) = emulated_plans.run_plan(plan, recorded, [x, x], results, **how)
        assert np.all(np.abs(out.astype(np.float64) - wide @ wide.swapaxes(-1, -2)) <= bound)
        np.testing.assert_array_equal(out, out.swapaxes(-1, -2))


FAULTS = {
    "a stage is released while MMAs read it": (
        ["reads"], "gemm/sm90/consumer.cuh", "warpgroup_wait<1>();", "warpgroup_wait<2>();",
    ),
    "results are staged while TMA reads the buffer": (
        ["reads"], "gemm/sm90/store.cuh", "tma_store_wait_read<kSubtileBuffers - 1>();", "(void)0;",
    ),
    "a k-tile is multiplied before it has come in": (
        ["writes"], "gemm/sm90/consumer.cuh",
        "wait_full(state);\n    mma_.t", "stage(0);\n    mma_.t",
    ),
    "a wrong distance of groups of rows": ([], "wgmma.cuh", "1024ull", "2048ull"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.thorough
def test_faults_are_found(monkeypatch, fault):
    late, file, right, wrong = FAULTS[fault]
    assert right in (emulated_plans.ROOT / "ffi" / "cuda" / file).read_text()
    as_cpp = emulated_plans.as_cpp
    monkeypatch.setattr(emulated_plans, "as_cpp", lambda text: as_cpp(text.replace(right, wrong)))
    monkeypatch.setattr(emulated_plans, "SALT", fault)
    try:
        _, error = run_product("bf16", (300, 328, 700), "wgmma 128x256", "kn", late=late)
    except RuntimeError as failure:
        message = str(failure)
    else:
        message = "emulated kernel" if error > TOLERANCES["bf16"] else ""
    assert "emulated kernel" in message


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.thorough
def test_a_slot_that_is_written_too_early_is_found(monkeypatch, how):
    """The producer asks for tiles a ring of stages ahead, which is longer than that of slots."""
    right = "mbarrier_wait(empty(state.stage), state.parity ^ 1);"
    file = emulated_plans.ROOT / "ffi/cuda/gemm/sm90/dynamic_tile_scheduler.cuh"
    assert right in file.read_text()
    as_cpp = emulated_plans.as_cpp
    monkeypatch.setattr(emulated_plans, "as_cpp", lambda text: as_cpp(text.replace(right, "")))
    monkeypatch.setattr(emulated_plans, "SALT", "slots")
    gpu = dataclasses.replace(SMALL_H100, sm_count=2, beside_collectives=True)
    with pytest.raises((AssertionError, RuntimeError)):
        check_symmetric_product("bf16", BF16, 520, (2,), "128x128 ping-pong", gpu, 16, [how])


def operands_of(*shapes, dtype=np.float32):
    generator = np.random.default_rng(sum(map(sum, shapes)))
    return [jnp.asarray(generator.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.one_in(3)
def test_product_with_its_own_transpose(how):
    """Half of it is computed, also under ``vmap``; its derivatives are ordinary products."""
    (x,) = operands_of((2, 264, 136), dtype=jnp.bfloat16)
    function = jax.jit(jax.vmap(lambda x: jtk.matmul(x, x.T, precision="highest")))
    with emulated_gpu(**how) as ran:
        out = np.asarray(function(x), np.float64)
    assert [plan.name for plan in ran] == ["wgmma_symmetric_matmul bf16"]
    wide = np.asarray(x, np.float64)
    bound = TOLERANCES["bf16"] * np.abs(wide) @ np.abs(wide).swapaxes(-1, -2)
    assert np.all(np.abs(out - wide @ wide.swapaxes(-1, -2)) <= bound)
    # An operand of the epilogue need not be symmetric.
    (y,) = operands_of((264,))
    with_bias = jax.jit(lambda x, y: jtk.matmul(x, x.T, epilogue=jnp.add, operands=[y]))
    with emulated_gpu(**how) as ran:
        out = np.asarray(with_bias(x[0], y), np.float64)
    assert not any("symmetric" in plan.name for plan in ran)
    expected = wide[0] @ wide[0].T + np.asarray(y, np.float64)
    assert np.all(np.abs(out - expected) <= bound[0] + TOLERANCES["bf16"] * np.abs(expected))


def cubic(product, scale, x, row, column):
    return scale * product - x + jnp.where(row == column, scale, 0)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    ("dtype", "tile"),
    [
        (jnp.bfloat16, WgmmaTile(128, 256)),
        (jnp.float16, WgmmaTile(256, 128)),
        (jnp.bfloat16, WgmmaTile(128, 192)),
        (jnp.float32, WgmmaTile(128, 128)),
        (jnp.float32, WgmmaTile(128, 160)),
        (jnp.bfloat16, WgmmaTile(128, 128, cooperative=False)),
    ],
)
@pytest.mark.one_in(18)
def test_symmetric_products_with_matrices_in_the_epilogue(monkeypatch, how, dtype, tile):
    """Operands of cooperative consumers come through the mainloop's stages."""
    monkeypatch.setattr(kernels, "SYMMETRIC", dataclasses.replace(kernels.SYMMETRIC, tiles=(tile,)))
    monkeypatch.setattr(select, "candidates", lambda *_: NoKernel("no whole products"))
    (x,) = operands_of((2, 392, 392), dtype=np.float32)
    x = (x + x.mT).astype(dtype)
    scale, index = jnp.asarray([0.5, 2.0])[:, None, None], jnp.arange(392)

    @jax.jit
    def function(x, scale):
        second = None if dtype == jnp.float32 else x
        operands = scale, x, index[:, None], index
        return jtk.symmetric_matmul(x, second, epilogue=cubic, operands=operands)

    with emulated_gpu(**how) as ran:
        out = np.asarray(function(x, scale), np.float64)
    assert [plan.name.split()[0] for plan in ran] == ["wgmma_symmetric_matmul"]
    assert str(tile) in ran[0].reason
    wide = np.asarray(x, np.float64)
    expected = cubic(wide @ wide, np.asarray(scale, float), wide, index[:, None], index)
    kind = {"bfloat16": "bf16", "float16": "f16", "float32": "tf32"}[x.dtype.name]
    bound = TOLERANCES[kind] * (2 * np.abs(wide) @ np.abs(wide) + np.abs(expected))
    assert np.all(np.abs(out - np.asarray(expected)) <= bound)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.thorough
def test_newton_schulz(how):
    (x,) = operands_of((2, 264, 400), dtype=jnp.float16)
    expected = jtk.linalg.newton_schulz(x.astype(np.float32), method="standard")
    function = jax.jit(lambda x: jtk.linalg.newton_schulz(x, method="gram"))
    with emulated_gpu(**how) as ran:
        out = np.asarray(function(x), np.float32)
    names = [plan.name for plan in ran]
    assert names.count("wgmma_symmetric_matmul f16") == 16
    assert names.count("wgmma_matmul f16") == len(names) - 16 == 2
    assert np.abs(out - expected).max() < 2e-3


@pytest.mark.parametrize(
    ("dtype", "shapes"),
    [
        (F32, ((1001,), (1001,))),
        (F32, ((2, 1, 2, 1, 2, 8), (1, 3, 1, 3, 1, 8))),
        (BF16, ((33, 64), (1, 64))),
        (INT8, ((2, 5, 131), (2, 1, 131))),
        (INT8, ((1024,), (1,))),
    ],
)
@pytest.mark.thorough
def test_additions(dtype, shapes):
    generator = np.random.default_rng(0)
    x, y = (generator.integers(-60, 60, shape).astype(dtype) for shape in shapes)
    with emulated_gpu() as ran:
        out = jax.jit(jtk.add)(x, y)
    assert len(ran) == 1
    np.testing.assert_array_equal(out, x + y)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.thorough
def test_a_layer_of_experts(dtype, monkeypatch):
    """The sort, rows and products of a layer and of its gradients, with indices out of bounds.

    As a process with one device traces them: XLA computes no emulated kernel once for two calls.
    """
    monkeypatch.setattr(moe, "is_one_call", lambda *_: False)
    generator = np.random.default_rng(0)
    tokens, features, hidden, experts, chosen = 20, 32, 64, 3, 2
    shapes = (tokens, features), *[(experts, features, hidden)] * 2, (experts, hidden, features)
    arrays = [(generator.normal(size=shape) / 4).astype(dtype) for shape in shapes]
    arrays.append(generator.random((tokens, chosen)).astype(dtype))
    indices = generator.integers(-1, experts + 1, (tokens, chosen)).astype(np.int32)
    indices[0] = [2**31 - 1, -(2**31)]

    def ours(x, up, gate, down, weights):
        return jtk.moe(x, up, down, weights, indices, w_gate=gate, precision="highest")

    def dense(x, up, gate, down, weights):
        acted = jax.nn.silu(jnp.einsum("td,edh->teh", x, gate)) * jnp.einsum("td,edh->teh", x, up)
        share = (jax.nn.one_hot(indices, experts) * weights[..., None]).sum(1)
        return jnp.einsum("te,teh,ehd->td", share, acted, down)

    def results(layer, arrays):
        out, pullback = jax.vjp(layer, *arrays)
        return out, *pullback(jnp.ones_like(out))

    with emulated_gpu() as ran:
        found = jax.jit(lambda *arrays: results(ours, arrays))(*arrays)
        found = [np.asarray(x, np.float64) for x in found]
    assert sum("ragged" in plan.name for plan in ran) == 9
    assert sum("combine" in plan.name for plan in ran) == 3
    with jax.default_matmul_precision("highest"):
        wanted = results(dense, [x.astype(np.float32) for x in arrays])
    for x, y in zip(found, wanted, strict=True):
        tolerance = TOLERANCES["bf16" if dtype == BF16 else "f32"]
        np.testing.assert_allclose(x, y, rtol=0, atol=4 * tolerance * np.abs(y).max())
