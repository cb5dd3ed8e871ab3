"""Ragged products are closed under JAX's transformations, and none of them moves an operand."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numerics import BF16, assert_close, random
from ragged import CONTRACTED, KINDS, group_sizes

import jax_tilekern as jtk


def ours(x, w, sizes, offset=None):
    return jtk.ragged_dot(x, w, sizes, "highest", group_offset=offset)


def theirs(x, w, sizes, offset=None):
    """The dense masked formulation."""
    ends = jnp.minimum(jnp.cumsum(jnp.clip(sizes, 0, x.shape[0])), x.shape[0])
    row = jnp.arange(x.shape[0])
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    mask = (starts[:, None] <= row) & (row < ends[:, None])
    if offset is not None:
        mask = lax.dynamic_slice_in_dim(mask, offset.reshape(()), w.shape[0])
    return jnp.einsum("gm,mk,gkn->mn", mask.astype(x.dtype), x, w, precision="highest")


def loss(f):
    return lambda x, w, *rest: jnp.sin(f(x, w, *rest)).sum()


def many_sizes(rng, *shape):
    kinds = rng.choice(KINDS, int(np.prod(shape)))
    sizes = [group_sizes(rng, kind, 4, 30) for kind in kinds]
    return jnp.asarray(np.stack(sizes).reshape(*shape, 4))


@pytest.mark.parametrize("axes", [(None, None, None, 0), (0, None, 0, 0), (None, 0, None, 0)])
@pytest.mark.one_in(3)
def test_vmap_over_offsets(rng, axes):
    """The shards of one device after another."""
    x, w = random(rng, (30, 6), np.float32), random(rng, (2, 6, 5), np.float32)
    sizes = many_sizes(rng, 1)[0]
    args = [
        operand if axis is None else jnp.stack([operand] * 2)
        for operand, axis in zip((x, w, sizes), axes, strict=False)
    ]
    args.append(jnp.array([[0], [2]]))
    for make in (lambda f: f, lambda f: jax.grad(loss(f), (0, 1))):
        got, expected = (jax.jit(jax.vmap(make(f), axes))(*args) for f in (ours, theirs))
        assert_close(got, expected)


# Experts shared out among devices.


@pytest.fixture
def mesh():
    devices = jax.devices("cpu")[:4]
    with jax.default_device(devices[0]):
        yield jax.make_mesh((4,), ("experts",), axis_types=(AxisType.Auto,), devices=devices)


@pytest.mark.parametrize("rows_spec", [P(), P("experts")])
def test_shard_map_over_experts(rng, mesh, rows_spec):
    """Each device has two of eight experts; it multiplies all rows, and the results are added."""
    with jax.default_device(jax.devices("cpu")[0]):
        x, w = random(rng, (32, 6), np.float32), random(rng, (8, 6, 5), np.float32)
    sizes = jnp.asarray(group_sizes(rng, "random", 8, 32))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(rows_spec, P("experts"), P()), out_specs=P()
    )
    def sharded(x, w, sizes):
        if rows_spec:
            x = lax.all_gather(x, "experts", tiled=True)
        first = lax.axis_index("experts") * w.shape[0]
        return lax.psum(ours(x, w, sizes, first[None]), "experts")

    assert_close(jax.jit(sharded)(x, w, sizes), theirs(x, w, sizes))
    assert_close(
        jax.jit(jax.grad(loss(sharded), (0, 1)))(x, w, sizes),
        jax.grad(loss(theirs), (0, 1))(x, w, sizes),
    )
    assert_close(
        jax.jit(jax.jacfwd(loss(sharded)))(x, w, sizes), jax.grad(loss(theirs))(x, w, sizes)
    )


# What the program must not contain.

ROWS = jax.ShapeDtypeStruct((300, 64), BF16)
OUT = jax.ShapeDtypeStruct((300, 96), BF16)
WEIGHTS = jax.ShapeDtypeStruct((8, 64, 96), BF16)
ROWS_3 = jax.ShapeDtypeStruct((3, 300, 64), BF16)
WEIGHTS_3 = jax.ShapeDtypeStruct((3, 8, 64, 96), BF16)
WEIGHTS_SWAPPED = jax.ShapeDtypeStruct((8, 96, 64), BF16)
SIZES = jax.ShapeDtypeStruct((8,), np.int32)


def forward(x, w, sizes):
    return jtk.ragged_dot(x, w, sizes)


def forward_swapped(x, w, sizes):
    return jtk.ragged_dot(x, w.swapaxes(1, 2), sizes)


def pullback(f):
    return lambda x, w, sizes, y: jax.vjp(lambda x, w: f(x, w, sizes), x, w)[1](y)


PROGRAMS = [
    (forward, (ROWS, WEIGHTS, SIZES), 1),
    (forward_swapped, (ROWS, WEIGHTS_SWAPPED, SIZES), 1),
    (pullback(forward), (ROWS, WEIGHTS, SIZES, OUT), 2),
    (lambda x, y, sizes: jtk.ragged_dot_general(x, y, sizes, CONTRACTED), (ROWS, OUT, SIZES), 1),
    (jax.vmap(forward, (0, None, None)), (ROWS_3, WEIGHTS, SIZES), 1),
    (jax.vmap(forward, (None, 0, None)), (ROWS, WEIGHTS_3, SIZES), 1),
]  # fmt: skip


@pytest.mark.parametrize("program", range(len(PROGRAMS)))
def test_nothing_but_kernels_touches_the_operands(program):
    function, args, products = PROGRAMS[program]
    text = jax.jit(function).lower(*args).compile().as_text()
    made = re.findall(r"= (\([^()]*\)|\S+) ([a-z-]+)\(", text)
    touched = {name for types, name in made if re.search(r"\b(bf16|f32|f16)\[", types)}
    unmoved = {"custom-call", "parameter", "get-tuple-element", "tuple"}
    assert {"custom-call"} <= touched <= unmoved, touched
    assert text.count("custom_call_target=") == products
