"""Bytes and errors inside a ``shard_map`` over some of the mesh's axes.

``test_derived.py`` has the values of each operation there.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import assert_close
from sharded import (
    AUTO,
    MESH_TYPES,
    SLACK,
    bytes_sent,
    collectives,
    devices,
    integers,
    mesh_of,
    put,
)

import jax_tilekern as jtk

pytestmark = pytest.mark.skipif(devices() is None, reason="eight CPU devices")

# Functions of an operation's local arrays: a device of ``d`` has the rows, or matrices, of one.


@pytest.fixture(autouse=True)
def plain_float32():
    """What is compared runs on a GPU where there is one."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("name", ["solve", "slogdet"])
def test_gradients_gather_a_matrix_once(rng, name):
    """Inside the ``shard_map`` a transposed system has the factors of the same matrix."""
    mesh = mesh_of((AUTO, AUTO))
    a = rng.standard_normal((8, 4, 4)).astype(np.float32) / 2 + 4 * np.eye(4, dtype=np.float32)
    arrays = [a, rng.standard_normal((8, 4, 4)).astype(np.float32)][: 1 + (name == "solve")]

    def gradient(module):
        function = getattr(module, name)

        def loss(*args):
            return (jax.tree.leaves(function(*args))[-1] ** 2).sum()

        return jax.shard_map(
            jax.grad(loss, tuple(range(len(arrays)))),
            mesh=mesh,
            in_specs=P("d"),
            out_specs=P("d"),
            axis_names={"d"},
        )

    with jax.set_mesh(mesh):
        args = [put(mesh, x, P("d", "m")) for x in arrays]
        theirs, ours = (
            jax.jit(gradient(module)).lower(*args).compile() for module in (jnp.linalg, jtk.linalg)
        )
    assert_close(list(ours(*args)), list(theirs(*args)))
    assert bytes_sent(ours) <= SLACK * bytes_sent(theirs), (collectives(ours), collectives(theirs))


@pytest.mark.parametrize("transform", ["forward", "gradient"])
@pytest.mark.parametrize(
    "specs",
    [
        (P("d", None, "m"), P(("d", "m"))),
        (P("d", None, None, "m"), P(("d", "m"))),
        (P(("d", "m")), P("d", "m")),
    ],
    ids=str,
)
def test_einsum_sends_no_more_bytes_than_jaxs(rng, specs, transform):
    """The other axis of the mesh splits the batch of one operand further."""
    mesh = mesh_of((AUTO, AUTO))
    arrays = [integers(rng, *shape) for shape in ((16, 4, 8, 8), (16, 8, 4, 8))]
    programs = []
    with jax.set_mesh(mesh):
        args = [put(mesh, x, spec) for x, spec in zip(arrays, specs, strict=True)]
        for module in (jnp, jtk):
            mapped = jax.shard_map(
                functools.partial(module.einsum, "bhqk,bkhd->bqhd"),
                mesh=mesh,
                in_specs=P("d"),
                out_specs=P("d"),
                axis_names={"d"},
            )

            def loss(*args, mapped=mapped):
                return (mapped(*args) ** 2).sum()

            program = mapped if transform == "forward" else jax.grad(loss, (0, 1))
            programs.append(jax.jit(program).lower(*args).compile())
    theirs, mine = programs
    assert bytes_sent(mine) <= SLACK * bytes_sent(theirs), (collectives(mine), collectives(theirs))


def test_what_jax_refuses_is_refused_alike():
    """A contracted dimension that an explicit axis splits beside the manual one."""
    mesh = mesh_of(MESH_TYPES["explicit"])
    with jax.set_mesh(mesh):
        x, w = put(mesh, np.ones((16, 32)), P("d", "m")), put(mesh, np.ones((32, 8)), P("m"))
        errors = []
        for product in (jnp.matmul, jtk.matmul, lax.dot, jtk.dot):
            mapped = jax.shard_map(
                product, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"), axis_names={"d"}
            )
            with pytest.raises(Exception, match="Contracting dimensions are sharded") as error:
                jax.jit(mapped)(x, w)
            errors.append(error.type)
    assert len(set(errors)) == 1


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_segments_over_one_of_two_axes(kind):
    """Each device reduces and takes rows by its own ids."""
    mesh = jax.make_mesh((2, 2), ("d", "m"), (kind,) * 2, devices=jax.devices("cpu")[:4])
    x, ids = jnp.arange(32.0).reshape(8, 4), jnp.arange(8) % 4

    def local(x, ids):
        return lax.psum(jtk.segment_sum(jtk.take(x, ids, axis=0), ids, 4), "d")

    mapped = jax.shard_map(local, in_specs=(P("d"), P("d")), out_specs=P(), axis_names={"d"})
    with jax.set_mesh(mesh):
        split = (jax.device_put(a, NamedSharding(mesh, P("d"))) for a in (x, ids))
        found = jax.jit(mapped)(*split)
    np.testing.assert_array_equal(found, x[:4] + x[4:])
