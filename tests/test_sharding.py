"""Under ``shard_map`` and explicit meshes a gradient equals the unsharded one, or says why not.

What went silently wrong elsewhere: a primitive that binds operands with different varying axes
transposes without the sum over the axes that an operand did not vary over.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numerics import assert_equal, whole

import jax_tilekern as jtk


@pytest.fixture
def devices():
    found = jax.devices("cpu")
    assert len(found) >= 4, "conftest.py asks for four host devices"
    return found[:4]


@pytest.fixture(autouse=True)
def on_the_cpu(devices):
    """The unsharded references too."""
    with jax.default_device(devices[0]):
        yield


@pytest.fixture
def operands(rng, on_the_cpu):
    return whole(rng, 8, 4), whole(rng, 4, 12)


def plain(a, b):
    return (jnp.matmul(a, b) ** 2).sum()


SPECS = [(P("i", None), P()), (P(), P(None, "i")), (P("i", None), P("i", None)), (P(), P())]


@pytest.mark.parametrize(("a_spec", "b_spec"), SPECS[:2])
def test_shard_map_gradients(devices, operands, a_spec, b_spec):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,), devices=devices)

    def loss(a, b):
        sharded = jax.shard_map(
            lambda a, b: lax.psum((jtk.matmul(a, b) ** 2).sum(), "i"),
            mesh=mesh,
            in_specs=(a_spec, b_spec),
            out_specs=P(),
            check_vma=True,
        )
        return sharded(a, b)

    for argnums in (0, 1):
        got = jax.jit(jax.grad(loss, argnums))(*operands)
        assert_equal(got, jax.grad(plain, argnums)(*operands))
        got = jax.jit(jax.jacfwd(loss, argnums))(*operands)
        assert_equal(got, jax.grad(plain, argnums)(*operands))


def test_shard_map_with_vmap_and_second_order(devices, operands):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,), devices=devices)
    a, b = operands

    def loss(matmul, a, b):
        return (jax.vmap(matmul, (0, None))(a, b) ** 2).sum()

    def sharded(a, b):
        return jax.shard_map(
            lambda a, b: lax.psum(loss(jtk.matmul, a, b), "i"),
            mesh=mesh, in_specs=(P("i", None), P()), out_specs=P(),
        )(a, b)  # fmt: skip

    got = jax.jit(jax.hessian(sharded, 1))(a, b)
    expected = jax.hessian(functools.partial(loss, jnp.matmul), 1)(a, b)
    assert_equal(got, expected)


EXPLICIT = [
    (P("i", None), P(None, "j")),
    (P("i", None), P()),
    (P(), P()),
    (P("i", "j"), P()),
    (P(None, "i"), P("i", None)),
    (P("i", None), P(None, "i")),
    (P("i", "j"), P("j", None)),
]


@pytest.mark.parametrize(("a_spec", "b_spec"), EXPLICIT)
def test_explicit_mesh_is_right_or_raises_as_jax(devices, operands, a_spec, b_spec):
    mesh = jax.make_mesh((2, 2), ("i", "j"), devices=devices)
    with jax.set_mesh(mesh):
        a, b = (jax.device_put(x, s) for x, s in zip(operands, (a_spec, b_spec), strict=True))

        def run(matmul):
            product = jax.jit(matmul)(a, b)
            gradients = jax.jit(jax.grad(lambda a, b: (matmul(a, b) ** 2).sum(), (0, 1)))(a, b)
            return product, *gradients

        try:
            expected = run(jnp.matmul)
        except Exception as error:
            refusal = error
        else:
            refusal = None
        if refusal is not None:
            with pytest.raises(type(refusal), match=re.escape(str(refusal).split(":")[0])):
                run(jtk.matmul)
            return
        for got, wanted in zip(run(jtk.matmul), expected, strict=True):
            assert got.sharding == wanted.sharding
            assert_equal(got, wanted)
