"""Under ``shard_map`` and explicit meshes a gradient equals the unsharded one, or says why not.

What went silently wrong elsewhere: a primitive that binds operands with different varying axes
transposes without the sum over the axes that an operand did not vary over.
"""

import re

import jax
import jax.numpy as jnp
import pytest
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
