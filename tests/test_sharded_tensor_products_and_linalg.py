"""Sharded tensor products and matrices: right, and no more communication than JAX's own."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsp_linalg
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from numerics import assert_close
from sharded import (
    AUTO,
    EXPLICIT,
    SLACK,
    assert_equal_trees,
    bytes_sent,
    collectives,
    compiled_pair,
    custom_calls,
    devices,
    integers,
    mesh_of,
    put,
)

import jax_tilekern as jtk
from jax_tilekern.interop import ffi

pytestmark = pytest.mark.skipif(devices() is None, reason="eight CPU devices")

TRANSFORMS = ("forward", "gradient")


def transformed(transform, f, count):
    if transform == "forward":
        return f

    def loss(*args):
        floats = (x for x in jax.tree.leaves(f(*args)) if jnp.issubdtype(x.dtype, jnp.floating))
        return sum((x**2).sum() for x in floats)

    return jax.grad(loss, tuple(range(count)))


def assert_close_trees(got, wanted):
    assert_close(jax.tree.leaves(got), jax.tree.leaves(wanted))


def check(specs, arrays, program, transform, compare):
    """Compare a sharded program with the whole one of JAX, and with JAX's sharded one."""
    mesh = mesh_of((AUTO, AUTO))
    args = [put(mesh, x, spec) for x, spec in zip(arrays, specs, strict=True)]

    def of_module(module):
        return transformed(transform, program(module), len(arrays))

    theirs, ours = compiled_pair(mesh, of_module, args)
    compare(ours(*args), jax.jit(of_module(jnp))(*arrays))
    assert bytes_sent(ours) <= SLACK * bytes_sent(theirs), (collectives(ours), collectives(theirs))
    return ours


# Tensor products.


def einsum(subscripts):
    return lambda module: functools.partial(module.einsum, subscripts)


def multi_dot(module):
    function = jtk.multi_dot if module is jtk else jnp.linalg.multi_dot
    return lambda *arrays: function(arrays)


QUERIES = [(8, 16, 4, 8)] * 2
SCORES = [(8, 4, 16, 16), (8, 16, 4, 8)]
CHAIN = [(16, 32), (32, 64), (64, 8)]
PAIRS = [(8, 32)] * 2
PRODUCTS = {
    f"{name} {', '.join(map(str, specs))}": (program, shapes, specs)
    for name, program, shapes, every in (
        ("scores", einsum("bqhd,bkhd->bhqk"), QUERIES, [
            (P("d"), P("d")),
            (P("d", None, "m"), P("d", None, "m")),
            (P("d", "m"), P("d")),
            (P(None, None, None, "m"), P(None, None, None, "m")),
            (P(("d", "m")), P()),
        ]),
        ("values", einsum("bhqk,bkhd->bqhd"), SCORES, [
            (P("d", "m"), P("d", None, "m")),
            (P("d", None, "m"), P("d")),
            (P("d", None, None, "m"), P("d", "m")),
            (P(None, None, None, "m"), P("d", None, "m")),
        ]),
        ("heads", einsum("bsd,dhk->bshk"), [(8, 16, 32), (32, 4, 8)], [
            (P("d"), P(None, "m")),
            (P("d", None, "m"), P("m")),
            (P("d"), P("d", "m")),
        ]),
        ("batches", einsum("bsd,bdf->bsf"), [(8, 16, 32), (8, 32, 64)], [
            (P("m"), P("m", None, "d")),
            (P(None, None, "d"), P("m")),
        ]),
        ("three operands", einsum("ab,bc,cd->ad"), CHAIN, [
            (P("d"), P(None, "m"), P("m")),
            (P("d", "m"), P("m"), P()),
        ]),
        ("multi_dot", multi_dot, CHAIN, [
            (P("d"), P(None, "m"), P("m")),
            (P("m"), P("d"), P()),
        ]),
        ("tensordot", lambda module: module.tensordot, [(8, 16, 8), (16, 8, 24)], [
            (P("d"), P(None, None, "m")),
            (P("d", "m"), P("m")),
        ]),
        ("inner", lambda module: module.inner, PAIRS, [
            (P("d"), P("m")),
            (P("d", "m"), P(None, "m")),
            (P(None, "d"), P(None, "m")),
        ]),
        ("vecdot", lambda module: module.vecdot, PAIRS, [
            (P("d"), P("m")),
            (P("d", "m"), P(None, "m")),
        ]),
    )
    for specs in every
    }  # fmt: skip


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.one_in(5)
def test_tensor_products(rng, name, transform):
    program, shapes, specs = PRODUCTS[name]
    arrays = [integers(rng, *shape) for shape in shapes]
    ours = check(specs, arrays, program, transform, assert_equal_trees)
    assert "jax_tilekern_partitioned" not in ours.as_text()
    # XLA fuses the products of pairs of vectors.
    assert name.startswith("vecdot") or "jax_tilekern_cpu_" in ours.as_text()


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_einsum_with_out_sharding(rng, transform):
    """On an explicit mesh the result is sharded as asked, in the order that is asked for."""
    scores, values = (integers(rng, *shape) for shape in SCORES)
    mesh = mesh_of((EXPLICIT, EXPLICIT))
    with jax.set_mesh(mesh):
        args = put(mesh, scores, P("d", "m")), put(mesh, values, P("d", None, "m"))

        def program(module):
            return functools.partial(
                module.einsum, "bhqk,bkhd->bqhd", out_sharding=P("d", None, "m", None)
            )

        theirs, ours = (
            jax.jit(transformed(transform, program(module), 2)).lower(*args).compile()
            for module in (jnp, jtk)
        )
        got, wanted = ours(*args), theirs(*args)
        assert_equal_trees(got, wanted)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            assert jax.typeof(x).sharding == jax.typeof(y).sharding
        assert bytes_sent(ours) <= SLACK * bytes_sent(theirs)


STRASSEN = [
    (P("d"), P(None, "m")),
    (P("d", "m"), P("m")),
    (P(None, "m"), P("m", "d")),
    (P(("d", "m")), P()),
]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("specs", STRASSEN, ids=str)
@pytest.mark.one_in(4)
def test_strassen(rng, specs, transform):
    """It is partitioned like a product, and each device cuts its own part."""
    arrays = [integers(rng, 32, 32), integers(rng, 32, 64)]

    def program(module):
        return jtk.strassen_matmul if module is jtk else jnp.matmul

    ours = check(specs, arrays, program, transform, assert_equal_trees)
    products = {"forward": 1, "gradient": 3}[transform]
    assert len(custom_calls(ours, ffi.CPU_MATMUL)) == 7 * products


def test_strassen_with_out_sharding(rng):
    mesh = mesh_of((EXPLICIT, EXPLICIT))
    a, b = integers(rng, 16, 32), integers(rng, 32, 64)
    with jax.set_mesh(mesh):
        args = put(mesh, a, P("d", "m")), put(mesh, b, P("m", None))
        product = functools.partial(jtk.strassen_matmul, out_sharding=P("d", None))
        with pytest.raises(Exception, match="out_sharding"):
            jtk.strassen_matmul(*args)
        got = jax.jit(product)(*args)
        gradients = jax.jit(transformed("gradient", product, 2))(*args)
    assert_equal_trees([got, gradients], [a @ b, transformed("gradient", jnp.matmul, 2)(a, b)])
    for x, spec in zip((got, *gradients), (P("d", None), P("d", "m"), P("m", None)), strict=True):
        assert jax.typeof(x).sharding.spec == spec


# Matrices.


def of_linalg(name, jaxs=None, **options):
    """A function of our ``linalg``, or JAX's of the same name."""

    def function(module):
        found = getattr(jtk.linalg if module is jtk else jaxs or jnp.linalg, name)
        return functools.partial(found, **options)

    return function


def slogdet(module):
    return lambda a: tuple(module.linalg.slogdet(a))


def squared_by_eigh(module, a):
    w, v = module.linalg.eigh(a)
    return (v * w[..., None, :] ** 2) @ v.mT


ONE = {  # Functions of a batch of matrices.
    "inv": of_linalg("inv"),
    "det": of_linalg("det"),
    "slogdet": slogdet,
    "cholesky": of_linalg("cholesky"),
    "lu_factor": of_linalg("lu_factor", jsp_linalg),
    "qr": lambda module: lambda a: tuple(module.linalg.qr(a)),
    "svdvals": of_linalg("svdvals"),
    "eigh": lambda module: lambda a: squared_by_eigh(module, a),
    "lu": lambda module: jtk.linalg.lu if module is jtk else jax.vmap(jsp_linalg.lu),
}
TWO = {  # Functions of matrices and right-hand sides.
    "solve": of_linalg("solve"),
    "solve_triangular": of_linalg("solve_triangular", jsp_linalg, lower=True),
    "triangular_solve": of_linalg("triangular_solve", lax.linalg, left_side=True, lower=True),
}


def positive_definite(rng, *shape):
    a = rng.standard_normal(shape).astype(np.float32)
    return a @ a.mT / shape[-1] + np.eye(shape[-1], dtype=np.float32)


LARGE = {
    "inv": (ONE["inv"], [(72, 72)]),
    "det": (ONE["det"], [(72, 72)]),
    "cholesky": (ONE["cholesky"], [(72, 72)]),
    "solve": (TWO["solve"], [(72, 72), (72, 8)]),
    "inv of a batch": (ONE["inv"], [(8, 72, 72)]),
    "cholesky of a batch": (ONE["cholesky"], [(8, 72, 72)]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("spec", [P("d"), P("d", "m"), P(None, "m")], ids=str)
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.one_in(9)
def test_large_matrices(rng, name, spec, transform):
    program, shapes = LARGE[name]
    matrix, *columns = shapes
    arrays = [positive_definite(rng, *matrix)]
    arrays += [rng.standard_normal(shape).astype(np.float32) for shape in columns]
    specs = [spec, *(P(None, "m") for _ in columns)]
    check(specs, arrays, program, transform, assert_close_trees)
