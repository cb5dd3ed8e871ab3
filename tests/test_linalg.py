"""Matrices that are solved, inverted and factored, in batches and in blocks."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsp_linalg
import numpy as np
import pytest
from jax import lax
from jaxprs import equations
from numerics import UNIT_ROUNDOFF, assert_close, random

import jax_tilekern as jtk
from jax_tilekern import linalg
from jax_tilekern.ops.linalg import blocked
from jax_tilekern.ops.linalg.matrices import inverted_triangles
from jax_tilekern.ops.linalg.matrix_kernels import refusal

DTYPES = (np.float32, np.float64)
# No multiple of what a thread block or a vector has.
COUNT = 37


def definite(rng, shape, dtype):
    x = np.asarray(random(rng, shape, np.float64))
    a = x @ x.swapaxes(-1, -2) + np.eye(shape[-1])
    # NumPy's product need not be symmetric to the last bit.
    return jnp.asarray(((a + a.swapaxes(-1, -2)) / 2).astype(dtype))


def kernels(function, *args):
    return [choice.kernel for choice in jtk.explain(function, *args)]


def test_of_equal_pivots_the_first_is_taken(rng):
    """Matrices of -1, 0 and 1 make every compared number whole or half."""
    a = rng.integers(-1, 2, (500, 4, 4)).astype(np.float32)
    _, pivots = linalg.lu_factor(jnp.asarray(a))
    for matrix, found in zip(a.astype(np.float64), np.asarray(pivots), strict=True):
        for k in range(3):
            assert found[k] == k + np.argmax(np.abs(matrix[k:, k]))
            matrix[[k, found[k]]] = matrix[[found[k], k]]
            if matrix[k, k] != 0:
                matrix[k + 1 :] -= np.outer(matrix[k + 1 :, k] / matrix[k, k], matrix[k])


@pytest.mark.parametrize("n", [2, 9, 33])
def test_what_is_not_definite_has_a_triangle_of_nan(rng, n):
    a = definite(rng, (6, n, n), np.float32)
    bad = a.at[1, n - 1, n - 1].set(-1).at[2, 0, 0].set(0).at[3, n - 1, 0].set(jnp.nan)
    factor = np.asarray(linalg.cholesky(bad, symmetrize_input=False))
    for i in (1, 2, 3):
        assert np.isnan(factor[i][np.tril_indices(n)]).all()
        np.testing.assert_array_equal(np.triu(factor[i], 1), 0)
    # The same instance of the kernel: ptxas may contract another one's multiply-adds differently.
    expected = linalg.cholesky(a, symmetrize_input=False)
    np.testing.assert_array_equal(factor[[0, 4, 5]], expected[jnp.array([0, 4, 5])])


def test_determinants_of_singular_matrices(rng):
    zeros = jnp.zeros((COUNT, 7, 7))
    np.testing.assert_array_equal(linalg.det(zeros), 0)
    np.testing.assert_array_equal(linalg.slogdet(zeros)[0], 0)
    np.testing.assert_array_equal(linalg.slogdet(zeros)[1], -np.inf)
    a = jnp.asarray(rng.integers(-4, 5, (COUNT, 7, 7)).astype(np.float32))
    singular = a.at[:, -1].set(2 * a[:, 0])
    assert np.abs(linalg.det(singular)).max() <= 1e-4 * np.abs(np.asarray(singular)).max() ** 7


@pytest.mark.parametrize("trans", [0, 1, "T", "C"])
@pytest.mark.parametrize(
    "shapes", [((5, 4, 4), (4,)), ((4, 4), (5, 4, 3)), ((2, 1, 4, 4), (5, 4, 3))]
)
@pytest.mark.one_in(4)
def test_solve_triangular_broadcasts(rng, shapes, trans):
    a, b = (random(rng, shape, np.float32) for shape in shapes)
    a = a + 4 * jnp.eye(4)
    for lower in (False, True):
        got, expected = (
            f(a, b, trans=trans, lower=lower)
            for f in (linalg.solve_triangular, jsp_linalg.solve_triangular)
        )
        assert got.shape == expected.shape
        assert_close(got, expected)


@pytest.mark.parametrize(
    "shapes",
    [
        ((4, 4), (4,)), ((4, 4), (4, 2)), ((5, 4, 4), (4,)), ((4, 4), (5, 4, 2)),
        ((3, 1, 4, 4), (5, 4, 2)), ((0, 4, 4), (4, 2)), ((4, 4), (4, 0)), ((5, 0, 0), (5, 0, 2)),
    ],
)  # fmt: skip
@pytest.mark.one_in(2)
def test_solve_broadcasts(rng, shapes):
    a, b = (random(rng, shape, np.float32) for shape in shapes)
    a = a + 4 * jnp.eye(a.shape[-1])
    expected = jnp.linalg.solve(a, b)
    got = linalg.solve(a, b)
    assert got.shape == expected.shape
    assert_close(got, expected, 1e-3)


# What is singular or not finite.


def test_singular_matrices_have_no_finite_inverse():
    known = jnp.array([[[1.0, 2.0], [2.0, 4.0]]] * 8)
    expected = jnp.linalg.inv(known)
    np.testing.assert_array_equal(linalg.inv(known), [[[-np.inf, np.inf], [np.inf, -np.inf]]] * 8)
    np.testing.assert_array_equal(np.isfinite(expected), False)
    for n in (2, 40):
        zero_column = jnp.ones((8, n, n)).at[:].set(jnp.eye(n)).at[:, :, n // 2].set(0)
        for a in (jnp.zeros((8, n, n)), zero_column):
            for f, g in (
                (linalg.inv, jnp.linalg.inv),
                (lambda a: linalg.solve(a, jnp.ones((8, a.shape[-1], 1))), None),
            ):
                assert not np.isfinite(f(a)).all((-2, -1)).any()
                if g is not None:
                    assert not np.isfinite(g(a)).all((-2, -1)).any()


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="of the CPU; kernels are emulated")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [2, 8, 33])
@pytest.mark.one_in(2)
def test_singular_matrices_have_the_inverses_of_lu_factors(rng, x64, n, dtype):
    regular = random(rng, (COUNT, n, n), dtype)
    equal_columns = rng.integers(-2, 3, (COUNT, n, n)).astype(dtype)
    equal_columns[:, :, -1] = equal_columns[:, :, 0]
    zero_column = np.asarray(regular).copy()
    zero_column[:, :, n // 2] = 0
    identity = np.broadcast_to(np.eye(n, dtype=dtype), regular.shape)
    for singular in (equal_columns, zero_column):
        a = jnp.stack([jnp.asarray(singular), regular], 1)
        inverses = linalg.inv(a)
        assert not np.isnan(inverses).all((-2, -1)).any()
        found, factored = inverses[:, 0], linalg.solve(singular, identity)
        # Rounding may leave a pivot that is not zero.
        no_pivot = ~np.isfinite(factored).all((-2, -1))
        np.testing.assert_array_equal(found[no_pivot], factored[no_pivot])
        np.testing.assert_array_equal(inverses[:, 1], linalg.inv(regular))
        if n == 2:
            # LAPACK's blocks of larger matrices have more NaN.
            theirs = jnp.linalg.inv(singular)
            np.testing.assert_array_equal(found[~np.isfinite(theirs)], theirs[~np.isfinite(theirs)])


# Transformations.


@pytest.mark.parametrize("axes", [(0, 0), (None, 0), (0, None), (2, 1), (None, 1), (1, None)])
@pytest.mark.one_in(3)
def test_vmap_of_solve_is_one_call(rng, axes):
    shapes = [[6, 6], [6, 2]]
    for shape, axis in zip(shapes, axes, strict=True):
        if axis is not None:
            shape.insert(axis, 9)
    a, b = (random(rng, shape, np.float32) for shape in shapes)
    dominant = 6 * jnp.eye(6)
    a = a + (dominant if axes[0] is None else jnp.expand_dims(dominant, axes[0]))
    mapped = jax.vmap(linalg.solve, axes)
    np.testing.assert_allclose(
        jax.jit(mapped)(a, b), jax.jit(jax.vmap(jnp.linalg.solve, axes))(a, b), 1e-4, 1e-4
    )
    assert len(kernels(mapped, a, b)) == 1
    twice = [jax.vmap(jax.vmap(f, axes), (None, -1)) for f in (linalg.solve, jnp.linalg.solve)]
    stacked = jnp.stack([b, 2 * b], -1)
    found, expected = (jax.jit(f)(a, stacked) for f in twice)
    assert_close(found, expected)
    assert len(kernels(twice[0], a, stacked)) == 1


def cofactors(a):
    """From the determinants of minors, in float64."""
    n = a.shape[-1]
    result = np.empty(a.shape)
    for i in range(n):
        for j in range(n):
            minor = np.delete(np.delete(a, i, -2), j, -1).astype(np.float64)
            result[..., i, j] = (-1) ** (i + j) * np.linalg.det(minor)
    return result


def test_the_derivative_of_a_determinant_that_is_zero(rng):
    a = rng.integers(-3, 4, (40, 4, 4)).astype(np.float32)
    a[:, 3] = a[:, 0] + a[:, 1]
    # So that the last pivot is the one that is zero.
    a = a[np.linalg.matrix_rank(a[..., :3]) == 3]
    assert len(a) > 4
    gradient = jax.grad(lambda a: linalg.det(a).sum())(jnp.asarray(a))
    np.testing.assert_allclose(gradient, cofactors(a), 0, 1e-3)
    rank_1 = jnp.ones((5, 4, 4))
    np.testing.assert_array_equal(jax.grad(lambda a: linalg.det(a).sum())(rank_1), 0)


# Names.


def public(module):
    return {name for name in dir(module) if not name.startswith("_")}


def test_every_name_of_jax():
    ours = {"matmul", "multi_dot", "tensordot", "vecdot", *linalg.__all__}
    for module in (jnp.linalg, jsp_linalg):
        assert public(module) <= public(linalg)
        for name in public(module) - ours:
            first = jnp.linalg if hasattr(jnp.linalg, name) else module
            assert getattr(linalg, name).__wrapped__ is getattr(first, name)
        for name in public(jnp.linalg) & ours:
            theirs, own = (inspect.signature(getattr(m, name)) for m in (jnp.linalg, linalg))
            positional = {
                name for name, p in theirs.parameters.items() if p.kind == p.POSITIONAL_ONLY
            }
            assert theirs.parameters.keys() - positional <= own.parameters.keys(), name
    for name in ("matmul", "multi_dot", "tensordot", "vecdot"):
        assert getattr(linalg, name) is getattr(jtk, name)
    assert not hasattr(linalg, "invert")


# Types, errors and what is left to XLA.


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("inv", [(3, 4)]), ("inv", [(3,)]), ("cholesky", [(3, 4)]), ("cholesky", [(3,)]),
        ("det", [(3, 4)]), ("slogdet", [(3, 4)]), ("solve", [(3, 4), (4,)]),
        ("solve", [(3, 3), (4,)]), ("solve", [(3,), (3,)]), ("solve", [(5, 3, 3), (5, 3)]),
        ("solve", [(5, 3, 3), (4, 3, 2)]),
    ],
)  # fmt: skip
def test_errors_are_jaxs(name, shapes):
    args = [np.ones(shape, np.float32) for shape in shapes]
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - the type is what is compared
        getattr(jnp.linalg, name)(*args)
    with pytest.raises(theirs.type, match=re.escape(str(theirs.value)[:30])):
        getattr(linalg, name)(*args)


def test_other_errors_are_jaxs():
    with pytest.raises(ValueError, match="square matrix"):
        linalg.triangular_solve(jnp.ones((3, 4)), jnp.ones((3, 4)))
    with pytest.raises(ValueError, match="Invalid 'trans' value 3"):
        linalg.solve_triangular(jnp.ones((3, 3)), jnp.ones(3), trans=3)
    with pytest.raises(ValueError, match="Unknown slogdet method 'svd'"):
        linalg.slogdet(jnp.ones((3, 3)), method="svd")
    with pytest.raises(TypeError):
        linalg.inv([[1.0]])
    # Older versions of JAX add the transpose, and return matrices.
    for name, shape in (("cholesky", (2, 3, 1)), ("eigh", (1, 3)), ("eigvalsh", (3, 1))):
        with pytest.raises(ValueError, match=r"\[\.\.\., n, n\]"):
            getattr(linalg, name)(np.ones(shape, np.float32))


def test_lists():
    given = [[2.0, 1.0], [1.0, 3.0]]
    for found, wanted in zip(linalg.lu(given), jsp_linalg.lu(given), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((5, 4, 4), np.complex64, "no kernel for matrices of complex64"),
        ((4, 4), jnp.bfloat16, "no kernel for matrices of bfloat16"),
    ],
)
def test_what_is_left_to_xla_says_why(rng, shape, dtype, reason):
    a = random(rng, shape, dtype) + 9 * jnp.eye(shape[-1], dtype=dtype)
    if dtype != jnp.bfloat16:
        for name in ("inv", "cholesky", "det"):
            ours, theirs = getattr(linalg, name), getattr(jnp.linalg, name)
            np.testing.assert_array_equal(ours(a), theirs(a))
        jax.grad(lambda a: jnp.abs(linalg.inv(a)).sum())(a)
        assert jax.vmap(linalg.inv)(a[None]).shape == (1, *shape)
    # JAX's own functions refuse 16-bit floats, so that only this decides.
    assert refusal(shape[-1], np.dtype(dtype)) == reason
    if dtype != jnp.bfloat16:
        (choice,) = jtk.explain(linalg.inv, a)
        assert choice.kernel is None
        assert choice.reason == reason


def test_what_is_left_to_xla_is_decided_when_it_is_traced():
    a = jnp.eye(3, dtype=np.complex64)
    jaxpr = jax.make_jaxpr(linalg.inv)(a)
    assert not any(eqn.primitive.name.startswith("tilekern") for eqn in equations(jaxpr.jaxpr))
    message = "inv falls back to XLA, which .* forbids: no kernel for matrices of complex64"
    with jtk.strict(), pytest.raises(jtk.FallbackError, match=message):
        jax.jit(linalg.inv).trace(a)
    for platform in ("cpu", "cuda"):
        (choice,) = jtk.explain(lambda a: linalg.inv(linalg.inv(a)), a, platform=platform)
        assert (choice.platform, choice.operands) == (platform, ("c64[3,3]",))
    with jtk.policy("xla"):
        assert "policy" in jtk.explain(linalg.inv, a)[0].reason


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 0), (2, 0, 3)])
def test_empty(shape):
    a = jnp.zeros(shape)
    batched_lu = jax.vmap(jsp_linalg.lu) if a.ndim == 3 else jsp_linalg.lu
    pairs = [(linalg.lu, batched_lu), (linalg.lu_factor, jsp_linalg.lu_factor)]
    if shape[-1] == shape[-2]:
        names = ("inv", "cholesky", "det", "slogdet")
        pairs += [(getattr(linalg, name), getattr(jnp.linalg, name)) for name in names]
    for ours, theirs in pairs:
        for got, expected in zip(*(jax.tree.leaves(f(a)) for f in (ours, theirs)), strict=True):
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
            np.testing.assert_array_equal(got, expected)
    for function in (linalg.lu, linalg.lu_factor):
        gradient = jax.grad(lambda a, f=function: jax.tree.leaves(f(a))[0].sum())(a)
        assert gradient.shape == shape


def test_determinants_of_symbolic_sizes_are_jaxs():
    (n,) = jax.export.symbolic_shape("n")
    symbolic = jax.ShapeDtypeStruct((n, n), np.float32)

    def determinants(a):
        return jtk.linalg.det(a), *jtk.linalg.slogdet(a)

    exported = jax.export.export(jax.jit(determinants))(symbolic)
    a = 2 * np.eye(5, dtype=np.float32)
    assert_close(exported.call(a), (np.linalg.det(a), *np.linalg.slogdet(a)))


def in_blocks(function, **flags):
    return jax.jit(functools.partial(function, block=128, invert=inverted_triangles, **flags))


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
def test_inverse_in_blocks(rng, x64, shape, dtype):
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
def test_triangular_solve_in_blocks(rng, shape, left_side, lower, transpose, unit_diagonal):
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
