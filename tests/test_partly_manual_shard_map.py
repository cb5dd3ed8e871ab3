"""Inside a ``shard_map`` over some of the mesh's axes each operation is XLA's own, and right."""

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
from operations import BY_ROWS, MATRICES, OPERATIONS, arrays_of
from sharded import (
    AUTO,
    EXPLICIT,
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


def global_arrays(rng, name):
    """Both devices' operands: those by rows lie behind each other, others are the same."""
    letters = OPERATIONS[name][2]
    pairs = zip(letters, arrays_of(rng, name), arrays_of(rng, name), strict=True)
    return [np.concatenate([x, y]) if letter in BY_ROWS else x for letter, x, y in pairs]


def specs_of(name):
    return tuple(P("d") if letter in BY_ROWS else P() for letter in OPERATIONS[name][2])


def with_a_dimension(function):
    """A number becomes an array, of which every device has an element."""

    def call(*args):
        result = function(*args)
        return result[None] if result.ndim == 0 else result

    return call


def by_rows(name):
    """The function of global arrays, one part after the other, on one device."""
    function = with_a_dimension(OPERATIONS[name][1])

    def call(*args):
        halves = (
            (x[: len(x) // 2], x[len(x) // 2 :]) if spec == P("d") else (x, x)
            for x, spec in zip(args, specs_of(name), strict=True)
        )
        return jnp.concatenate([function(*part) for part in zip(*halves, strict=True)])

    return call


def results(f, count):
    """The function's value and gradients."""
    loss = jax.grad(lambda *args: (f(*args).astype(jnp.float32) ** 2).sum(), tuple(range(count)))
    return jax.jit(lambda *args: (f(*args), loss(*args)))


@pytest.fixture(autouse=True)
def plain_float32():
    """What is compared runs on a GPU where there is one."""
    with jax.default_matmul_precision("highest"):
        yield


# The types of the mesh's axes, and which axis splits columns. JAX refuses an explicit one for some.
LAYOUTS = {
    f"{name}, columns over {along}": (types, along)
    for name, types in MESH_TYPES.items()
    for along in (None, "m")
    if along is None or types[1] == AUTO
}


def mapped_over_d(function, name, mesh):
    return jax.shard_map(
        function, mesh=mesh, in_specs=specs_of(name), out_specs=P("d"), axis_names={"d"}
    )


SEGMENTS = ("segment_sum", "segment_max", "segment_reduce", "take")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.one_in(16)
def test_values_and_gradients(rng, name, layout):
    """Over ``d``; the other axis of the mesh splits columns, or nothing."""
    types, along = LAYOUTS[layout]
    if name.startswith("ragged_dot") and types[1] == EXPLICIT:
        pytest.skip("JAX needs out_sharding on a mesh with explicit axes")
    if name == "fuse" and EXPLICIT in types:
        pytest.skip("with explicit axes nothing is fused")
    arrays, mesh = global_arrays(rng, name), mesh_of(types)
    wanted = results(by_rows(name), len(arrays))(*arrays)
    ours = results(mapped_over_d(with_a_dimension(OPERATIONS[name][0]), name, mesh), len(arrays))
    with jax.set_mesh(mesh):
        args = [
            put(mesh, x, P(*(spec or (None,)), *[along] * (x.ndim > 1)))
            for x, spec in zip(arrays, specs_of(name), strict=True)
        ]
        got = ours(*args)
        calls = jtk.explain(ours, *args)
    assert_close(jax.tree.leaves(got), jax.tree.leaves(wanted))
    # Those of segments are XLA's on a CPU.
    assert calls or name in (*SEGMENTS, "top_k")
    assert all(call.kernel is None for call in calls)
    assert not calls or any("shard_map" in call.reason for call in calls)


@pytest.mark.parametrize("name", ["solve", "slogdet"])
def test_gradients_gather_a_matrix_once(rng, name):
    """Inside the ``shard_map`` a transposed system has the factors of the same matrix."""
    mesh = mesh_of((AUTO, AUTO))
    arrays = global_arrays(rng, name)

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


@pytest.mark.parametrize("along", [1, 2], ids="axis {}".format)
@pytest.mark.parametrize("name", ["matmul", "strassen_matmul", "add", *MATRICES])
@pytest.mark.one_in(5)
def test_gradients_send_no_more_bytes_than_jaxs(rng, name, along):
    """The other axis of the mesh splits a dimension of the local arrays."""
    mesh, programs = mesh_of((AUTO, AUTO)), []
    with jax.set_mesh(mesh):
        args = [
            put(mesh, x, P(*("m" if i == along else spec[0] if spec and i == 0 else None
                             for i in range(x.ndim))))
            for x, spec in zip(global_arrays(rng, name), specs_of(name), strict=True)
        ]  # fmt: skip
        for function in OPERATIONS[name][:2]:
            mapped = mapped_over_d(function, name, mesh)
            programs.append(results(mapped, len(args)).lower(*args).compile())
    theirs, mine = programs
    assert bytes_sent(mine) <= SLACK * bytes_sent(theirs), (collectives(mine), collectives(theirs))


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
