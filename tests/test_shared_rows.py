"""Rows that a product gathers and the gradient of its weights reads, as CPU devices compute both.

The partition is that for GPUs. A CPU's gathered product is an all-gather and a product.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import AUTO, collectives, devices, needs_devices

import jax_tilekern as jtk
from jax_tilekern.partitioning import call
from jax_tilekern.partitioning.sharing import Sharing
from jax_tilekern.plans import overlap

pytestmark = needs_devices

ROWS, WIDTH, HIDDEN = 32, 16, 48
SHAPES = ((ROWS, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH), (ROWS, WIDTH))


@pytest.fixture
def as_gpus(monkeypatch):
    """Partition calls as those of GPUs, in which rows of any size are exchanged."""
    monkeypatch.setattr(call, "_answers", {})
    monkeypatch.setattr(
        call, "_exchanges_rows", lambda operation, _: operation.name in call._along_axis
    )
    monkeypatch.setattr(overlap, "why_no_exchange", lambda: "")
    monkeypatch.setattr(overlap, "_ALIGNMENT", 1)
    with overlap.in_parts(1):
        yield


def mesh_of(*shape):
    names = ("d", "m")[-len(shape) :]
    count = int(np.prod(shape))
    return jax.make_mesh(shape, names, axis_types=(AUTO,) * len(shape), devices=devices()[:count])


def mlp(matmul, sharding=None):
    def run(x, up, down):
        hidden = matmul(x, up)
        if sharding is not None:
            hidden = jax.lax.with_sharding_constraint(hidden, sharding)
        return matmul(jnp.tanh(hidden), down)

    return run


def with_gradients(f):
    def run(*args):
        *arrays, cotangent = args
        y, transpose = jax.vjp(f, *arrays)
        return y, transpose(cotangent)

    return run


def compiled(mesh, function, args, specs, out):
    def placed(tree):
        is_spec = lambda x: isinstance(x, P)  # noqa: E731
        return jax.tree.map(lambda s: NamedSharding(mesh, s), tree, is_leaf=is_spec)

    args = [jax.device_put(x, s) for x, s in zip(args, placed(specs), strict=True)]
    program = jax.jit(function, out_shardings=placed(out)).lower(*args).compile()
    return program(*args), sorted(c.kind for c in collectives(program))


def close(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), ours, theirs)


TENSOR_PARALLEL = (P("m"), P(None, "m"), P("m"), P("m"))


@pytest.fixture
def args(rng):
    return [rng.standard_normal(shape, np.float32) for shape in SHAPES]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_an_mlp_gathers_its_rows_and_their_cotangent_once(as_gpus, args, count):
    x, up, down, _ = TENSOR_PARALLEL
    out = (x, (x, up, down))
    found, kinds = compiled(
        mesh_of(count), with_gradients(mlp(jtk.matmul)), args, TENSOR_PARALLEL, out
    )
    close(found, with_gradients(mlp(jnp.matmul))(*args))
    assert kinds == 2 * ["all-gather"] + 2 * ["reduce-scatter"]


# Shardings of the arrays, and of the hidden values if they do not follow from these.
SCHEMES = {
    "data": ((P("d"), P(), P(), P("d")), None),
    "fully sharded": ((P("d"), P("d"), P("d"), P("d")), None),
    "tensor": (TENSOR_PARALLEL, P(None, "m")),
    "data and tensor": ((P(("d", "m")), P(None, "m"), P("m"), P(("d", "m"))), P("d", "m")),
    "tokens whole": ((P("d"), P(None, "m"), P("m"), P("d")), P("d", "m")),
    "columns": ((P("d", "m"), P("m"), P(None, "m"), P("d", "m")), None),
    "results whole": ((P("m"), P(None, "m"), P("m"), P()), P(None, "m")),
    "tokens gathered by the gradients alone": (
        (P(("d", "m")), P(), P(), P(("d", "m"))), P(("d", "m"))
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("name", SCHEMES)
def test_values(as_gpus, args, name, shape):
    specs, hidden = SCHEMES[name]
    mesh, (x, up, down, y) = mesh_of(*shape), specs
    sharding = hidden and NamedSharding(mesh, hidden)
    run = with_gradients(mlp(jtk.matmul, sharding))
    found, _ = compiled(mesh, run, args, specs, (y, (x, up, down)))
    close(found, with_gradients(mlp(jnp.matmul))(*args))


def test_a_loop_and_a_branch_read_their_own_operands(as_gpus, args):
    x, up, down, _ = args
    mesh, (rows, columns, *_) = mesh_of(4), TENSOR_PARALLEL

    def layers(matmul):
        def step(x, weights):
            hidden = jax.lax.with_sharding_constraint(
                matmul(x, weights[0]), NamedSharding(mesh, columns)
            )
            y = jax.lax.cond(x[0, 0] > 0, jnp.tanh, jnp.sin, hidden)
            return jax.lax.with_sharding_constraint(
                matmul(y, weights[1]), NamedSharding(mesh, rows)
            ), None

        def loss(x, up, down):
            weights = jnp.stack([up, up + 1]) / 8, jnp.stack([down, down - 1]) / 8
            return (jax.lax.scan(jax.checkpoint(step), x, weights)[0] ** 2).sum()

        def run(x, up, down):
            # The branch contracts rows that the product before it gathers.
            product = matmul(x, up)
            gram = jax.lax.cond(x[0, 0] > 0, lambda: matmul(x.T, product), lambda: up)
            return gram, jax.grad(loss, (0, 1, 2))(x, up, down)

        return run

    specs = TENSOR_PARALLEL[:3]
    found, _ = compiled(mesh, layers(jtk.matmul), (x, up, down), specs, (columns, specs))
    close(found, jax.jit(layers(jnp.matmul))(x, up, down))


def test_products_of_small_arrays_share_nothing(args):
    """Their calls have one result, as without GPUs that exchange rows."""
    x, up, down, y = (
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh_of(4), s))
        for a, s in zip(args, TENSOR_PARALLEL, strict=True)
    )
    traced = jax.jit(with_gradients(mlp(jtk.matmul))).trace(x, up, down, y)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert '"gives' not in text.replace("\\22", '"')
    with overlap.in_parts(1):
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert '"gives' in text.replace("\\22", '"')


def test_text():
    assert Sharing().text() == ""
    for sharing in (Sharing(), Sharing((1, 2), 0, True), Sharing(takes=(1,))):
        assert Sharing.from_text(sharing.text()) == sharing
