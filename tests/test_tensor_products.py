"""``einsum``, ``tensordot``, ``inner``, ``vecdot`` and ``multi_dot`` mean what JAX's own mean."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import traced
from numerics import BF16, assert_close, random

import jax_tilekern as jtk


def einsum(subscripts, path=None):
    def call(f, *operands):
        keywords = {} if path is None or f is np.einsum else {"optimize": path}
        return f(subscripts, *operands, **keywords)

    return "einsum", call


def plain(name, **kwargs):
    return name, lambda f, *xs: f(*xs, **kwargs)


MULTI_DOT = ("multi_dot", lambda f, *xs: f(xs))

# A function's name and how it is called, and the operands' shapes.
CASES = {
    "matmul": (einsum("ij,jk"), ((4, 5), (5, 3))),
    "scores": (einsum("bqhd,bkhd->bhqk"), ((2, 4, 3, 5), (2, 6, 3, 5))),
    "values": (einsum("bhqk,bkhd->bqhd"), ((2, 3, 4, 6), (2, 6, 3, 5))),
    "two contracted in other orders": (einsum("iab,bja->ji"), ((4, 2, 3), (3, 5, 2))),
    "ellipsis": (einsum("...ij,...jk->...ik"), ((7, 1, 4, 5), (2, 5, 3))),
    "summed first": (einsum("ijl,jk->k"), ((4, 5, 2), (5, 3))),
    "diagonal": (einsum("iij,jk->ik"), ((4, 4, 5), (5, 3))),
    "outer": (einsum("i,j->ji"), ((4,), (5,))),
    "three operands": (einsum("ij,jk,kl->li"), ((4, 5), (5, 3), (3, 6))),
    "in the given order": (einsum("ij,jk,kl", [(0, 1), (0, 1)]), ((4, 5), (5, 3), (3, 6))),
    "empty": (einsum("ij,jk"), ((4, 0), (0, 3))),
    "tensordot": (plain("tensordot"), ((3, 4, 5), (4, 5, 2))),
    "one axis": (plain("tensordot", axes=1), ((3, 4, 5), (5, 2))),
    "no axes": (plain("tensordot", axes=0), ((3, 4), (5,))),
    "pairs of axes": (plain("tensordot", axes=((2, 0), (-1, 1))), ((3, 4, 5), (6, 3, 5))),
    "inner": (plain("inner"), ((2, 4, 5), (3, 5))),
    "inner of vectors": (plain("inner"), ((5,), (5,))),
    "inner with a scalar": (plain("inner"), ((), (3, 5))),
    "vecdot": (plain("vecdot"), ((7, 4, 5), (4, 5))),
    "vecdot over another axis": (plain("vecdot", axis=0), ((5, 4), (5, 1))),
    "multi_dot": (MULTI_DOT, ((4, 5), (5, 6), (6, 2))),
    "multi_dot of vectors": (MULTI_DOT, ((5,), (5, 6), (6, 7), (7,))),
}


def ours(case):
    (name, call), _ = case
    return functools.partial(call, getattr(jtk, name))


def theirs(case, module=jnp):
    (name, call), _ = case
    return functools.partial(call, getattr(module.linalg if name == "multi_dot" else module, name))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_product_is_ours(rng, case):
    operands = [random(rng, shape, np.float32) for shape in case[1]]
    products = traced(theirs(case), *operands)[1]
    assert traced(ours(case), *operands) == (products, 0)
    assert traced(jax.grad(lambda *xs: ours(case)(*xs).sum()), *operands)[1] == 0
    # And JAX's own stay JAX's.
    assert traced(theirs(case), *operands) == (0, products)


def test_keywords_reach_the_product(rng):
    x, y = random(rng, (4, 5), BF16), random(rng, (5, 3), BF16)
    for function in (
        functools.partial(jtk.einsum, "ij,jk"),
        functools.partial(jtk.tensordot, axes=1),
        lambda x, y, **kwargs: jtk.inner(x, y.T, **kwargs),
        lambda x, y, **kwargs: jtk.vecdot(x[:3], y.T, **kwargs),
    ):
        bound = functools.partial(function, precision="highest", preferred_element_type=np.float32)
        assert bound(x, y).dtype == np.float32
        (eqn,) = (e for e in jax.make_jaxpr(bound)(x, y).eqns if "tilekern" in e.primitive.name)
        assert eqn.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2
        assert eqn.params["out_dtype"] == np.float32
    many = functools.partial(jtk.multi_dot, precision="highest")
    eqns = jax.make_jaxpr(lambda x, y: many([x, y, y.T]))(x, y).eqns
    assert str(eqns).count("HIGHEST") >= 2


def test_einsum_takes_operands_with_sequences_of_labels(rng):
    x, y = random(rng, (4, 5), np.float32), random(rng, (5, 3), np.float32)
    np.testing.assert_array_equal(
        jtk.einsum(x, [0, 1], y, [1, 2], [2, 0]), jtk.einsum("ij,jk->ki", x, y)
    )


def test_weak_types_scalars_and_numpy_arrays():
    for name, args in (
        ("einsum", (",->", 2.0, 3.0)),
        ("einsum", ("i,i", np.ones(3), [1.0, 2.0, 3.0] @ np.eye(3))),
        ("tensordot", (2.0, jnp.ones(3, BF16), 0)),
        ("inner", (2, jnp.ones((2, 3), BF16))),
        ("vecdot", (np.ones(3), jnp.arange(3))),
    ):
        found, expected = getattr(jtk, name)(*args), getattr(jnp, name)(*args)
        assert jax.typeof(found) == jax.typeof(expected)
        np.testing.assert_array_equal(found, expected)


# Orders of the result that are not those of a dot_general.
ORDERS = {
    "bhqk,bkhd->bqhd": [(2, 3, 8, 16), (2, 16, 3, 4)],
    "bqhd,bkhd->bqhk": [(2, 8, 3, 4), (2, 16, 3, 4)],
    "...hqk,...khd->...qhd": [(2, 3, 8, 16), (2, 16, 3, 4)],
    "bsd,dhk->bhsk": [(2, 8, 16), (16, 3, 4)],
    "bqd,bkd->qbk": [(2, 8, 4), (2, 16, 4)],
    "ij,jk->ki": [(8, 16), (16, 4)],
}


@pytest.mark.parametrize("subscripts", ORDERS)
@pytest.mark.one_in(3)
def test_the_product_writes_the_order_that_is_asked_for(rng, subscripts):
    """The result and both gradients, compiled here and lowered for a GPU."""
    args = [rng.integers(-2, 3, shape).astype(np.float32) for shape in ORDERS[subscripts]]

    def program(module):
        def f(a, b):
            # A weight for each element: the cotangent is no constant.
            out = module.einsum(subscripts, a, b)
            return (out * jnp.arange(out.size).reshape(out.shape)).sum(), out

        return jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))

    for got, wanted in zip(
        jax.tree.leaves(program(jtk)(*args)), jax.tree.leaves(program(jnp)(*args)), strict=True
    ):
        np.testing.assert_array_equal(got, wanted)
    programs = [jax.jit(lambda *args: jtk.einsum(subscripts, *args))]
    if subscripts != "bsd,dhk->bhsk":  # A kernel merges the contracted b and s of its gradient.
        programs.append(program(jtk))
    for f in programs:
        if jax.default_backend() == "cpu":
            assert " transpose(" not in f.lower(*args).compile().as_text()
        with jtk.gpu_target("sm_90"):
            lowered = f.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        assert "jax_tilekern" in lowered
        assert "stablehlo.transpose" not in lowered


def test_an_einsum_of_two_that_is_no_product_alone(rng):
    """JAX prepares diagonals, sums of one operand and sizes of 1, and says what has no arrow."""
    a, b = rng.standard_normal((4, 4)), rng.standard_normal((4, 1))
    for subscripts in (
        "ii,ij->ij",
        "ij,ik->k",
        "ij,kj->ik",
        "...j,jk->...k",
        "ij,ik",
        "ij , ik -> k j",
    ):
        assert_close(jtk.einsum(subscripts, a, b), jnp.einsum(subscripts, a, b))


def test_einsum_takes_the_hook_of_layers(rng):
    """Attention of flax passes it, where a program has replaced ``jnp.einsum``."""
    x, called = rng.standard_normal((3, 4)).astype(np.float32), []

    def hook(*args, **kwargs):
        called.append(args)
        return jax.lax.dot_general(*args, **kwargs)

    for given in (jax.lax.dot_general, hook):
        found = jtk.einsum("ij,kj->ik", x, x, precision="highest", _dot_general=given)
        np.testing.assert_allclose(found, x @ x.T, 1e-5, 1e-5)
    assert len(called) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_outer_products_of_float64_are_rounded_once(rng, dtype):
    with jax.enable_x64(True):
        x, y = rng.standard_normal(40), rng.standard_normal(70)
        found = jax.jit(functools.partial(jtk.tensordot, axes=0, preferred_element_type=dtype))
        exact = np.outer(x, y).astype(np.float64)
        np.testing.assert_array_equal(found(x, y), jnp.asarray(exact).astype(dtype))
        text = found.trace(x, y).lower(lowering_platforms=("cuda",)).as_text()
        assert "optimization_barrier" in text


def test_outer_products_of_bfloat16_and_float16_have_the_exponents_of_both():
    """LLVM's product in float16 is infinite here, and has fewer bits of the small numbers."""
    x, y = jnp.array([1e6, -3e5, 1e-6, 3e-7], BF16), jnp.array([1e-3, 0.05, 1.1, 19.0], np.float16)
    found = jax.jit(functools.partial(jtk.tensordot, axes=0, preferred_element_type=np.float16))
    exact = np.outer(np.asarray(x, np.float64), np.asarray(y, np.float64))
    with np.errstate(over="ignore"):
        rounded = exact.astype(np.float16)
    np.testing.assert_array_equal(found(x, y), rounded)
    text = found.trace(x, y).lower(lowering_platforms=("cuda",)).as_text()
    assert "optimization_barrier" in text
