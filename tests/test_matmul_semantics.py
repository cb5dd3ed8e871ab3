"""``matmul`` is ``jnp.matmul`` and ``dot_general`` is ``lax.dot_general``, errors included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numerics import assert_equal, on_gpu, random, whole

import jax_tilekern as jtk

TOLERANCE = {"rtol": 2e-2 if on_gpu() else 1e-5, "atol": 2e-2 if on_gpu() else 1e-5}


def same(ours, theirs, *args):
    got, expected = ours(*args), theirs(*args)
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert got.weak_type == expected.weak_type
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(expected, np.float32), **TOLERANCE
    )


def test_matmul_takes_what_jnp_takes():
    weak = jnp.full((3, 4), 2.0), jnp.full((4, 5), 3.0)
    same(jtk.matmul, jnp.matmul, *weak)
    same(jtk.matmul, jnp.matmul, weak[0], jnp.ones((4, 5), jnp.bfloat16))
    same(jtk.matmul, jnp.matmul, np.ones((3, 4), np.float32), np.ones(4, np.float32))
    same(jtk.matmul, jnp.matmul, weak[0], jnp.ones((4, 5), jnp.int32))


BAD = [
    (lambda f: f(jnp.ones((3, 4)), jnp.ones((5, 6)), (((1,), (0,)), ((), ()))), TypeError),
    (lambda f: f(jnp.ones((3, 4)), jnp.ones((4, 6)), (((-1,), (0,)), ((), ()))), TypeError),
    (lambda f: f(jnp.ones((3, 4)), jnp.ones((4, 6)), (((2,), (0,)), ((), ()))), TypeError),
    (lambda f: f(jnp.ones((3, 4)), jnp.ones((4, 6)), (((1, 1), (0, 0)), ((), ()))), TypeError),
    (lambda f: f(jnp.ones((3, 4)), jnp.ones((2, 6)), (((), ()), ((0,), (0,)))), TypeError),
    (lambda f: f(jnp.ones((3, 4)), jnp.ones((4, 6)), (((1,), ()), ((), ()))), TypeError),
]


@pytest.mark.parametrize(("lhs", "rhs"), [((4, 8), (8, 3)), ((8,), (8, 3)), ((4, 8), (8,))])
def test_dimension_numbers_of_dot(rng, lhs, rhs):
    x, y = (jnp.asarray(rng.normal(size=shape), np.float32) for shape in (lhs, rhs))
    wanted = lax.dot_general(x, y, None, precision="highest")
    np.testing.assert_allclose(jtk.dot_general(x, y, None, precision="highest"), wanted, atol=1e-5)
    numbers = (((x.ndim - 1,), (0,)), ((), ()))
    np.testing.assert_array_equal(
        jtk.fp8_dot_general(x, y, None), jtk.fp8_dot_general(x, y, numbers)
    )
    with pytest.raises(ValueError, match="dimension_numbers must be specified"):
        jtk.dot_general(jnp.ones((2, 4, 8)), jnp.ones((2, 8, 3)), None)


@pytest.mark.parametrize(("call", "expected"), BAD)
def test_dot_general_raises_as_lax(call, expected):
    with pytest.raises(expected) as theirs:
        call(lax.dot_general)
    with pytest.raises(type(theirs.value)) as ours:
        call(jtk.dot_general)
    assert str(ours.value) == str(theirs.value)
    with pytest.raises(type(theirs.value)):
        jax.jit(lambda: call(jtk.dot_general))()


@pytest.mark.parametrize("shapes", [((3, 4), (5, 6)), ((2, 3, 4), (3, 4, 5)), ((), (4, 5)),
                                    ((3, 4), ())])  # fmt: skip
def test_matmul_raises_as_jnp(shapes):
    a, b = (jnp.ones(shape) for shape in shapes)
    with pytest.raises((TypeError, ValueError)) as theirs:
        jnp.matmul(a, b)
    with pytest.raises(type(theirs.value)) as ours:
        jtk.matmul(a, b)
    assert str(ours.value) == str(theirs.value)


def test_traced_dimension_numbers_are_refused():
    x = jnp.ones((3, 3))
    with pytest.raises(jax.errors.TracerIntegerConversionError):
        jax.jit(lambda d: jtk.dot_general(x, x, (((d,), (0,)), ((), ()))))(1)


# -- Gradients, export and threads


@pytest.fixture
def matrices(rng):
    return whole(rng, 6, 8), whole(rng, 8, 4)


def mm(a, b):
    return jtk.matmul(a, b, precision="highest")


def reference(a, b):
    return jnp.matmul(a, b, precision="highest")


def test_gradient_with_preferred_type(rng):
    a, b = (whole(rng, *shape, dtype=jnp.bfloat16) for shape in ((6, 8), (8, 4)))
    got = jax.grad(lambda a: jtk.matmul(a, b, preferred_element_type=np.float32).sum())(a)
    expected = jax.grad(lambda a: jnp.matmul(a, b, preferred_element_type=np.float32).sum())(a)
    assert got.dtype == jnp.bfloat16
    assert_equal(got, expected)


def test_export_with_symbolic_shapes_falls_back(matrices):
    a, b = matrices
    (rows,) = jax.export.symbolic_shape("rows")
    shape = jax.ShapeDtypeStruct((rows, a.shape[1]), a.dtype)
    exported = jax.export.export(jax.jit(mm))(shape, b)
    assert_equal(exported.call(a, b), reference(a, b))


@pytest.mark.defaults  # A policy holds for a thread.
def test_concurrent_calls(rng):
    """One compiled executable, many threads."""
    from concurrent.futures import ThreadPoolExecutor

    a = [random(rng, (150, 70), np.float32) for _ in range(8)]
    b = random(rng, (70, 130), np.float32)
    run = jax.jit(mm)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda x: np.asarray(run(x, b)), a * 10))
    for x, got in zip(a * 10, results, strict=True):
        np.testing.assert_array_equal(got, run(x, b))
    assert on_gpu() or len(results) == 80
