"""What the compiled program must not contain: transposes, copies, materialised broadcasts."""

import os
import re

import jax
import jax.numpy as jnp
import pytest

import jax_tilekern as jtk

X = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
W = jax.ShapeDtypeStruct((128, 96), jnp.bfloat16)
XS = jax.ShapeDtypeStruct((5, 64, 128), jnp.bfloat16)
WS = jax.ShapeDtypeStruct((5, 128, 96), jnp.bfloat16)


def operations(function, *args):
    """Names of the optimised program's instructions, fused ones included."""
    text = jax.jit(function).lower(*args).compile().as_text()
    return re.findall(r"= \S+ ([a-z-]+)\(", text)


def assert_only_products(function, *args, products):
    names = operations(function, *args)
    assert names.count("custom-call") == products, names
    moved = {"transpose", "copy", "broadcast", "dot", "reshape", "concatenate", "pad"}
    assert not moved & set(names), names


def test_forward():
    assert_only_products(jtk.matmul, X, W, products=1)


def test_gradients_move_nothing():
    """Each operand's gradient is one product that reads the other two where they lie."""

    def pullback(x, w, g):
        return jax.vjp(jtk.matmul, x, w)[1](g)

    g = jax.ShapeDtypeStruct((64, 96), jnp.bfloat16)
    assert_only_products(pullback, X, W, g, products=2)


def test_gradients_of_every_major_order_move_nothing():
    g = jax.ShapeDtypeStruct((64, 96), jnp.bfloat16)
    for lhs, rhs in ((0, 0), (0, 1), (1, 0), (1, 1)):
        x = X if lhs else jax.ShapeDtypeStruct(X.shape[::-1], X.dtype)
        w = jax.ShapeDtypeStruct(W.shape[::-1], W.dtype) if rhs else W

        def pullback(x, w, g, dims=(((lhs,), (rhs,)), ((), ()))):
            return jax.vjp(lambda x, w: jtk.dot_general(x, w, dims), x, w)[1](g)

        assert_only_products(pullback, x, w, g, products=2)


def test_transposed_operands_are_read_where_they_lie():
    assert_only_products(lambda x, w: jtk.matmul(w.T, x.T), X, W, products=1)
    assert_only_products(lambda x: jtk.matmul(x, x.T), X, products=1)
    assert_only_products(lambda x: jtk.matmul(jnp.swapaxes(x, 1, 2), x), XS, products=1)


def test_transposes_of_transposes_are_read_where_they_lie():
    """A kernel that read the inner transpose would need it in memory."""
    assert_only_products(lambda x, w: jtk.matmul(x.T.T, w.T.T), X, W, products=1)

    def permuted_twice(x):
        x = jnp.transpose(jnp.transpose(x, (1, 2, 0)), (2, 1, 0))  # (0, 2, 1) in all
        return jtk.matmul(x, jnp.swapaxes(x, 1, 2))

    assert_only_products(permuted_twice, XS, products=1)


@pytest.mark.parametrize(
    ("axes", "args"), [((0, None), (XS, W)), ((None, 0), (X, WS)), ((0, 0), (XS, WS))]
)
def test_vmap_is_one_call(axes, args):
    """The operand without the mapped axis is not materialised."""
    assert_only_products(jax.vmap(jtk.matmul, axes), *args, products=1)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_vmap_over_any_axis_moves_nothing(axis):
    shape = (64, 128)
    x = jax.ShapeDtypeStruct((*shape[:axis], 5, *shape[axis:]), jnp.float32)
    w = jax.ShapeDtypeStruct((128, 96), jnp.float32)
    function = jax.vmap(jtk.matmul, (axis, None))
    # A batch dimension that is innermost has no unit stride for a GPU kernel to read.
    if axis < 2 or jax.default_backend() == "cpu":
        assert_only_products(function, x, w, products=1)


def test_vmapped_matvec_is_a_matmul():
    vectors = jax.ShapeDtypeStruct((5, 128), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((96, 128), jnp.bfloat16)
    function = jax.vmap(jtk.matmul, (None, 0))
    assert_only_products(function, w, vectors, products=1)


def test_per_example_gradients_are_one_call():
    def example(w, x):
        return jtk.matmul(x, w).sum()

    names = operations(jax.vmap(jax.grad(example), (None, 0)), W, XS)
    assert names.count("custom-call") == 1
    assert "transpose" not in names


def test_outer_products_are_fused_into_what_uses_them():
    """The per-example gradients of a vector input, of which only the norms are wanted."""

    def norm(w, x):
        return (jax.grad(lambda w: jtk.matmul(x, w).sum())(w) ** 2).sum()

    text = jax.jit(jax.vmap(norm, (None, 0))).lower(W, X).compile().as_text()
    assert "64,128,96" not in text.split("ENTRY")[1], "the gradients themselves were written"


def test_source_lines_are_the_users():
    """As with JAX's own functions, no frame of the package is in a program's locations."""

    def model(x, w):
        return jtk.einsum("ij,jk->ik", jtk.matmul(x, w), w.mT) + jtk.sum(x)

    text = jax.jit(model).lower(X, W).as_text(debug_info=True)
    assert __file__ in text
    assert f"{os.sep}jax_tilekern{os.sep}" not in text
