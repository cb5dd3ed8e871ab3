"""Plans that no call of an emulated GPU has: sizes, arrays and orders of these tests alone."""

import emulated_plans
import numpy as np
import pytest
from emulated_gpu import SMALL_H100
from nvrtc_mark import needs_emulator
from products import BF16, F16, F32, F64, H100, INT8, INT32, Product, row_major

from jax_tilekern.plans.gemm.vector_product import vector_product_candidate
from jax_tilekern.plans.grouped_gemm.expert_rows import ExpertRows, plan_combine, plan_spread
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.linalg.blocked_cholesky import plan_cholesky
from jax_tilekern.plans.linalg.blocked_lu_plans import plan_inverse, plan_solution
from jax_tilekern.plans.linalg.small_matrices import SmallMatrices, inverse_kernel, plan_matrices
from jax_tilekern.plans.segments.few_segments import FewSegments
from jax_tilekern.plans.segments.fill import plan_fill
from jax_tilekern.plans.segments.index_sort import IndexSort, plan_bounds, plan_index_sort
from jax_tilekern.plans.segments.problem import MapOperand, MapText, SegmentReduction
from jax_tilekern.plans.segments.scanned_segments import ScannedSegments
from jax_tilekern.plans.segments.sorted_segments import SortedSegments

pytestmark = needs_emulator


def run(plan_of, operands, results, **how):
    """The results of a plan, which ``plan_of()`` compiles."""
    with emulated_plans.record() as recorded:
        plan = plan_of()
    assert not isinstance(plan, NoKernel), plan
    return emulated_plans.run_plan(plan, recorded, operands, results, **how)


def relative_error(lhs, rhs, expected):
    """The largest error of a product's element, relative to the magnitudes that make it up."""
    lhs, rhs = (x.astype(np.float64) for x in (lhs, rhs))
    magnitudes = np.maximum(np.abs(lhs) @ np.abs(rhs), 1e-300)
    return (np.abs(lhs @ rhs - expected) / magnitudes).max()


# Matrices.


def general(rng, kind, rows):
    if kind == "reversed":
        return np.eye(rows)[::-1]
    if kind == "growth":
        # The elements of the inverse of the lower factor are too large for float32.
        return np.eye(rows) - np.tril(np.ones((rows, rows)), -1)
    a = rng.standard_normal((rows, rows))
    return np.sign(a) if kind == "signs" else a


@pytest.mark.parametrize(
    ("dtype", "gpu", "rows", "columns", "kind"),
    [
        (F32, H100, 300, 0, "normal"),
        # With few SMs a panel is applied by more warps.
        (F64, SMALL_H100, 300, 33, "normal"),
        (F32, SMALL_H100, 600, 1, "reversed"),
        (F32, H100, 300, 3, "growth"),
        (F64, H100, 512, 0, "signs"),
    ],
)
@pytest.mark.thorough
def test_blocked_lu(rng, dtype, gpu, rows, columns, kind):
    a = general(rng, kind, rows).astype(dtype)
    if columns == 0:
        (x,) = run(lambda: plan_inverse(rows, dtype, gpu), [a], [(a.shape, dtype)])
        b = np.eye(rows)
    else:
        # The exact solutions are ones.
        b = np.repeat(a.sum(1, keepdims=True), columns, 1)
        plan = lambda: plan_solution(rows, columns, dtype, gpu)  # noqa: E731
        (x,) = run(plan, [a, b], [(b.shape, dtype)])
    assert relative_error(a, x, b) <= rows * np.finfo(dtype).eps / 2


def definite(rng, kind, rows):
    root = rng.standard_normal((rows, rows))
    a = root @ root.T + rows * np.eye(rows)
    if kind == "graded":
        scale = 10.0 ** (12 - 24 * np.arange(rows) / rows)
        a *= scale[:, None] * scale
    if kind == "indefinite":
        a[rows // 2, rows // 2] *= -1
    if kind == "nearly":
        a[-1, -1] = 1e-3 * a[0, 0]
    if kind == "zero":
        a[0, 0] = 0
    if kind == "infinite":
        a[1, 1] = np.inf
    return a


def factors(rng, rows, symmetrize, kind):
    """Two matrices, of which the second is of a kind, as they are read, and their factors."""
    a = np.stack([definite(rng, each, rows) for each in ("normal", kind)])
    diagonal = np.eye(rows, dtype=bool)
    # Halves differ, which shows what is read.
    lower, upper = (1.5, 0.5) if symmetrize else (1, np.nan)
    stored = np.where(diagonal, a, np.tril(lower * a, -1))
    stored += np.where(diagonal, 0, np.triu(upper * np.where(diagonal, 0, a), 1))
    stored = np.where(np.tri(rows, dtype=bool), stored, upper * a).astype(F32)
    (x,) = run(lambda: plan_cholesky(2, rows, bool(symmetrize), H100), [stored], [(a.shape, F32)])
    wide = stored.astype(np.float64)
    read = (wide + wide.mT) / 2 if symmetrize else np.tril(wide) + np.tril(wide, -1).mT
    np.testing.assert_array_equal(np.triu(x, 1), 0)
    return read, x


@pytest.mark.parametrize("rows", [64, 300, 401, 130])
@pytest.mark.parametrize("symmetrize", [0, 1])
@pytest.mark.parametrize("kind", ["normal", "graded"])
@pytest.mark.one_in(16)
def test_blocked_cholesky(rng, rows, symmetrize, kind):
    for a, x in zip(*factors(rng, rows, symmetrize, kind), strict=True):
        assert relative_error(x, x.T, a) <= rows * np.finfo(F32).eps / 2


@pytest.mark.parametrize("kind", ["indefinite", "nearly", "zero", "infinite"])
@pytest.mark.one_in(4)
def test_blocked_cholesky_of_what_is_not_positive_definite(rng, kind):
    rows = 200
    a, x = factors(rng, rows, 1, kind)
    assert relative_error(x[0], x[0].T, a[0]) <= rows * np.finfo(F32).eps / 2
    assert np.isnan(x[1][np.tri(rows, dtype=bool)]).all()


def solved_identity(a):
    """The inverses by partial pivoting in the type of the matrices, as LAPACK computes them."""
    count, n, _ = a.shape
    a, x, every = (
        a.copy(),
        np.broadcast_to(np.eye(n, dtype=a.dtype), a.shape).copy(),
        np.arange(count),
    )
    for k in range(n):
        pivot = k + np.abs(a[:, k:, k]).argmax(1)
        for m in (a, x):
            m[every, k], m[every, pivot] = m[every, pivot], m[every, k].copy()
        factor = a[:, k + 1 :, k] / np.where(a[:, k, k] == 0, 1, a[:, k, k])[:, None]
        for m in (a, x):
            m[:, k + 1 :] -= factor[..., None] * m[:, k, None]
    for k in reversed(range(n)):
        x[:, k] /= a[:, k, k, None]
        x[:, :k] -= a[:, :k, k, None] * x[:, k, None]
    return x


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("n", [1, 3, 17, 33])
@pytest.mark.one_in(4)
def test_inverses_of_small_matrices(rng, dtype, n):
    """Every second matrix is singular: two columns are equal, or one is zero."""
    count = 67
    a = rng.integers(-2, 3, (count, n, n)).astype(dtype)
    a[::2] += 4 * np.eye(n, dtype=dtype)
    a[1::4, :, n // 2] = a[1::4, :, 0] if n > 1 else 0
    a[3::4, :, n // 2] = 0
    kernel = inverse_kernel(SmallMatrices(count, n, dtype))
    (x,) = run(lambda: plan_matrices(kernel, 1, SMALL_H100), [a], [(a.shape, dtype)])
    with np.errstate(all="ignore"):
        expected = solved_identity(a)
    finite = np.isfinite(expected).all((1, 2))
    np.testing.assert_array_equal(x[~finite], expected[~finite])
    errors = [relative_error(a[i], x[i], np.eye(n)) for i in np.flatnonzero(finite)]
    assert max(errors) <= 8 * n * np.finfo(dtype).eps


@pytest.mark.parametrize(("dtype", "out"), [(INT8, INT32), (F32, F32)])
@pytest.mark.parametrize("k", [48, 40671])
@pytest.mark.parametrize("lhs_k_major", [True, False])
@pytest.mark.one_in(4)
def test_products_with_a_vector(rng, dtype, out, k, lhs_k_major):
    """With few and with many lanes, in one launch and in two."""
    rows, kind = 3, {INT8: "int8", F32: "f32"}[dtype]
    geometry = row_major(rows, 1, k, lhs_k_major=lhs_k_major, rhs_k_major=True)
    product = Product(geometry, dtype, dtype, out, kind)
    candidate = vector_product_candidate(product, SMALL_H100)
    assert len(candidate.passes) == (1 if k == 48 else 2)
    x, y = (3 * rng.standard_normal(shape) for shape in ((rows, k), (k, 1)))
    x, y = (
        np.round(each).astype(dtype) if dtype == INT8 else each.astype(dtype) for each in (x, y)
    )
    # Sums of integers are exact.
    bound = 0 if dtype == INT8 else k * np.finfo(dtype).eps / 2
    stored = x if lhs_k_major else np.ascontiguousarray(x.T)
    (z,) = run(lambda: candidate.plan(SMALL_H100), [stored, y], [((rows, 1), out)])
    assert relative_error(x, y, z) <= bound


# Segments.


def ids_of(rng, kind, edges, segments, batches=1):
    """Segments of a batch's edges, some below or beyond these, and the keys that edges have."""
    ids = rng.integers(-1, segments + 1, edges)
    ids = np.where(rng.random(edges) < 1 / 3, segments // 2, ids)
    if kind == "equal":
        ids = np.full(edges, segments // 2)
    if kind == "outside":
        ids = np.where(rng.random(edges) < 0.5, -1, segments)
    keys = ids + np.arange(edges) * batches // edges * (segments + 2)
    if batches == 1:
        far = rng.integers(0, 2**30, edges)
        keys = np.where(ids < 0, keys - far, np.where(ids >= segments, keys + far, keys))
    return ids, keys.astype(np.int32)


def sorted_by(keys, bins):
    """The stable order of keys, and where each bin begins."""
    bin_of = np.clip(keys, -1, bins - 2) + 1
    bounds = np.searchsorted(np.sort(bin_of), np.arange(bins + 1))
    return np.argsort(bin_of, kind="stable").astype(np.int32), bounds.astype(np.int32)


def sums_of(ids, segments, values):
    """Sums of the edges' rows, modulo 2**32."""
    inside = (ids >= 0) & (ids < segments)
    sums = np.zeros((segments, values.shape[1]), np.int64)
    np.add.at(sums, ids[inside], values[inside])
    return sums.astype(np.int32)


def random_rows(rng, *shape):
    return rng.integers(-(2**31), 2**31, shape).astype(np.int32)


def reduction_of(edges, segments, columns, batches=1, *, ordered=True):
    operands = (MapOperand(INT32, edges),)
    return SegmentReduction(
        "sum", edges, segments, batches, columns, operands, 0, None, INT32, INT32, ordered
    )


KINDS = ("random", "equal", "outside")


@pytest.mark.parametrize(
    ("rows", "segments"), [(3000, 60), (1, 1), (4000, 3000), (7000, 300000), (200_000, 60)]
)
@pytest.mark.one_in(5)
def test_index_sort(rng, rows, segments):
    bins = segments + 2
    sort, results = IndexSort(rows, bins), [((rows,), INT32), ((bins + 1,), INT32)]
    for kind in KINDS:
        _, keys = ids_of(rng, kind, rows, segments)
        found = run(lambda: plan_index_sort(sort, H100), [keys], results)
        for x, y in zip(found, sorted_by(keys, bins), strict=True):
            np.testing.assert_array_equal(x, y)
    # Bounds of keys that do not ascend ascend.
    (bounds,) = run(lambda: plan_bounds(sort, H100), [keys], results[1:])
    assert bounds[-1] == rows
    assert np.all(np.diff(bounds) >= 0)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(
    ("kind", "edges", "segments", "batches", "columns"),
    [
        ("random", 3000, 40, 1, 5),
        ("random", 3000, 40, 3, 20),
        ("random", 300, 2000, 2, 36),
        ("random", 300, 40, 1, 200),
        ("equal", 3000, 1, 1, 8),
        # CTAs share the columns of the parts, of few and of many workers.
        ("random", 300, 10, 1, 900),
        ("equal", 3000, 1, 1, 600),
        ("equal", 40, 7, 1, 1),
        ("outside", 500, 7, 1, 3),
        ("random", 1, 1, 1, 1),
    ],
)
@pytest.mark.one_in(21)
def test_reductions_of_sorted_edges(rng, kind, edges, segments, batches, columns, ordered):
    ids, keys = ids_of(rng, kind, edges, segments, batches)
    rows = random_rows(rng, edges, columns)
    if not ordered:
        own = np.argsort(keys, kind="stable")
        ids, keys = ids[own], keys[own]
    order, bounds = sorted_by(keys, batches * (segments + 2))
    problem = reduction_of(edges, segments, columns, batches, ordered=ordered)
    operands = [rows, *([order] if ordered else []), bounds]
    results = [((batches * segments, columns), INT32)]
    bin_of = np.clip(keys, -1, batches * (segments + 2) - 2) + 1
    at = bin_of - 1 - bin_of // (segments + 2) * 2
    expected = np.zeros((batches * segments, columns), np.int64)
    inside = (ids >= 0) & (ids < segments)
    np.add.at(expected, at[inside], rows[inside])
    (out,) = run(lambda: SortedSegments(problem, 4).plan(H100), operands, results)
    np.testing.assert_array_equal(out, expected.astype(np.int32))


@pytest.mark.parametrize("columns", [1, 5, 64])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.one_in(5)
def test_orders_and_bounds_that_are_none_access_nothing_out_of_bounds(rng, columns, ordered):
    for time in range(4):
        edges, segments, batches = (int(rng.integers(1, most)) for most in (400, 40, 4))
        bins = batches * (segments + 2)
        order, bounds = random_rows(rng, edges), random_rows(rng, bins + 1)
        if time % 2 == 0:
            bounds = rng.integers(0, 2 * edges, bins + 1).astype(np.int32)
        problem = reduction_of(edges, segments, columns, batches, ordered=ordered)
        operands = [random_rows(rng, edges, columns), *([order] if ordered else []), bounds]
        run(
            lambda problem=problem: SortedSegments(problem, 4).plan(H100),
            operands,
            [((batches * segments, columns), INT32)],
            options=emulated_plans.SANITIZED,
        )


@pytest.mark.parametrize("way", ["few", "scanned"])
@pytest.mark.parametrize(("edges", "segments", "columns"), [(3000, 5, 6), (700, 1, 1), (1, 8, 4)])
@pytest.mark.one_in(6)
def test_reductions_of_few_segments_or_edges(rng, way, edges, segments, columns):
    rows, problem = random_rows(rng, edges, columns), reduction_of(edges, segments, columns)
    kernel = FewSegments(problem, 128, SMALL_H100) if way == "few" else ScannedSegments(problem)
    for kind in KINDS:
        ids, keys = ids_of(rng, kind, edges, segments)
        (out,) = run(
            lambda: kernel.plan(SMALL_H100), [rows, keys], [((segments, columns), INT32)],
            options=emulated_plans.SANITIZED,
        )  # fmt: skip
        np.testing.assert_array_equal(out, sums_of(ids, segments, rows))


@pytest.mark.thorough
def test_generated_maps(rng):
    """Products of rows of 8 columns that edges gather and a number of each edge."""
    edges, segments, columns, count = 3000, 40, 8, 50
    operands = MapOperand(INT32, count, 0), MapOperand(INT32, edges, None, broadcast=True)
    text = MapText(("int", "int"), (), "lax::mul(x0, x1)")
    problem = SegmentReduction(
        "sum", edges, segments, 1, columns, operands, 1, text, INT32, INT32, ordered=True
    )
    table, weights = random_rows(rng, count, columns), random_rows(rng, edges, 1)
    index = rng.integers(-3, count + 3, edges).astype(np.int32)
    ids, keys = ids_of(rng, "random", edges, segments)
    inside = ((index >= 0) & (index < count))[:, None]
    values = np.where(inside, table[np.clip(index, 0, count - 1)], 0).astype(np.int64) * weights
    (out,) = run(
        lambda: SortedSegments(problem, 4).plan(H100),
        [table, weights, index, *sorted_by(keys, segments + 2)],
        [((segments, columns), INT32)],
        options=emulated_plans.SANITIZED,
    )
    np.testing.assert_array_equal(out, sums_of(ids, segments, values.astype(np.int32)))


# Rows of experts.


def places_of(rng, kind, pairs, rows):
    """The places of some pairs among the rows of these and of other pairs."""
    places = rng.permutation(rows)[:pairs].astype(np.int32)
    outside = rng.choice(np.array([-1, rows, -(2**31), 2**31 - 1], np.int32), pairs)
    return np.where(rng.random(pairs) < {"outside": 1 / 3, "dropped": 1}.get(kind, 0),
                    outside, places)  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16, INT8])
@pytest.mark.parametrize(
    ("tokens", "chosen", "columns"), [(300, 3, 40), (37, 2, 520), (50, 9, 7), (1, 1, 1)]
)
@pytest.mark.thorough
def test_rows_of_experts(rng, dtype, tokens, chosen, columns):
    for kind in ("permutation", "outside", "dropped"):
        check_rows_of_experts(rng, dtype, kind, tokens, chosen, columns)


def check_rows_of_experts(rng, dtype, kind, tokens, chosen, columns):
    # A device has all rows, and some of the tokens.
    pairs = tokens * chosen
    rows = pairs + 5
    places = places_of(rng, kind, pairs, rows)
    inside = (places >= 0) & (places < rows)
    problem = ExpertRows(tokens, chosen, rows, columns, dtype)
    x = rng.integers(-128, 128, (tokens, columns)).astype(dtype)
    results = [((rows, columns), dtype)]
    (out,) = run(lambda: plan_spread(problem, H100), [x, places], results,
                 options=emulated_plans.SANITIZED)  # fmt: skip
    # What no pair has is not written.
    expected = np.frombuffer(b"\xff" * out.nbytes, dtype).reshape(out.shape).copy()
    expected[places[inside]] = np.repeat(x, chosen, 0)[inside]
    assert out.tobytes() == expected.tobytes()
    for arrays in (1, 2) if dtype != INT8 else ():
        each = [rng.standard_normal((rows, columns)).astype(dtype) for _ in range(arrays)]
        # In the kernel's order, equal sums have equal bits.
        total = np.zeros((tokens, columns), F64 if dtype == F64 else F32)
        for i in range(chosen):
            at, valid = places[i::chosen], inside[i::chosen, None]
            for one in each:
                read = one[np.where(valid[:, 0], at, 0)].astype(total.dtype)
                total = np.where(valid, total + read, total)
        (out,) = run(
            lambda arrays=arrays: plan_combine(problem, arrays, H100), [*each, places],
            [((tokens, columns), dtype)], options=emulated_plans.SANITIZED,
        )  # fmt: skip
        assert out.tobytes() == total.astype(dtype).tobytes()


@pytest.mark.parametrize(
    ("count", "element"), [(1, F64.type(3)), (77, F16.type(-2)), (5000, F32.type(1)), (123456, 7j)]
)
def test_arrays_are_filled_with_an_element(count, element):
    element = np.asarray(element)
    expected = np.full(count, element)
    (found,) = run(
        lambda: plan_fill(count, element.tobytes(), SMALL_H100),
        [],
        [((count,), element.dtype)],
        options=emulated_plans.SANITIZED,
    )
    np.testing.assert_array_equal(found, expected)
