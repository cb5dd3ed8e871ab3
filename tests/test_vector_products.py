"""``dot``, ``vdot``, ``matvec``, ``vecmat``: semantics of JAX's, values of float64's, rules of one
primitive.
"""

import re
from functools import partial

import jax
import numpy as np
import pytest
from numerics import (
    BF16,
    assert_product,
    exact,
    on_gpu,
    random,
)

import jax_tilekern as jtk


def test_accuracy_is_float32s_by_default(rng):
    """Products with a vector do not go through TF32, on a GPU neither."""
    a, x = random(rng, (40, 3000), np.float32), random(rng, (3000,), np.float32)
    assert_product(jtk.matvec(a, x), a, x, "mk,k->m")
    assert_product(jtk.vdot(a[0], x), a[0], x, "k,k->")


# Transformations, of small integers and polynomials, which are exact.


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
