"""Ragged products: values of groups of any sizes, transformations, and what moves no operand."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numerics import (
    BF16,
    F8E4,
    F8E5,
    TF32_ROUNDOFF,
    assert_close,
    on_gpu,
    random,
    roundoff,
)
from ragged import (
    CONTRACTED,
    KINDS,
    assert_rows,
    assert_sums,
    group_sizes,
)

import jax_tilekern as jtk


def weights_of(out, x, y, sizes):
    return jtk.ragged_dot_general(x, y, sizes, CONTRACTED, preferred_element_type=out)


@pytest.mark.parametrize("precision", [None, "highest", "high", lax.DotAlgorithmPreset.F32_F32_F32,
                                       lax.DotAlgorithmPreset.BF16_BF16_F32_X3])  # fmt: skip
def test_precision_names_keep_their_promise(rng, precision):
    if not on_gpu() and precision is lax.DotAlgorithmPreset.BF16_BF16_F32_X3:
        pytest.skip("XLA has no such product on a CPU")
    x, w = random(rng, (520, 256), np.float32), random(rng, (6, 256, 130), np.float32)
    y = random(rng, (520, 130), np.float32)
    sizes = group_sizes(rng, "random", 6, 520)
    rounded = TF32_ROUNDOFF if on_gpu() and precision in (None, "high") else 0.0
    assert_rows(jtk.ragged_dot(x, w, sizes, precision), x, w, sizes, rounded)
    assert_sums(jtk.ragged_dot_general(x, y, sizes, CONTRACTED, precision), x, y, sizes, rounded)
    with jax.default_matmul_precision("highest"):
        assert_rows(jtk.ragged_dot(x, w, sizes), x, w, sizes)


@pytest.mark.parametrize(("types", "out"), [
    ((BF16, np.float32), None), ((np.float32, np.float32), BF16), ((np.int8, np.int8), np.float32),
    ((np.int8, np.int8), np.int8), ((F8E4, F8E5), F8E4),
])  # fmt: skip
def test_types_that_no_kernel_writes(rng, types, out):
    x, w = random(rng, (130, 40), types[0]), random(rng, (4, 40, 33), types[1])
    sizes = group_sizes(rng, "random", 4, 130)
    got = jtk.ragged_dot(x, w, sizes, preferred_element_type=out)
    assert_rows(got, x, w, sizes, roundoff(np.float32))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["of a group", "of no group"])
@pytest.mark.one_in(2)
def test_nothing_leaks_from_rows(rng, dtype, value, where):
    """NaN and infinity in one group's rows, or in no group's, are in no other group's results."""
    rows, groups = 430, 5
    sizes = np.array([90, 70, 0, 133, 40], np.int32)
    bad = slice(90, 160) if where == "of a group" else slice(333, rows)
    x, w = random(rng, (rows, 72), dtype), random(rng, (groups, 72, 136), dtype)
    y = random(rng, (rows, 136), dtype)
    poisoned = [x.at[bad].set(value), y.at[bad].set(value)]
    run = jax.jit(lambda x, w, y: jax.vjp(lambda x, w: jtk.ragged_dot(x, w, sizes), x, w)[1](y))
    out = np.asarray(jtk.ragged_dot(poisoned[0], w, sizes))
    rows_gradient = np.asarray(run(x, w, poisoned[1])[0])
    keep = np.ones(rows, bool)
    keep[bad] = False
    for got, clean in ((out, jtk.ragged_dot(x, w, sizes)), (rows_gradient, run(x, w, y)[0])):
        np.testing.assert_array_equal(got[keep], np.asarray(clean)[keep])
        if where == "of a group":
            assert not np.isfinite(got[bad].astype(np.float32)).any()
        else:
            assert not got[bad].astype(np.float32).any()
    groups_kept = [0, 2, 3, 4] if where == "of a group" else list(range(5))
    clean = np.asarray(run(x, w, y)[1])
    for args in ((poisoned[0], w, y), (x, w, poisoned[1]), (poisoned[0], w, poisoned[1])):
        weights_of = np.asarray(run(*args)[1])
        np.testing.assert_array_equal(weights_of[groups_kept], clean[groups_kept])
        if where == "of a group":
            assert not np.isfinite(weights_of[1].astype(np.float32)).any()


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
