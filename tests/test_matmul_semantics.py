"""``matmul`` is ``jnp.matmul`` and ``dot_general`` is ``lax.dot_general``, errors included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from numerics import BF16, on_gpu, random

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


@pytest.mark.parametrize("shapes", [
    ((3, 4), (4, 5)), ((4,), (4,)), ((4,), (4, 5)), ((3, 4), (4,)), ((2, 3, 4), (4, 5)),
    ((2, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (7, 4, 5)), ((1, 3, 4), (2, 4, 5)),
    ((1, 3, 4), (1, 4, 5)), ((3, 4), (2, 4, 5)), ((2, 3, 4), (4,)), ((4,), (2, 4, 5)),
    ((6, 1, 3, 4), (1, 7, 4, 5)), ((6, 7, 3, 4), (1, 4, 5)), ((2, 1, 3, 4), (2, 1, 4, 5)),
])  # fmt: skip
@pytest.mark.one_in(2)
def test_matmul_broadcasts_as_jnp(rng, shapes):
    a, b = (random(rng, shape, np.float32) for shape in shapes)
    same(jtk.matmul, jnp.matmul, a, b)
    same(jax.jit(jtk.matmul), jnp.matmul, a, b)


@pytest.mark.parametrize("types", [(np.float32, np.int32), (BF16, np.float32), (np.int8, np.int8),
                                   (np.int8, np.float16), (np.float32, bool)])  # fmt: skip
@pytest.mark.parametrize("preferred", [None, np.float32])
def test_matmul_promotes_as_jnp(rng, types, preferred):
    if on_gpu() and types[0] is types[1] is np.int8 and preferred:
        pytest.skip("XLA crashes on int8 x int8 -> float32")
    a, b = (jnp.asarray(rng.integers(0, 3, shape).astype(t))
            for shape, t in zip([(3, 4), (4, 5)], types, strict=True))  # fmt: skip
    ours = functools.partial(jtk.matmul, preferred_element_type=preferred)
    theirs = functools.partial(jnp.matmul, preferred_element_type=preferred)
    same(ours, theirs, a, b)


def test_matmul_takes_what_jnp_takes():
    weak = jnp.full((3, 4), 2.0), jnp.full((4, 5), 3.0)
    same(jtk.matmul, jnp.matmul, *weak)
    same(jtk.matmul, jnp.matmul, weak[0], jnp.ones((4, 5), jnp.bfloat16))
    same(jtk.matmul, jnp.matmul, np.ones((3, 4), np.float32), np.ones(4, np.float32))
    same(jtk.matmul, jnp.matmul, weak[0], jnp.ones((4, 5), jnp.int32))


@st.composite
def dot_generals(draw):
    """Operand shapes and dimension numbers of a random contraction, empty ones included."""
    size = st.integers(0, 5) if draw(st.booleans()) else st.integers(1, 9)
    batch, contracting = (
        draw(st.lists(size, max_size=2)),
        draw(st.lists(size, max_size=2)),
    )
    shapes, batch_dims, contracting_dims = [], [], []
    for _ in range(2):
        free = draw(st.lists(size, max_size=2))
        total = len(batch) + len(contracting) + len(free)
        order = draw(st.permutations(range(total)))
        shape = [0] * total
        for position, value in zip(order, [*batch, *contracting, *free], strict=True):
            shape[position] = value
        shapes.append(tuple(shape))
        batch_dims.append(tuple(order[: len(batch)]))
        contracting_dims.append(tuple(order[len(batch) : len(batch) + len(contracting)]))
    return shapes, (tuple(contracting_dims), tuple(batch_dims))


@given(dot_generals(), st.sampled_from([np.float32, BF16, np.int8]), st.integers(0, 2**32 - 1))
def test_dot_general_on_random_dimension_numbers(case, dtype, seed):
    shapes, dimension_numbers = case
    rng = np.random.default_rng(seed)
    a, b = (jnp.asarray(rng.integers(-3, 4, shape).astype(dtype)) for shape in shapes)
    same(
        lambda a, b: jtk.dot_general(a, b, dimension_numbers),
        lambda a, b: lax.dot_general(a, b, dimension_numbers),
        a,
        b,
    )


@given(dot_generals(), st.integers(0, 2**32 - 1))
def test_gradients_on_random_dimension_numbers(case, seed):
    shapes, dimension_numbers = case
    rng = np.random.default_rng(seed)
    a, b = (jnp.asarray(rng.integers(-3, 4, shape).astype(np.float32)) for shape in shapes)

    def gradients(dot_general):
        def loss(a, b):
            return (dot_general(a, b, dimension_numbers) ** 2).sum()

        return jax.jit(jax.grad(loss, (0, 1)))(a, b)

    for ours, theirs in zip(gradients(jtk.dot_general), gradients(lax.dot_general), strict=True):
        np.testing.assert_array_equal(ours, theirs)  # small integers: every product is exact


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
