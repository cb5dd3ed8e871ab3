"""float0, the type of integers' tangents: accepted or refused as JAX does, and no derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_tilekern as jtk

FLOAT0 = jax.dtypes.float0
SIZES = np.array([1, 2], np.int32)


def of_lax(module):
    return lax if module is jnp else jtk


# A function of a module, jax.numpy or ours, and the shapes of its operands.
CALLS = {
    "transpose": (lambda m: m.transpose, [(2, 3)]),
    "transpose with axes": (lambda m: lambda x: m.transpose(x, (1, 0)), [(2, 3)]),
    "transpose without a permutation": (lambda m: lambda x: m.transpose(x, (1, 1)), [(2, 3)]),
    "sum": (lambda m: lambda x: m.sum(x, 0), [(2, 3)]),
    "add": (lambda m: m.add, [(2, 3), (2, 3)]),
    "matmul": (lambda m: m.matmul, [(2, 3), (3, 2)]),
    "matvec": (lambda m: m.matvec, [(2, 3), (3,)]),
    "vecmat": (lambda m: m.vecmat, [(2,), (2, 3)]),
    "dot": (lambda m: m.dot, [(3,), (3,)]),
    "vdot": (lambda m: m.vdot, [(3,), (3,)]),
    "einsum": (lambda m: lambda x, y: m.einsum("ij,jk->ki", x, y), [(2, 3), (3, 2)]),
    "tensordot": (lambda m: m.tensordot, [(2, 3), (2, 3)]),
    "inner": (lambda m: m.inner, [(2, 3), (2, 3)]),
    "vecdot": (lambda m: m.vecdot, [(2, 3), (2, 3)]),
    "ragged_dot": (
        lambda m: lambda x, w: of_lax(m).ragged_dot(x, w, SIZES),
        [(3, 4), (2, 4, 5)],
    ),
    "inv": (lambda m: m.linalg.inv, [(3, 3)]),
    "det": (lambda m: m.linalg.det, [(3, 3)]),
    "cholesky": (lambda m: m.linalg.cholesky, [(3, 3)]),
    "solve": (lambda m: m.linalg.solve, [(3, 3), (3, 3)]),
}


def outcome(function, *args):
    """The types of the results, or that of the exception."""
    try:
        return jax.tree.map(lambda x: (x.dtype, x.shape), function(*args))
    except Exception as error:
        return type(error)


def tangent(x):
    return np.zeros(x.shape, FLOAT0) if np.issubdtype(x.dtype, np.integer) else np.ones_like(x)


def jvp(f, *args):
    return jax.jvp(f, args, tuple(map(tangent, args)))


def vjp(f, *args):
    result, pullback = jax.vjp(f, *args)
    return pullback(tangent(result))


@pytest.mark.parametrize("name", CALLS)
def test_float0_operands(name):
    make, shapes = CALLS[name]
    args = [np.zeros(shape, FLOAT0) for shape in shapes]
    assert outcome(make(jtk), *args) == outcome(make(jnp), *args)


@pytest.mark.parametrize("derivative", [jvp, vjp])
@pytest.mark.parametrize("kinds", ["integers", "an integer and a float"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.one_in(9)
def test_derivatives_in_integers(name, kinds, derivative):
    make, shapes = CALLS[name]
    args = [
        np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
        + np.eye(*shape[-2:], dtype=np.int32)
        for shape in shapes
    ]
    if kinds != "integers":
        args[-1] = args[-1].astype(np.float32)
    wanted = outcome(derivative, make(jnp), *args)
    assert outcome(derivative, make(jtk), *args) == wanted
    assert "permutation" in name or isinstance(wanted, tuple)


def test_a_transpose_of_float0_under_transformations():
    x = np.zeros((4, 2, 3), FLOAT0)
    for f in (jax.vmap(jtk.transpose), jax.jit(jax.vmap(jtk.transpose))):
        assert outcome(f, x) == (FLOAT0, (4, 3, 2))
    with jtk.gpu_target("sm_90"):
        (choice,) = jtk.explain(jtk.transpose, x, platform="cuda")
    assert choice.kernel is None
    assert "float0" in choice.reason
