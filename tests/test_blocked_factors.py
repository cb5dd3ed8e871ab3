"""LU and Cholesky factors in blocks: the plans, and values on a Hopper GPU."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import UNIT_ROUNDOFF, on_gpu, random
from nvrtc_mark import needs_nvrtc
from plan_buffers import assert_within_buffers

import jax_tilekern as jtk
from jax_tilekern import linalg
from jax_tilekern.interop.gpu_target import gpu_target
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.launch import NoKernel, TensorMap
from jax_tilekern.plans.linalg.blocked_cholesky import plan_cholesky
from jax_tilekern.plans.linalg.blocked_lu_plans import plan_inverse, plan_solution

needs_hopper = pytest.mark.skipif(
    not on_gpu() or jax.devices()[0].compute_capability != "9.0", reason="there is no Hopper GPU"
)

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
ROUNDOFF = UNIT_ROUNDOFF[F32]


def lowered(function, *shapes):
    with gpu_target("sm_90"):
        traced = jax.jit(function).trace(*(jax.ShapeDtypeStruct(shape, F32) for shape in shapes))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_lu_kernels_are_for_hopper(arch):
    for found in (
        plan_inverse(4096, F32, known_gpu(arch)),
        plan_solution(4096, 1, F32, known_gpu(arch)),
    ):
        assert isinstance(found, NoKernel)
        assert arch in found.reason


@needs_nvrtc
def test_no_right_hand_sides():
    with gpu_target("sm_90"):
        text = lowered(linalg.solve, (4096, 4096), (4096, 0))
    assert "jax_tilekern_cuda_launch" not in text


LU_PLANS = [(plan_inverse, 512, F32), (plan_inverse, 5000, F32), (plan_inverse, 8192, F64)]
LU_PLANS += [(plan_solution, 4096, 1, F32), (plan_solution, 4352, 100, F64)]
LU_PLANS += [(plan_solution, 8192, 4096, F32)]
lu_plans = pytest.mark.parametrize(
    "call", LU_PLANS, ids=lambda call: f"{call[0].__name__} {call[1:]}"
)


@needs_nvrtc
@lu_plans
@pytest.mark.one_in(5)
def test_lu_kernels_compile_without_spills(call):
    plan = call[0](*call[1:], known_gpu("sm_90a"))
    entries = {launch.entry.name: launch.entry for launch in plan.launches}
    # The products' operands are not checked, so no kernel decides and no other takes their place.
    assert not any("decide" in name or "simt" in name for name in entries)
    own = [name for name in entries if "blocked_lu" in name or "substitution" in name]
    assert any("substitution" in name for name in own)
    for name in own:
        assert (entries[name].spill_bytes, entries[name].stack_bytes) == (0, 0)
    # A lane of the tournament's kernel holds 8 columns of four or eight rows.
    tournaments = {name: entries[name] for name in own if "pivots" in name}
    assert tournaments
    for name, entry in tournaments.items():
        rows = max(map(int, re.findall(r", (\d), (\d)>", name)[0]))
        assert entry.max_threads == 256
        assert 8 * rows * call[-1].itemsize // 4 < entry.registers <= 255


@needs_nvrtc
@lu_plans
@pytest.mark.one_in(3)
def test_the_lu_plan_stays_in_its_buffers(call):
    plan = call[0](*call[1:], known_gpu("sm_90a"))
    size, itemsize = call[1], call[-1].itemsize
    columns = size if call[0] is plan_inverse else call[2]
    sizes = [itemsize * size * size, itemsize * size * columns]
    if call[0] is plan_solution:
        sizes.append(itemsize * size * columns)
    sizes += plan.workspace_bytes
    assert_within_buffers(plan, sizes)
    tournaments = [launch for launch in plan.launches if "pivots" in launch.entry.name]
    assert len(tournaments) == 8 * math.ceil(size / 256)
    # The candidates fit one CTA.
    assert all(
        32 * launch.grid[0] <= 64 * int(launch.entry.name.split(", ")[2][0])
        for launch in tournaments
    )
    # Other kernels do not wait for prerequisites, so none of them may start early.
    waiting = "split_float32|wgmma|blocked_lu_pivots|blocked_lu_update"
    early = [launch.entry.name for launch in plan.launches if launch.overlaps]
    assert all(re.search(waiting, name) for name in early)
    assert any("pivots" in name for name in early)


# On a Hopper GPU.


def rows_of(n):
    return np.unique(np.append(np.arange(0, n, n // 32), n - 1))


def assert_inverse(a, x):
    """Rows of ``a @ x`` are those of an identity, up to the rounding of sums of n products."""
    roundoff = UNIT_ROUNDOFF[np.dtype(x.dtype)]
    a, x = np.asarray(a, np.float64), np.asarray(x, np.float64)
    # Large products take long on the host.
    rows = np.arange(len(a)) if len(a) <= 1024 else rows_of(len(a))
    error = np.abs(a[rows] @ x - np.eye(len(a))[rows]).max()
    assert error <= len(a) * roundoff * (np.abs(a[rows]) @ np.abs(x)).max()


def permuted_triangle(rng, n):
    """Without pivoting, the first pivots would be 0."""
    triangle = np.tril(rng.standard_normal((n, n)), -1) / n**0.5 + 2 * np.eye(n)
    return triangle[rng.permutation(n)]


def negative_triangle(_, n):
    """Its inverse has elements of up to 2^(n - 2); its elimination changes nothing."""
    return np.eye(n) - np.tril(np.ones((n, n)), -1)


MATRICES = {
    "random": lambda rng, n: rng.standard_normal((n, n)),
    "permuted triangle": permuted_triangle,
    "reversed identity": lambda _, n: np.eye(n)[::-1],
    "ties": lambda rng, n: rng.choice([-1.0, 1.0], (n, n)),
}


@needs_hopper
@pytest.mark.parametrize("size", [512, 1000, 4096, 5000, 8192])
@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.one_in(5)
def test_inverse(rng, x64, dtype, kind, size):
    a = jnp.asarray(MATRICES[kind](rng, size), dtype)
    with jtk.strict():
        x = jax.jit(linalg.inv)(a)
    assert_inverse(a, x)


def kernel_matrix(rng, n, ridge):
    """Values of a Gaussian kernel, whose factors are nearly singular where the points are near."""
    points = np.sort(rng.random(n))
    return np.exp(-((points[:, None] - points) ** 2) / 0.02) + ridge * np.eye(n)


HARD = {
    "unit lower, of -1": negative_triangle,
    "kernel, 1e-2": lambda rng, n: kernel_matrix(rng, n, 1e-2),
    "kernel, 1e-4": lambda rng, n: kernel_matrix(rng, n, 1e-4),
    "rows of 1e-6 to 1": lambda rng, n: (
        rng.standard_normal((n, n)) * np.geomspace(1, 1e-6, n)[:, None]
    ),
    "columns of 1e-6 to 1": lambda rng, n: rng.standard_normal((n, n)) * np.geomspace(1e-6, 1, n),
}


@needs_hopper
@pytest.mark.parametrize(
    ("size", "columns"), [(512, 1), (1000, 33), (2304, 100), (5000, 7), (8192, 256)]
)
@pytest.mark.parametrize("kind", MATRICES | HARD)
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.one_in(7)
def test_solution_is_backward_stable(rng, x64, dtype, kind, size, columns):
    """The residual does not depend on the condition number."""
    a = jnp.asarray((MATRICES | HARD)[kind](rng, size), dtype)
    # Small integers: the right-hand sides of a triangle of -1 are exact, and its solutions finite.
    b = jnp.asarray(np.asarray(a, np.float64) @ rng.integers(-2, 3, (size, columns)), dtype)
    with jtk.strict():
        x = jax.jit(linalg.solve)(a, b)
    a, x, b = (np.asarray(value, np.float64) for value in (a, x, b))
    rows = np.arange(size) if size <= 1024 else rows_of(size)
    residual = np.abs(a[rows] @ x - b[rows]).max(0)
    roundoff = UNIT_ROUNDOFF[dtype]
    assert np.all(residual <= size * roundoff * np.abs(a[rows]).sum(1).max() * np.abs(x).max(0))


@needs_hopper
@pytest.mark.parametrize(
    ("dtype", "exponent"), [(F32, 127), (F32, -125), (F64, 1023), (F64, -1021)]
)
@pytest.mark.parametrize("columns", [31, 32, 33])
def test_scales_near_the_limits(x64, dtype, exponent, columns):
    """Reciprocals of pivots are subnormal, or nearly infinite."""
    a = np.ldexp(np.eye(600, dtype=dtype), exponent)
    b = np.ldexp(np.ones((600, columns), dtype), exponent)
    np.testing.assert_array_equal(jax.jit(linalg.solve)(a, b), 1)


@needs_hopper
def test_vmap_over_right_hand_sides_is_one_call(rng):
    a, b = random(rng, (700, 700), F32), random(rng, (3, 700, 5), F32)
    mapped = jax.vmap(linalg.solve, (None, 0))
    (choice,) = jtk.explain(mapped, a, b)
    assert "15 columns" in choice.kernel
    x, a, b = (np.asarray(value, np.float64) for value in (mapped(a, b), a, b))
    bound = 700 * ROUNDOFF * np.abs(a).sum(1).max() * np.abs(x).max()
    assert np.abs(a @ x - b).max() <= bound


@needs_hopper
@pytest.mark.parametrize(
    "damage",
    [
        lambda a: a.at[:, 300].set(0),
        lambda a: jnp.zeros_like(a),
        lambda a: a.at[70, 1000].set(jnp.nan),
        lambda a: a.at[:, 257].set(jnp.inf),
        lambda a: jnp.full_like(a, jnp.nan),
    ],
    ids=["column of zeros", "zeros", "NaN", "column of infinities", "all NaN"],
)
@pytest.mark.parametrize(("n", "dtype"), [(1024, F32), (1001, F64)])
def test_what_has_no_inverse_is_not_finite(rng, x64, damage, n, dtype):
    """And the kernels end: their loops do not depend on values."""
    a = damage(random(rng, (n, n), dtype))
    for x in linalg.inv(a), linalg.solve(a, jnp.ones(n, dtype)):
        assert not np.isfinite(x).all()
        if np.isnan(a).any():
            assert np.isnan(x).any()


@needs_hopper
def test_gradient_of_a_solution(rng):
    """The gradient of ``u @ solve(a, b)`` is ``y = solve(a.T, u)`` and ``-outer(y, x)``."""
    n = 1024
    a, b, u = (random(rng, shape, F32) for shape in ((n, n), (n,), (n,)))
    of_a, of_b = jax.jit(jax.grad(lambda a, b: u @ linalg.solve(a, b), (0, 1)))(a, b)
    x = np.asarray(linalg.solve(a, b), np.float64)
    y, u, wide = (np.asarray(value, np.float64) for value in (of_b, u, a))
    residual = np.abs(wide.T @ y - u).max()
    assert residual <= n * ROUNDOFF * np.abs(wide).sum(0).max() * np.abs(y).max()
    np.testing.assert_allclose(
        of_a, -np.outer(y, x), rtol=1e-5, atol=1e-6 * np.abs(y).max() * np.abs(x).max()
    )


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
