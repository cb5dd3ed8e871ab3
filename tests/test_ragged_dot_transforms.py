"""Ragged products are closed under JAX's transformations, and none of them moves an operand."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numerics import BF16, assert_close, check_derivatives, random
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


@pytest.fixture
def layer(rng):
    sizes = jnp.asarray(group_sizes(rng, "random", 4, 30))
    return random(rng, (30, 6), np.float32), random(rng, (4, 6, 5), np.float32), sizes


def stacked(rng, count, axis, shape):
    return random(rng, (*shape[:axis], count, *shape[axis:]), np.float32)


def many_sizes(rng, *shape):
    kinds = rng.choice(KINDS, int(np.prod(shape)))
    sizes = [group_sizes(rng, kind, 4, 30) for kind in kinds]
    return jnp.asarray(np.stack(sizes).reshape(*shape, 4))


def test_derivatives(layer):
    x, w, sizes = layer
    check_derivatives(lambda x, w: ours(x, w, sizes), (x, w))
    y = jnp.cos(ours(x, w, sizes))

    def weights(x, y):
        return jtk.ragged_dot_general(x, y, sizes, CONTRACTED)

    check_derivatives(weights, (x, y))


def test_second_order(layer):
    def curvature(f):
        first = jax.grad(loss(f), (0, 1))
        return jax.grad(lambda x, w, s: sum(jnp.sum(g**2) for g in first(x, w, s)), (0, 1))

    got, expected = (jax.jit(curvature(f))(*layer) for f in (ours, theirs))
    assert_close(got, expected)
    args = layer[0][:6, :3], layer[1][:, :3, :2], jnp.array([2, 0, 3, 0])
    assert_close(*(jax.jit(jax.hessian(loss(f), (0, 1)))(*args) for f in (ours, theirs)))


@pytest.mark.parametrize(("axes", "out_axis"), [
    ((0, None, None), 0), ((2, None, None), -1), ((None, 1, None), 0), ((None, 3, None), 0),
    ((None, None, 0), 0), ((1, 2, None), 1), ((2, None, 1), 0), ((None, 0, 0), 0),
    ((1, 3, 1), 2),
])  # fmt: skip
@pytest.mark.one_in(3)
def test_vmap(rng, axes, out_axis):
    """Over every subset of the operands, and the gradients of it and of its sum."""
    x, w = (
        random(rng, shape, np.float32) if axis is None else stacked(rng, 3, axis, shape)
        for shape, axis in zip(((30, 6), (4, 6, 5)), axes, strict=False)
    )
    sizes = many_sizes(rng, 3) if axes[2] is not None else many_sizes(rng, 1)[0]
    sizes = sizes.T if axes[2] == 1 else sizes

    def everything(f):
        mapped = jax.vmap(f, axes, out_axis)
        each = jax.vmap(jax.grad(loss(f), (0, 1)), axes)
        whole = jax.grad(loss(mapped), (0, 1))
        return lambda *args: (mapped(*args), each(*args), whole(*args))

    assert_close(jax.jit(everything(ours))(x, w, sizes), jax.jit(everything(theirs))(x, w, sizes))
    choices = jtk.explain(everything(ours), x, w, sizes)
    assert sum(choice.kernel is not None for choice in choices) == 7, choices


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


def test_nested_vmap(rng):
    """Over rows, weights and sizes by turns, and a sum over it all."""
    x = random(rng, (2, 30, 6, 3), np.float32)
    w = random(rng, (3, 4, 6, 2, 5), np.float32)
    sizes = many_sizes(rng, 3, 2)

    def both(f):
        return jax.vmap(jax.vmap(f, (2, 0, 0)), (0, 3, 1))

    got, expected = (jax.jit(both(f))(x, w, sizes) for f in (ours, theirs))
    assert_close(got, expected)
    gradients = [jax.jit(jax.grad(loss(both(f)), (0, 1))) for f in (ours, theirs)]
    assert_close(gradients[0](x, w, sizes), gradients[1](x, w, sizes))
    shared = x[0, ..., 0], w[0, :, :, 0], sizes
    twice = [jax.vmap(jax.vmap(f, (None, None, 0)), (None, None, 0)) for f in (ours, theirs)]
    got, expected = (jax.jit(f)(*shared) for f in twice)
    assert_close(got, expected)


@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
def test_gradients_have_the_operands_types(rng, dtype):
    x, w = random(rng, (30, 6), dtype), random(rng, (4, 6, 5), np.float32)
    sizes = many_sizes(rng, 1)[0]
    got = jax.grad(lambda x, w: jtk.ragged_dot(x, w, sizes).sum(), (0, 1))(x, w)
    assert [g.dtype for g in got] == [dtype, np.float32]
    got = jax.grad(
        lambda x: jtk.ragged_dot(x, w.astype(dtype), sizes, None, np.float32).sum()
    )(x)  # fmt: skip
    assert got.dtype == dtype


@given(st.integers(0, 40), st.integers(1, 6), st.lists(st.integers(-9, 30), min_size=1, max_size=7),
       st.integers(0, 2**32 - 1))  # fmt: skip
@settings(max_examples=6)
def test_random_sizes_and_shapes(rows, k, sizes, seed):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.integers(-3, 4, (rows, k)), np.float32)
    w = jnp.asarray(rng.integers(-3, 4, (len(sizes), k, 3)), np.float32)

    def value_and_gradients(f):
        def square(x, w):
            return (f(x, w, jnp.array(sizes)) ** 2).sum()

        return jax.jit(jax.value_and_grad(square, (0, 1)))(x, w)

    assert_close(value_and_gradients(ours), value_and_gradients(theirs))


def test_export(rng):
    x, w = random(rng, (30, 6), np.float32), random(rng, (4, 6, 5), np.float32)
    sizes = many_sizes(rng, 1)[0]
    exported = jax.export.export(
        jax.jit(jax.grad(loss(ours))), disabled_checks=jtk.export_checks()
    )(x, w, sizes)
    loaded = jax.export.deserialize(exported.serialize())
    assert_close(loaded.call(x, w, sizes), jax.grad(loss(theirs))(x, w, sizes))
    (rows,) = jax.export.symbolic_shape("rows")
    symbolic = jax.ShapeDtypeStruct((rows, 6), np.float32)
    exported = jax.export.export(jax.jit(ours))(symbolic, w, sizes)
    assert_close(exported.call(x, w, sizes), theirs(x, w, sizes))


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


def test_shard_map_over_rows(rng, mesh):
    """Each device has rows and sizes of its own, and all weights."""
    with jax.default_device(jax.devices("cpu")[0]):
        x, w = random(rng, (4, 30, 6), np.float32), random(rng, (4, 6, 5), np.float32)
    sizes = many_sizes(rng, 4)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("experts"), P(), P("experts")), out_specs=P("experts")
    )
    def sharded(x, w, sizes):
        return jax.vmap(ours, (0, None, 0))(x, w, sizes)

    plain = jax.vmap(theirs, (0, None, 0))
    for argnums in (0, 1):
        assert_close(
            jax.jit(jax.grad(loss(sharded), argnums))(x, w, sizes),
            jax.grad(loss(plain), argnums)(x, w, sizes),
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
