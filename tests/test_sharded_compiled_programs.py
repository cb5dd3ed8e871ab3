"""Where local products are XLA's own, a sharded program is compiled to what JAX's is.

XLA's partitioner calls back for each of our calls. What it inlines must not keep XLA from combining
collectives, from fusing, or from multiplying without copies.
"""

from __future__ import annotations

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import AUTO, mesh_of, needs_devices

import jax_tilekern as jtk
from benchmarks.sharded_bytes import bytes_sent
from jax_tilekern.ops.products import contraction_lowering
from jax_tilekern.primitives.operation import Fallback

pytestmark = needs_devices

TOKENS, WIDTH, HIDDEN = 96, 48, 160
SCHEMES = {  # x, up, down
    "data parallel": (P("m"), P(), P()),
    "tensor parallel": (P(), P(None, "m"), P("m")),
    "data and tensor parallel": (P("d"), P(None, "m"), P("m")),
}
_INSTRUCTION = re.compile(r"= .*? ([a-z][\w-]*)\(")
COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")


def counted(compiled):
    """How often each instruction occurs, those of fusions included."""
    lines = compiled.as_text().splitlines()
    return collections.Counter(match[1] for x in lines if (match := _INSTRUCTION.search(x)))


def training_step(matmul):
    def forward(x, up, down):
        return matmul(jax.nn.silu(matmul(x, up)), down)

    def run(x, up, down, cotangent):
        y, transpose = jax.vjp(forward, x, up, down)
        return y, transpose(cotangent)

    return run


@pytest.fixture
def local_products_are_xlas(monkeypatch):
    def left_to_xla(*_):
        return Fallback("the test leaves it to XLA")

    monkeypatch.setattr(contraction_lowering, "chosen_cpu_kernel", left_to_xla)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.usefixtures("local_products_are_xlas")
def test_products_of_xlas_are_compiled_as_jaxs(scheme, dtype):
    x, up, down = SCHEMES[scheme]
    mesh = mesh_of((AUTO, AUTO))
    specs = (x, up, down, x)
    shapes = ((TOKENS, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH), (TOKENS, WIDTH))
    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    out = jax.tree.map(lambda arg: arg.sharding, (args[0], tuple(args[:3])))
    theirs, ours = (
        counted(jax.jit(training_step(matmul), out_shardings=out).lower(*args).compile())
        for matmul in (jnp.matmul, jtk.matmul)
    )
    assert "custom-call" not in ours
    assert ours["dot"] == theirs["dot"] == 6
    assert {x: ours[x] for x in COLLECTIVES} == {x: theirs[x] for x in COLLECTIVES}
    assert ours["all-reduce"]
    for name in ("convert", "copy", "transpose", "fusion", "reshape", "call", "opt-barrier"):
        assert ours[name] <= theirs[name], (name, ours, theirs)


def bytes_of(function, mesh, args):
    """The bytes that devices send, of arrays given as a shape and a sharding each."""
    arrays = [
        jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in args
    ]
    return bytes_sent(jax.jit(function).lower(*arrays).compile())


@pytest.mark.parametrize(
    ("a", "b"),
    [(P(("d", "m")), P("m")), (P("m"), P(("d", "m"))), (P("d"), P("m")), (P("m"), P("m", "d"))],
)
@pytest.mark.one_in(2)
def test_systems_send_no_more_than_jaxs(a, b):
    """Matrices and right-hand sides that different axes split along the batch or the rows."""
    mesh = mesh_of((AUTO, AUTO))
    args = (((16, 8, 8), a), ((16, 8, 8), b))

    def gradients(solve):
        return jax.grad(lambda a, b: (solve(a, b) ** 2).sum(), (0, 1))

    for of in (lambda solve: solve, gradients):
        ours, theirs = (bytes_of(of(x), mesh, args) for x in (jtk.linalg.solve, jnp.linalg.solve))
        assert ours <= 1.05 * theirs, (of, ours, theirs)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (P(), P(None, "m")),
        (P("d"), P("d")),
        (P(None, "m"), P()),
        (P("d", "m"), P("d", "m")),
    ],
)
@pytest.mark.one_in(4)
def test_a_large_system_sends_no_more_than_jaxs(a, b):
    """One matrix, of a size that a GPU factors in blocks, split along its rows or columns."""
    mesh = mesh_of((AUTO, AUTO))
    args = (((512, 512), a), ((512, 64), b))
    functions = {
        "solve": lambda linalg: linalg.solve,
        "gradients": lambda linalg: jax.grad(lambda a, b: (linalg.solve(a, b) ** 2).sum(), (0, 1)),
        "inv": lambda linalg: lambda a, _: linalg.inv(a),
    }
    for name, of in functions.items():
        ours, theirs = (bytes_of(of(x.linalg), mesh, args) for x in (jtk, jnp))
        assert ours <= 1.05 * theirs, (name, ours, theirs)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.one_in(2)
def test_gated_units_send_no_more_than_two_products(scheme):
    x, up, _ = SCHEMES[scheme]
    mesh = mesh_of((AUTO, AUTO))
    args = (((TOKENS, WIDTH), x), ((WIDTH, HIDDEN), up), ((WIDTH, HIDDEN), up))
    rng = np.random.default_rng()
    values = [rng.standard_normal(shape, np.float32) / shape[0] ** 0.5 for shape, _ in args]
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, (_, spec) in zip(values, args, strict=True)
    ]

    def plain(x, gate, up):
        return jax.nn.silu(jnp.matmul(x, gate)) * jnp.matmul(x, up)

    def gradients(f):
        return jax.grad(lambda *xs: (f(*xs) ** 2).sum(), (0, 1, 2))

    for of in (lambda f: f, gradients):
        ours, theirs = (bytes_of(of(f), mesh, args) for f in (jtk.gated_linear, plain))
        assert ours <= 1.05 * theirs, (of, ours, theirs)
        found = jax.jit(of(jtk.gated_linear))(*placed)
        # On a GPU the products would be in TF32.
        with jax.default_device(jax.devices("cpu")[0]):
            wanted = of(plain)(*values)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            scale = np.abs(b).max()
            np.testing.assert_allclose(a, b, 0, 64 * WIDTH * np.finfo(np.float32).eps * scale)
