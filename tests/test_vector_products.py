"""``dot``, ``vdot``, ``matvec``, ``vecmat``: semantics of JAX's, values of float64's, rules of one
primitive.
"""

import functools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import (
    BF16,
    UNIT_ROUNDOFF,
    assert_equal,
    assert_product,
    exact,
    on_gpu,
    random,
    whole,
)

import jax_tilekern as jtk

TYPES = [np.float32, np.float64, BF16, np.float16, np.int8]
PAIRS = [
    (jtk.dot, jnp.dot),
    (jtk.vdot, jnp.vdot),
    (jtk.matvec, jnp.matvec),
    (jtk.vecmat, jnp.vecmat),
]
SIZES = [(1, 1), (1, 5000), (3, 4), (37, 129), (128, 96), (513, 64), (5, 1), (64, 1024)]


def wide(dtype):
    """The type to ask for, so that products of bytes do not wrap in a byte."""
    return np.int32 if dtype == np.int8 else None


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("k", [1, 3, 17, 1000, 4096, 70001])
@pytest.mark.one_in(6)
def test_values_of_dot(rng, x64, dtype, k):
    x, y = random(rng, (k,), dtype), random(rng, (k,), dtype)
    for f in (jtk.dot, jtk.vdot, jtk.matmul):
        out = jax.jit(functools.partial(f, preferred_element_type=wide(dtype)))(x, y)
        assert_product(out, x, y, "k,k->")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("m", "k"), SIZES)
@pytest.mark.one_in(8)
def test_values_of_matvec_in_both_orders(rng, x64, dtype, m, k):
    a, x = random(rng, (m, k), dtype), random(rng, (k,), dtype)
    rows = functools.partial(jtk.matvec, preferred_element_type=wide(dtype))
    columns = functools.partial(jtk.vecmat, preferred_element_type=wide(dtype))
    # The vector by the matrix's rows, and by its columns: where the matrix lies, and transposed.
    for f in (rows, lambda a, x: columns(x, a.T)):
        assert_product(jax.jit(f)(a, x), a, x, "mk,k->m")
    transposed = jnp.asarray(np.asarray(a).T.copy())
    for f in (lambda a, x: columns(x, a), lambda a, x: rows(a.T, x)):
        assert_product(jax.jit(f)(transposed, x), transposed, x, "km,k->m")


@pytest.mark.parametrize(
    ("a_batch", "x_batch"), [((3,), (3,)), ((3,), ()), ((), (3,)), ((2, 1), (1, 5)), ((2, 3), (3,))]
)
def test_batches_broadcast(rng, a_batch, x_batch):
    a, x = whole(rng, *a_batch, 33, 40), whole(rng, *x_batch, 40)
    expected = (np.asarray(a) @ np.asarray(x)[..., None])[..., 0]
    for ours in (
        jtk.matvec(a, x, precision="highest"),
        jtk.vecmat(x, a.mT, precision="highest"),
    ):
        assert_equal(ours, expected)


def test_accuracy_is_float32s_by_default(rng):
    """Products with a vector do not go through TF32, on a GPU neither."""
    a, x = random(rng, (40, 3000), np.float32), random(rng, (3000,), np.float32)
    assert_product(jtk.matvec(a, x), a, x, "mk,k->m")
    assert_product(jtk.vdot(a[0], x), a[0], x, "k,k->")


def test_many_elements(rng):
    x, y = (jnp.asarray(rng.random(10_000_001, np.float32)) for _ in range(2))
    reference = float(np.dot(exact(x), exact(y)))
    ours, theirs = (abs(float(f(x, y)) - reference) / reference for f in (jtk.vdot, jnp.vdot))
    assert ours <= max(theirs, 8 * UNIT_ROUNDOFF[np.dtype(np.float32)])
    np.testing.assert_array_equal(jtk.vdot(x, y), jtk.vdot(x, y))


def test_nan_and_infinities(rng):
    a, x = rng.standard_normal((8, 999)).astype(np.float32), np.ones(999, np.float32)
    a[0, 998], a[1, 3], a[2, 500] = np.nan, np.inf, -np.inf
    expected = a.astype(np.float64).sum(1)
    for out in (jtk.matvec(a, x), jtk.vecmat(x, np.ascontiguousarray(a.T))):
        for test in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(test(np.asarray(out)), test(expected))


@pytest.mark.parametrize("name", ["dot", "vdot", "matvec", "vecmat"])
def test_complex_is_conjugated_as_jaxs(rng, name):
    ours, theirs = getattr(jtk, name), getattr(jnp, name)
    x, a = (whole(rng, *shape) + 1j * whole(rng, *shape) for shape in ((7,), (7, 7)))
    arguments = {"matvec": (a, x), "vecmat": (x, a)}.get(name, (x, a[0]))
    for left, right in (arguments, (arguments[0].real, arguments[1])):
        assert_equal(ours(left, right), theirs(left, right))
        assert ours(left, right).dtype == np.complex64

    def gradient(f):
        return jax.grad(lambda left: (f(left, arguments[1]) ** 2).sum().imag)(arguments[0])

    assert_equal(gradient(ours), gradient(theirs))


@pytest.mark.parametrize("x64_enabled", [False, True])
@pytest.mark.one_in(2)
def test_types_are_jaxs(x64_enabled):
    types = [np.float32, BF16, np.float16, np.int8, np.int32, np.bool_, np.complex64]
    with jax.enable_x64(x64_enabled):
        for ours, theirs in PAIRS:
            for left in types:
                for right in (*types, None):
                    x = jnp.zeros((4, 4) if ours is jtk.matvec else 4, left)
                    y = jnp.zeros((4, 4) if ours is jtk.vecmat else 4, right or left)
                    # No type: a weak one.
                    y = y if right else 1.0 * y if ours is jtk.dot else y
                    got, expected = jax.eval_shape(ours, x, y), jax.eval_shape(theirs, x, y)
                    assert (got, got.weak_type) == (expected, expected.weak_type)


@pytest.mark.parametrize(("m", "k"), [(0, 3), (3, 0), (0, 0)])
def test_empty(m, k):
    out = jtk.matvec(jnp.zeros((m, k)), jnp.zeros(k))
    np.testing.assert_array_equal(out, np.zeros(m))
    assert jtk.vdot(jnp.zeros(0), jnp.zeros(0)) == 0


# Transformations, of small integers and polynomials, which are exact.


@pytest.fixture
def arguments(rng):
    a, x = whole(rng, 6, 6, largest=1), whole(rng, 6, largest=1)
    return {"dot": (a[0], x), "vdot": (a, a.T), "matvec": (a, x), "vecmat": (x, a)}


# What the compiled program holds, and which kernel it is.


def assert_only_products(function, *args, products=1):
    text = jax.jit(function).lower(*args).compile().as_text()
    names = re.findall(r"= \S+ ([a-z-]+)\(", text)
    assert names.count("custom-call") == products, names
    moved = {"transpose", "copy", "broadcast", "dot", "reshape", "concatenate", "pad", "reduce"}
    assert not moved & set(names), names


A = jax.ShapeDtypeStruct((96, 128), np.float32)
X = jax.ShapeDtypeStruct((128,), np.float32)


def test_each_is_one_product():
    y = jax.ShapeDtypeStruct((96,), np.float32)
    assert_only_products(jtk.matvec, A, X)
    assert_only_products(jtk.vecmat, y, A)
    assert_only_products(lambda a, y: jtk.matvec(a.T, y), A, y)
    if not on_gpu():  # There, short dot products are XLA's.
        assert_only_products(jtk.dot, X, X)
        assert_only_products(jtk.vdot, A, A)


@pytest.mark.defaults
def test_strided_dot_products_are_left_to_xla_on_cpus():
    columns = jax.ShapeDtypeStruct((64, 8), np.float32)
    mapped = jax.vmap(jtk.dot, (1, 1))
    (choice,) = jtk.explain(mapped, columns, columns, platform="cpu")
    assert choice.kernel is None
    assert "unless they are contiguous" in choice.reason
    rows = jax.ShapeDtypeStruct((8, 128), np.float32)
    with jtk.policy("kernels"):
        (choice,) = jtk.explain(jax.vmap(jtk.dot), rows, rows, platform="cpu")
    assert "dot" in choice.kernel


@pytest.mark.parametrize("subscripts", ["kb,kb->b", "bk,kb->b", "abk,abk->ba", "k,k->"])
@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_dot_products_in_any_order(rng, subscripts, dtype):
    sizes = {"a": 3, "b": 7, "k": 1000}
    inputs, _ = subscripts.split("->")
    operands = [random(rng, tuple(map(sizes.get, x)), dtype) for x in inputs.split(",")]
    found = jax.jit(partial(jtk.einsum, subscripts, preferred_element_type=np.float32))(*operands)
    expected = np.einsum(subscripts, *map(exact, operands))
    bound = 1000 * 2**-24 * np.einsum(subscripts, *(np.abs(exact(x)) for x in operands))
    assert np.all(np.abs(exact(found) - expected) <= bound)
