"""The primitive is closed under JAX's transformations, alone and in combination."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from numerics import assert_equal, check_derivatives, on_gpu, random, whole

import jax_tilekern as jtk

# Small integers and polynomials, which are exact in float32 at its full precision on any backend.
DIMENSION_NUMBERS = [
    (((1,), (0,)), ((), ())),
    (((0,), (0,)), ((), ())),
    (((1,), (1,)), ((0,), (0,))),
    (((0, 2), (1, 2)), ((1,), (0,))),
    (((), ()), ((0,), (2,))),
    (((0, 1), (1, 0)), ((), ())),
]
AXES = [(0, None), (None, 0), (0, 0), (1, 2), (2, 0), (3, None), (None, 3), (3, 3)]


def ours(a, b, dimension_numbers):
    return jtk.dot_general(a, b, dimension_numbers, precision="highest")


def theirs(a, b, dimension_numbers):
    return lax.dot_general(a, b, dimension_numbers, precision="highest")


@pytest.fixture
def cubes(rng):
    """Two operands whose three dimensions may be contracted with one another freely."""
    return whole(rng, 5, 5, 5, largest=2), whole(rng, 5, 5, 5, largest=2)


def loss(dot_general, dimension_numbers):
    return lambda a, b: (dot_general(a, b, dimension_numbers) ** 2).sum()


@pytest.mark.parametrize("dimension_numbers", DIMENSION_NUMBERS)
class TestEveryContraction:
    @pytest.mark.one_in(2)
    def test_derivatives(self, cubes, dimension_numbers):
        check_derivatives(lambda a, b: ours(a, b, dimension_numbers), cubes)

    def test_jvp_and_vjp(self, rng, cubes, dimension_numbers):
        tangents = tuple(whole(rng, *x.shape) for x in cubes)
        for f in (ours, theirs):
            out = jax.jvp(lambda a, b, f=f: f(a, b, dimension_numbers), cubes, tangents)
            _, pullback = jax.vjp(lambda a, b, f=f: f(a, b, dimension_numbers), *cubes)
            gradients = pullback(out[0])
            if f is ours:
                expected = out, gradients
            else:
                assert_equal(expected, (out, gradients))

    @pytest.mark.parametrize("axes", AXES)
    @pytest.mark.one_in(8)
    def test_vmap(self, rng, cubes, dimension_numbers, axes):
        """Over each operand and axis, with more than one element mapped, and its gradient."""
        a, b = (
            x if axis is None else whole(rng, *x.shape[:axis], 3, *x.shape[axis:])
            for x, axis in zip(cubes, axes, strict=True)
        )

        def mapped(f, a, b):
            product = functools.partial(f, dimension_numbers=dimension_numbers)
            gradient = jax.grad(loss(f, dimension_numbers), (0, 1))
            return (
                jax.vmap(product, axes)(a, b),
                jax.vmap(product, axes, -1)(a, b),
                jax.vmap(gradient, axes)(a, b),
            )

        got, expected = (jax.jit(functools.partial(mapped, f))(a, b) for f in (ours, theirs))
        assert_equal(got, expected)

    def test_nested_vmap(self, rng, cubes, dimension_numbers):
        a, b = whole(rng, 2, *cubes[0].shape, 3), whole(rng, 3, *cubes[1].shape)
        for f in (ours, theirs):
            inner = jax.vmap(lambda a, b, f=f: f(a, b, dimension_numbers), (3, 0))
            out = jax.vmap(inner, (0, None))(a, b)
            if f is ours:
                expected = out
            else:
                assert_equal(expected, out)

    @pytest.mark.one_in(3)
    def test_second_order(self, cubes, dimension_numbers):
        def curvature(f):
            first = jax.grad(loss(f, dimension_numbers), (0, 1))
            return jax.grad(lambda a, b: sum(jnp.sum(g**2) for g in first(a, b)), (0, 1))

        got, expected = (jax.jit(curvature(f))(*cubes) for f in (ours, theirs))
        assert_equal(got, expected)


@pytest.fixture
def matrices(rng):
    return whole(rng, 6, 8), whole(rng, 8, 4)


def mm(a, b):
    return jtk.matmul(a, b, precision="highest")


def reference(a, b):
    return jnp.matmul(a, b, precision="highest")


def scalar(f):
    return lambda a, b: (f(a, b) ** 2).sum()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradients_have_the_operands_types(rng, dtype):
    a, b = whole(rng, 6, 8, dtype=dtype), whole(rng, 8, 4)

    def gradient(f):
        return jax.grad(lambda a, b: f(a, b).astype(np.float32).sum(), (0, 1))(a, b)

    assert_equal(gradient(jtk.matmul), gradient(jnp.matmul))


def test_gradient_with_preferred_type(rng):
    a, b = (whole(rng, *shape, dtype=jnp.bfloat16) for shape in ((6, 8), (8, 4)))
    got = jax.grad(lambda a: jtk.matmul(a, b, preferred_element_type=np.float32).sum())(a)
    expected = jax.grad(lambda a: jnp.matmul(a, b, preferred_element_type=np.float32).sum())(a)
    assert got.dtype == jnp.bfloat16
    assert_equal(got, expected)


def test_complex_gradients_through_the_fallback(rng):
    a, b = (whole(rng, *shape) + 1j * whole(rng, *shape) for shape in ((5, 6), (6, 4)))

    def gradient(f):
        return jax.grad(lambda a: (f(a, b) ** 2).sum().imag)(a)

    assert_equal(gradient(mm), gradient(reference))


def test_export_round_trip(matrices):
    exported = jax.export.export(
        jax.jit(jax.grad(scalar(mm), (0, 1))), disabled_checks=jtk.export_checks()
    )
    loaded = jax.export.deserialize(exported(*matrices).serialize())
    assert_equal(loaded.call(*matrices), jax.grad(scalar(reference), (0, 1))(*matrices))


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
