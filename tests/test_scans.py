"""What the descriptions of scans do not draw: long sequences, errors, signatures, choices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import BF16, F16, F32
from test_emulated_scans import assert_states, composed, drawn, states

import jax_tilekern as jtk

C64 = np.dtype(np.complex64)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((1, 200_001), 1), ((300_000,), 0), ((2, 9000, 33), 1), ((5000, 2, 3), 0), ((70, 4), 0)],
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_long_sequences(rng, shape, axis, dtype):
    a, b = drawn(rng, shape, dtype)
    first = rng.standard_normal(shape[:axis] + shape[axis + 1 :]).astype(dtype)
    for reverse in (False, True):
        found = jtk.linear_recurrence(a, b, axis=axis - b.ndim, reverse=reverse, initial=first)
        expected = states(a, b, axis, reverse, np.asarray(first, np.float64))
        assert found.dtype == dtype
        assert_states(found, expected, shape[axis], dtype)


@pytest.mark.parametrize("length", [*range(2, 34), 63, 127, 129])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.one_in(4)
def test_short_sequences(rng, length, reverse):
    """Sums of integers are exact, and NaN stays in its sequence."""
    for shape, axis in (((1001, length), 1), ((length, 1001), 0), ((131, length, 3), 1)):
        x = rng.integers(-9, 9, shape)
        x[(5,) * len(shape[:axis]) + (-1,)] = 99
        ordered = np.flip(x, axis) if reverse else x
        sums, most = np.cumsum(ordered, axis), np.maximum.accumulate(ordered, axis)
        sums, most = (np.flip(z, axis) if reverse else z for z in (sums, most))
        for dtype in (np.int8, np.int16, np.int32, F32):
            found = jtk.cumsum(x.astype(dtype), axis, reverse=reverse)
            np.testing.assert_array_equal(found, sums.astype(dtype))
        given = np.where(x == 99, np.nan, x).astype(BF16)
        wanted = np.where(most == 99, np.nan, most)
        np.testing.assert_array_equal(jtk.cummax(given, axis, reverse).astype(F32), wanted)


def test_same_bits_in_repeated_runs(rng):
    a, b = drawn(rng, (3, 40_000, 4))
    run = jax.jit(lambda a, b: jtk.linear_recurrence(a, b, axis=1))
    first = run(a, b)
    assert all((run(a, b) == first).all() for _ in range(3))


def test_operands_broadcast_and_are_promoted(rng):
    a, b = drawn(rng, (6, 3))
    found = jtk.linear_recurrence(a[0], b.astype(F16), axis=0, initial=2)
    assert found.dtype == F32
    same = jtk.linear_recurrence(
        np.broadcast_to(a[0], b.shape), b.astype(F16).astype(F32), axis=0, initial=np.full(3, 2.0)
    )
    np.testing.assert_array_equal(found, same)
    assert jtk.linear_recurrence(a, b.astype(C64), axis=1).dtype == C64
    assert jtk.linear_recurrence(jnp.ones((0, 3)), jnp.ones((0, 3)), axis=0).shape == (0, 3)


def test_an_infinite_input_stays_where_it_is(rng):
    """What comes before an infinite or undefined number does not see it."""
    a, b = drawn(rng, (2, 3000))
    b[0, 1500], b[1, 1500] = np.inf, np.nan
    found = np.asarray(jtk.linear_recurrence(a, b, axis=1))
    assert np.isfinite(found[:, :1500]).all()
    assert np.isinf(found[0, 1500])
    assert np.isnan(found[1, 1500:]).all()


def test_derivatives_of_ties_and_infinite_numbers_are_finite():
    x = jnp.array([-jnp.inf, -jnp.inf, 1.0, 1.0, 0.0])
    for name in ("cummax", "cummin", "cumlogsumexp"):
        function = getattr(jtk, name)
        gradient = jax.grad(lambda x, f=function: f(x)[2:].sum())(x)
        assert jnp.isfinite(gradient).all(), name
    # A factor of zero does not hide the derivatives of the others.
    gradient = jax.grad(lambda x: jtk.cumprod(x)[-1])(jnp.array([2.0, 0.0, 3.0]))
    np.testing.assert_array_equal(gradient, [0, 6, 0])


def log_sums(x, y):
    most = jnp.maximum(x["most"], y["most"])
    shares = (z["sum"] * jnp.exp(z["most"] - most) for z in (x, y))
    return {"most": most, "sum": sum(shares)}


def test_trees_of_arrays(rng):
    x = rng.standard_normal((3, 50)).astype(F32)
    found = jtk.associative_scan(log_sums, {"most": x, "sum": np.ones_like(x)}, axis=1)
    sums = found["most"] + jnp.log(found["sum"])
    np.testing.assert_allclose(sums, jtk.cumlogsumexp(x, 1), rtol=1e-5, atol=1e-5)


def test_derivatives_of_several_arrays_are_jaxs(rng):
    a, b = drawn(rng, (5, 9))

    def gradients(scan):
        def loss(a, b):
            products, states = scan(composed, (a, b), axis=1)
            return (products * states).sum()

        return jax.grad(loss, (0, 1))(a, b)

    for x, y in zip(*map(gradients, (jtk.associative_scan, jax.lax.associative_scan)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


SHIFT = jnp.arange(3.0)


@pytest.mark.parametrize(
    ("function", "is_elementwise"),
    [
        (jnp.add, True), (jax.jit(jnp.logaddexp), True), (lambda x, y: x + y + 1, True),
        (lambda x, y: jnp.where(y > 0, x, y), True), (lambda x, y: x + jnp.flip(y, 1), False),
        (lambda x, y: x * y.sum(1, keepdims=True), False), (lambda x, y: x + y + SHIFT, False),
        (lambda x, y: jnp.swapaxes(jnp.swapaxes(x, 1, 2), 1, 2) + y, False),
        (jnp.matmul, False),
    ],
)  # fmt: skip
def test_which_functions_are_a_part_of_the_kernel(rng, function, is_elementwise):
    """Others, which mix the elements of an array, are JAX's."""
    x = rng.standard_normal((4, 3, 3)).astype(F32)
    text = str(jax.make_jaxpr(lambda x: jtk.associative_scan(function, x))(x))
    assert ("tilekern_associative_scan" in text) == is_elementwise
    found, wanted = (f(function, x) for f in (jtk.associative_scan, jax.lax.associative_scan))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_function_that_reads_a_value_of_the_program_is_jaxs(rng):
    x = rng.standard_normal(7).astype(F32)
    scaled = jax.jit(lambda x, y: jtk.associative_scan(lambda a, b: a + b + 0 * y, x))
    np.testing.assert_allclose(scaled(x, 2.0), np.cumsum(x), rtol=1e-5)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "axis", lambda x: jtk.cumsum(x, 2)),
        (ValueError, "negative axes", lambda x: jtk.cummax(x, -1)),
        (TypeError, "bool", lambda x: jtk.cummax(x > 0)),
        (NotImplementedError, "out", lambda x: jtk.cumsum(x, 0, None, x)),
    ],
)
def test_errors_of_jax(error, message, call):
    with pytest.raises(error, match=message):
        call(jnp.ones((4, 5)))


def sums(x):
    return jtk.cumsum(x, x.ndim - 1)


def recurrence(x):
    return jtk.linear_recurrence(x, x, axis=1)


@pytest.mark.defaults
@pytest.mark.parametrize(
    ("function", "shape", "is_kernel"),
    [
        (sums, (4096, 4096), True), (sums, (1 << 24,), True), (sums, (1000,), True),
        (sums, (100_000,), True), (recurrence, (4, 256, 64), True),
        # A launch that clears what tiles publish takes longer than XLA's scan.
        (sums, (9000,), False),
    ],
)  # fmt: skip
def test_what_is_predicted_to_be_faster(function, shape, is_kernel):
    x = jax.ShapeDtypeStruct(shape, F32)
    with jtk.gpu_target("H200"):
        (choice,) = jtk.explain(function, x)
    assert (choice.kernel is not None) == is_kernel, choice


def test_recurrences_of_symbolic_sizes():
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("batch, 12"), np.float32)
    exported = jax.export.export(jax.jit(lambda x: jtk.linear_recurrence(x, x, axis=1)))(shape)
    x = jnp.linspace(-1, 1, 36).reshape(3, 12)
    expected = jtk.linear_recurrence(x, x, axis=1)
    np.testing.assert_allclose(exported.call(x), expected, rtol=1e-5, atol=1e-6)
