"""Decompositions of small matrices, ``expm``, ``pinv`` and functions of these parts."""

import functools

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsp_linalg
import numpy as np
import pytest
from numerics import UNIT_ROUNDOFF, assert_close, on_gpu, random

import jax_tilekern as jtk
from jax_tilekern import _core, linalg

# No multiple of what a thread block or a vector has.
COUNT = 37
FUNCTIONS = (linalg.svd, linalg.eigh, linalg.qr)


def tolerance(shape, dtype):
    """Bound the error relative to the norm: rounding errors of orthogonal operations."""
    return 12 * max(shape[-2:]) * UNIT_ROUNDOFF[np.dtype(dtype)]


def columns(x):
    """The difference of the columns' products from the identity."""
    return np.abs(x.mT @ x - np.eye(x.shape[-1])).max()


def kernels(function, *args):
    return [choice.kernel for choice in jtk.explain(function, *args)]


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
    for factors in (linalg.qr(a), linalg.qr(a, "complete")):
        q, r = (np.asarray(x, np.float64) for x in factors)
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


# Transformations.


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


def terms(a):
    """The exponential's series in extended precision, of matrices that are halved 10 times."""
    x = np.asarray(a, np.longdouble) / 2**10
    result = power = np.broadcast_to(np.eye(x.shape[-1]), x.shape)
    for k in range(1, 18):
        power = power @ x / k
        result = result + power
    for _ in range(10):
        result = result @ result
    return result


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 3, 12])
@pytest.mark.one_in(6)
def test_exponentials(rng, x64, n, dtype):
    """Each matrix has as many squarings as its own norm takes."""
    scales = np.array([0, 1e-3, 0.1, 1, 4, 10])[:, None, None]
    a = np.asarray(random(rng, (6, n, n), np.float64)) * scales / n**0.5
    a = a.astype(dtype)
    expected = terms(a)
    error = np.abs(np.asarray(linalg.expm(a), np.float64) - expected).max((-2, -1))
    error /= np.abs(expected).max((-2, -1))
    # The exponential's condition is that of its norm.
    bound = 20 * n * np.finfo(dtype).eps * (1 + np.abs(a).sum(-2).max(-1)) ** 2
    assert np.all(error <= bound)
    for flag in (False, True):
        own, theirs = (
            functools.partial(m.expm, upper_triangular=flag) for m in (linalg, jsp_linalg)
        )
        upper = np.triu(a[:4])
        assert_close(own(upper), theirs(upper), 100 * n * np.finfo(dtype).eps)


@pytest.mark.parametrize("shape", [(0, 0), (3, 0, 0), (0, 2, 2)], ids=str)
def test_exponentials_of_nothing(shape):
    for function in (linalg.expm, jax.grad(lambda a: linalg.expm(a).sum())):
        assert function(np.zeros(shape, np.float32)).shape == shape
    assert linalg.expm(np.zeros(shape, int)).dtype == jsp_linalg.expm(np.zeros(shape, int)).dtype


def test_exponentials_that_take_too_many_squarings():
    a = jnp.stack([jnp.eye(3), 1e9 * jnp.eye(3), jnp.full((3, 3), jnp.inf), 4 * jnp.eye(3)])
    found = linalg.expm(a)
    np.testing.assert_array_equal(np.isnan(found).all((-2, -1)), [False, True, True, False])
    np.testing.assert_array_equal(np.isnan(linalg.expm(8 * a, max_squarings=0))[3], True)
    np.testing.assert_allclose(found[0], np.e * np.eye(3), 1e-6)


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (3, 5)], ids=str)
@pytest.mark.one_in(3)
def test_pseudo_inverses(rng, x64, shape):
    # Ratios of singular values are not near the thresholds.
    u, _, vh = np.linalg.svd(rng.standard_normal((6, *shape)), full_matrices=False)
    a = u * np.array([2, 1.3, 0.7, 0.3])[: min(shape)] @ vh
    a[1] = a[1, :, :1] * a[1, :1]
    a[2] = 0
    assert_close(linalg.pinv(a), jnp.linalg.pinv(a), 1e-12)
    rtol = np.array([0, 0.1, 0, 0.5, 0.9, 2.0])
    for keyword in ("rtol", "rcond"):
        ours, theirs = (m.pinv(a, **{keyword: rtol}) for m in (linalg, jnp.linalg))
        assert_close(ours, theirs, 1e-12)
    with pytest.raises(ValueError, match="only one of rtol and rcond"):
        linalg.pinv(a, 0.1, rcond=0.1)


def test_kernels_compute_them():
    a = jnp.ones((50, 6, 6))
    kernels = [choice.kernel for choice in jtk.explain(linalg.pinv, a)]
    assert "cpu_matrix_svd float32" in kernels or jax.default_backend() == "gpu"
    assert None not in [choice.kernel for choice in jtk.explain(linalg.expm, a)]
    for name in ("pinv", "expm"):
        (choice,) = jtk.explain(getattr(linalg, name), jnp.ones((2, 70, 70)))
        assert "64x64" in choice.reason


# JAX's functions of this library's parts: of a matrix, and the parts that have a kernel.
SOLUTIONS = ("triangular_solve",) * 2
COMPOSED = {
    "cho_factor": (lambda m, a: m.cho_factor(a @ a.mT, lower=True)[0], ("cholesky",)),
    "cho_solve": (lambda m, a: m.cho_solve((jnp.tril(a), True), a[:, :2]), SOLUTIONS),
    "lu_solve": (lambda m, a: m.lu_solve(m.lu_factor(a), a.mT, trans=1), ("lu", *SOLUTIONS)),
    "lstsq": (lambda m, a: m.lstsq(a[:, :3], a[:, 3:])[0], ("svd",)),
    "cond": (lambda m, a: m.cond(a), ("singular values",)),
    "cond, 1": (lambda m, a: m.cond(a, 1), ("lu", *SOLUTIONS)),
    "matrix_rank": (lambda m, a: m.matrix_rank(a), ("singular values",)),
    "matrix_rank, hermitian": (lambda m, a: m.matrix_rank(a + a.mT, hermitian=True), ("eigh",)),
    "matrix_power": (lambda m, a: m.matrix_power(a, -2), ("lu", *SOLUTIONS)),
    "norm, 2": (lambda m, a: m.norm(a, 2), ("singular values",)),
    "norm, nuc": (lambda m, a: m.norm(a, "nuc"), ("singular values",)),
    "matrix_norm": (lambda m, a: m.matrix_norm(a, ord=-2), ("singular values",)),
    "tensorinv": (lambda m, a: m.tensorinv(a.reshape(2, 3, 6)), ("lu", *SOLUTIONS)),
    "tensorsolve": (
        lambda m, a: m.tensorsolve(a.reshape(2, 3, 6), a[:, :1].reshape(2, 3)),
        ("lu", *SOLUTIONS),
    ),
    "polar": (lambda m, a: m.polar(a, method="svd")[0], ("svd",)),
    "expm_frechet": (lambda m, a: m.expm_frechet(a, a.mT)[1], ("lu", *SOLUTIONS)),
    "svd, hermitian": (lambda m, a: m.svd(a + a.mT, hermitian=True)[1], ("eigh",)),
    "pinv, hermitian": (lambda m, a: m.pinv(a + a.mT, hermitian=True), ("eigh",)),
    "slogdet, qr": (lambda m, a: m.slogdet(a, method="qr")[1], ()),
    "sqrtm": (lambda m, a: m.sqrtm(a @ a.mT).real, ()),
}


class OfJax:
    """JAX's two modules as one."""

    def __getattr__(self, name):
        return getattr(jnp.linalg, name, None) or getattr(jsp_linalg, name)


@pytest.mark.parametrize("name", COMPOSED)
@pytest.mark.one_in(21)
def test_functions_of_our_parts(rng, x64, name):
    if name == "sqrtm" and on_gpu():
        pytest.skip("JAX's Schur decomposition runs on CPUs alone")
    function, parts = COMPOSED[name]
    a = random(rng, (64, 6, 6), np.float64) / 4 + 2 * jnp.eye(6)
    ours, theirs = (jax.vmap(functools.partial(function, m)) for m in (linalg, OfJax()))
    assert_close(ours(a), theirs(a), 1e-10)
    if jnp.issubdtype(ours(a).dtype, jnp.floating) and name != "sqrtm":
        gradients = (jax.grad(lambda a, f=f: jnp.sin(f(a)).sum())(a) for f in (ours, theirs))
        assert_close(*gradients, 1e-8)
    choices = jtk.explain(ours, a)
    found = [choice.call for choice in choices if choice.kernel or jax.default_backend() == "gpu"]
    for part in {*parts}:
        assert sum(call.startswith(part) for call in found) >= parts.count(part), choices
    one = jax.jit(functools.partial(function, linalg))(a[0])
    assert_close(one, theirs(a)[0], 1e-10)


def test_what_our_parts_leave_to_jax():
    for a, why in ((jnp.eye(4) * 1j, "complex64"), (jnp.eye(70), "64x64")):
        (choice,) = jtk.explain(linalg.matrix_rank, a)
        assert why in choice.reason
        assert linalg.matrix_rank(a) == len(a)
    with jtk.strict(), pytest.raises(jtk.FallbackError, match="svd falls back to XLA"):
        linalg.matrix_rank(jnp.eye(70))
    with pytest.raises(ValueError, match="norm"):
        linalg.norm(jnp.eye(3), "none")
