"""Large matrices in blocks: accuracy, semantics, derivatives, and when blocks are chosen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numerics import UNIT_ROUNDOFF, assert_close, check_derivatives, random

from jax_tilekern import linalg
from jax_tilekern.ops import blocked
from jax_tilekern.ops.matrices import inverted_triangles


def in_blocks(function, **flags):
    return jax.jit(functools.partial(function, block=128, invert=inverted_triangles, **flags))


DTYPES = (np.float32, np.float64)
# Whole blocks, blocks with a remainder, and a batch.
SHAPES = [(256, 256), (300, 300), (2, 449, 449)]


def inverse(a):
    factors, _, permutation = lax.linalg.lu(a)
    return in_blocks(blocked.inverse)(factors, permutation)


def norms(x):
    return np.abs(np.asarray(x, np.float64)).sum(-1).max(-1)


def spread(rng, shape, condition):
    """Symmetric positive definite matrices of a condition number, in float64."""
    n = shape[-1]
    basis, _ = np.linalg.qr(rng.standard_normal(shape))
    a = basis * np.geomspace(1, 1 / condition, n) @ basis.swapaxes(-1, -2)
    return (a + a.swapaxes(-1, -2)) / 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.one_in(6)
def test_inverse(rng, x64, shape, dtype):
    a = random(rng, shape, dtype)
    x = inverse(a)
    exact = np.linalg.inv(np.asarray(a, np.float64))
    bound = 8 * shape[-1] ** 1.5 * UNIT_ROUNDOFF[np.dtype(dtype)] * norms(a) * norms(exact) ** 2
    assert np.all(norms(x - exact) <= bound)


@pytest.mark.thorough
def test_a_singular_matrix_has_no_finite_inverse(rng):
    a = jnp.asarray(random(rng, (200, 200), np.float32)).at[:, 7].set(0)
    assert not np.isfinite(inverse(a)).all()


@pytest.mark.parametrize("unit_diagonal", [False, True])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("left_side", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.one_in(6)
def test_triangular_solve(rng, shape, left_side, lower, transpose, unit_diagonal):
    n, m = shape[-1], 33
    flags = {"left_side": left_side, "lower": lower, "unit_diagonal": unit_diagonal}
    a = np.asarray(random(rng, shape, np.float32)) / n**0.5 + 2 * np.eye(n, dtype=np.float32)
    unread = np.triu(np.ones((n, n)), 1) if lower else np.tril(np.ones((n, n)), -1)
    unread = unread + unit_diagonal * np.eye(n)
    b = random(rng, (*shape[:-1], m) if left_side else (*shape[:-2], m, n), np.float32)
    hidden = jnp.asarray(np.where(unread, np.float32(np.nan), a))
    x = in_blocks(blocked.triangular_solve, transpose=transpose, **flags)(hidden, b)
    triangle = np.where(unread, np.eye(n) * unit_diagonal, np.asarray(a, np.float64))
    triangle = triangle.swapaxes(-1, -2) if transpose else triangle
    wide = np.asarray(x, np.float64)
    residual = (triangle @ wide if left_side else wide @ triangle) - np.asarray(b)
    bound = 4 * n * UNIT_ROUNDOFF[np.dtype(np.float32)] * norms(triangle).max()
    assert np.abs(residual).max() <= bound * np.abs(wide).max()


def test_residuals_are_small_for_a_triangle_of_any_condition(rng):
    """A product with the inverse of a block would not achieve this."""
    n = 300
    a = np.tril(rng.standard_normal((n, n))).astype(np.float32)
    np.fill_diagonal(a, 12)
    a[:, :200] *= np.geomspace(1, 1e-4, 200, dtype=np.float32)
    b = random(rng, (n, 5), np.float32)
    flags = {"left_side": True, "lower": True, "transpose": False, "unit_diagonal": False}
    x = in_blocks(blocked.triangular_solve, **flags)(a, b)
    wide = np.asarray(x, np.float64)
    residual = np.abs(a.astype(np.float64) @ wide - np.asarray(b))
    assert np.all(residual <= 4 * n * UNIT_ROUNDOFF[np.dtype(np.float32)] * (abs(a) @ abs(wide)))


# The public functions.

CASES = {
    "inv": (linalg.inv, 1),
    "solve": (linalg.solve, 2),
    "cholesky": (linalg.cholesky, 1),
    "slogdet": (lambda a: linalg.slogdet(a)[1], 1),
    "triangular": (lambda a, b: linalg.solve_triangular(a, b, lower=True), 2),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(3)
@pytest.mark.thorough
def test_derivatives(rng, name):
    function, operands = CASES[name]
    n = 66
    a = spread(rng, (n, n), 3)
    # Few directions: the matrix is moved along outer products.
    left, right = rng.standard_normal((2, n, 2)) / n**0.5

    def of_few(x, b):
        moved = a + left @ x @ right.T
        moved = (moved + moved.T) / 2 if name == "cholesky" else moved
        return function(*(moved, b)[:operands])

    check_derivatives(of_few, (rng.standard_normal((2, 2)) / 8, rng.standard_normal((n, 2))))


@pytest.mark.thorough
def test_systems_broadcast_and_map(rng):
    a = spread(rng, (3, 1, 70, 70), 10).astype(np.float32)
    b = random(rng, (4, 70, 2), np.float32)
    assert_close(linalg.solve(a, b), jnp.linalg.solve(a, b), 1e-3)
    np.testing.assert_allclose(
        linalg.solve(a[0, 0], b[0, :, 0]), jnp.linalg.solve(a[0, 0], b[0, :, 0]), 1e-3, 1e-3
    )
    mapped = jax.vmap(linalg.solve, (None, 0))(a[0, 0], b)
    assert_close(mapped, jnp.linalg.solve(a[0], b), 1e-3)
    gradient = jax.grad(lambda a: jnp.sin(linalg.solve(a, b[0])).sum())(a[0, 0])
    expected = jax.grad(lambda a: jnp.sin(jnp.linalg.solve(a, b[0])).sum())(a[0, 0])
    assert_close(gradient, expected, 1e-3)


# Which matrices are computed in blocks.
