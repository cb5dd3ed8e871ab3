"""Scans whose kernels are emulated: tiles that look back, groups of them, and derivatives."""

import dataclasses
import functools

import emulated_plans
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_gpu import emulated_gpu
from nvrtc_mark import needs_emulator
from products import BF16, F32, F64, H100

import jax_tilekern as jtk
from jax_tilekern.ops.scans.combinations import combination
from jax_tilekern.ops.scans.lowering import scan_input
from jax_tilekern.plans.scans.column_scan import ColumnScan
from jax_tilekern.plans.scans.problem import Scan
from jax_tilekern.plans.scans.row_scan import RowScan
from jax_tilekern.plans.scans.short_column_scan import ShortColumnScan
from jax_tilekern.plans.scans.short_row_scan import ShortRowScan

pytestmark = needs_emulator


def composed(earlier, later):
    """Affine maps, whose order matters."""
    return [earlier[0] * later[0], later[0] * earlier[1] + later[1]]


def composition(outer, length, columns, dtype=F32, *, reverse=False, initial=False):
    inputs = (scan_input(dtype), scan_input(dtype))
    given = ("1", None) if initial else ()
    combined = combination(composed, (dtype, dtype))
    return Scan("maps", outer, length, columns, reverse, inputs, (0, 1), combined, given)


def sums(outer, length, dtype=F32, *, reverse=False):
    combined = combination(lambda earlier, later: [earlier[0] + later[0]], (dtype,))
    return Scan("sum", outer, length, 1, reverse, (scan_input(dtype),), (0,), combined, ())


def states(a, b, axis, reverse=False, first=0.0):
    """The recurrence in float64, and what its rounding errors are relative to."""
    a, b = (np.moveaxis(np.asarray(x, np.float64), axis, 0) for x in (a, b))
    order = slice(None, None, -1 if reverse else 1)
    results = []
    for x, y, state in ((a, b, first), (abs(a), abs(b), abs(first))):
        found = np.zeros_like(y)
        for t in range(len(y))[order]:
            found[t] = state = x[t] * state + y[t]
        results.append(np.moveaxis(found, 0, axis))
    return results


def assert_states(found, expected, terms, dtype=F32):
    value, magnitude = expected
    slack = 4 * (terms + 2) * 2.0**-24 * magnitude + 2.0**-100
    if dtype == BF16:
        slack = slack + 2.0**-8 * abs(value)
    assert (abs(np.asarray(found, np.float64) - value) <= slack).all()


def drawn(rng, shape, dtype=F32):
    return rng.uniform(0.5, 1, shape).astype(dtype), rng.standard_normal(shape).astype(dtype)


@pytest.mark.parametrize(
    ("scan", "group"),
    [
        # Three tiles of a row, of which the last is not whole; tiles are groups, or pairs are.
        (composition(2, 9001, 1), 1),
        (composition(2, 9001, 1, reverse=True, initial=True), 2),
        # The vectors of a single row need not end with it.
        (composition(1, 20_003, 1, initial=True), 256),
        # Rows of few elements.
        (composition(5, 37, 1, BF16, reverse=True), 256),
        (composition(3, 700, 1, F64), 256),
    ],
    ids=str,
)
@pytest.mark.parametrize("backwards", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_rows(rng, scan, group, backwards):
    run_scan(rng, scan, RowScan(scan, group), (scan.outer, scan.length), 1, backwards)


@pytest.mark.parametrize(
    ("scan", "sms"),
    [
        # More tiles than a group has.
        (composition(1, 35_000, 1 + 1), 132),
        (composition(2, 1100, 9, reverse=True, initial=True), 132),
        # A CTA computes tile after tile.
        (composition(2, 600, 35, reverse=True, initial=True), 1),
        (composition(1, 300, 70, BF16, initial=True), 1),
        (composition(3, 17, 5), 1),
        (composition(3, 17, 5), 132),
    ],
    ids=str,
)
@pytest.mark.parametrize("backwards", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_columns(rng, scan, sms, backwards):
    shape = (scan.outer, scan.length, scan.columns)
    run_scan(rng, scan, ColumnScan(scan, sms), shape, 1, backwards)


@pytest.mark.parametrize(
    "scan",
    [
        # Rows begin anywhere in a vector, and the last vector is not whole.
        composition(43, 3, 1, initial=True),
        composition(37, 5, 1, BF16, reverse=True, initial=True),
        # Vectors end with rows.
        composition(19, 8, 1, BF16),
        # Rows of several lanes, and of lanes that have several vectors.
        composition(25, 17, 1, reverse=True),
        composition(15, 127, 1, initial=True),
        composition(2, 128, 1, F64, reverse=True),
        # Rows of several columns: of a vector, or vectors of several accesses.
        composition(19, 7, 2, initial=True),
        composition(21, 5, 3, BF16, reverse=True, initial=True),
        composition(11, 40, 6, reverse=True, initial=True),
        composition(13, 2, 3, F64),
        *(
            pytest.param(
                composition(41, length, 1, dtype, reverse=length % 2 == 0, initial=length % 3 == 0),
                marks=pytest.mark.thorough,
            )
            for length in range(1, 34)
            for dtype in (F32, BF16)
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("sms", [0, 132])
def test_short_rows(rng, scan, sms):
    """Threads have the most vectors where there are enough warps."""
    shape = (scan.outer, scan.length, scan.columns)
    run_scan(rng, scan, ShortRowScan(scan, sms), shape, 1, backwards=False)


@pytest.mark.parametrize(
    "scan",
    [
        composition(3, 1, 200, initial=True),
        composition(43, 3, 2, BF16, reverse=True, initial=True),
        composition(1, 15, 131, reverse=True),
    ],
    ids=str,
)
def test_short_columns(rng, scan):
    shape = (scan.outer, scan.length, scan.columns)
    run_scan(rng, scan, ShortColumnScan(scan), shape, 1, backwards=False)


@pytest.mark.parametrize("reverse", [False, True])
def test_long_rows(rng, reverse):
    """Rows of several groups have larger tiles."""
    kernel = RowScan(sums(1, 40_004, reverse=reverse), group=2)
    assert kernel.thread_vectors == 2 * RowScan(kernel.scan).thread_vectors
    x = rng.standard_normal((1, 40_004)).astype(F32)
    with emulated_plans.record() as recorded:
        plan = kernel.plan(H100)
    (found,) = emulated_plans.run_plan(plan, recorded, [x], [(x.shape, F32)])
    ordered = x[:, ::-1] if reverse else x
    magnitude = np.cumsum(np.abs(ordered), 1, np.float64)
    ordered_found = found[:, ::-1] if reverse else found
    error = np.abs(ordered_found - np.cumsum(ordered, 1, np.float64))
    # Sums of parts are added in few steps.
    assert (error <= 100 * 2.0**-24 * magnitude).all()


def run_scan(rng, scan, kernel, shape, axis, backwards):
    dtype = scan.inputs[0].dtype
    a, b = drawn(rng, shape, dtype)
    operands, first = [a, b], 0.0
    if scan.initial:
        state = (*shape[:axis], *shape[axis + 1 :])
        first = rng.standard_normal(state).astype(dtype)
        operands.append(first)
    with emulated_plans.record() as recorded:
        plan = kernel.plan(H100)
    results = emulated_plans.run_plan(
        plan, recorded, operands, [(shape, dtype)] * 2, backwards=backwards
    )
    products = np.cumprod(np.flip(a.astype(F64), axis) if scan.reverse else a.astype(F64), axis)
    products = np.flip(products, axis) if scan.reverse else products
    first = np.asarray(first, F64)
    assert_states(results[1], states(a, b, axis, scan.reverse, first), scan.length, dtype)
    assert_states(results[0], (products, products), scan.length, dtype)


def recurrence_by_jax(a, b, *, axis, reverse=False, initial=None):
    with jtk.policy("xla"):
        return jtk.linear_recurrence(a, b, axis=axis, reverse=reverse, initial=initial)


@pytest.mark.parametrize(
    ("shape", "axis", "reverse"),
    [
        ((3, 5000), 1, False), ((2, 300, 33), 1, True), ((37, 5), 1, False), ((11, 33), 1, True),
        ((6, 4, 7), 1, True), ((6, 4, 19), 1, True),
    ],
)  # fmt: skip
def test_gradients(rng, shape, axis, reverse):
    a, b = drawn(rng, shape)
    first = rng.standard_normal(shape[:axis] + shape[axis + 1 :]).astype(F32)
    cotangent = rng.standard_normal(shape).astype(F32)

    def gradients(function):
        function = functools.partial(function, axis=axis, reverse=reverse)
        loss = lambda a, b, x: (function(a, b, initial=x) * cotangent).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1, 2)))(a, b, first)

    wanted = gradients(recurrence_by_jax)
    with emulated_gpu() as ran:
        found = gradients(jtk.linear_recurrence)
    assert len(ran) == 2
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "axis"),
    [
        ("cumsum", np.int8, (3, 200), 1), ("cumprod", np.complex64, (2, 40, 9), 1),
        ("cummax", BF16, (3, 200), 1), ("cummin", F32, (70, 8), 0),
        ("cumlogsumexp", F32, (3, 200), 1), ("cumsum", np.bool_, (3, 200), 1),
        ("cumprod", np.int8, (70, 3), 1), ("cumprod", np.complex64, (21, 5), 1),
        ("cummax", BF16, (20, 7), 1), ("cumlogsumexp", F32, (9, 31), 1),
        ("cummin", F32, (5, 4), 0),
    ],
)  # fmt: skip
def test_cumulative(rng, name, dtype, shape, axis):
    x = rng.standard_normal(shape)
    if dtype == np.complex64:
        x = np.exp(1j * x)
    x = np.array(jnp.asarray(3 * x if dtype == np.int8 else x).astype(dtype))
    if name in ("cummax", "cummin"):
        x[..., 1, 3] = np.nan
    wanted = getattr(jnp if name in ("cumsum", "cumprod") else jax.lax, name)(x, axis)
    with emulated_gpu() as ran:
        found = jax.jit(lambda x: getattr(jtk, name)(x, axis))(x)
    assert len(ran) == 1
    assert found.dtype == wanted.dtype
    wide = np.complex128 if dtype == np.complex64 else F64
    found, wanted = (np.asarray(z).astype(wide) for z in (found, wanted))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize(("shape", "axis"), [((3, 200), 1), ((5, 9, 7), 1), ((4, 90, 2), 1)])
def test_complex_numbers_are_whole_elements(rng, dtype, shape, axis):
    """Rows and columns have elements of 8 and of 16 bytes."""
    numbers = rng.integers(-9, 9, (*shape, 2)).astype(f"f{np.dtype(dtype).itemsize // 2}")
    with jax.enable_x64(dtype == np.complex128):
        with emulated_gpu() as ran:
            found = jax.jit(lambda x: jtk.cumsum(x, axis))(numbers.view(dtype)[..., 0])
        assert len(ran) == 1
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, np.cumsum(numbers.view(dtype)[..., 0], axis))


def most_and_any(x, y):
    return jnp.maximum(x[0], y[0]), x[1] | y[1], x[2] * y[2]


@pytest.mark.parametrize(("shape", "axis"), [((3, 5000), 1), ((60, 9), 0), ((30, 6), 1)])
def test_trees_of_several_types(rng, shape, axis):
    """Numbers of 8 bits are held in words, and 16-bit floats are rounded as the function says."""
    elems = (
        rng.standard_normal(shape).astype(BF16),
        rng.integers(0, 2, shape).astype(bool),
        rng.integers(-9, 9, shape).astype(np.int8),
    )
    wanted = jax.lax.associative_scan(most_and_any, elems, axis=axis)
    with emulated_gpu() as ran:
        found = jtk.associative_scan(most_and_any, elems, axis=axis)
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(x, F64), np.asarray(y, F64))
    assert len(ran) == 1


def test_values_that_no_shared_memory_holds():
    scan = composition(1, 100, 40)
    wide = dataclasses.replace(scan, inputs=scan.inputs * 16, name="wide")
    assert "bytes" in ColumnScan(wide, 132).plan(H100).reason
