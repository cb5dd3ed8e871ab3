"""``ring_attention``: values, gradients, communication and memory on eight CPU devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from numerics import BF16
from sharded import AUTO, EXPLICIT, collectives, devices, put

import jax_tilekern as jtk
from benchmarks.catalog.oracles import ORACLES
from jax_tilekern.ops.attention.ring import _Ring
from jax_tilekern.ops.attention.scores import Scores

pytestmark = [
    pytest.mark.usefixtures("highest_precision"),
    pytest.mark.skipif(devices() is None, reason="eight CPU devices"),
]

B, L, N, K, H, D = 2, 48, 4, 2, 8, 6
SEQUENCE = P(None, "s")


RNG = np.random.default_rng(0)
ARRAYS = [RNG.standard_normal(shape) for shape in ((B, L, N, H), (B, L, K, H), (B, L, K, D))]
SLOPES = np.linspace(0.1, 0.5, N)
DOCUMENTS = np.sort(RNG.integers(0, 5, (B, L)))


def mesh_of(size, kind=AUTO):
    return jax.make_mesh((size,), ("s",), axis_types=(kind,), devices=devices()[:size])


def ring(size, spec=SEQUENCE, kind=AUTO, check_vma=True, around=lambda f: f, **options):
    """Attention of a whole sequence, of which as many devices share queries, keys and values."""
    attend = around(functools.partial(jtk.ring_attention, axis_name="s", **options))
    specs = {"mesh": mesh_of(size, kind), "in_specs": (spec,) * 3, "out_specs": spec}
    return jax.shard_map(attend, check_vma=check_vma, **specs)


def gradient(f, operands=(0, 1, 2)):
    def loss(*xs):
        return sum(jnp.sum(jnp.sin(jnp.where(jnp.isinf(x), 0, x))) for x in jax.tree.leaves(f(*xs)))

    return jax.grad(loss, operands)


def value_and_gradient(f):
    return jax.jit(lambda *xs: (f(*xs), gradient(f)(*xs)))


def assert_near(got, wanted, share):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        y = np.asarray(y, np.float64)
        finite = np.isfinite(y)
        np.testing.assert_array_equal(np.isfinite(np.asarray(x, np.float64)), finite)
        bound = share * max(1, np.abs(y[finite]).max(initial=0))
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=0, atol=bound)


def of_documents(b, h, q, k):
    return jnp.asarray(DOCUMENTS)[b, q] == jnp.asarray(DOCUMENTS)[b, k]


def by_distance(s, b, h, q, k):
    return s - jnp.asarray(SLOPES)[h] * jnp.abs(q - k) + 0.1 * b


CALLS = {
    "all keys": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (7, 0)},
    "window of both sides": {"local_window_size": (9, 3)},
    "documents": {"mask_mod": of_documents, "is_causal": True},
    "score": {"score_mod": by_distance},
    "no key": {"mask_mod": lambda b, h, q, k: (q > 20) & (k < 30)},
    "nothing": {"mask_mod": lambda b, h, q, k: q < 0},
}


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.one_in(3)
def test_values_and_gradients(name, size):
    """Sums of 48 terms of size 1 in float64 differ by far less than 1e-12."""
    options = {"return_residual": True} | CALLS[name]
    with jax.enable_x64(True):
        xs = [jnp.asarray(x) for x in ARRAYS]
        f = ring(size, **options)
        expected = functools.partial(ORACLES.attention, **options)
        assert_near(value_and_gradient(f)(*xs), value_and_gradient(expected)(*xs), 1e-12)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_by_arrays_that_a_score_reads(check_vma):
    """Devices share the array, and add their parts of its gradient. Others have none."""

    def with_slopes(attend, query, key, value, slopes, documents):
        return attend(
            query, key, value, is_causal=True,
            score_mod=lambda s, b, h, q, k: s - slopes[h] * (q - k),
            mask_mod=lambda b, h, q, k: documents[b, q] == documents[b, k],
        )  # fmt: skip

    f = jax.shard_map(
        functools.partial(with_slopes, functools.partial(jtk.ring_attention, axis_name="s")),
        mesh=mesh_of(4), in_specs=(*[SEQUENCE] * 3, P(), P()), out_specs=SEQUENCE,
        check_vma=check_vma,
    )  # fmt: skip
    with jax.enable_x64(True):
        xs = [jnp.asarray(x) for x in (*ARRAYS, SLOPES, DOCUMENTS)]
        expected = functools.partial(with_slopes, ORACLES.attention)
        wanted = jax.jit(gradient(expected, (0, 1, 2, 3)))(*xs)
        assert_near(jax.jit(gradient(f, (0, 1, 2, 3)))(*xs), wanted, 1e-12)
        program = str(jax.make_jaxpr(gradient(f))(*xs))
        assert "wanted=(0, 1, 2)" in program
        assert "wanted=(0, 1, 2, 3)" not in program


def test_other_lengths_types_and_ranks():
    """Queries and keys have numbers of their own; of a batch there may be none."""
    with jax.enable_x64(True):
        xs = [jnp.asarray(x[0]) for x in ARRAYS]
        xs[0] = xs[0][:16]
        f = ring(8, P("s"), is_causal=True, return_residual=True)
        found = value_and_gradient(f)(*xs)
        whole = [x[None] for x in xs]
        expected = functools.partial(ORACLES.attention, is_causal=True, return_residual=True)
        wanted = value_and_gradient(expected)(*whole)
        assert_near(found, jax.tree.map(lambda x: x[0], wanted), 1e-12)
    empty = [jnp.zeros((0, 16, 2, 4)), jnp.zeros((0, 16, 2, 4)), jnp.zeros((0, 16, 2, 5))]
    assert ring(8)(*empty).shape == (0, 16, 2, 5)
    halves = [jnp.asarray(x, BF16) for x in ARRAYS]
    f, expected = ring(8, is_causal=True), functools.partial(ORACLES.attention, is_causal=True)
    # Parts, weights, the merged result and cotangents are rounded to 8 bits.
    exact = [jnp.asarray(x, np.float32) for x in halves]
    found = value_and_gradient(f)(*halves)
    assert found[0].dtype == BF16
    assert_near(found, value_and_gradient(expected)(*exact), 8 * 2.0**-9)


@pytest.fixture(scope="module")
def wanted_derivatives():
    """Second derivatives of one device, and the gradients of two mapped calls."""
    expected = functools.partial(ORACLES.attention, is_causal=True)
    with jax.enable_x64(True):
        xs = [jnp.asarray(x) for x in ARRAYS]
        second = jax.jit(gradient(gradient(expected)))(*xs)
        several = [jnp.stack([x, 2 * x]) for x in xs]
        mapped = jax.jit(jax.vmap(gradient(expected)))(*several)
        return jax.device_get((second, mapped))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_transformations(kind, wanted_derivatives):
    f = ring(4, kind=kind, is_causal=True)
    second, mapped = wanted_derivatives
    with jax.enable_x64(True), jax.set_mesh(mesh_of(4, kind)):
        split = [put(jax.sharding.get_mesh(), jnp.asarray(x), SEQUENCE) for x in ARRAYS]
        assert_near(jax.jit(gradient(gradient(f)))(*split), second, 1e-11)
        several = [jnp.stack([x, 2 * x]) for x in split]
        assert_near(jax.jit(jax.vmap(gradient(f)))(*several), mapped, 1e-12)
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(f, split, split)


def test_other_axes_share_the_batch():
    mesh = jax.make_mesh((2, 4), ("d", "s"), axis_types=(AUTO,) * 2, devices=devices()[:8])
    spec = P("d", "s")
    f = jax.shard_map(
        functools.partial(jtk.ring_attention, axis_name="s", local_window_size=(20, 0)),
        mesh=mesh, in_specs=(spec,) * 3, out_specs=spec,
    )  # fmt: skip
    expected = functools.partial(ORACLES.attention, local_window_size=(20, 0))
    with jax.enable_x64(True):
        xs = [jnp.asarray(x) for x in ARRAYS]
        assert_near(jax.jit(gradient(f))(*xs), jax.jit(gradient(expected))(*xs), 1e-12)


# Communication and memory.


def compiled(size, program, length=32):
    mesh = mesh_of(size)
    xs = [put(mesh, np.zeros((1, length * size, 2, 16), np.float32), SEQUENCE)] * 3
    return jax.jit(program).lower(*xs).compile()


SAVED = jax.checkpoint_policies.save_only_these_names("attention")
AROUND = {
    "plain": lambda f: f,
    "remat": jax.checkpoint,
    "saved": functools.partial(jax.checkpoint, policy=SAVED),
}


@functools.cache
def gradient_of_part(around, size):
    return compiled(size, gradient(ring(size, around=AROUND[around], is_causal=True)))


@pytest.mark.parametrize("around", AROUND)
def test_blocks_are_permuted_and_memory_is_that_of_a_part(around):
    found = {}
    for size in (4, 8):
        program = gradient_of_part(around, size)
        assert {x.kind for x in collectives(program)} == {"collective-permute"}
        found[size] = program.memory_analysis().temp_size_in_bytes, len(collectives(program))
    (four, _), (eight, permutes) = found[4], found[8]
    # A block of keys has 4 KiB.
    assert eight - four < 1024
    # A policy that saves results saves the value's journey. XLA of jaxlib 0.10 merges the two.
    plain = len(collectives(gradient_of_part("plain", 8)))
    assert (permutes > plain) == (around == "remat" and jax.__version_info__ >= (0, 11))


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, range(8)),
        ({"is_causal": True}, range(8)),
        ({"window": (6, 0), "is_causal": True}, range(2)),
        ({"window": (7, 0), "is_causal": True}, range(3)),
        ({"window": (9, 3)}, range(7, 11)),
        ({"window": (0, 0)}, range(1)),
        ({"window": (0, 5)}, range(7, 9)),
    ],
)
def test_blocks_that_no_device_sees_are_not_sent(options, steps):
    query, key = np.zeros((2, 6, 4, 8)), np.zeros((2, 6, 2, 8))
    known = _Ring("s", 8, Scores(1.0, **options))
    assert known.steps(known.kinds(query, key, [])) == steps


def test_a_window_of_a_neighbour_is_sent_once():
    program = compiled(8, ring(8, is_causal=True, local_window_size=(5, 0)))
    assert [x.kind for x in collectives(program)] == ["collective-permute"] * 2
    assert not collectives(compiled(8, ring(8, local_window_size=0)))


def test_hidden_blocks_are_not_computed():
    """Infinite values would make their products with weights of 0 NaN."""
    query, key, value = (jnp.asarray(x, np.float32) for x in ARRAYS)
    value = value.at[:, -6:].set(jnp.inf)
    masks = {"is_causal": True}, {"mask_mod": lambda b, h, q, k: k <= q}
    documents = jnp.arange(L) // 12
    masks += ({"mask_mod": lambda b, h, q, k: documents[q] == documents[k]},)
    for options in masks:
        out = jax.jit(ring(8, **options))(query, key, value)
        assert np.isfinite(out[:, :36]).all()
        assert not np.isfinite(out[:, -1]).any()


def test_errors():
    xs = [jnp.asarray(x, np.float32) for x in ARRAYS]
    with pytest.raises(NameError, match="unbound axis name: s"):
        jtk.ring_attention(*xs, "s")
    with pytest.raises(ValueError, match=r"not evenly divisible(?s:.*)float32\[2,46,4,8\]"):
        ring(8)(*(x[:, :46] for x in xs))
    with pytest.raises(ValueError, match=r"multiple of those of key, 2: .*float32\[2, 6, 3, 8\]"):
        ring(8)(xs[0][:, :, :3], *xs[1:])
    with pytest.raises(TypeError, match="unexpected keyword argument 'bias'"):
        jtk.ring_attention(*xs, "s", bias=xs[0])
