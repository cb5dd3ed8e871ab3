"""``expm``, ``pinv`` and functions of this library's parts agree with JAX's, and with float64."""

import functools

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsp_linalg
import numpy as np
import pytest
from numerics import assert_close, check_derivatives, on_gpu, random

import jax_tilekern as jtk
from jax_tilekern import linalg


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
    ours, theirs = (
        jax.jit(jax.grad(lambda a, m=m: jnp.sin(m.pinv(a, 1e-3)).sum()))(a)
        for m in (linalg, jnp.linalg)
    )
    assert_close(ours, theirs, 1e-12)
    check_derivatives(linalg.pinv, (a[3:],))
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
