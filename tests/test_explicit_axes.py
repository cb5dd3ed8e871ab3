"""Operands of different kinds in one call on a mesh, and some axes of a mesh that are manual."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import assert_close, assert_equal, whole
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
    needs_devices,
    put,
)

import jax_tilekern as jtk

# What is compared runs on a GPU where there is one.
pytestmark = [needs_devices, pytest.mark.usefixtures("highest_precision")]


def relu_of_bias(x, w, b):
    return jnp.maximum(x @ w + b, 0)


def test_a_gradient_is_whole_as_jaxs():
    mesh = mesh_of((EXPLICIT, EXPLICIT))
    w = jnp.ones((4, 4))
    with jax.set_mesh(mesh):
        x = put(mesh, jnp.ones((4, 4)), P("d"))
        gradients = [
            jax.grad(lambda w, matmul=matmul: matmul(x, w).sum())(w)
            for matmul in (jnp.matmul, jtk.matmul)
        ]
    for gradient in gradients:
        assert gradient.sharding.spec == P(None, None)
        np.testing.assert_array_equal(gradient, np.full((4, 4), 4.0))


def test_operands_of_an_epilogue_are_split_alike_or_refused():
    def residual(x, w, r):
        return jtk.matmul(x, w, epilogue=jnp.add, operands=(r,))

    mesh = mesh_of((EXPLICIT, EXPLICIT))
    with jax.set_mesh(mesh):
        x, w = put(mesh, np.ones((8, 4)), P("d")), np.ones((4, 8))
        columns = put(mesh, np.ones((8, 8)), P(None, "m"))
        out = residual(x, w, columns)
        assert jax.typeof(out).sharding.spec == P("d", "m")
        with pytest.raises(Exception, match="split the same dimension") as error:
            residual(x, w, put(mesh, np.ones((8, 8)), P("m")))
    assert "Sharding" in error.type.__name__


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("is_split", [False, True])
def test_convolution_of_mapped_sequences(rng, has_state, is_split):
    """A state without the axis, and the zeros that stand for none, are repeated along it."""
    mesh = mesh_of((EXPLICIT, EXPLICIT))
    x, weights, state = (rng.standard_normal(shape) for shape in ((4, 3, 7, 6), (4, 6), (3, 3, 6)))
    given = {"state": state} if has_state else {}

    def loss(x, weights, given):
        results = jax.vmap(lambda x: jtk.causal_conv1d(x, weights, **given))(x)
        return sum((y**2).sum() for y in jax.tree.leaves(results))

    wanted = jax.grad(loss, (0, 1, 2))(x, weights, given)
    with jax.set_mesh(mesh):
        x = put(mesh, x, P("d") if is_split else P())
        given = {name: put(mesh, each, P()) for name, each in given.items()}
        found = jax.jit(jax.grad(loss, (0, 1, 2)))(x, weights, given)
    assert_close(jax.tree.leaves(found), jax.tree.leaves(wanted), 1e-4)


# Batches of matrices, which JAX refuses. What follows them, and the leading dimensions' sharding.


OF_MATRICES = {
    **{
        name: (getattr(jtk.linalg, name), getattr(jnp.linalg, name))
        for name in ("inv", "det", "cholesky", "solve", "svdvals", "eigvalsh")
    },
    "slogdet": (lambda a: jtk.linalg.slogdet(a)[1], lambda a: jnp.linalg.slogdet(a)[1]),
    "qr": (lambda a: jtk.linalg.qr(a).Q, lambda a: jnp.linalg.qr(a).Q),
    "lu_factor": (
        lambda a: jtk.linalg.lu_factor(a)[0],
        lambda a: jax.scipy.linalg.lu_factor(a)[0],
    ),
    "solve_triangular": (
        functools.partial(jtk.linalg.solve_triangular, lower=True),
        functools.partial(jax.scipy.linalg.solve_triangular, lower=True),
    ),
}


@pytest.mark.parametrize("spec", [P("m"), P("d", "m")], ids=str)
@pytest.mark.parametrize("name", OF_MATRICES)
@pytest.mark.one_in(4)
def test_batches_of_matrices(rng, name, spec):
    """The right-hand sides' type has no mesh."""
    ours, theirs = OF_MATRICES[name]
    batch = (8,) if len(spec) == 1 else (2, 4)
    a = integers(rng, *batch, 4, 4)
    a = a @ a.mT + 4 * np.eye(4, dtype=np.float32)
    columns = [integers(rng, *batch, 4, 2)] if name.startswith("solve") else []

    def results(function):
        count = tuple(range(1 + len(columns)))
        loss = jax.grad(lambda *args: (function(*args) ** 2).sum(), count)
        return jax.jit(lambda *args: (function(*args), loss(*args)))

    wanted = results(theirs)(a, *columns)
    mesh = mesh_of((EXPLICIT, EXPLICIT))
    with jax.set_mesh(mesh):
        got = results(ours)(put(mesh, a, spec), *columns)
    assert got[0].sharding.spec[: len(spec)] == tuple(spec)
    assert_close(jax.tree.leaves(got), jax.tree.leaves(wanted))


def test_mapped_right_hand_sides_of_one_matrix(rng):
    a, b = 2 * np.eye(4, dtype=np.float32), integers(rng, 8, 4, 2)
    mesh = mesh_of((EXPLICIT, EXPLICIT))
    with jax.set_mesh(mesh):
        columns = put(mesh, b, P("m"))
        mapped = jax.vmap(jtk.linalg.solve, (None, 0))(a, columns)
        broadcast = jtk.linalg.solve(a, columns)
    assert mapped.sharding.spec[0] == broadcast.sharding.spec[0] == "m"
    assert_close([mapped, broadcast], [b / 2, b / 2])


def test_a_split_matrix_is_refused_as_by_jax():
    mesh = mesh_of((EXPLICIT, EXPLICIT))
    with jax.set_mesh(mesh):
        a = put(mesh, np.ones((2, 8, 8), np.float32), P(None, "m"))
        for function in (jax.lax.linalg.cholesky, jtk.linalg.cholesky, jtk.linalg.inv):
            with pytest.raises(Exception, match=r"m'?.*whole|sharded") as error:
                function(a)
            assert "Sharding" in error.type.__name__


FUSED = {
    "number": lambda x, w, b: jnp.maximum(x @ w + b, 0),
    "operand": lambda x, w, b: jnp.maximum(x @ w, b),
    "relu": lambda x, w, b: jax.nn.relu(x @ w + b),
    "two products": lambda x, w, b: jnp.maximum(jnp.maximum(x @ w, 0) @ w + b, 0.5),
}


@pytest.mark.parametrize("mapped", range(3), ids="argument {}".format)
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.one_in(3)
def test_fuse_in_a_shard_map_in_a_vmap_over_its_axis(rng, name, mapped):
    """Axis ``m`` is manual, no array varies over it, and ``vmap`` splits its own axis over it."""
    mesh = mesh_of((AUTO, AUTO))
    arrays = [integers(rng, 8, 4), integers(rng, 4, 4), integers(rng, 4)]
    arrays[mapped] = np.stack([i * arrays[mapped] for i in range(4)])
    dims = [0 if i == mapped else None for i in range(3)]

    def gradients(function):
        def loss(x, w, b):
            return jax.lax.psum((function(x, w, b) ** 2).sum(), "d")

        sharded = jax.shard_map(loss, mesh=mesh, in_specs=(P("d"), P(), P()), out_specs=P())
        return jax.jit(jax.vmap(jax.grad(sharded, (0, 1, 2)), dims, spmd_axis_name="m"))

    with jax.set_mesh(mesh):
        got = gradients(jtk.fuse(FUSED[name]))(*arrays)
        wanted = gradients(FUSED[name])(*arrays)
    assert_close(got, wanted)


@pytest.mark.parametrize("axis_names", [{"d"}, {"d", "m"}], ids=len)
def test_hessian_of_fuse_in_a_shard_map(rng, axis_names):
    mesh = mesh_of((AUTO, AUTO))
    x, w, b = integers(rng, 8, 4), integers(rng, 4, 4), integers(rng, 4)

    def hessian(function):
        def loss(x, w, b):
            return jax.lax.psum((function(x, w, b) ** 2).sum(), "d")

        sharded = jax.shard_map(
            loss, mesh=mesh, in_specs=(P("d"), P(), P()), out_specs=P(), axis_names=axis_names
        )
        return jax.jit(jax.hessian(sharded, (1, 2)))

    with jax.set_mesh(mesh):
        got = hessian(jtk.fuse(relu_of_bias))(x, w, b)
        wanted = hessian(relu_of_bias)(x, w, b)
    assert_close(jax.tree.leaves(got), jax.tree.leaves(wanted))


# Functions of an operation's local arrays: a device of ``d`` has the rows, or matrices, of one.


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


# Products whose operands have sharded types: the gradient is the unsharded one, or JAX's error.

SPECS = [
    (P("d", None), P(None, "m")),
    (P("d", None), P()),
    (P(), P()),
    (P("d", "m"), P()),
    (P(None, "d"), P("d", None)),
    (P("d", None), P(None, "d")),
    (P("d", "m"), P("m", None)),
]


@pytest.mark.parametrize(("a_spec", "b_spec"), SPECS)
def test_explicit_mesh_is_right_or_raises_as_jax(rng, a_spec, b_spec):
    mesh = mesh_of((EXPLICIT, EXPLICIT))
    with jax.default_device(devices()[0]), jax.set_mesh(mesh):
        operands = whole(rng, 8, 4), whole(rng, 4, 12)
        a, b = (put(mesh, x, spec) for x, spec in zip(operands, (a_spec, b_spec), strict=True))

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
