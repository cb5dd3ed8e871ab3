"""What the tests of sharded programs share: meshes, and what a compiled program communicates."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_tilekern as jtk
from benchmarks.sharded_bytes import SLACK, bytes_sent, collectives

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
AXES = {"d": 2, "m": 4}
MESH_TYPES = {
    "auto": (AUTO, AUTO),
    "explicit": (EXPLICIT, EXPLICIT),
    "explicit and auto": (EXPLICIT, AUTO),
    "auto and explicit": (AUTO, EXPLICIT),
}


def devices():
    found = jax.devices("cpu")
    return found if len(found) >= 8 else None


needs_devices = pytest.mark.skipif(devices() is None, reason="eight CPU devices")


def mesh_of(types):
    return jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=types, devices=devices()[:8])


def put(mesh, x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def explicit_part(spec, types, rank):
    """Leave out the axes that types do not speak of."""
    explicit = {name for name, kind in zip(AXES, types, strict=True) if kind == EXPLICIT}

    def kept(entry):
        axes = tuple(
            a for a in ((entry,) if isinstance(entry, str) else entry or ()) if a in explicit
        )
        return axes or None

    entries = (*spec, *(None,) * (rank - len(spec)))
    return P(*map(kept, entries))


def custom_calls(compiled, target):
    """Result types of the calls of a target, such as ``f32[8,16]``."""
    return [
        re.search(r"= \(?(\w+\[[\d,]*\])", line)[1]
        for line in compiled.as_text().splitlines()
        if f'custom_call_target="{target}"' in line
    ]


def integers(rng, *shape, dtype=np.float32):
    """Small integers, of which every sum in every order is exact."""
    return rng.integers(-1, 2, shape).astype(dtype)


def assert_equal_trees(got, wanted):
    got, wanted = jax.tree.leaves(got), jax.tree.leaves(wanted)
    assert len(got) == len(wanted)
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def compiled_pair(mesh, program, args, out_specs=None):
    """Compile a program of ours and of JAX's; ``program(jax_numpy or jax_tilekern)``."""
    compiled = []
    for module in (jnp, jtk):
        out = (
            None
            if out_specs is None
            else jax.tree.map(
                lambda spec: NamedSharding(mesh, spec),
                out_specs,
                is_leaf=lambda x: isinstance(x, P),
            )
        )
        compiled.append(jax.jit(program(module), out_shardings=out).lower(*args).compile())
    return compiled


def check(mesh, program, args, out_specs=None, kernels=True):
    theirs, ours = compiled_pair(mesh, program, args, out_specs)
    assert_equal_trees(ours(*args), theirs(*args))
    assert "jax_tilekern_partitioned" not in ours.as_text()
    assert bytes_sent(ours) <= SLACK * bytes_sent(theirs), (collectives(ours), collectives(theirs))
    if kernels:
        assert "jax_tilekern_cpu_" in ours.as_text()
    for mine, jaxs in zip(
        jax.tree.leaves(ours.output_shardings),
        jax.tree.leaves(theirs.output_shardings),
        strict=True,
    ):
        rank = max(len(mine.spec), len(jaxs.spec))
        assert mine.is_equivalent_to(jaxs, rank), (mine, jaxs)
    return ours


# A network of two layers under the schemes by which models are trained.

T, D, F = 16, 8, 16
SCHEMES = {  # x, w1, w2, what lies between, and the result
    "data": (P("d"), P(), P(), P("d"), P("d")),
    "batch over two axes": (P(("d", "m")), P(), P(), P(("d", "m")), P(("d", "m"))),
    "fully sharded": (P("d"), P("d"), P("d"), P("d"), P("d")),
    "tensor": (P(), P(None, "m"), P("m"), P(None, "m"), P()),
    "data and tensor": (P("d"), P(None, "m"), P("m"), P("d", "m"), P("d")),
    "fully sharded and tensor": (P("d"), P("d", "m"), P("m", "d"), P("d", "m"), P("d")),
    "sequence": (P("m"), P(None, "m"), P("m"), P(None, "m"), P("m")),
}


def transformed(transform, f):
    def loss(x, *weights):
        return f(x, *weights).sum()

    if transform == "forward":
        return f
    if transform == "gradient":
        return jax.grad(loss, (0, 1, 2))
    if transform == "vmap of gradient":
        return lambda xs, *weights: jax.vmap(lambda x: jax.grad(loss, (1, 2))(x, *weights))(xs)
    assert transform == "second order"
    return lambda *args: jax.jvp(jax.grad(loss, (0, 1, 2)), args, args)[1]


TRANSFORMS = ("forward", "gradient", "vmap of gradient", "second order")
