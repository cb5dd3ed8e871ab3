"""``row_quantize``: the bits of ``quantize`` of a product, by its kernel, emulated, and by XLA."""

import emulated_plans
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_gpu import emulated_gpu, in_each_mode
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import F8E5
from nvrtc_mark import needs_emulator, needs_nvrtc
from products import BF16, E4M3, F16, F32, H100, product_of, row_major
from scaled_products import scales, values
from sharded import bytes_sent, devices

import jax_tilekern as jtk
from jax_tilekern.epilogue.cuda_text import cuda_text
from jax_tilekern.epilogue.scalar_function import trace_scalars
from jax_tilekern.ops.products.fused_lowering import epilogue_of
from jax_tilekern.plans.gemm.problem import Product, Scales
from jax_tilekern.plans.gemm.sm90.candidates import wgmma_candidates


def relu(y, bias):
    return jax.nn.relu(y + bias)


def quantized(y, bias):
    return jtk.row_quantize(relu(y, bias))


def arrays(rng, m, n, k, dtype, batch=()):
    """Small integers, so that sums are exact, and a bias with numbers that are not finite."""
    x, w = (jnp.asarray(rng.integers(-4, 5, shape), dtype) for shape in ((*batch, m, k), (k, n)))
    bias = rng.integers(-9, 9, n).astype(np.float32)
    bias[:: max(1, n // 5)] = np.resize(
        [np.nan, 0, np.inf, 1e30, 1e-30], bias[:: max(1, n // 5)].size
    )
    return x, w, jnp.asarray(bias)


def assert_same_bits(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (
            np.asarray(x).view(np.uint8 if x.dtype.itemsize == 1 else np.uint32) for x in (a, b)
        )
        np.testing.assert_array_equal(a, b)


def fused(x, w, bias):
    return jtk.matmul(x, w, epilogue=quantized, operands=(bias,))


def separate(x, w, bias):
    return jtk.quantize(jtk.matmul(x, w, epilogue=relu, operands=(bias,)))


@pytest.mark.parametrize("shape", [(40, 264, 24), (3, 129, 8), (2, 1, 4)])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.one_in(2)
def test_bits(rng, dtype, shape):
    given = arrays(rng, *shape, dtype)
    assert_same_bits(fused(*given), separate(*given))


def test_options_and_other_results(rng):
    x, w, bias = arrays(rng, 24, 200, 8, F32)

    def several(y, b):
        y = relu(y, b)
        return jtk.row_quantize(y, F8E5, power_of_two=True), y, jtk.row_max(y)

    (pair, y, top), product = (
        jtk.matmul(x, w, epilogue=several, operands=(bias,)),
        jtk.matmul(x, w, epilogue=relu, operands=(bias,)),
    )
    assert_same_bits(pair, jtk.quantize(product, dtype=F8E5, power_of_two=True))
    np.testing.assert_array_equal(y, product)
    np.testing.assert_array_equal(top, product.max(-1))


@pytest.mark.parametrize("policy", ["auto", "kernels"])
def test_results_in_any_order(rng, policy):
    """Each of the two may be left out, and the function may quantise several values."""
    x, w, _ = arrays(rng, 24, 200, 8, BF16)
    product = jtk.matmul(x, w)
    values, of_rows = jtk.quantize(product)
    twice = jtk.quantize(product * 2, dtype=F8E5)

    def swapped(y):
        return jtk.row_quantize(y)[::-1]

    def several(y):
        return jtk.row_quantize(y)[1], jtk.row_quantize(2 * y, F8E5), y

    cases = {
        swapped: (of_rows, values),
        several: (of_rows, twice, product),
        lambda y: jtk.row_quantize(y)[0]: values,
        lambda y: jtk.row_quantize(y)[1]: of_rows,
    }
    emulate = policy == "kernels" and emulated_plans.COMPILER is not None
    for epilogue, expected in cases.items():
        with emulated_gpu() if emulate else jtk.policy(policy):
            got = jax.jit(lambda x, w, f=epilogue: jtk.matmul(x, w, epilogue=f))(x, w)
        assert_same_bits(got, expected)


def test_layers_take_it(rng):
    x, w, bias = arrays(rng, 24, 200, 8, BF16)
    bits = jtk.linear(x, w, bias, lambda y: jtk.row_quantize(jax.nn.relu(y)))
    assert_same_bits(bits, separate(x, w, bias))
    gated = jtk.gated_linear(x, w, w + 1, jax.nn.relu, epilogue=jtk.row_quantize)
    assert_same_bits(gated, jtk.quantize(jtk.gated_linear(x, w, w + 1, jax.nn.relu)))


def test_the_next_product_takes_it(rng):
    x, w = (jnp.asarray(rng.normal(size=shape), F32) for shape in ((2, 24, 40), (40, 200)))
    next_w = jnp.asarray(rng.normal(size=(48, 200)), F32)
    h, of_h = jtk.linear(x, w, activation=lambda y: jtk.row_quantize(jax.nn.gelu(y)))
    weights, of_blocks = jtk.quantize(next_w, (128, 128))
    y = jtk.scaled_matmul(h, weights, of_h, of_blocks)
    expected = jax.nn.gelu(x @ w) @ next_w.T
    assert np.linalg.norm(y - expected) < 0.05 * np.linalg.norm(expected)


def test_there_is_no_derivative(rng):
    x, w, bias = arrays(rng, 4, 8, 4, F32)
    with pytest.raises(TypeError, match=r"quantize has no derivative.*fp8_dot_general"):
        jax.grad(lambda x: fused(x, w, bias)[1].sum())(x)
    with pytest.raises(TypeError, match="quantize has no derivative"):
        jax.grad(lambda x: jtk.gated_linear(x, w, w, epilogue=jtk.row_quantize)[1].sum())(x)


def test_errors(rng):
    x, w, _ = arrays(rng, 4, 8, 4, F32)
    with pytest.raises(TypeError, match="float8_e4m3fn or float8_e5m2, not int8"):
        jtk.matmul(x, w, epilogue=lambda y: jtk.row_quantize(y, np.int8))
    with pytest.raises(TypeError, match=r"takes a scalar and is a result of an epilogue.*\(4, 8\)"):
        jtk.row_quantize(x @ w)
    with pytest.raises(TypeError, match="float32, not int32"):
        jtk.matmul(x.astype(int), w.astype(int), epilogue=jtk.row_quantize)
    with pytest.raises(TypeError, match=r"row_quantize takes .*, not bool"):
        jtk.matmul(x, w, epilogue=lambda y: jtk.row_quantize(y > 0))
    with pytest.raises(ValueError, match=r"row_quantize .* at least 2 dimensions.*\(8,\)"):
        jtk.matmul(x[0], w, epilogue=jtk.row_quantize)


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
@pytest.mark.parametrize("columns", [512, 520, 128])
@pytest.mark.parametrize("contracted", [False, True])
@pytest.mark.one_in(2)
def test_devices_have_whole_blocks(rng, columns, contracted):
    mesh = jax.make_mesh((2, 4), ("d", "m"), (AxisType.Auto,) * 2, devices=devices()[:8])
    given = arrays(rng, 64, columns, 32, F32)
    specs = (P("d", "m"), P("m"), P()) if contracted else (P("d"), P(None, "m"), P("m"))
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(given, specs, strict=True)
    ]
    compiled = jax.jit(fused).lower(*placed).compile()
    assert_same_bits(compiled(*placed), separate(*given))
    if columns == 512 and not contracted:
        assert bytes_sent(compiled) == 0


# -- The kernels, emulated -------------------------------------------------------------------------


@needs_emulator
@in_each_mode
@pytest.mark.parametrize(
    ("shape", "dtype", "batch"),
    [((140, 264, 72), BF16, ()), ((70, 129, 64), F16, ()), ((72, 256, 32), F32, (2,))],
)
@pytest.mark.one_in(9)
def test_bits_of_the_kernel(rng, shape, dtype, batch, how):
    given = arrays(rng, *shape, dtype, batch)
    with jax.default_matmul_precision("default"), emulated_gpu(**how) as ran:
        got = jax.jit(fused)(*given)
    assert_same_bits(got, separate(*given))
    assert [plan.name.partition(" ")[0] for plan in ran] == ["wgmma_matmul"]


@needs_emulator
def test_bits_of_the_kernels_of_pairs_and_of_scaled_products(rng):
    # Products are exact in 16 bits, to which one of a gated layer's is rounded on a CPU.
    x, w = (jnp.asarray(rng.integers(-1, 2, shape), BF16) for shape in ((140, 72), (72, 264)))
    bias = jnp.asarray(rng.integers(-9, 9, 264), np.float32)
    a, b = values(rng, 140, 200), values(rng, 264, 200)
    of_a, of_b = scales(rng, 140, 2), scales(rng, 3, 2)

    def gated(epilogue=None):
        return jax.jit(lambda x, w: jtk.gated_linear(x, w, w, jax.nn.relu, epilogue=epilogue))

    def scaled(epilogue):
        return jax.jit(
            lambda *xs: jtk.scaled_matmul(*xs[:4], jnp.bfloat16, epilogue=epilogue, operands=xs[4:])
        )

    def several(y, bias):
        return relu(y, bias), quantized(y, bias)

    with emulated_gpu(H100) as ran:
        of_pair = gated(jtk.row_quantize)(x, w)
        y, of_scaled = scaled(several)(a, b, of_a, of_b, bias)
    assert [plan.name for plan in ran] == ["wgmma_matmul_of_pair bf16", "scaled_wgmma_matmul fp8"]
    assert_same_bits(of_pair, jtk.quantize(gated()(x, w)))
    assert_same_bits(of_scaled, jtk.quantize(y))


@needs_emulator
@pytest.mark.thorough
def test_the_next_product_reads_scales_where_they_lie(rng):
    """Batches are rows of both products, and nothing is transposed between them."""
    x, w = (jnp.asarray(rng.normal(size=s), BF16) for s in ((2, 64, 72), (72, 256)))
    weights, of_blocks = values(rng, 72, 256), scales(rng, 1, 2)

    def two(x, w, weights, of_blocks):
        h, of_h = jtk.linear(x, w, activation=lambda y: jtk.row_quantize(jax.nn.gelu(y)))
        return jtk.scaled_matmul(h, weights, of_h, of_blocks)

    with emulated_gpu() as ran:
        call = jax.jit(two)
        got = call(x, w, weights, of_blocks)
        text = call.lower(x, w, weights, of_blocks).as_text()
    assert [plan.name for plan in ran] == ["wgmma_matmul bf16", "scaled_wgmma_matmul fp8"]
    assert len(ran[1].launches) == 1
    expected = two(x, w, weights, of_blocks)
    np.testing.assert_allclose(got, expected, rtol=1e-2, atol=1e-2 * float(jnp.abs(expected).max()))
    assert "scales of rhs transposed" not in text


@pytest.mark.parametrize("policy", ["auto", "kernels"])
def test_one_kernel_computes_and_quantizes(rng, policy):
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays(rng, 256, 256, 256, BF16)]
    with jtk.gpu_target("sm_90"), jtk.policy(policy):
        found = jtk.explain(fused, *given, platform="cuda")
    assert [choice.kernel for choice in found] == ["wgmma_matmul bf16"]


def _epilogue(function, types, n, out):
    traced = trace_scalars(function, F32, out, types).function
    products = 2 if function is gate else 1
    operands = types[products - 1 :]
    strides = [*((0, 1) for _ in operands), (n, 1), (1, 0)]
    return epilogue_of(
        cuda_text(traced), traced, operands, strides, batch=(), m=4096, products=products,
        ragged=None,
    )  # fmt: skip


def gate(y, up):
    return jtk.row_quantize(jax.nn.silu(y) * up)


def activated(y, bias):
    return jtk.row_quantize(jax.nn.gelu(y + bias))


@needs_nvrtc
@pytest.mark.parametrize("kind", ["plain", "scaled", "pair"])
@pytest.mark.one_in(3)
def test_no_register_is_spilled_and_no_mma_serialized(kind):
    n = 4096
    plain = product_of("bf16", 4096, n, 4096)
    epilogue = _epilogue(gate if kind == "pair" else activated, [F32], n, BF16)
    if kind == "plain":
        found = wgmma_candidates(plain.with_epilogue(epilogue), H100)
    elif kind == "pair":
        pair = Product(plain.geometry, *plain.dtypes, plain.arithmetic, epilogue, pair=True)
        found = wgmma_candidates(pair, H100)
    else:
        product = Product(
            row_major(4096, n, 4096, (), rhs_k_major=True), E4M3, E4M3, BF16, "fp8", epilogue,
            scales=(Scales(1, (), 1, 4096), Scales(128, (), 32, 1)),
        )  # fmt: skip
        found = wgmma_candidates(product, H100)
    for candidate in sorted(found, key=lambda x: x.cycles)[:3]:
        entry = candidate.plan(H100).launches[0].entry
        assert (candidate.key, entry.spill_bytes) == (candidate.key, 0)
        assert not entry.serialized
