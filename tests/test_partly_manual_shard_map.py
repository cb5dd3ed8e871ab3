"""Inside a ``shard_map`` over some of the mesh's axes each operation is XLA's own, and right."""

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

SIZES = np.array([3, 5], np.int32)
LABELS = np.arange(8, dtype=np.int32)
BATCHED = (((2,), (1,)), ((0,), (0,)))
MATRICES, COLUMNS = (16, 4, 4), (16, 4, 8)
# A function of local arrays, and the arrays' shapes. The first is sharded along its rows, and so
# are those of its rank with as many rows.
CALLS = {
    "matmul": (jtk.matmul, [(16, 32), (32, 8)]),
    "matmul with an epilogue": (
        functools.partial(jtk.matmul, epilogue=lambda x: 2 * x),
        [(16, 32), (32, 8)],
    ),
    "linear": (functools.partial(jtk.linear, activation=jnp.square), [(16, 32), (32, 8)]),
    "dot_general": (
        functools.partial(jtk.dot_general, dimension_numbers=BATCHED),
        [(16, 4, 8), (16, 8, 4)],
    ),
    "matvec": (jtk.matvec, [(16, 32), (32,)]),
    "vecmat": (lambda a, v: jtk.vecmat(v, a.T), [(16, 32), (32,)]),
    "dot": (jtk.dot, [(16, 32), (32,)]),
    "vdot": (lambda a, v: a * jtk.vdot(v, v), [(16, 32), (32,)]),
    "einsum": (
        functools.partial(jtk.einsum, "bhqk,bkhd->bqhd"),
        [(16, 4, 8, 8), (16, 8, 4, 8)],
    ),
    "tensordot": (functools.partial(jtk.tensordot, axes=1), [(16, 4, 8), (8, 4)]),
    "inner": (jtk.inner, [(16, 32), (8, 32)]),
    "vecdot": (jtk.vecdot, [(16, 32), (16, 32)]),
    "multi_dot": (lambda *xs: jtk.multi_dot(xs), [(16, 32), (32, 8), (8, 8)]),
    "strassen_matmul": (jtk.strassen_matmul, [(16, 32), (32, 8)]),
    "ragged_dot": (lambda x, w: jtk.ragged_dot(x, w, SIZES), [(16, 8), (2, 8, 4)]),
    "linear_cross_entropy": (
        lambda x, w: jtk.linear_cross_entropy(x, w, LABELS, reduction="none"),
        [(16, 8), (8, 32)],
    ),
    "transpose": (lambda x: jtk.transpose(x, (0, 2, 1)), [(16, 8, 4)]),
    "sum": (lambda x: jtk.sum(x, 1), [(16, 8, 4)]),
    "add": (jtk.add, [(16, 8), (8,)]),
    "inv": (jtk.linalg.inv, [MATRICES]),
    "det": (jtk.linalg.det, [MATRICES]),
    "slogdet": (lambda a: jtk.linalg.slogdet(a)[1], [MATRICES]),
    "cholesky": (jtk.linalg.cholesky, [MATRICES]),
    "lu_factor": (lambda a: jtk.linalg.lu_factor(a)[0], [MATRICES]),
    "solve": (jtk.linalg.solve, [MATRICES, COLUMNS]),
    "solve_triangular": (
        functools.partial(jtk.linalg.solve_triangular, lower=True),
        [MATRICES, COLUMNS],
    ),
}


def operands(rng, shapes):
    if shapes[0] != MATRICES:
        return [integers(rng, *shape) for shape in shapes]
    a = rng.standard_normal(MATRICES).astype(np.float32)
    return [a @ a.mT / 4 + np.eye(4, dtype=np.float32), *(integers(rng, *s) for s in shapes[1:])]


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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.one_in(26)
def test_values_and_gradients(rng, name, layout):
    """Over ``d``; the other axis of the mesh splits columns, or nothing."""
    function, shapes = CALLS[name]
    types, along = LAYOUTS[layout]
    if name == "ragged_dot" and types[1] == EXPLICIT:
        pytest.skip("JAX needs out_sharding on a mesh with explicit axes")
    arrays = operands(rng, shapes)
    rows = [x.shape[0] == 16 and x.ndim == arrays[0].ndim for x in arrays]
    mesh = mesh_of(types)
    in_specs = tuple(P("d") if own else P() for own in rows)

    def mapped(*args):
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=P("d"), axis_names={"d"}
        )(*args)

    def by_rows(*args):
        """The same, one part after the other, on one device."""
        parts = zip(
            *((x[:8], x[8:]) if own else (x, x) for x, own in zip(args, rows, strict=True)),
            strict=True,
        )
        return jnp.concatenate([function(*part) for part in parts])

    def results(f):
        count = tuple(range(len(arrays)))
        loss = jax.grad(lambda *args: (f(*args).astype(jnp.float32) ** 2).sum(), count)
        return jax.jit(lambda *args: (f(*args), loss(*args)))

    wanted = results(by_rows)(*arrays)
    with jax.set_mesh(mesh):
        args = [
            put(mesh, x, P("d" if own else None, *[along] * (x.ndim > 1)))
            for x, own in zip(arrays, rows, strict=True)
        ]
        got = results(mapped)(*args)
        calls = jtk.explain(results(mapped), *args)
    assert_close(jax.tree.leaves(got), jax.tree.leaves(wanted))
    assert calls
    assert all(call.kernel is None for call in calls)
    assert any("shard_map" in call.reason for call in calls)


@pytest.mark.parametrize("name", ["solve", "slogdet"])
def test_gradients_gather_a_matrix_once(rng, name):
    """Inside the ``shard_map`` a transposed system has the factors of the same matrix."""
    mesh = mesh_of((AUTO, AUTO))
    shapes = CALLS[name][1]

    def gradient(module):
        function = getattr(module, name)

        def loss(*args):
            return (jax.tree.leaves(function(*args))[-1] ** 2).sum()

        return jax.shard_map(
            jax.grad(loss, tuple(range(len(shapes)))),
            mesh=mesh,
            in_specs=P("d"),
            out_specs=P("d"),
            axis_names={"d"},
        )

    with jax.set_mesh(mesh):
        args = [put(mesh, x, P("d", "m")) for x in operands(rng, shapes)]
        theirs, ours = (
            jax.jit(gradient(module)).lower(*args).compile() for module in (jnp.linalg, jtk.linalg)
        )
    assert_close(list(ours(*args)), list(theirs(*args)))
    assert bytes_sent(ours) <= SLACK * bytes_sent(theirs), (collectives(ours), collectives(theirs))


JAXS = {
    "matmul": jnp.matmul,
    "strassen_matmul": jnp.matmul,
    "add": jnp.add,
    "inv": jnp.linalg.inv,
    "det": jnp.linalg.det,
    "slogdet": lambda a: jnp.linalg.slogdet(a)[1],
    "cholesky": jnp.linalg.cholesky,
    "lu_factor": lambda a: jsp_linalg.lu_factor(a)[0],
    "solve": jnp.linalg.solve,
    "solve_triangular": functools.partial(jsp_linalg.solve_triangular, lower=True),
}


@pytest.mark.parametrize("along", [1, 2], ids="axis {}".format)
@pytest.mark.parametrize("name", JAXS)
@pytest.mark.one_in(5)
def test_gradients_send_no_more_bytes_than_jaxs(rng, name, along):
    """The other axis of the mesh splits a dimension of the local arrays."""
    ours, shapes = CALLS[name]
    mesh = mesh_of((AUTO, AUTO))
    rows = [len(shape) == len(shapes[0]) and shape[0] == 16 for shape in shapes]
    arrays = operands(rng, shapes)
    in_specs = tuple(P("d") if own else P() for own in rows)
    programs = []
    with jax.set_mesh(mesh):
        args = [
            put(
                mesh,
                x,
                P(*("d" if own and i == 0 else "m" if i == along else None for i in range(x.ndim))),
            )
            for x, own in zip(arrays, rows, strict=True)
        ]
        for function in (JAXS[name], ours):
            mapped = jax.shard_map(
                function, mesh=mesh, in_specs=in_specs, out_specs=P("d"), axis_names={"d"}
            )

            def loss(*args, mapped=mapped):
                return (mapped(*args).astype(jnp.float32) ** 2).sum()

            gradient = jax.grad(loss, tuple(range(len(args))))
            programs.append(jax.jit(gradient).lower(*args).compile())
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
    arrays = operands(rng, CALLS["einsum"][1])
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
