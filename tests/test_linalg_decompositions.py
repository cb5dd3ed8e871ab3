"""``svd``, ``eigh`` and ``qr`` of batches of small matrices are accurate, and differentiable."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import UNIT_ROUNDOFF, assert_close, random

import jax_tilekern as jtk
from jax_tilekern import _core, linalg

# No multiple of what a thread block or a vector has.
COUNT = 37
DTYPES = (np.float32, np.float64)
FUNCTIONS = (linalg.svd, linalg.eigh, linalg.qr)


def tolerance(shape, dtype):
    """Bound the error relative to the norm: rounding errors of orthogonal operations."""
    return 12 * max(shape[-2:]) * UNIT_ROUNDOFF[np.dtype(dtype)]


def norms(a):
    return np.linalg.norm(np.asarray(a, np.float64), axis=(-2, -1))


def wide(arrays):
    return [np.asarray(x, np.float64) for x in arrays]


def columns(x):
    """The difference of the columns' products from the identity."""
    return np.abs(x.mT @ x - np.eye(x.shape[-1])).max()


def kernels(function, *args):
    return [choice.kernel for choice in jtk.explain(function, *args)]


def check_svd(a):
    exact = np.asarray(a, np.float64)
    norm, bound = norms(a), tolerance(a.shape, a.dtype)
    m, n = a.shape[-2:]
    k = min(m, n)
    expected = np.linalg.svd(exact, compute_uv=False)
    values = linalg.svd(a, compute_uv=False)
    np.testing.assert_array_equal(linalg.svdvals(a), values)
    assert np.all(np.abs(values - expected).max(-1) <= bound * norm)
    for full in (False, True):
        u, s, vh = wide(linalg.svd(a, full_matrices=full))
        assert (u.shape[1:], vh.shape[1:]) == ((m, m if full else k), (n if full else k, n))
        np.testing.assert_array_equal(s, values)
        assert np.all(s >= 0)
        assert np.all(np.diff(s) <= 0)
        assert np.all(norms(u[..., :k] * s[:, None] @ vh[:, :k] - exact) <= bound * norm)
        assert max(columns(u), columns(vh.mT)) <= bound


def check_eigh(a):
    symmetric = np.asarray((a + a.mT) / 2, np.float64)
    norm, bound = norms(symmetric), tolerance(a.shape, a.dtype)
    w, v = wide(linalg.eigh(a))
    np.testing.assert_array_equal(linalg.eigvalsh(a), w)
    assert np.all(np.abs(w - np.linalg.eigvalsh(symmetric)).max(-1) <= bound * norm)
    assert np.all(np.diff(w) >= 0)
    assert np.all(norms(v * w[:, None] @ v.mT - symmetric) <= bound * norm)
    assert columns(v) <= bound


def check_qr(a, like_jax):
    bound = tolerance(a.shape, a.dtype)
    np.testing.assert_array_equal(linalg.qr(a, "r"), linalg.qr(a).R)
    for mode in ("reduced", "complete"):
        factors, expected = linalg.qr(a, mode), jnp.linalg.qr(a, mode)
        assert [x.shape for x in factors] == [x.shape for x in expected]
        q, r = wide(factors)
        np.testing.assert_array_equal(np.tril(r, -1), 0)
        assert np.all(norms(q @ r - np.asarray(a, np.float64)) <= bound * norms(a))
        assert columns(q) <= bound
        if like_jax:
            # Rounding errors grow with the condition number; a sign would be an error of 1.
            assert np.median(norms(q - expected[0])) <= 40 * bound


@pytest.mark.parametrize("n", [3, 12])
def test_small_singular_values_are_accurate(rng, n):
    """Those of columns of every magnitude, relative to themselves."""
    q = np.linalg.qr(rng.standard_normal((COUNT, n, n)))[0]
    scales = 10.0 ** -np.arange(n)
    a = ((q + rng.standard_normal((COUNT, n, n)) / 8 / n) * scales).astype(np.float32)
    exact = np.linalg.svd(a.astype(np.float64), compute_uv=False)
    found = np.asarray(linalg.svdvals(a), np.float64)
    assert np.abs(found / exact - 1).max() <= tolerance((n, n), np.float32)


@pytest.mark.parametrize("n", [3, 9])
def test_factors_of_subnormal_numbers_are_finite(rng, n):
    """Their reciprocals overflow. A CPU takes them for zero."""
    a = np.full((COUNT, n, n), 3e-42, np.float32)
    a[1::2, 0, 0] = 1
    for q, r in map(wide, (linalg.qr(a), linalg.qr(a, "complete"))):
        assert columns(q) <= tolerance(a.shape, a.dtype)
        assert np.abs(q @ r - a).max() <= 1e-6
        assert np.isfinite(r).all()


@pytest.mark.parametrize("lower", ["L", "U"])
def test_eigh_reads_one_triangle(rng, lower):
    a = np.asarray(random(rng, (COUNT, 5, 5), np.float32))
    symmetric = (a + a.mT) / 2
    kept = np.tril(np.ones((5, 5))) if lower == "L" else np.triu(np.ones((5, 5)))
    triangle = np.where(kept, symmetric, np.nan)
    expected = linalg.eigh(symmetric)
    for found in (
        linalg.eigh(triangle, lower, symmetrize_input=False),
        linalg.eigh(triangle, UPLO=lower, symmetrize_input=False),
    ):
        assert_close(tuple(found), tuple(expected), 1e-5)
    values = linalg.eigvalsh(triangle, lower, symmetrize_input=False)
    assert_close(values, expected.eigenvalues, 1e-5)
    with pytest.raises(ValueError, match="UPLO must be one of"):
        linalg.eigh(a, "X")


@pytest.mark.parametrize("lower", ["L", "U"])
def test_second_derivatives_of_what_is_not_symmetrized(rng, x64, lower):
    a = rng.standard_normal((3, 3))
    a = a + a.T

    def hessian(module):
        def loss(a):
            w, v = module.eigh(a, UPLO=lower, symmetrize_input=False)
            values = module.eigvalsh(a, UPLO=lower, symmetrize_input=False)
            return jnp.sin(w).sum() + (v**4).sum() + values.prod()

        return jax.hessian(loss)(a)

    assert_close(hessian(linalg), hessian(jnp.linalg), 1e-9)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("n", [2, 9])
def test_what_is_not_finite_stays_in_its_own_matrix(rng, n, value):
    a = random(rng, (COUNT, n, n), np.float32)
    bad = a.at[5, n - 1, 0].set(value)
    others = np.arange(COUNT) != 5
    for function in FUNCTIONS:
        for got, clean in zip(function(bad), function(a), strict=True):
            np.testing.assert_array_equal(np.asarray(got)[others], np.asarray(clean)[others])
            if function is not linalg.qr:
                assert np.isnan(got[5]).all()
            elif got.shape == a.shape:
                assert np.isnan(got[5]).any()


def test_bits_do_not_depend_on_the_batch(rng):
    """Nor on how threads share it, nor on the run."""
    for shape in ((3000, 3, 3), (300, 12, 12)):
        a = random(rng, shape, np.float32)
        for function in FUNCTIONS:
            whole = function(a)
            for again, first in zip(function(a), whole, strict=True):
                np.testing.assert_array_equal(again, first)
            for part, first in zip(function(a[7:12]), whole, strict=True):
                np.testing.assert_array_equal(part, first[7:12])


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="of the CPU")
def test_every_instruction_set(rng, x64):
    before = _core.cpu_instruction_set()
    try:
        for dtype in DTYPES:
            a = random(rng, (COUNT, 9, 9), dtype)
            for level in _core.cpu_instruction_sets():
                _core.set_cpu_instruction_set(level)
                check_svd(a)
                check_eigh(a)
                check_qr(a, like_jax=True)
    finally:
        _core.set_cpu_instruction_set(before)


# Transformations.


def polar(module, a):
    u, _, vh = module.svd(a, full_matrices=False)
    return u @ vh


def exponential(module, a):
    w, v = module.eigh(a)
    return v * jnp.exp(w)[..., None, :] @ v.mT


# Functions of a module and a batch of matrices whose derivatives do not depend on signs.
CASES = {
    "polar": (polar, (4, 4)),
    "polar, tall": (polar, (5, 3)),
    "polar, wide": (polar, (3, 5)),
    "svdvals": (lambda module, a: module.svd(a, compute_uv=False), (4, 3)),
    "eigh": (exponential, (4, 4)),
    "eigvalsh": (lambda module, a: module.eigvalsh(a), (4, 4)),
    "eigh, one triangle": (
        lambda module, a: module.eigh((a + a.mT) / 2, symmetrize_input=False)[0],
        (4, 4),
    ),
    "qr": (lambda module, a: tuple(module.qr(a)), (4, 4)),
    "qr, tall": (lambda module, a: tuple(module.qr(a)), (5, 3)),
    "qr, wide": (lambda module, a: tuple(module.qr(a)), (3, 5)),
    "r": (lambda module, a: module.qr(a, mode="r"), (4, 3)),
}


def apart(rng, shape):
    """Matrices whose singular values and whose eigenvalues differ by 1 or so."""
    m, n = shape
    q, _ = np.linalg.qr(rng.standard_normal((3, m, m)))
    values = 1 + np.arange(min(m, n)) + rng.uniform(0, 0.3, (3, min(m, n)))
    return (
        q[..., : min(m, n)]
        * values[:, None]
        @ (
            q.mT[:, : min(m, n)]
            if m == n
            else np.linalg.qr(rng.standard_normal((3, n, n)))[0][:, : min(m, n)]
        )
    )


# Derivatives of wide matrices' factors are newer than the oldest JAX.
@pytest.mark.parametrize("name", [name for name in CASES if name != "qr, wide"])
@pytest.mark.one_in(2)
def test_gradients_are_jaxs(rng, x64, name):
    function, shape = CASES[name]
    a = apart(rng, shape)

    def loss(module, a):
        return sum(jnp.sin(x).sum() for x in jax.tree.leaves(function(module, a)))

    ours, theirs = (
        jax.jit(jax.grad(functools.partial(loss, module)))(a) for module in (linalg, jnp.linalg)
    )
    assert_close(ours, theirs, 1e-10)


def test_gradients_of_a_complete_basis(rng, x64):
    a = apart(rng, (5, 3))

    def loss(a):
        q, r = linalg.qr(a, "complete")
        return jnp.sin(q).sum() + r.sum()

    gradient = jax.grad(loss)(a)
    step = 1e-6 * rng.standard_normal(a.shape)
    difference = (loss(a + step) - loss(a - step)) / 2
    np.testing.assert_allclose(jnp.vdot(gradient, step), difference, 1e-4)
    with pytest.raises(NotImplementedError, match="not implemented for full matrices"):
        jax.grad(lambda a: linalg.svd(a)[0].sum())(a)


def test_vmap_is_one_call(rng):
    a = random(rng, (6, 6, 5, 6), np.float32)
    for function in FUNCTIONS:
        mapped = jax.vmap(jax.vmap(function, 1), 1)
        found = jax.jit(mapped)(a[..., :5, :])
        assert_close(tuple(found), tuple(function(jnp.moveaxis(a, (1, 2), (0, 1)))))
        assert len(kernels(mapped, a)) == 1


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="of the CPU")
@pytest.mark.defaults
def test_few_matrices_are_lapacks():
    """A vector of matrices takes as long as one, and Jacobi computes more than LAPACK does."""
    before = _core.cpu_instruction_set()
    try:
        for level, function, shape, reason in (
            (before, linalg.svd, (8, 32, 40), None),
            (before, linalg.svd, (7, 32, 40), "fewer than 8 matrices"),
            (before, linalg.eigh, (3, 8, 8), None),
            (before, linalg.eigh, (1, 8, 8), "fewer than 2 matrices"),
            (before, linalg.qr, (4, 64, 64), None),
            (before, linalg.qr, (3, 64, 64), "fewer than 4 matrices"),
            ("portable", linalg.svdvals, (99, 32, 32), None),
            ("portable", linalg.svdvals, (99, 33, 33), "a vector has 4 lanes"),
            ("portable", linalg.qr, (99, 33, 33), None),
        ):
            _core.set_cpu_instruction_set(level)
            jax.clear_caches()
            (choice,) = jtk.explain(function, jax.ShapeDtypeStruct(shape, np.float32))
            assert (choice.kernel is None) == (reason is not None)
            assert reason is None or reason in choice.reason
    finally:
        _core.set_cpu_instruction_set(before)


# Types, errors and what is left to JAX.


def test_results_have_jaxs_types():
    a = jnp.eye(4)
    for name in ("svd", "eigh", "qr"):
        ours, theirs = (getattr(module, name)(a) for module in (linalg, jnp.linalg))
        assert type(ours) is type(theirs)
    assert linalg.svd(np.eye(3, dtype=np.int32)).S.dtype == np.float32


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 0), (2, 0, 3), (2, 3, 0)])
def test_empty(shape):
    a = jnp.zeros(shape)
    calls = [("svd", {"full_matrices": full}) for full in (False, True)]
    calls += [("svdvals", {}), *(("qr", {"mode": mode}) for mode in ("r", "reduced", "complete"))]
    if shape[-1] == shape[-2]:
        calls += [("eigh", {}), ("eigvalsh", {})]
    for name, keywords in calls:
        ours, theirs = (getattr(m, name)(a, **keywords) for m in (linalg, jnp.linalg))
        for got, expected in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
            assert (got.shape, got.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize(
    ("name", "shape", "keywords"),
    [
        ("svd", (3,), {}), ("svdvals", (3,), {}), ("eigh", (3, 4), {}), ("eigh", (3,), {}),
        ("eigvalsh", (3, 4), {}), ("qr", (3,), {}), ("qr", (3, 3), {"mode": "fast"}),
    ],
)  # fmt: skip
def test_errors_are_jaxs(name, shape, keywords):
    a = np.ones(shape, np.float32)
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - the type is what is compared
        getattr(jnp.linalg, name)(a, **keywords)
    with pytest.raises(theirs.type):
        getattr(linalg, name)(a, **keywords)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "keywords", "reason"),
    [
        ("svd", (2, 65, 3), np.float32, {}, "matrices of up to 64x64"),
        ("qr", (2, 3, 65), np.float32, {}, "matrices of up to 64x64"),
        ("eigh", (5, 4, 4), np.complex64, {}, "no kernel for matrices of complex64"),
        ("svdvals", (5, 4, 4), np.complex64, {}, "no kernel for matrices of complex64"),
        ("qr", (5, 4, 4), np.float32, {"mode": "raw"}, "mode raw"),
    ],
)
def test_what_is_left_to_jax_says_why(rng, name, shape, dtype, keywords, reason):
    a = random(rng, shape, dtype)
    ours, theirs = (functools.partial(getattr(m, name), **keywords) for m in (linalg, jnp.linalg))
    (choice,) = jtk.explain(ours, a)
    assert choice.kernel is None
    assert reason in choice.reason
    for got, expected in zip(*map(jax.tree.leaves, (ours(a), theirs(a))), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize("size", [4, 70])
def test_singular_values_of_an_infinite_matrix(rng, dtype, size):
    """LAPACK's own iteration does not end for the first matrix."""
    a = rng.standard_normal((2, size, size)).astype(dtype)
    a[0, 2, 0] = -np.inf
    functions = linalg.svd, linalg.svdvals, linalg.pinv, functools.partial(linalg.norm, ord="nuc")
    for function in functions:
        axis = {"axis": (-2, -1)} if isinstance(function, functools.partial) else {}
        for x in jax.tree.leaves(function(a, **axis)):
            assert np.isnan(x[0]).all()
            assert np.isfinite(x[1]).all()
