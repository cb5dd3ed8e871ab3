"""Kernels of selection, emulated on a CPU, against JAX's own, bit for bit."""

import dataclasses

import emulated_plans
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from emulated_gpu import emulated_gpu
from jax import lax
from nvrtc_mark import needs_emulator
from products import BF16, F16, F32, F64, H100

import jax_tilekern as jtk
from jax_tilekern.plans.gpu import known_gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.policy import policy
from jax_tilekern.plans.selection.order_statistics import (
    OrderStatistics,
    plan_order_statistics,
)
from jax_tilekern.plans.selection.radix_sort import Control, RadixSort, radix_sort_candidate
from jax_tilekern.plans.selection.searchsorted import Searches, plan_searchsorted
from jax_tilekern.plans.selection.sort_rows import plan_sort_rows
from jax_tilekern.plans.selection.sorted_rows import SortedRows
from jax_tilekern.plans.selection.tile import Tile
from jax_tilekern.plans.selection.top_k import plan_top_k
from jax_tilekern.plans.selection.top_k_problem import MAX_K, TopK
from jax_tilekern.plans.selection.top_k_segments import plan_segments
from jax_tilekern.plans.selection.top_k_tiles import levels_of, plan_tiles

pytestmark = [
    needs_emulator,
    pytest.mark.usefixtures("x64"),
]
INTEGERS = tuple(
    np.dtype(x) for x in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
)
ORDERED = (F64, F32, BF16, F16, *INTEGERS)
KINDS = ("bits", "equal", "special", "spread")


def run(plan_of, operands, results, **how):
    """The results of a plan, which ``plan_of()`` compiles."""
    with emulated_plans.record() as recorded, policy("kernels"):
        plan = plan_of()
    assert not isinstance(plan, NoKernel), plan
    return emulated_plans.run_plan(plan, recorded, operands, results, **how)


def elements(rng, kind, shape, dtype):
    """Random elements, of which many are equal, all are, some are special, or few are equal."""
    if kind == "spread" and dtype not in INTEGERS:
        return rng.standard_normal(shape).astype(dtype)
    if kind in ("bits", "spread"):
        words = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
        x = words.view(dtype)[..., 0]
        if dtype in INTEGERS:
            return x
        # XLA takes subnormal numbers for zeros on a CPU. Comparisons of a NaN may warn.
        with np.errstate(invalid="ignore"):
            subnormal = np.abs(x) < ml_dtypes.finfo(dtype).smallest_normal
        return np.where(subnormal, dtype.type(0), x)
    if kind == "equal":
        return np.full(shape, 3, dtype)
    x = rng.integers(0, 20, shape).astype(dtype)
    if kind == "special" and dtype not in INTEGERS:
        for value in (np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0):
            x[rng.random(shape) < 0.1] = value
    return x


def with_bits(x):
    """Return numbers in the order of ``x``; XLA changes bits of a NaN of bfloat16."""
    return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32) if x.dtype == BF16 else x


def drawn(rng, *choices):
    """Return one of each sequence; another ``number`` of a case is another draw."""
    return [choice[rng.integers(len(choice))] for choice in choices]


def assert_same_bits(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        own = np.asarray(theirs)
        unsigned = f"u{own.dtype.itemsize}"
        np.testing.assert_array_equal(ours.view(unsigned), own.view(unsigned))


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(
    ("rows", "columns", "k"),
    [
        (5, 33, 33), (1, 1, 1), (9, 128, 8), (3, 1000, 40), (3, 1000, 700), (2, 4096, 2048),
        (1, 16384, 3), (2, 20_000, 17), (1, 50_001, MAX_K), (1, 300_000, 1000), (37, 3, 2),
        (21, 8, 8), (9, 31, 1), (9, 32, 30),
    ],
)  # fmt: skip
@pytest.mark.one_in(4)
def test_top_k(rng, number, rows, columns, k):
    dtype, kind = drawn(rng, ORDERED, KINDS)
    x = elements(rng, kind, (rows, columns), dtype)
    results = [((rows, k), dtype), ((rows, k), np.dtype(np.int32))]
    how = {"backwards": bool(rng.integers(2))}
    found = run(lambda: plan_top_k(TopK(rows, columns, k, dtype), H100), [x], results, **how)
    order = np.asarray(lax.top_k(with_bits(x), k)[1])
    assert_same_bits(found, (np.take_along_axis(x, order, 1), order))


@pytest.mark.parametrize("kind", ["spread", "sorted", "equal"])
@pytest.mark.parametrize(
    ("dtype", "rows", "columns", "k"),
    [
        (F32, 2, 8000, 64), (BF16, 1, 40_000, 20), (np.dtype(np.int32), 1, 20_000, 256),
        (F64, 1, 20_000, 30), (F32, 1, 16_384, 380),
    ],
)  # fmt: skip
def test_bounds_of_threads(rng, kind, dtype, rows, columns, k):
    """Few elements of a tile reach the bound, or too many where all are equal."""
    x = elements(rng, "spread" if kind == "sorted" else kind, (rows, columns), dtype)
    x = np.sort(x) if kind == "sorted" else x
    results = [((rows, k), dtype), ((rows, k), np.dtype(np.int32))]
    found = run(lambda: plan_tiles(TopK(rows, columns, k, dtype), H100), [x], results)
    order = np.asarray(lax.top_k(with_bits(x), k)[1])
    assert_same_bits(found, (np.take_along_axis(x, order, 1), order))


@pytest.mark.parametrize("dtype", ORDERED, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(4)
def test_segments(rng, dtype, kind):
    """Where elements are equal, candidates are too many."""
    # All lanes of a warp have a segment, or 8.
    rows, columns, k = 2, 40_001, int(rng.choice([3, 30]))
    x = elements(rng, kind, (rows, columns), dtype)
    problem = TopK(rows, columns, k, dtype)
    results = [((rows, k), dtype), ((rows, k), np.dtype(np.int32))]
    found = run(lambda: plan_segments(problem, H100), [x], results)
    order = np.asarray(lax.top_k(with_bits(x), k)[1])
    assert_same_bits(found, (np.take_along_axis(x, order, 1), order))


@pytest.mark.parametrize(
    ("rows", "columns", "k", "by_segments"),
    [
        (1, 2**24, 1000, True),
        (16, 2**20, 400, True),
        (1, 2**20, 100, True),
        (64, 151_936, 20, False),
        (1, 2**18, 20, False),
        # Tiles find few elements in less time.
        (1, 2**22, 50, False),
        # There would be more candidates than are sorted, or too many segments.
        (4, 2**22, 2000, False),
        (1, 2**25, 1000, False),
    ],
)
def test_segments_are_instead_of_many_launches(rows, columns, k, by_segments):
    plan = plan_top_k(TopK(rows, columns, k, F32), H100)
    assert ("segments" in plan.reason) == by_segments


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (3, 1), (5, 33), (7, 200), (2, 300), (3, 1000), (2, 2048), (1, 4000), (1, 8100), (37, 3),
        (21, 8), (9, 13), (9, 31),
    ],
)  # fmt: skip
@pytest.mark.one_in(6)
def test_sort_rows(rng, number, rows, columns):
    dtype, kind = drawn(rng, ORDERED, KINDS)
    order, (values, indices) = drawn(
        rng, ("ascending", "reversed", "descending"), ((True, False), (False, True), (True, True))
    )
    x = elements(rng, kind, (rows, columns), dtype)
    problem = SortedRows(rows, columns, dtype, order, values, indices)
    check_sort(problem, lambda: plan_sort_rows(problem, H100), x, bool(rng.integers(2)))


@pytest.mark.parametrize("dtype", ORDERED, ids=str)
@pytest.mark.parametrize("columns", [2, 7, 16, 32])
@pytest.mark.one_in(4)
def test_rows_that_share_a_warp(rng, dtype, columns):
    """NaN, zeros and equal elements among rows, and the order of both functions."""
    x = elements(rng, "special", (41, columns), dtype)
    k = columns // 2
    results = [((41, k), dtype), ((41, k), np.dtype(np.int32))]
    found = run(lambda: plan_top_k(TopK(41, columns, k, dtype), H100), [x], results)
    order = np.asarray(lax.top_k(with_bits(x), k)[1])
    assert_same_bits(found, (np.take_along_axis(x, order, 1), order))
    problem = SortedRows(41, columns, dtype, "descending", True, True)
    check_sort(problem, lambda: plan_sort_rows(problem, H100), x, False)


@pytest.mark.parametrize("dtype", [F64, F32, np.dtype(np.int32)], ids=str)
@pytest.mark.parametrize("columns", [700, 2048, 4001])
def test_elements_that_are_spread(rng, dtype, columns):
    """Rows of which few elements share a part of the range, zeros of both signs among them."""
    x = elements(rng, "spread", (2, columns), dtype)
    x[1, :: columns // 9] = 0
    if dtype not in INTEGERS:
        x[1, 5 :: columns // 9] = -0.0
    x[0] = np.sort(x[0])
    (order,) = drawn(rng, ("ascending", "reversed", "descending"))
    problem = SortedRows(2, columns, dtype, order, True, True)
    check_sort(problem, lambda: plan_sort_rows(problem, H100), x)


def check_sort(problem, plan_of, x, backwards=False):
    """Run a plan of a sort, and compare its results with those of ``lax.sort``."""
    order, values, indices = problem.order, problem.values, problem.indices
    types = [x.dtype] * values + [np.dtype(np.int32)] * indices
    found = run(plan_of, [x], [(x.shape, t) for t in types], backwards=backwards)
    own = x[:, ::-1] if order == "descending" else x
    columns_of = np.arange(x.shape[1], dtype=np.int32)
    columns_of = np.broadcast_to(columns_of[::-1] if order == "descending" else columns_of, x.shape)
    expected = np.asarray(lax.sort((with_bits(own), columns_of), num_keys=1)[1])
    if order != "ascending":
        expected = expected[:, ::-1]
    expected = (np.take_along_axis(x, expected, 1), expected)
    assert_same_bits(found, expected[not values : 1 + indices])


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("dtype", ORDERED, ids=str)
@pytest.mark.one_in(12)
def test_radix_sort(rng, number, dtype):
    (results,) = drawn(rng, ((True, False), (False, True), (True, True)))
    sizes = (3, 1), (2, 1023), (1, 1024), (2, 1025), (1, 8192), (2, 4000), (1, 2100)
    for i, (rows, columns) in enumerate(sizes):
        kind = KINDS[(i + number) % len(KINDS)]
        (order,) = drawn(rng, ("ascending", "reversed", "descending"))
        x = elements(rng, kind, (rows, columns), dtype)
        if kind == "equal":
            x[0, -1] = 1
        elif kind == "bits" and dtype in INTEGERS:
            # Digits that all elements share are skipped.
            x &= (rng.integers(0, 2, dtype.itemsize, np.uint8) * 255).view(dtype)
        problem = SortedRows(rows, columns, dtype, order, *results)
        check_sort(problem, lambda p=problem: side_by_side(p), x, number == 1)


@pytest.mark.parametrize("dtype", [np.dtype(np.int64), np.dtype(np.uint64), F64], ids=str)
@pytest.mark.parametrize("kind", ["spread", "runs", "long runs", "crowded", "few values", "nan"])
@pytest.mark.one_in(6)
def test_rows_of_64_bits_are_sorted_by_their_upper_digits(rng, kind, dtype):
    columns = 3000
    (order,) = drawn(rng, ("ascending", "reversed", "descending"))
    x = rng.integers(0, 2**64, (2, columns), np.uint64)
    low = x & np.uint64(2**24 - 1)
    if kind in ("runs", "long runs"):
        # Elements of a run share 40 bits, and are in descending order.
        length = 32 if kind == "runs" else 33
        x = np.repeat(x[:, ::length], length, 1)[:, :columns] >> np.uint64(24) << np.uint64(24)
        x |= np.sort(low)[:, ::-1]
    elif kind == "crowded":
        x = low | x & np.uint64(7 << 40)
    elif kind == "few values":
        x = rng.choice(x[0, :5], x.shape)
    if dtype == F64:
        # XLA takes subnormal numbers for zeros, so there are none.
        x = (x & ~np.uint64(1 << 62) | np.uint64(1 << 61)).view(np.float64)
        if kind == "spread":
            x = rng.standard_normal(x.shape)
        if kind == "nan":
            x[:, ::7] = -np.nan
            x[:, ::11] = -0.0
            x[:, 1::11] = 0.0
    problem = SortedRows(*x.shape, dtype, order, True, bool(rng.integers(2)))
    check_sort(problem, lambda: side_by_side(problem), x.view(dtype))


def side_by_side(problem):
    """Plan a radix sort whose tiles, where there are eight, run side by side.

    They find counts of tiles that look back, too. Otherwise those before have ended.
    """
    plan = RadixSort(problem, Tile(256, 4), 0).plan(H100)
    cleared, counted, *sorts = plan.launches
    if sorts[0].grid[0] % 8 == 0:
        sorts = [dataclasses.replace(launch, cluster=(8, 1, 1)) for launch in sorts]
    return dataclasses.replace(plan, launches=(cleared, counted, *sorts))


@pytest.mark.parametrize(("dtype", "columns"), [(F32, 16_385), (np.dtype(np.int64), 8193)], ids=str)
@pytest.mark.one_in(2)
def test_long_rows(rng, dtype, columns):
    x = elements(rng, "bits", (1, columns), dtype)
    problem = SortedRows(1, columns, dtype, "descending", False, True)
    check_sort(problem, lambda: plan_sort_rows(problem, H100), x)


@pytest.mark.parametrize("indices", [False, True])
@pytest.mark.parametrize("dtype", [F64, F32, BF16, np.dtype(np.int8)], ids=str)
@pytest.mark.parametrize("rows", [1, 8])
def test_long_rows_are_sorted_by_what_is_predicted_faster(rows, dtype, indices):
    taken = set()
    for columns in (16_385, 2**20, 2**24, 2**28):
        problem = SortedRows(rows, columns, dtype, "ascending", not indices, indices)
        with policy("auto"):
            found = plan_sort_rows(problem, known_gpu("H200"))
        ours, xla = found.predicted_us
        assert isinstance(found, NoKernel) == (xla < ours)
        taken |= {columns} - ({columns} if isinstance(found, NoKernel) else set())
    # CUB's sort of a very long row of bytes moves as many.
    assert 2**20 in taken
    assert rows == 1 or {2**24, 2**28} <= taken


@pytest.mark.parametrize(("rows", "columns"), [(1, 2**18), (1, 2**20), (1, 2**28), (64, 2**14)])
@pytest.mark.parametrize(("count", "num_keys"), [(2, 1), (2, 2), (3, 1)])
def test_several_arrays_are_sorted_by_what_is_predicted_faster(rows, columns, count, num_keys):
    structs = [jax.ShapeDtypeStruct((rows, columns), F32)] * count
    with policy("auto"), jtk.gpu_target("H200"):
        found, *sorts = jtk.explain(lambda *x: jtk.sort_operands(x, num_keys=num_keys), *structs)
    ours, xla = found.predicted_us
    is_xlas = found.reason.startswith("XLA")
    assert is_xlas == (xla < ours)
    assert is_xlas or len(sorts) == num_keys
    # CUB moves the payload of one long row with its key.
    if (rows, columns) in ((1, 2**20), (1, 2**28)):
        assert is_xlas == (columns == 2**28 and count == 2 and num_keys == 1)


@pytest.mark.parametrize("dtype", ORDERED, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_parts_of_rows(rows, dtype):
    for columns in (16_385, 2**20, 2**31 - 1):
        problem = SortedRows(rows, columns, dtype, "ascending", True, True)
        found = radix_sort_candidate(problem, H100)
        assert not isinstance(found, NoKernel)
        parts, length = found.parts(H100)
        assert 0 < columns - (parts - 1) * length <= length
        control = Control(problem, found.tiles)
        assert found.tiles * found.tile.columns >= columns
        # Every part of the workspace ends where the next one begins.
        assert control.differing >= 4 * dtype.itemsize
        assert control.failed - control.differing == 8 * rows
        assert 4 * rows <= control.counts - control.failed <= 4 * (rows + 1)
        assert control.slots(0) - control.counts == 4 * 256 * rows * dtype.itemsize
        assert control.slots(1) - control.slots(0) == 4 * 256 * rows * found.tiles
        assert control.bytes == control.slots(dtype.itemsize * (1 + (dtype.itemsize == 8)))


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize(
    ("rows", "columns"), [(3, 1), (5, 33), (2, 1024), (2, 3000), (1, 9000), (1, 16_384)]
)
@pytest.mark.one_in(6)
def test_order_statistics(rng, number, rows, columns):
    dtype, kind, indices = drawn(rng, ORDERED, KINDS, (False, True))
    x = elements(rng, kind, (rows, columns), dtype)
    if dtype not in INTEGERS:
        # Rows that have one element that is no number, and rows without.
        x = np.where(np.isnan(with_bits(x)), dtype.type(-0.0), x)
        x[0, columns // 2] = -np.nan
    ranks = rng.integers(-1, columns + 1, 7).astype(np.int32)
    ranks[3] = ranks[2]
    problem = OrderStatistics(rows, columns, len(ranks), dtype, indices)
    shape = (rows, len(ranks))
    results = [(shape, dtype), (shape, np.dtype(np.int32))][: 1 + indices]
    how = {"backwards": bool(rng.integers(2))}
    found = run(lambda: plan_order_statistics(problem, H100), [x, ranks], results, **how)
    order = np.broadcast_to(np.arange(columns, dtype=np.int32), x.shape)
    clipped = np.clip(ranks, 0, columns - 1)
    values, order = (np.array(y)[:, clipped] for y in lax.sort((x, order), num_keys=1))
    if dtype not in INTEGERS:
        values[0], order[0] = np.nan, 0
    assert_same_bits(found, (values, order)[: 1 + indices])


SORTS = {
    "two keys": (lambda x, y, z: lax.sort((x, y, z), 0, num_keys=2), 2),
    "a key": (lambda x, y, z: lax.sort((x, y, z)), 1),
    "a sort": (lambda x, *_: jnp.sort(x, 0), 1),
    "an argsort": (lambda x, *_: jnp.argsort(x), 1),
    "a batch": (jax.vmap(lambda x, *_: jnp.argsort(x)), 1),
    "lexsort": (lambda x, y, _: jnp.lexsort((y, x)), 2),
    # Cumulative sums besides, as many as JAX's function has.
    "unique": (lambda x, *_: jtk.unique(x, size=9, return_inverse=True), 1),
}


@pytest.mark.parametrize("name", SORTS)
def test_sorts_of_several_operands(rng, name):
    operands = [jnp.asarray(elements(rng, "special", (9, 70), x)) for x in (F32, BF16, ORDERED[5])]
    function, sorts = SORTS[name]
    expected = jax.jit(function)(*operands)
    with emulated_gpu() as ran, jtk.patch():
        found = jax.block_until_ready(jax.jit(function)(*operands))
    assert sum(plan.name.startswith("sort") for plan in ran) == sorts
    results = jax.tree.map(np.asarray, [found, expected])
    assert_same_bits(*map(jax.tree.leaves, results))


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize(("count", "queries"), [(1, 5), (33, 1025), (2048, 3000), (4095, 7)])
@pytest.mark.one_in(6)
def test_searchsorted(rng, number, count, queries):
    dtype, kind, side, is_sorted = drawn(rng, ORDERED, KINDS, ("left", "right"), (True, False))
    a, v = (elements(rng, kind, (size,), dtype) for size in (count, queries))
    a = np.asarray(lax.sort(a)) if is_sorted else a
    problem = Searches(count, queries, dtype, side == "right")
    results = [(v.shape, np.dtype(np.int32))]
    found = run(lambda: plan_searchsorted(problem, H100), [a, v], results)
    assert_same_bits(found, [jnp.searchsorted(a, v, side)])


def test_rows_of_16384(rng):
    x = elements(rng, "bits", (1, 16_384), F32)
    problem = SortedRows(1, 16_384, F32, "ascending", True, True)
    results = [(x.shape, F32), (x.shape, np.dtype(np.int32))]
    found = run(lambda: plan_sort_rows(problem, H100), [x], results)
    columns = np.arange(16_384, dtype=np.int32)[None]
    assert_same_bits(found, lax.sort((x, columns), num_keys=1))


@pytest.mark.parametrize("k", [1, 20, 256, MAX_K])
@pytest.mark.parametrize("columns", [16385, 70_001, 2**24 + 1, 2**31 - 1])
@pytest.mark.parametrize("rows", [1, 64])
def test_tiles_have_all_columns(rows, columns, k):
    levels = levels_of(TopK(rows, columns, k, F32), H100)
    for level, after in zip(levels, [*levels[1:], None], strict=True):
        last = level.columns - (level.tiles - 1) * level.length
        assert 0 < last <= level.length <= level.tile.columns
        assert level.found == sum(min(k, n) for n in (*[level.length] * (level.tiles - 1), last))
        assert (after.columns if after else k) == level.found
    assert levels[-1].tiles == 1


def test_what_no_kernel_covers():
    assert "at most 2048" in plan_top_k(TopK(1, 9000, 2049, F32), H100).reason
    assert "bool" in plan_top_k(TopK(1, 9, 1, np.dtype(bool)), H100).reason
    assert "CTAs" in plan_top_k(TopK(2**31, 9, 1, F32), H100).reason
    for rows, columns in ((1, 2**31), (2**20, 2**30)):
        problem = SortedRows(rows, columns, F32, "ascending", True, True)
        assert "columns and CTAs" in plan_sort_rows(problem, H100).reason


@pytest.mark.parametrize("dtype", [F64, F32, BF16, np.dtype(np.int8)], ids=str)
@pytest.mark.one_in(4)
def test_kernels_do_not_spill(dtype):
    with policy("kernels"):
        plans = [
            *(plan_top_k(TopK(64, 100_000, k, dtype), H100) for k in (20, 1000)),
            *(plan_segments(TopK(1, 2**24, k, dtype), H100) for k in (30, 1000)),
            *(
                plan_top_k(TopK(64, columns, 8, dtype), H100)
                for columns in (8, 100, 500, 1000, 16_384)
            ),
            *(
                plan_sort_rows(SortedRows(64, columns, dtype, "ascending", True, True), H100)
                for columns in (31, 100, 2000, 4000, 2**24)
            ),
            plan_order_statistics(OrderStatistics(64, 10_000, 2, dtype, True), H100),
            plan_searchsorted(Searches(5000, 7000, dtype, True), H100),
        ]
    for plan in plans:
        assert not isinstance(plan, NoKernel), plan
        for launch in plan.launches:
            assert launch.entry.spill_bytes == launch.entry.stack_bytes == 0, plan


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("columns", "is_sorted"), [(32, True), (128, True), (1000, False)])
def test_medians_of_short_rows_are_those_of_sorted_rows(columns, is_sorted, dtype):
    x = jax.ShapeDtypeStruct((2**21 // columns, columns), dtype)
    with policy("auto"), jtk.gpu_target("H200"):
        found = jtk.explain(lambda x: jtk.median(x, 1), x)
    search, *sorts = found
    assert (search.reason == "a sort of the rows is predicted as fast") == is_sorted
    assert [y.kernel is not None for y in sorts] == [True] * is_sorted
