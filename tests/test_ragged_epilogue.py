"""``ragged_dot`` with an epilogue: values, derivatives, transformations, errors and kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numerics import BF16, assert_close
from ragged_layer import (
    GROUPS,
    HIGHEST,
    SHAPES,
    SIZES,
    M,
    N,
    drawn,
    function,
    fused,
    loss,
    unfused,
)

import jax_tilekern as jtk


@pytest.fixture
def arrays(rng):
    return drawn(rng)


# Values.


@pytest.mark.parametrize(
    "sizes",
    [[0, 0, 0, 0], [40, 0, 0, 0], [0, 0, 0, 40], [1, 1, 1, 1], [-3, 5, 0, 2], [9, 9, 2**31 - 1, 9]],
)
def test_sizes_of_groups(arrays, sizes):
    valid = np.clip(sizes, 0, M)
    ends = np.minimum(np.cumsum(valid), M)
    sums = np.diff(ends, prepend=0).astype(np.int32)
    assert_close(fused(*arrays, np.array(sizes, np.int32)), unfused(*arrays, sums))


def test_rows_of_no_group_are_zeros_in_every_result(arrays):
    x, w, *_ = arrays
    plain = jtk.ragged_dot(x, w, SIZES, HIGHEST)
    results = jtk.ragged_dot(
        x, w, SIZES, HIGHEST, epilogue=lambda y: {"a": y + 1, "b": (y, y < 2, jnp.exp(y))}
    )
    for result in jax.tree.leaves(results):
        assert not np.any(result[SIZES.sum() :])
    np.testing.assert_array_equal(results["b"][0], plain)
    inside = np.arange(M)[:, None] < SIZES.sum()
    np.testing.assert_array_equal(results["b"][1], (plain < 2) & inside)


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32, np.int8], ids=lambda x: x.__name__)
def test_types(rng, dtype):
    x, w = (jnp.asarray(rng.integers(-2, 3, shape), dtype) for shape in SHAPES[:2])
    scale = jnp.asarray(rng.integers(1, 3, GROUPS)[:, None], np.float32)
    accumulator, wide_type = (np.int32, np.float32) if dtype == np.int8 else (np.float32, dtype)

    def scaled(y, scale):
        assert y.dtype == accumulator
        return y, y.astype(np.float32) * scale

    plain, wide = jtk.ragged_dot(x, w, SIZES, epilogue=scaled, group_operands=(scale,))
    # The accumulator's type becomes the product's, and any other stays.
    assert (plain.dtype, wide.dtype) == (dtype, wide_type)
    products = jtk.ragged_dot(x, w, SIZES, preferred_element_type=accumulator)
    group = np.repeat(np.arange(GROUPS), SIZES)
    np.testing.assert_array_equal(plain, products.astype(dtype))
    scaled_products = (products[: len(group)] * scale[group]).astype(wide_type)
    np.testing.assert_array_equal(wide[: len(group)], scaled_products)


def test_nan_stays_in_its_rows_and_groups(arrays):
    x, w, residual, bias, scale = arrays
    x = x.at[3].set(jnp.nan).at[SIZES.sum() :].set(jnp.nan)
    w, bias, residual = w.at[1].set(jnp.nan), bias.at[1].set(jnp.nan), residual.at[-1].set(jnp.nan)
    found = np.isnan(fused(x, w, residual, bias, scale))
    assert found[3].all()
    assert found.sum() == N


def test_group_offset(arrays):
    x, w, residual, bias, scale = arrays
    part = fused(x, w[1:3], residual, bias[1:3], scale[1:3], group_offset=np.array([1], np.int32))
    whole = fused(*arrays)
    first, last = SIZES[:1].sum(), SIZES[:3].sum()
    assert_close(part[first:last], whole[first:last])
    assert not np.any(part[:first])
    assert not np.any(part[last:])


# Derivatives.


def test_rows_of_no_group_have_no_derivative(arrays):
    """Though the function's is infinite there, and that of the last group's bias is read there."""
    x, w, residual, bias, _ = arrays

    def root(x, w, residual, bias):
        return jtk.ragged_dot(
            x,
            w,
            SIZES,
            HIGHEST,
            epilogue=lambda y, residual, bias: jnp.sqrt(jnp.abs(y)) * bias + jnp.log(residual),
            operands=(residual,),
            group_operands=(bias,),
        )

    residual = jnp.abs(residual).at[SIZES.sum() :].set(0)
    _, tangent = jax.jvp(root, (x, w, residual, bias), (x, w, residual, bias))
    gradients = jax.grad(loss(root), (0, 1, 2, 3))(x, w, residual, bias)
    for y in (tangent, *gradients):
        assert np.isfinite(y).all()
    for y in (tangent, gradients[0], gradients[2]):
        assert not np.any(y[SIZES.sum() :])


def test_gradients_of_several_results_of_several_types(arrays):
    x, w, *_ = arrays

    def several(y):
        return jnp.tanh(y), (y * 3).astype(jnp.int32), y.astype(jnp.bfloat16)

    def total(x, w):
        tanh, count, narrow = jtk.ragged_dot(x, w, SIZES, HIGHEST, epilogue=several)
        assert (count.dtype, narrow.dtype) == (np.int32, BF16)
        return tanh.sum()

    plain = jax.grad(lambda *xs: jnp.tanh(jtk.ragged_dot(*xs, SIZES, HIGHEST)).sum(), (0, 1))
    assert_close(jax.grad(total, (0, 1))(x, w), plain(x, w))


# Errors.


def test_operands_that_do_not_fit(arrays):
    x, w, residual, bias, _ = arrays
    with pytest.raises(ValueError, match=r"operand 0 .* \(40, 31\).* the product's, \(40, 32\)"):
        jtk.ragged_dot(x, w, SIZES, epilogue=jnp.add, operands=(residual[:, :31],))
    with pytest.raises(ValueError, match=r"operand 0 .* \(3, 32\).* the groups', \(4, 32\)"):
        jtk.ragged_dot(x, w, SIZES, epilogue=jnp.add, group_operands=(bias[:3],))
    with pytest.raises(TypeError, match="no epilogue= that reads them"):
        jtk.ragged_dot(x, w, SIZES, operands=(residual,))
    with pytest.raises(TypeError, match="reduce_max"):
        jtk.ragged_dot(x, w, SIZES, epilogue=lambda y: y - jnp.max(y))
    with pytest.raises(TypeError, match=r"5.*4|3.*4"):
        jtk.ragged_dot(x, w, SIZES[:3], epilogue=jnp.tanh)


def test_debug_checks_the_sizes(arrays):
    x, w, *_ = arrays
    with pytest.raises(ValueError, match="exceed the 40 rows"):
        jtk.ragged_dot(x, w, SIZES + 9, epilogue=jnp.tanh, debug=True)
    with pytest.raises(jax.errors.JaxRuntimeError, match="negative sizes"):
        jax.block_until_ready(
            jax.jit(lambda sizes: jtk.ragged_dot(x, w, sizes, epilogue=jnp.tanh, debug=True))(
                jnp.array([1, -1, 2, 3])
            )
        )


# Kernels.


def choices(gpu, dtype, call=fused):
    shapes = (4096, 512), (8, 512, 1024), (4096, 1024), (8, 1024), (8, 1)
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    with jtk.gpu_target(gpu):
        return jtk.explain(call, *operands, jax.ShapeDtypeStruct((8,), np.int32), platform="cuda")


def several_types(y, residual, bias, scale):
    z = function(y, residual, bias, scale)
    return y, z, z > 0, z.astype(jnp.float16), z.astype(jnp.int32)


@pytest.mark.parametrize("dtype", [BF16, np.float32, np.int8], ids=lambda x: x.__name__)
@pytest.mark.parametrize("gpu", ["sm_90", "sm_80"])
@pytest.mark.one_in(6)
def test_kernels_have_the_epilogue(gpu, dtype):
    def call(*xs):
        preferred = np.int32 if dtype == np.int8 else None
        return fused(*xs, function=several_types, preferred_element_type=preferred)

    (choice,) = choices(gpu, dtype, call)
    assert choice.kernel is not None, choice.reason
    assert choice.kernel.startswith("ragged")
    assert "gmn" not in choice.call
    assert "several_types(accumulator, mn, gn, g)" in choice.call


def test_an_epilogue_that_cuda_lacks_follows_the_product():
    def call(*xs):
        return fused(*xs, function=lambda y, *_: lax.bessel_i0e(y))

    fused_call, product, *_ = choices("sm_90", BF16, call)
    assert fused_call.kernel is None
    assert "runs in XLA, after the product: " in fused_call.reason
    assert "bessel_i0e" in fused_call.reason
    assert product.kernel.startswith("ragged_wgmma")
