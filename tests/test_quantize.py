"""``quantize``: bit for bit a model in NumPy, by XLA and by the kernel, emulated."""

import itertools

import emulated_plans
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from emulated_gpu import emulated_gpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import F8E4, F8E5
from nvrtc_mark import needs_emulator, needs_nvrtc
from sharded import bytes_sent, devices

import jax_tilekern as jtk
from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.ops.quantisation import quantize
from jax_tilekern.ops.quantisation.fp8_bits import fp8_bits
from jax_tilekern.ops.quantisation.quantize import _reciprocal
from jax_tilekern.plans.quantize import Quantized
from jax_tilekern.primitives.operation import lowering_platform

BLOCKS = [(1, 128), (128, 128), (1, None), (None, None)]


def model(x, block, dtype, power_of_two):
    """The bytes of values, and the scales."""
    x = np.asarray(x).astype(np.float32)
    height, width = (size or whole for size, whole in zip(block, x.shape, strict=True))
    magnitudes = np.where(np.isfinite(x), np.abs(x), 0)
    values = np.empty(x.shape, dtype)
    counts = [-(-n // size) for n, size in zip(x.shape, (height, width), strict=True)]
    scales = np.ones(counts, np.float32)
    for i, j in np.ndindex(scales.shape):
        block = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
        largest, scale = magnitudes[block].max(), np.float32(1)
        if largest >= 2.0**-90:
            scale = largest * np.float32(1 / float(ml_dtypes.finfo(dtype).max))
            if power_of_two:
                mantissa, exponent = np.frexp(scale)
                scale = np.float32(np.ldexp(1.0, exponent - (mantissa == 0.5)))
        scales[i, j] = scale
        with np.errstate(all="ignore"):
            values[block] = (x[block] * (np.float32(1) / scale)).astype(dtype)
    values = values.view(np.uint8)
    values[~np.isfinite(x)] = 0x7F
    return values, scales


def hostile(rng, shape, dtype):
    """Rows of every magnitude, zeros, infinities, NaN and numbers whose squares are subnormal."""
    with np.errstate(all="ignore"):
        x = rng.normal(size=shape) * np.exp(6 * rng.normal(size=shape))
        rows = [
            0.0, -0.0, np.nan, np.inf, -np.inf, 1e-37, 1e-40, 3e38, -448.0, 1e-30, 2.0**-90,
            np.nextafter(np.float32(2.0**-90), np.float32(0)),
        ]  # fmt: skip
        x[10 : 10 + len(rows)] = np.array(rows)[:, None]
        x[30] *= 1e30
        x[31] *= 1e-36
        x[32:36, 5:9] = np.array([np.nan, -np.nan, np.inf, -np.inf])
        return jnp.asarray(x.astype(np.float32).astype(dtype))


def check(x, block, dtype, power_of_two, both, call=jtk.quantize):
    found = call(x, block, dtype, power_of_two=power_of_two, both=both)
    arrays = (x, jnp.swapaxes(x, -1, -2)) if both else (x,)
    for (values, scales), array in zip(found if both else (found,), arrays, strict=True):
        expected, of_blocks = model(array, block, np.dtype(dtype), power_of_two)
        np.testing.assert_array_equal(np.asarray(scales), of_blocks, strict=True)
        np.testing.assert_array_equal(np.asarray(values).view(np.uint8), expected, strict=True)


@pytest.mark.parametrize("flags", [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", [F8E4, F8E5])
@pytest.mark.parametrize("of", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.one_in(9)
def test_bits(rng, of, dtype, block, flags):
    check(hostile(rng, (150, 270), of), block, dtype, *flags)


def integers_of(x, group, dtype, *, symmetric):
    """Integers, scales and zero points of groups of rows, in float32 as NumPy rounds it."""
    x = np.asarray(x).astype(np.float32)
    most = 7 if dtype == jnp.int4 else 127
    values, scales, zeros = [], [], []
    for row in x:
        for i in range(0, x.shape[1], group):
            part = row[i : i + group]
            finite = np.where(np.isfinite(part), part, 0)
            below, above = max(0, -finite.min()), max(0, finite.max())
            scale, zero, factor = np.float32(1), np.float32(0), np.float32(1)
            if np.abs(finite).max() >= 2.0**-90:
                if symmetric:
                    scale = max(below, above) * np.float32(1 / most)
                else:
                    with np.errstate(over="ignore"):
                        halves = np.float32(above + below) * np.float32(0.5)
                    scale = halves * np.float32(2 / (2 * most + 1))
                factor = np.float32(1) / scale
                zero = np.clip(np.rint(below * factor) - most - 1, -most - 1, most)
            is_finite = np.isfinite(part).all()
            zero = np.float32(0) if symmetric or not is_finite else zero
            low = -most if symmetric else -most - 1
            values.append(np.clip(np.rint(finite * factor) + zero, low, most) * is_finite)
            scales.append(scale if is_finite else np.float32(np.nan))
            zeros.append(zero)
    shape = len(x), -1
    found = np.concatenate(values).reshape(shape), np.reshape(scales, shape)
    return found if symmetric else (*found, np.reshape(zeros, shape))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128, 270])
@pytest.mark.parametrize("dtype", [jnp.int4, jnp.int8])
def test_bits_of_integers(rng, dtype, group, symmetric):
    for of in (np.float32, ml_dtypes.bfloat16):
        x = hostile(rng, (50, 270), of)
        block = 1, group if group < 270 else None
        found = jtk.quantize(x, block, dtype, symmetric=symmetric)
        expected = integers_of(x, group, dtype, symmetric=symmetric)
        for y, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(y, np.float32), wanted)
        transposed = jtk.quantize(x.T, block, dtype, symmetric=symmetric, both=True)[1]
        for y, wanted in zip(transposed, found, strict=True):
            np.testing.assert_array_equal(np.asarray(y), np.asarray(wanted))


@pytest.mark.parametrize("dtype", [F8E4, F8E5, jnp.int4, jnp.int8])
@pytest.mark.parametrize("block", [(1, 32), (128, 128), (None, None)])
def test_programs_of_gpus_and_cpus_have_the_same_bits(rng, block, dtype):
    symmetric = dtype in (F8E4, F8E5) or bool(rng.integers(2))
    x = jnp.asarray(hostile(rng, (50, 270), np.float32))
    params = {"block": block, "dtype": np.dtype(dtype), "power_of_two": False}
    results = {}
    for platform in ("cpu", "cuda"):
        with lowering_platform(platform):
            results[platform] = quantize._reference(x, **params, both=True, symmetric=symmetric)
    for y, wanted in zip(results["cuda"], results["cpu"], strict=True):
        np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(wanted, np.float32))


def test_integers_are_rounded_to_even():
    values, scales = jtk.quantize(jnp.array([[7.0, 0.5, 1.5, 2.5, -0.5, -1.5]]), dtype=jnp.int4)
    assert values.tolist() == [[7, 0, 2, 2, 0, -2]]
    assert scales == 1


def test_zero_points_are_of_integers():
    with pytest.raises(ValueError, match="zero points of int4 and int8, not of float8_e4m3fn"):
        jtk.quantize(jnp.ones((2, 2)), symmetric=False)


def test_the_reciprocal_is_rounded_to_nearest(rng):
    x = np.exp(rng.uniform(-60, 80, 1 << 20)).astype(np.float32)
    x = np.concatenate([x, np.exp2(np.arange(-100, 100)).astype(np.float32)])
    expected = np.float32(1) / x
    np.testing.assert_array_equal(np.asarray(_reciprocal(x)), expected)


def test_a_division_may_be_wrong_by_two_units(rng, monkeypatch):
    """XLA's on a GPU is."""
    x = np.exp(rng.uniform(-60, 80, 1 << 12)).astype(np.float32)
    divided = jax.lax.div
    for ulps in (-2, -1, 1, 2):

        def divide(a, b, ulps=ulps):
            bits = jax.lax.bitcast_convert_type(divided(a, b), np.int32)
            return jax.lax.bitcast_convert_type(bits + ulps, np.float32)

        monkeypatch.setattr(quantize.lax, "div", divide)
        np.testing.assert_array_equal(np.asarray(_reciprocal(x)), np.float32(1) / x)


def test_there_is_no_derivative():
    x = jnp.ones((2, 128))
    with pytest.raises(TypeError, match="quantize has no derivative"):
        jax.grad(lambda x: jtk.quantize(x)[1].sum())(x)
    of_constant = jax.grad(lambda x: (x * jtk.quantize(jax.lax.stop_gradient(x))[1]).sum())(x)
    np.testing.assert_allclose(of_constant, 1 / 448, rtol=1e-6)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, "takes bfloat16, float16 or float32, not int32", (np.ones((2, 2), np.int32),)),
        (TypeError, "rounds to .*, not int16", (np.ones((2, 2), np.float32), (1, 128), np.int16)),
        (ValueError, r"blocks .*\(128, 128\).*not \(1, 16\)", (np.ones((2, 2)), (1, 16))),
        (ValueError, r"blocks .*\(128, 128\).*not 128", (np.ones((2, 2)), 128)),
        (ValueError, r"blocks .*not \(1, 'a'\)", (np.ones((2, 2)), (1, "a"))),
        (TypeError, r"\(1, 64\.0\) has the float 64\.0.* 64 ", (np.ones((2, 2)), (1, 64.0))),
        (ValueError, r"at least 2 dimensions.*\(4,\)", (np.ones(4),)),
        (TypeError, "rounds to .*, not 'fp8'", (np.ones((2, 2)), (1, 128), "fp8")),
        (TypeError, "rounds to .*, not None", (np.ones((2, 2)), (1, 128), None)),
    ],
)
def test_errors(error, message, arguments):
    with pytest.raises(error, match=message):
        jtk.quantize(*arguments)


def test_options():
    x = np.ones((2, 128), np.float32)
    for options in ({"both": "yes"}, {"power_of_two": 1}):
        with pytest.raises(TypeError, match=f"{next(iter(options))} of quantize is True or False"):
            jtk.quantize(x, **options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dtpe'"):
        jtk.quantize(x, dtpe=jnp.float8_e5m2)
    assert (jtk.quantize(x, power_of_two=jnp.array(True))[1] == 1 / 256).all()


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("rows", [128, 256])
@pytest.mark.one_in(4)
def test_devices_have_whole_blocks(rng, block, rows):
    mesh = jax.make_mesh((2, 4), ("d", "m"), (AxisType.Auto,) * 2, devices=devices()[:8])
    x = jnp.asarray(rng.normal(size=(rows, 1024)), np.float32)
    placed = jax.device_put(x, NamedSharding(mesh, P("d", "m")))
    call = jax.jit(lambda x: jtk.quantize(x, block, both=True))
    compiled = call.lower(placed).compile()
    for a, b in zip(jax.tree.leaves(compiled(placed)), jax.tree.leaves(call(x)), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    if block[1]:
        # A single block of rows is whole on every device.
        assert (bytes_sent(compiled) == 0) == (rows > 128)


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
@pytest.mark.parametrize(
    ("shape", "spec", "of_scales"),
    [
        ((256, 512), P("d", "m"), (P("d", "m"), P("m", "d"))),
        # Parts of blocks: every device has their scales.
        ((256, 256), P("d", "m"), (P("d", None), P("m", "d"))),
        ((40, 300), P("m", "d"), (P("m", None), P("d", None))),
        ((256, 512), P(("d", "m"), None), (P(("d", "m"), None), P(None, None))),
    ],
)
@pytest.mark.one_in(3)
def test_explicit_axes(rng, shape, spec, of_scales):
    x = jnp.asarray(rng.normal(size=shape), np.float32)
    with jax.set_mesh(jax.make_mesh((2, 4), ("d", "m"), devices=devices()[:8])):
        placed = jax.device_put(x, spec)
        check(placed, (128, 128), F8E4, False, False)
        check(placed, (1, 128), F8E4, False, True)
        (values, scales), (of_transpose, transposed) = jtk.quantize(placed, both=True)
        specs = [jax.typeof(y).sharding.spec for y in (values, scales, of_transpose, transposed)]
        assert specs == [spec, of_scales[0], P(*spec[::-1]), of_scales[1]]
        rows = jax.device_put(x, P("d"))
        by_rows = jax.shard_map(
            jtk.quantize, in_specs=P("d"), out_specs=(P("d"), P("d")), axis_names={"d"}
        )
        check(rows, (1, 128), F8E4, False, False, lambda x, *_, **__: jax.jit(by_rows)(x))


KERNELS = [
    (np.float32, F8E4, (1, 128), False, True, (150, 272)),
    (ml_dtypes.bfloat16, F8E5, (1, 128), True, False, (150, 272)),
    (ml_dtypes.bfloat16, F8E4, (1, 128), False, True, (152, 272)),
    (np.float16, F8E4, (128, 128), False, True, (152, 272)),
    (np.float32, F8E5, (128, 128), True, True, (151, 271)),
    (ml_dtypes.bfloat16, F8E4, (1, 128), True, True, (151, 271)),
]


@needs_emulator
@pytest.mark.parametrize(("of", "dtype", "block", "power_of_two", "both", "shape"), KERNELS)
@pytest.mark.one_in(4)
def test_bits_of_the_kernel(rng, of, dtype, block, power_of_two, both, shape):
    x = hostile(rng, shape, of)
    with emulated_gpu(options=emulated_plans.SANITIZED) as ran:
        check(x, block, dtype, power_of_two, both)
    assert {plan.name for plan in ran} == {f"quantize {np.dtype(of)}"}


@needs_nvrtc
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("of", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.one_in(6)
def test_the_kernel_compiles_without_spills(of, square):
    for transposed, power_of_two in itertools.product((False, True), repeat=2):
        if power_of_two and transposed and not square and of != ml_dtypes.bfloat16:
            # ptxas keeps more of these in registers than there are.
            continue
        problem = Quantized(
            1, 256, 256, np.dtype(of), np.dtype(F8E4), square, transposed, power_of_two
        )
        compiled = compile_kernels(problem.kernel, arch="sm_90a")
        entry = compiled.entry(problem.kernel.name)
        assert compiled.log == ""
        assert entry.spill_bytes == 0
        # Two CTAs share an SM.
        assert entry.registers <= 128


@pytest.mark.parametrize("dtype", [F8E4, F8E5])
def test_rounding_to_8_bit_floats(rng, dtype):
    """Every number, the ones around it, and the midpoints between two, and those around them."""
    numbers = np.arange(256, dtype=np.uint8).view(dtype)
    exact = numbers.astype(np.float32)
    finite = np.unique(exact[np.isfinite(exact)])
    steps = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2, [1e-30, -1e-30, -0.0]])
    steps = steps.astype(np.float32)
    x = [np.nextafter(steps, np.float32(end)) for end in (-np.inf, np.inf)]
    x = np.concatenate([steps, *x, rng.normal(size=10_000).astype(np.float32)])
    x = x.clip(finite[0], finite[-1])
    np.testing.assert_array_equal(fp8_bits(jnp.asarray(x), dtype), x.astype(dtype).view(np.uint8))
