"""Cholesky factors in blocks: the plans, and values on a Hopper GPU."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import UNIT_ROUNDOFF, on_gpu, random
from nvrtc_mark import needs_nvrtc
from plan_buffers import assert_within_buffers

import jax_tilekern as jtk
from jax_tilekern import linalg
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.launch import NoKernel, TensorMap
from jax_tilekern.plans.linalg.blocked_cholesky import plan_cholesky

needs_hopper = pytest.mark.skipif(
    not on_gpu() or jax.devices()[0].compute_capability != "9.0", reason="there is no Hopper GPU"
)

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
ROUNDOFF = UNIT_ROUNDOFF[F32]


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_the_kernels_are_for_hopper(arch):
    found = plan_cholesky(1, 4096, True, known_gpu(arch))
    assert isinstance(found, NoKernel)
    assert arch in found.reason


PLANS = [(1, 100), (1, 512), (9, 1000), (1, 1023), (1, 5000)]
plans = pytest.mark.parametrize(("count", "size"), PLANS)


@needs_nvrtc
@plans
@pytest.mark.one_in(5)
def test_kernels_compile_without_spills(count, size):
    plan = plan_cholesky(count, size, size % 2 == 0, known_gpu("sm_90a"))
    for entry in {launch.entry.name: launch.entry for launch in plan.launches}.values():
        assert (entry.spill_bytes, entry.stack_bytes) == (0, 0)


@needs_nvrtc
@plans
def test_the_plan_stays_in_its_buffers(count, size):
    plan = plan_cholesky(count, size, True, known_gpu("sm_90a"))
    sizes = [4 * count * size**2] * 2 + [*plan.workspace_bytes]
    assert_within_buffers(plan, sizes)


@needs_nvrtc
@plans
def test_each_column_is_factored_once_and_updated_by_all_before(count, size):
    """The launches, replayed as sets of columns."""
    plan = plan_cholesky(count, size, True, known_gpu("sm_90a"))
    _, *launches, _ = plan.launches
    extended = -(-size // 128) * 128
    updated = {column: set() for column in range(0, extended, 128)}
    factored = []
    for launch in launches:
        if "blocked_cholesky" in launch.entry.name:
            first = int.from_bytes(launch.parameters[4].data, "little")
            assert updated[first] == set(factored)
            factored.append(first)
        else:
            lhs, rhs, *_ = (p for p in launch.parameters if isinstance(p, TensorMap))
            assert lhs.offset_bytes == rhs.offset_bytes
            row, first = divmod(lhs.offset_bytes // 2, 2 * extended)
            k = lhs.sizes[0] - extended
            rows, columns = sorted((lhs.sizes[1], rhs.sizes[1]), reverse=True)
            assert rows == extended - row
            assert math.prod(lhs.sizes[2:]) == math.prod(rhs.sizes[2:]) == count
            for column in range(row, row + columns, 128):
                new = set(range(first, first + k, 128))
                assert not new & updated[column]
                assert new <= set(factored)
                updated[column] |= new
    assert factored == list(updated)


# On a Hopper GPU.


def positive_definite(rng, n, kind="normal"):
    """A float32 matrix, and the largest error of an element of the product of its factors."""
    root = rng.standard_normal((n, n + 10)).astype(np.float32)
    a = np.asarray(root @ root.T / n + np.eye(n, dtype=np.float32))
    if kind == "graded":
        scale = 10.0 ** np.linspace(12, -12, n)
        a = a * scale * scale[:, None]
    elif kind == "kernel":
        x = np.linspace(0, 1, n)
        a = np.exp(-50 * (x[:, None] - x) ** 2) + 1e-2 * np.eye(n)
    elif kind == "diagonal":
        a = np.diag(np.exp(rng.uniform(-80, 80, n)))
    return a.astype(np.float32)


def assert_factor(a, x):
    """The error of an element is relative to the roots of its row's and its column's pivots."""
    a, x = np.asarray(a, np.float64), np.asarray(x, np.float64)
    assert not np.triu(x, 1).any()
    n = len(a)
    rows = np.unique(np.append(np.arange(0, n, max(1, n // 64)), n - 1))
    roots = np.sqrt(np.diag(a))
    error = np.abs(x[rows] @ x.T - np.where(np.arange(n) <= rows[:, None], a[rows], a[:, rows].T))
    # A sum of products of factors, which add up to the roots at most.
    assert (error <= n * ROUNDOFF * roots[rows, None] * roots).all()


@needs_hopper
@pytest.mark.parametrize("kind", ["normal", "graded", "kernel", "diagonal"])
@pytest.mark.parametrize("n", [65, 128, 300, 512, 1001, 1500, 4096])
def test_factors(rng, kind, n):
    a = positive_definite(rng, n, kind)
    (choice,) = jtk.explain(linalg.cholesky, a)
    assert "blocked_cholesky" in choice.kernel
    assert_factor(a, linalg.cholesky(a))


@needs_hopper
@pytest.mark.parametrize("n", [640, 1001])
def test_what_is_read(rng, n):
    a = positive_definite(rng, n)
    halves = np.tril(1.5 * a, -1) + np.triu(0.5 * a, 1) + np.diag(np.diag(a))
    assert_factor(a, linalg.cholesky(halves))
    unread = np.tril(a) + np.triu(np.full_like(a, np.nan), 1)
    lower = linalg.cholesky(unread, symmetrize_input=False)
    assert_factor(a, lower)
    upper = linalg.cholesky(unread, upper=True, symmetrize_input=False)
    np.testing.assert_array_equal(upper, np.asarray(lower).T)


@needs_hopper
@pytest.mark.parametrize(("count", "n"), [(2, 65), (300, 100), (40, 257), (6, 512), (3, 1001)])
def test_batches(rng, count, n):
    """Each matrix has its own factor, and only that of one that is not positive definite is NaN."""
    a = np.stack([positive_definite(rng, n) for _ in range(count)])
    a *= 10.0 ** rng.integers(-3, 4, (count, 1, 1)).astype(np.float32)
    wrong = int(rng.integers(count))
    a[wrong, n // 2, n // 2] = -1
    x = np.asarray(jax.jit(jax.vmap(linalg.cholesky))(a))
    (choice,) = jtk.explain(jax.vmap(linalg.cholesky), a)
    assert f"{count} matrices {n}x{n}" in choice.kernel
    for i in range(count):
        if i == wrong:
            assert np.isnan(x[i][np.tril_indices(n)]).all()
            assert not np.triu(x[i], 1).any()
        else:
            assert_factor(a[i], x[i])


@needs_hopper
@pytest.mark.parametrize(
    "damage",
    [
        lambda a: a.at[300, 300].set(-1),
        lambda a: a.at[0, 0].set(0),
        lambda a: a.at[-1, -1].set(1e-3),
        lambda a: a.at[400, 30].set(jnp.nan),
        lambda a: a.at[5, 5].set(jnp.inf),
        lambda a: a.at[400, 30].set(jnp.inf),
        lambda a: jnp.ones_like(a),
        lambda a: -a,
        lambda a: jnp.zeros_like(a),
    ],
    ids=[
        "negative",
        "zero",
        "last",
        "NaN",
        "infinite pivot",
        "infinite",
        "singular",
        "negated",
        "zeros",
    ],
)
@pytest.mark.parametrize("n", [512, 1001])
def test_a_matrix_that_is_not_positive_definite(rng, damage, n):
    x = np.asarray(linalg.cholesky(damage(jnp.asarray(positive_definite(rng, n)))))
    assert np.isnan(x[np.tril_indices(n)]).all()
    assert not np.triu(x, 1).any()


@needs_hopper
def test_derivatives(rng):
    """The tangent of the factor of ``a`` satisfies ``x_dot x.T + x x_dot.T = a_dot``."""
    n = 640
    a = positive_definite(rng, n)
    a_dot = random(rng, (n, n), F32)
    x, x_dot = jax.jvp(linalg.cholesky, (a,), (a_dot,))
    x, x_dot, a_dot = (np.asarray(value, np.float64) for value in (x, x_dot, a_dot))
    symmetric = (a_dot + a_dot.T) / 2
    half = x_dot @ x.T
    assert not np.triu(x_dot, 1).any()
    bound = 10 * n * ROUNDOFF * (np.abs(x_dot) @ np.abs(x.T)).max()
    assert np.abs(half + half.T - symmetric).max() <= bound
    gradient = jax.grad(lambda a: jnp.sum(jnp.log(jnp.diag(linalg.cholesky(a)))))(jnp.asarray(a))
    # The gradient of half the logarithm of the determinant is half the inverse.
    inverse = np.linalg.inv(np.asarray(a, np.float64))
    assert np.abs(gradient - inverse / 2).max() <= 10 * n * ROUNDOFF * np.abs(inverse).max()
