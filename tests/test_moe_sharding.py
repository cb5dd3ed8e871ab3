"""``route`` and ``moe`` on several devices: values, and bytes against ``lax.ragged_dot``'s."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import AUTO, EXPLICIT, MESH_TYPES, custom_calls, devices, mesh_of, put

import jax_tilekern as jtk
from benchmarks.sharded_bytes import SLACK, bytes_sent, collectives
from jax_tilekern.ops.mixture.activation import traced_activation
from jax_tilekern.partitioning import call, local_program
from jax_tilekern.partitioning.params_text import from_text, to_text

pytestmark = [
    pytest.mark.skipif(devices() is None, reason="eight CPU devices"),
    pytest.mark.usefixtures("highest_precision"),
]

T, D, H, E, K = 64, 16, 32, 8, 2
SCHEMES = {  # tokens, the first matrices, the second ones and the result
    "data": (P("d"), P(), P(), P("d")),
    "data over two axes": (P(("d", "m")), P(), P(), P(("d", "m"))),
    "experts": (P(), P("m"), P("m"), P()),
    "columns": (P(), P(None, None, "m"), P(None, "m"), P()),
    "data and experts": (P("d"), P("m"), P("m"), P("d")),
    "data and columns": (P("d"), P(None, None, "m"), P(None, "m"), P("d")),
    "experts and columns": (P(), P("d", None, "m"), P("d", "m"), P()),
    "data and experts by one axis": (P("m"), P("m"), P("m"), P("m")),
    "data and experts by axes in common": (P(("m", "d")), P("m"), P("m"), P(("m", "d"))),
    "fully sharded": (P("d"), P(None, "d"), P(None, None, "d"), P("d")),
    "features": (P(None, "m"), P(None, "m"), P(None, None, "m"), P(None, "m")),
}


def _arrays(rng):
    shapes = (T, D), (T, E), (E, D, H), (E, D, H), (E, H, D), (E, D)
    return [(rng.standard_normal(shape) / 2).astype(np.float32) for shape in shapes]


def _specs(scheme):
    x, up, down, _ = SCHEMES[scheme]
    return x, P(*x[:1]), up, up, down, P(*down[:1])


def by_parts(x, logits, up, gate, down, bias):
    """The layer as a user of ``lax.ragged_dot`` writes it."""
    scores, indices = lax.top_k(jax.nn.softmax(logits), K)
    scores = scores / scores.sum(1, keepdims=True)
    order, sizes = jnp.argsort(indices.ravel()), jnp.bincount(indices.ravel(), length=E)
    rows = jnp.take(x, order // K, axis=0)
    hidden = jax.nn.silu(lax.ragged_dot(rows, gate, sizes)) * lax.ragged_dot(rows, up, sizes)
    results = lax.ragged_dot(hidden, down, sizes) + jnp.take(bias, indices.ravel()[order], axis=0)
    results = results * scores.ravel()[order][:, None]
    return jnp.take(results, jnp.argsort(order), axis=0).reshape(T, K, D).sum(1)


def ours(x, logits, up, gate, down, bias, **kwargs):
    weights, indices = jtk.route(logits, K)
    return jtk.moe(x, up, down, weights, indices, w_gate=gate, b_down=bias, **kwargs)


def _gradients(layer):
    return jax.grad(lambda *args: (layer(*args) ** 2).sum(), tuple(range(6)))


def _assert_close(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


def _compiled(mesh, function, args, specs):
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )
    return jax.jit(function, out_shardings=shardings).lower(*args).compile()


@functools.cache
def _bytes_of_jax(scheme, gradient):
    """Bytes of the program of ``lax.ragged_dot`` with results sharded like the operands."""
    mesh = mesh_of((AUTO, AUTO))
    specs = _specs(scheme)
    args = [put(mesh, x, s) for x, s in zip(_arrays(np.random.default_rng(0)), specs, strict=True)]
    function, out = (_gradients(by_parts), specs) if gradient else (by_parts, SCHEMES[scheme][3])
    return bytes_sent(_compiled(mesh, function, args, out))


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.one_in(20)
def test_automatic_axes(rng, scheme, gradient):
    mesh, arrays, specs = mesh_of((AUTO, AUTO)), _arrays(rng), _specs(scheme)
    args = [put(mesh, x, s) for x, s in zip(arrays, specs, strict=True)]
    out = specs if gradient else SCHEMES[scheme][3]
    layer, theirs = (_gradients(f) if gradient else f for f in (ours, by_parts))
    compiled = _compiled(mesh, layer, args, out)
    _assert_close(compiled(*args), jax.jit(theirs)(*arrays))
    # Weights multiply hidden values, so the columns of these have parts of the weights' gradient.
    weights = 2 * T * K * 4 if gradient else 0
    found = bytes_sent(compiled)
    assert found <= SLACK * _bytes_of_jax(scheme, gradient) + weights, collectives(compiled)
    assert "jax_tilekern_cpu_ragged_matmul" in compiled.as_text()


@pytest.mark.parametrize("types", [x for x in MESH_TYPES.values() if EXPLICIT in x], ids=str)
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.one_in(48)
def test_explicit_axes(rng, scheme, gradient, types):
    mesh, arrays, specs = mesh_of(types), _arrays(rng), _specs(scheme)
    if AUTO in types and ("two axes" in scheme or "common" in scheme):
        pytest.skip("a type has no place for an automatic axis beside an explicit one")
    layer, theirs = (_gradients(f) if gradient else f for f in (ours, by_parts))
    with jax.set_mesh(mesh):
        args = [put(mesh, x, s) for x, s in zip(arrays, specs, strict=True)]
        compiled = jax.jit(layer).lower(*args).compile()
        found = compiled(*args)
        if gradient:
            for x, arg in zip(found, args, strict=True):
                assert jax.typeof(x).sharding == jax.typeof(arg).sharding
        elif AUTO not in types:
            spec = SCHEMES[scheme][3]
            assert jax.typeof(found).sharding.spec == P(*spec, *[None] * (2 - len(spec)))
    _assert_close(found, jax.jit(theirs)(*arrays))
    sent = bytes_sent(compiled)
    if AUTO in types:
        assert sent <= SLACK * _bytes_of_jax(scheme, gradient) + 2 * T * K * 4
        return
    # Where devices have tokens of their own, the gradients of the matrices are added. In the
    # program of lax.ragged_dot every device computes all tokens.
    matrices = sum(x.nbytes for x in arrays[2:]) if gradient and "d" in str(specs[0]) else 0
    assert sent <= 0.9 * _bytes_of_jax(scheme, gradient) + 2 * matrices, collectives(compiled)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.one_in(2)
def test_experts_by_hand(rng, gradient):
    """Each device has some tokens and some experts, and there is one reduction over the latter."""
    mesh, arrays, specs = mesh_of((AUTO, AUTO)), _arrays(rng), _specs("data and experts")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P("d"))
    def layer(x, logits, up, *others):
        first = lax.axis_index("m") * len(up)
        return lax.psum(ours(x, logits, up, *others, group_offset=first), "m")

    theirs = by_parts
    if gradient:
        layer, theirs = _gradients(layer), _gradients(by_parts)
    args = [put(mesh, x, s) for x, s in zip(arrays, specs, strict=True)]
    compiled = jax.jit(layer).lower(*args).compile()
    _assert_close(compiled(*args), jax.jit(theirs)(*arrays))
    assert bytes_sent(compiled) <= 0.2 * _bytes_of_jax("data and experts", gradient)
    if not gradient:
        (reduction,) = collectives(compiled)
        # A ring of four sends twice three quarters of the results of 32 tokens.
        assert reduction == ("all-reduce", 2 * 3 / 4 * T // 2 * D * 4)


def test_activations_of_automatic_axes(rng):
    """One of a module, one of this process, and one that reads a value of the program."""
    mesh, arrays, specs = mesh_of((AUTO, AUTO)), _arrays(rng), _specs("data and experts")
    args = [put(mesh, x, s) for x, s in zip(arrays, specs, strict=True)]

    def layer(make):
        return lambda scale, *args: ours(*args, activation=make(scale))

    for make in (
        lambda _: jax.nn.relu,
        lambda _: lambda x: x * jnp.tanh(x),
        lambda scale: lambda x: x * scale,
    ):
        f, scale = layer(make), np.float32(2)
        both = jax.jit(jax.value_and_grad(lambda *a, f=f: (f(*a) ** 2).sum(), (1, 3)))
        _assert_close(both(scale, *args), both(scale, *arrays))


def test_activations_are_known_by_what_they_compute(rng):
    """Not by their names. A function that is text keeps its value and its own derivative."""
    mesh, arrays = mesh_of((AUTO, AUTO)), _arrays(rng)
    args = [put(mesh, x, s) for x, s in zip(arrays, _specs("experts"), strict=True)]
    for factor in (2, 3):

        def activation(x, factor=factor):
            return factor * x

        layer = functools.partial(ours, activation=activation)
        _assert_close(jax.jit(layer)(*args), jax.jit(layer)(*arrays))
    for function in (jax.nn.relu, lambda x: x * jnp.tanh(x)):
        traced, _ = traced_activation(function, [np.dtype(np.float32)])
        traced = traced.differentiated()
        text = to_text(traced)
        assert "object" not in text
        x = jnp.arange(-1, 2, dtype=np.float32)
        for f in (traced, from_text(text)):
            np.testing.assert_allclose(f(x), function(x))
            slopes = [jax.vmap(jax.grad(g))(x) for g in (f, function)]
            np.testing.assert_allclose(*slopes)


@pytest.mark.parametrize(
    "activation", [lambda x: x.sum(), jax.nn.softmax, lambda x: x * jnp.ones(1)]
)
def test_activations_are_of_scalars(rng, activation):
    mesh, arrays = mesh_of((AUTO, AUTO)), _arrays(rng)
    args = [put(mesh, x, s) for x, s in zip(arrays, _specs("experts"), strict=True)]
    with pytest.raises(TypeError, match="scalars"):
        jax.jit(functools.partial(ours, activation=activation))(*args)


def test_offsets_of_a_narrow_type(rng):
    """The place of a device's experts is not in the range of the offset's type."""
    mesh = mesh_of((AUTO, AUTO))
    x, up, down = (rng.standard_normal(s, np.float32) for s in ((8, 4), (256, 4, 4), (256, 4, 4)))
    weights, indices = np.ones((8, 2), np.float32), rng.integers(0, 256, (8, 2))

    @jax.jit
    def layer(x, up, down, offset):
        return jtk.moe(x, up, down, weights, indices, group_offset=offset)

    placed = [put(mesh, a, s) for a, s in ((x, P()), (up, P("m")), (down, P("m")))]
    for offset in (np.int8(3), np.int8(-3)):
        _assert_close(layer(*placed, offset), layer(x, up, down, np.int32(offset)))


def test_infinite_biases_of_sharded_columns(rng):
    mesh, arrays = mesh_of((AUTO, AUTO)), _arrays(rng)
    arrays[-1][:, 0] = np.inf
    args = [put(mesh, x, s) for x, s in zip(arrays, _specs("columns"), strict=True)]
    found, wanted = jax.jit(ours)(*args), jax.jit(ours)(*arrays)
    assert np.isposinf(np.asarray(found)[:, 0]).all()
    _assert_close(found[:, 1:], wanted[:, 1:])


@pytest.mark.parametrize(("scheme", "rows"), [("data", T // 2 * K), ("experts", T * K)])
def test_devices_share_the_work_on_automatic_axes(rng, scheme, rows):
    mesh, arrays, specs = mesh_of((AUTO, AUTO)), _arrays(rng), _specs(scheme)
    args = [put(mesh, x, s) for x, s in zip(arrays, specs, strict=True)]
    compiled = _compiled(mesh, ours, args, SCHEMES[scheme][3])
    found = custom_calls(compiled, "jax_tilekern_cpu_ragged_matmul")
    assert set(found) == {f"f32[{rows},{H}]", f"f32[{rows},{D}]"}
    kinds = [c.kind for c in collectives(compiled)]
    assert kinds == ([] if scheme == "data" else ["all-reduce"])
    if scheme == "experts":
        assert f"f32[{E // 4},{D},{H}]" in compiled.as_text()


@pytest.mark.parametrize("tokens", [T, 9])
def test_large_sums_are_rounded_before_they_are_gathered(rng, monkeypatch, tokens):
    """They are rounded once, after devices have added float32; 9 x 15 results are no four parts."""
    monkeypatch.setattr(local_program, "_LEAST_BYTES_SAVED", 0)
    monkeypatch.setattr(call, "_answers", {})
    features = D if tokens == T else 15
    x = rng.integers(-1, 2, (tokens, features))
    up, down = rng.integers(-1, 2, (E, features, H)), rng.integers(-64, 65, (E, H, features))
    weights, indices = np.ones((tokens, K), np.float32), rng.integers(0, E, (tokens, K))

    def layer(x, up, down):
        return jtk.moe(x, up, down, weights, indices, activation=lambda x: x)

    mesh, arrays = mesh_of((AUTO, AUTO)), [a.astype(np.float32) for a in (x, up, down)]
    experts = SCHEMES["experts"][:3]
    args = [put(mesh, x.astype(jnp.bfloat16), s) for x, s in zip(arrays, experts, strict=True)]
    compiled = _compiled(mesh, layer, args, P())
    in_parts = ["reduce-scatter", "all-gather"] if tokens == T else ["all-reduce"]
    assert [c.kind for c in collectives(compiled)] == in_parts
    # Float32 is exact, of integers up to 2**16. Bfloat16 is not.
    wanted = np.asarray(layer(*arrays)).astype(jnp.bfloat16)
    assert not np.array_equal(wanted, np.asarray(layer(*arrays)))
    np.testing.assert_array_equal(compiled(*args), wanted)


@pytest.mark.parametrize("size", ["tokens", "choices"])
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_nothing_to_compute_with_sharded_features(rng, kind, size):
    x, _, up, _, down, bias = _arrays(rng)
    tokens, k = (0, K) if size == "tokens" else (T, 0)
    x, weights, indices = x[:tokens], np.ones((tokens, k), np.float32), np.ones((tokens, k), int)
    mesh = mesh_of((kind, kind))
    with jax.set_mesh(mesh):
        placed = put(mesh, down, P(None, None, "m"))
        layer = jax.jit(lambda x, down: jtk.moe(x, up, down, weights, indices, b_down=bias))
        found = layer(x, placed)
        gradients = jax.jit(jax.grad(lambda *args: layer(*args).sum(), (0, 1)))(x, placed)
    for each, like in zip((found, *gradients), (x, x, down), strict=True):
        assert each.shape == like.shape
        # JAX 0.10 does not copy an empty array that devices share.
        assert each.size == 0 or not np.any(each)


def test_quantised_experts_inside_shard_map(rng):
    x, logits, up, gate, down, _ = _arrays(rng)
    experts = jtk.quantize_weights(
        {"up": up, "gate": gate, "down": down}, where=lambda *_: True, block=(1, 32)
    )

    def layer(x, logits, experts):
        up, gate, down = experts["up"], experts["gate"], experts["down"]
        return jtk.moe(x, up, down, *jtk.route(logits, K), w_gate=gate)

    def loss(layer, x):
        return jnp.sum(layer(x, logits, experts) ** 2)

    specs = {"in_specs": (P("d"), P("d"), P()), "out_specs": P("d")}
    shared = jax.shard_map(layer, mesh=mesh_of((AUTO, AUTO)), **specs)
    arrays = jax.tree.map(
        jnp.asarray, experts, is_leaf=lambda w: isinstance(w, jtk.QuantizedWeights)
    )
    found, expected = (f(x, logits, w) for f, w in ((jax.jit(shared), experts), (layer, arrays)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    found, expected = (jax.grad(functools.partial(loss, jax.jit(f)))(x) for f in (shared, layer))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
