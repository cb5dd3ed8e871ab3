"""Products by quantised weights: bounds, errors, other values, devices, and what explain says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import F8E4, UNIT_ROUNDOFF
from products import F32
from sharded import bytes_sent, collectives, devices

import jax_tilekern as jtk

INT4, BF16 = jnp.int4, np.dtype(jnp.bfloat16)
TYPES = [INT4, jnp.int8, F8E4]


def exact(values, scales, zeros=None):
    """The weights in float64, of groups of 32, 64, 128 or all of k."""
    values = np.asarray(values.astype(F32), np.float64)
    k = values.shape[-1]

    def each(x):
        count = x.shape[-1]
        group = k if count == 1 else next(g for g in (32, 64, 128) if -(-k // g) == count)
        return np.repeat(np.asarray(x, np.float64), group, -1)[..., :k]

    return (values if zeros is None else values - each(zeros)) * each(scales)


def weights(rng, n, k, dtype=INT4, group=64, *, symmetric=True):
    w = jnp.asarray(rng.normal(size=(n, k)), F32)
    return jtk.quantize(w, (1, group), dtype, symmetric=symmetric)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("of", [F32, BF16, np.float16])
@pytest.mark.parametrize("k", [1, 31, 150, 512])
@pytest.mark.one_in(3)
def test_errors_are_those_of_products_of_x_s_type(rng, dtype, of, k):
    """A bfloat16 product rounds weights to bfloat16, and adds in float32."""
    x = jnp.asarray(rng.normal(size=(5, k)), of)
    for group in (32, 64, 128, None):
        for symmetric in (True, False)[: 1 + (dtype != F8E4)]:
            values, *others = weights(rng, 7, k, dtype, group, symmetric=symmetric)
            w = exact(values, *others)
            y = jtk.scaled_matmul(x, values, None, others[0], rhs_zeros=(*others, None)[1])
            wide = np.asarray(x, np.float64)
            rounding = UNIT_ROUNDOFF[BF16] if of == BF16 else 0
            share = rounding + (k + 4) * UNIT_ROUNDOFF[F32]
            if jax.default_backend() == "gpu" and of == np.float16:
                share += 2.0**-11
            assert (
                np.abs(np.asarray(y) - wide @ w.T) <= share * (np.abs(wide) @ np.abs(w).T)
            ).all()


def test_float16_has_weights_of_any_magnitude(rng):
    """Their scales may exceed the range of float16."""
    values, scales = weights(rng, 7, 96)
    x = jnp.asarray(rng.normal(size=(3, 96)), np.float16)
    for factor in (2.0**30, 2.0**-60):
        y = jtk.scaled_matmul(x, values, None, scales * factor) / factor
        np.testing.assert_allclose(y, jtk.scaled_matmul(x, values, None, scales), rtol=1e-5)


@pytest.mark.parametrize("of", [BF16, np.float16])
def test_scales_of_16_bits_are_multiplied_in_float32(rng, of):
    values, scales, zeros = weights(rng, 7, 150, symmetric=False)
    x = jnp.asarray(rng.normal(size=(3, 150)), F32)
    narrow = scales.astype(of), zeros.astype(of)
    expected = np.asarray(x, np.float64) @ exact(values, *narrow).T
    y = jtk.scaled_matmul(x, values, None, narrow[0], rhs_zeros=narrow[1])
    np.testing.assert_allclose(y, expected, atol=1e-4)


def test_what_is_not_finite(rng):
    """NaN and infinite scales reach their columns alone, and a column of zeros is 0."""
    values, scales = weights(rng, 6, 128)
    scales = scales.at[0, 0].set(jnp.nan).at[1].set(jnp.inf)
    values = values.at[2].set(0)
    y = np.asarray(jtk.scaled_matmul(jnp.ones((4, 128)), values, None, scales))
    assert np.isnan(y[:, 0]).all()
    assert not np.isfinite(y[:, 1]).any()
    assert (y[:, 2] == 0).all()
    assert np.isfinite(y[:, 3:]).all()


@pytest.mark.parametrize("shape", [(0, 64, 3), (2, 0, 3), (2, 64, 0)])
def test_empty_dimensions(shape):
    m, k, n = shape
    values, scales = jtk.quantize(jnp.ones((n, k)), (1, 32), INT4)
    for each in (scales, jnp.ones((n, 1))):
        y = jtk.scaled_matmul(jnp.ones((m, k)), values, None, each)
        assert (y == jnp.zeros((m, n))).all()


def test_derivatives_of_integers_are_float0(rng):
    values, scales = weights(rng, 7, 150)

    def loss(x, values, scales):
        return jtk.scaled_matmul(x, values, None, scales).sum()

    gradient = jax.grad(loss, (0, 1, 2), allow_int=True)
    of_x, of_values, of_scales = gradient(jnp.ones((3, 150)), values, scales)
    assert of_values.dtype == jax.dtypes.float0
    np.testing.assert_allclose(of_x[0], exact(values, scales).sum(0), rtol=1e-4, atol=1e-4)
    sums = np.add.reduceat(np.asarray(values.astype(F32)), [0, 64, 128], 1)
    np.testing.assert_allclose(of_scales, 3 * sums, rtol=1e-5)


def test_8_bit_floats_have_no_derivative():
    w = jnp.ones((3, 64))
    with pytest.raises(TypeError, match="quantised weights have no derivative"):
        jax.grad(lambda w: jtk.scaled_matmul(w, w.astype(F8E4), None, jnp.ones((3, 1))).sum())(w)


X, W, ONES = jnp.ones((4, 256)), jnp.ones((8, 256), jnp.int8), jnp.ones
ERRORS = [
    (TypeError, "lhs is int32", (X.astype(int), W, None, ONES((8, 1))), {}),
    (TypeError, "lhs is float8_e4m3fn; 8-bit", (X.astype(F8E4), W, None, ONES((8, 1))), {}),
    (TypeError, "has rhs of int4, int8.*not float32; ", (X, X, None, ONES((4, 1))), {}),
    (TypeError, "rhs_scales are float32, .*not int32", (X, W, None, ONES((8, 1), int)), {}),
    (TypeError, "rhs_zeros are .*not int8", (X, W, None, ONES((8, 1))), {"rhs_zeros": W[:, :1]}),
    (TypeError, "float8_e4m3fn and float8_e5m2, and lhs is", (X, W, ONES((4, 2)), W), {}),
    (
        ValueError, r"rhs_scales have shape \(8, 3\); weights of shape \(8, 256\).*\(8, 8\) or ",
        (X, W, None, ONES((8, 3))), {},
    ),
    (
        ValueError, r"rhs_zeros have shape \(8, 2\), and .*rhs_scales \(8, 4\)",
        (X, W, None, ONES((8, 4))), {"rhs_zeros": ONES((8, 2))},
    ),
    (ValueError, r"contracts the last.*\(4, 256\), rhs \(8, 25", (X, W[:, :25], None, X), {}),
    (TypeError, "which have no rhs_zeros", (X, W, X, X), {"rhs_zeros": X}),
    (TypeError, r"preferred_element_type.*int32", (X, W, None, ONES((8, 1)), np.int32), {}),
    (ValueError, "at least 2 dimensions", (X[0], W, None, ONES((8, 1))), {}),
    (ValueError, r"leading dim", (X[None], jnp.stack([W, W]), None, ONES((2, 8, 1))), {}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "arguments", "options"), ERRORS)
def test_errors(error, message, arguments, options):
    with pytest.raises(error, match=message):
        jtk.scaled_matmul(*arguments, **options)
    if arguments[0].ndim == 2 and "leading" not in message and len(arguments) == 4:
        x, w, of_x, of_w = arguments
        matrices = w[None], jnp.array([4]), of_x, of_w[None]
        options = {name: x[None] for name, x in options.items()}
        with pytest.raises(error):
            jtk.scaled_ragged_dot(x, *matrices, **options)


def test_explain_names_the_weights(rng):
    values, scales = weights(rng, 7, 150)
    x = jnp.ones((3, 150), BF16)
    first, *_ = jtk.explain(lambda x: jtk.scaled_matmul(x, values, None, scales), x)
    assert "scaled_matmul mk,nk->mn by weights" in first.call
    assert "dequantised first" in first.reason


SHARDINGS = {
    "columns": ((P(), P("m"), P("m")), P(None, "m"), []),
    "rows": ((P("d"), P(), P()), P("d"), []),
    "k": ((P(None, ("d", "m")),) * 3, P(), ["all-reduce"]),
    "rows, columns": ((P("d"), P("m"), P("m")), P("d", "m"), []),
}


@pytest.mark.parametrize("epilogue", [None, jnp.tanh])
def test_products_of_float32_are_not_rounded(rng, epilogue):
    values, scales = weights(rng, 64, 128)
    x = jnp.zeros((64, 128), F32)
    with jtk.gpu_target("H200"):
        own = functools.partial(jtk.scaled_matmul, rhs_scales=scales, epilogue=epilogue)
        text = str(jtk.explain(lambda x: own(x, values, None), x))
    assert " tiles" in text
    assert "tf32" not in text


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", SHARDINGS)
def test_devices_have_whole_groups(rng, name, symmetric):
    (of_x, of_w, of_scales), wanted, sent = SHARDINGS[name]
    mesh = jax.make_mesh((2, 4), ("d", "m"), (AxisType.Auto,) * 2, devices=devices()[:8])
    values, *others = weights(rng, 64, 512, symmetric=symmetric)
    x = jnp.asarray(rng.normal(size=(16, 512)), F32)
    specs = (of_x, of_w, *[of_scales] * len(others))
    placed = [
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in zip((x, values, *others), specs, strict=True)
    ]

    def product(x, values, scales, zeros=None):
        return jtk.scaled_matmul(x, values, None, scales, rhs_zeros=zeros)

    call = jax.jit(product)
    compiled, found = call.lower(*placed).compile(), call(*placed)
    np.testing.assert_allclose(found, product(x, values, *others), rtol=1e-4, atol=1e-4)
    assert found.sharding.is_equivalent_to(NamedSharding(mesh, wanted), 2)
    assert [x.kind for x in collectives(compiled)] == sent or bytes_sent(compiled) == 0 == len(sent)
