"""Large matrices in blocks: accuracy, semantics, derivatives, and when blocks are chosen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numerics import UNIT_ROUNDOFF, random

from jax_tilekern.ops.linalg import blocked
from jax_tilekern.ops.linalg.matrices import inverted_triangles


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

# Which matrices are computed in blocks.
