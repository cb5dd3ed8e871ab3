"""``strassen_matmul``: values, the growth of errors, derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import BF16, UNIT_ROUNDOFF, assert_close, check_derivatives, exact, random

import jax_tilekern as jtk

HIGHEST = jax.lax.Precision.HIGHEST


def highest_error(product, a, b):
    return np.abs(exact(product) - exact(a) @ exact(b)).max()


def bound(a, b, levels, dtype):
    """Higham, Accuracy and Stability of Numerical Algorithms, theorem 23.3 (in the largest norm).

    It has 18 ** levels where products of blocks of size n0 err by n0 ** 2; sums that are rounded to
    a narrow type add as many of its roundoffs as there are additions before a product.
    """
    k = -(-a.shape[-1] // 2**levels)
    norms = np.abs(exact(a)).max() * np.abs(exact(b)).max()
    sums = UNIT_ROUNDOFF[np.dtype(np.float64 if dtype == np.float64 else np.float32)]
    return 18**levels * (k * k * sums + 6 * k * UNIT_ROUNDOFF[np.dtype(dtype)]) * norms


@pytest.mark.parametrize("levels", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, BF16, np.float16])
@pytest.mark.parametrize("sizes", [(64, 48, 80), (33, 17, 65), (1, 5, 3)])
@pytest.mark.one_in(8)
def test_values(rng, x64, sizes, dtype, levels):
    m, n, k = sizes
    a, b = random(rng, (m, k), dtype), random(rng, (k, n), dtype)
    product = jtk.strassen_matmul(a, b, levels=levels, precision=HIGHEST)
    assert product.dtype == dtype
    assert product.shape == (m, n)
    rounding = UNIT_ROUNDOFF[np.dtype(dtype)] * np.abs(exact(a) @ exact(b)).max()
    assert highest_error(product, a, b) <= bound(a, b, levels, dtype) + rounding


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint8])
@pytest.mark.one_in(3)
def test_integers_are_exact(rng, levels, dtype):
    a, b = random(rng, (37, 50), dtype), random(rng, (50, 41), dtype)
    product = jtk.strassen_matmul(a, b, levels=levels)
    np.testing.assert_array_equal(product, jnp.matmul(a, b), strict=True)


@pytest.mark.parametrize(
    "shapes", [((3, 6, 5), (3, 5, 4)), ((6, 5), (3, 5, 4)), ((2, 1, 4, 4), (3, 4, 4))]
)
@pytest.mark.one_in(2)
def test_batches_broadcast(rng, shapes):
    a, b = (random(rng, shape, np.float32) for shape in shapes)
    product = jtk.strassen_matmul(a, b, precision=HIGHEST)
    assert_close(product, np.matmul(a, b))
    mapped = jax.vmap(functools.partial(jtk.strassen_matmul, precision=HIGHEST), (None, 0))
    stacked = jnp.stack([b, -b])
    assert_close(mapped(a, stacked), jnp.stack([product, -product]))


# Its rules are those of `matmul` and `add`, of which it is composed.
@pytest.mark.thorough
def test_derivatives(rng):
    pair = rng.standard_normal((3, 4)), rng.standard_normal((4, 3))
    check_derivatives(jtk.strassen_matmul, pair, 1)
    a, b = random(rng, (5, 6), np.float32), random(rng, (6, 3), np.float32)

    def gradients(product):
        return jax.jit(jax.grad(lambda a, b: jnp.sin(product(a, b)).sum(), (0, 1)))(a, b)

    twice = functools.partial(jtk.strassen_matmul, levels=2, precision=HIGHEST)
    expected = gradients(functools.partial(jnp.matmul, precision=HIGHEST))
    assert_close(gradients(twice), expected)

    def second(product):
        return jax.jit(jax.hessian(lambda a: jnp.sin(product(a, b)).sum()))(a)

    plain = functools.partial(jnp.matmul, precision=HIGHEST)
    once = functools.partial(jtk.strassen_matmul, precision=HIGHEST)
    assert_close(second(once), second(plain), 1e-3)


def test_nan_and_infinity_reach_the_result():
    """Not element by element: sums of blocks carry them to others of the result too."""
    a = jnp.ones((8, 8)).at[1, 2].set(jnp.nan)
    product = np.asarray(jtk.strassen_matmul(a, jnp.ones((8, 8))))
    assert np.isnan(product[1]).all()


def test_errors():
    x = jnp.ones((3, 4))
    with pytest.raises(ValueError, match="levels is -1, which is negative"):
        jtk.strassen_matmul(x, x.T, levels=-1)
    with pytest.raises(TypeError):
        jtk.strassen_matmul(x, x.T, levels=1.5)
    with pytest.raises(ValueError, match=r"b has shape \(4,\), which is no matrix"):
        jtk.strassen_matmul(x, jnp.ones(4))
    with pytest.raises(TypeError, match="contracting dimensions"):
        jtk.strassen_matmul(x, x)
