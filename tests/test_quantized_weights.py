"""``QuantizedWeights``: the products that take them, layers, checkpoints and transformations."""

import dataclasses
import functools
import gc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx, serialization
from guides import snippets
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from sharded import devices

import jax_tilekern as jtk
from jax_tilekern.interop import array_sources
from jax_tilekern.ops.mixture import call as mixture_call

PAGE = Path(__file__).parent.parent / "docs/small_weights.md"
BY_WEIGHTS = "tilekern_weight_matmul"


def quantised(rng, *shape, dtype=jnp.float32, **options):
    w = jnp.asarray(rng.normal(size=shape), dtype)
    return jtk.quantize_weights(w, lambda *_: True, **options)


def products_by_weights(function, *args):
    names = [x.primitive.name for x in equations(jax.make_jaxpr(function)(*args))]
    return names.count(BY_WEIGHTS)


def patched(function):
    return lambda *xs: jtk.patch(function)(*xs)


DIMENSIONS = (((2,), (0,)), ((), ()))
# A call of x of (2, 5, 150) and weights of (150, 40), and how many products by weights it has.
CALLS = {
    "matmul": (jtk.matmul, 1),
    "matmul of a vector": (lambda x, w: jtk.matmul(x[0, 0], w), 1),
    "dot_general": (lambda x, w: jtk.dot_general(x, w, DIMENSIONS), 1),
    "epilogue": (lambda x, w: jtk.matmul(x, w, epilogue=jnp.tanh), 1),
    "linear": (lambda x, w: jtk.linear(x, w, jnp.ones(40), jax.nn.gelu), 1),
    "gated_linear": (lambda x, w: jtk.gated_linear(x, w, w), 2),
    "one of a pair": (lambda x, w: jtk.gated_linear(x, jnp.asarray(w) / 2, w), 1),
    "jnp.matmul": (patched(jnp.matmul), 1),
    "jnp.dot": (patched(jnp.dot), 1),
    "jnp.tensordot": (patched(lambda x, w: jnp.tensordot(x, w, 1)), 1),
    "lax.dot_general": (patched(lambda x, w: jax.lax.dot_general(x, w, DIMENSIONS)), 1),
    "not patched": (jnp.matmul, 0),
    "lax, not patched": (lambda x, w: jax.lax.dot_general(x, jnp.asarray(w), DIMENSIONS), 0),
    "operator": (lambda x, w: x @ w, 0),
    "einsum": (lambda x, w: jtk.einsum("abk,kn->abn", x, w), 0),
    "of rows": (lambda x, w: jtk.dot_general(x[..., :40], w, (((2,), (1,)), ((), ()))), 0),
    "integers": (lambda x, w: jtk.matmul(x.astype(int), w), 1),
    "an integer result": (lambda x, w: jtk.matmul(x, w, preferred_element_type=int), 0),
    "complex": (lambda x, w: jtk.matmul(x + 1j, w), 0),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_products(rng, name, symmetric):
    call, count = CALLS[name]
    weights = quantised(rng, 150, 40, symmetric=symmetric)
    x = jnp.asarray(rng.normal(size=(2, 5, 150)), jnp.float32)
    found, wanted = call(x, weights), call(x, weights.array())
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert products_by_weights(call, x, weights) == count
    if found.dtype == jnp.float32:
        gradient = jax.grad(lambda w: call(x, w).sum(), allow_int=True)(weights)
        assert gradient.values.dtype == jax.dtypes.float0
        assert gradient.scales.shape == weights.scales.shape
    gc.collect()
    assert not array_sources._sources


def test_batches_of_matrices(rng):
    weights = quantised(rng, 3, 64, 8)
    x = jnp.asarray(rng.normal(size=(3, 5, 64)), jnp.float32)
    wanted = x @ weights.array()
    np.testing.assert_allclose(jtk.matmul(x, weights), wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jax.vmap(jtk.matmul)(x, weights), wanted, rtol=1e-4, atol=1e-4)
    stacked = jax.lax.scan(lambda _, xw: (None, jtk.matmul(*xw)), None, (x, weights))[1]
    np.testing.assert_allclose(stacked, wanted, rtol=1e-4, atol=1e-4)
    assert products_by_weights(jtk.matmul, x, weights) == 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_layers_of_flax(rng, dtype):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for features in (40, 8):
                dense = functools.partial(nn.Dense, param_dtype=dtype, dtype=dtype)
                x = nn.gelu(dense(features, dot_general=jtk.dot_general)(x))
            return x

    class Linear(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(
                150, 40, dtype=dtype, param_dtype=dtype, dot_general=jtk.dot_general, rngs=rngs
            )

    x = jnp.asarray(rng.normal(size=(4, 150)), dtype)
    model = Model()
    variables = jtk.quantize_weights(model.init(jax.random.key(0), x))
    arrays = jax.tree.map(
        lambda w: w.array() if is_quantised(w) else w, variables, is_leaf=is_quantised
    )
    np.testing.assert_allclose(
        np.asarray(model.apply(variables, x), np.float32),
        np.asarray(model.apply(arrays, x), np.float32),
        rtol=0.05, atol=0.05,
    )  # fmt: skip
    assert products_by_weights(model.apply, variables, x) == 2

    graph, state = nnx.split(Linear(nnx.Rngs(0)))
    small = jtk.quantize_weights(state)
    assert len(jax.tree.leaves(small)) == 3
    assert products_by_weights(lambda s, x: nnx.merge(graph, s).layer(x), small, x) == 1


def is_quantised(x):
    return isinstance(x, jtk.QuantizedWeights)


def test_experts(rng):
    up, down = quantised(rng, 3, 64, 32, block=(1, 32)), quantised(rng, 3, 32, 64, block=(1, 32))
    x, routing = jnp.ones((5, 64)), jtk.route(jnp.asarray(rng.normal(size=(5, 3))), 2)
    wanted = jtk.moe(x, up.array(), down.array(), routing)
    np.testing.assert_allclose(jtk.moe(x, up, down, routing), wanted, rtol=1e-5, atol=1e-4)


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_experts_are_multiplied_by_as_they_are(rng, monkeypatch):
    """The layer under transformations, beside that of the dequantised matrices."""
    # As in a process with one device.
    monkeypatch.setattr(mixture_call, "_most_devices", lambda _: 1)
    shapes = (64, 32), (64, 32), (32, 64)
    small = [quantised(rng, 3, *shape, block=(1, 32)) for shape in shapes]
    x = jnp.asarray(rng.normal(size=(2, 5, 64)), jnp.float32)
    routing = jtk.route(jnp.asarray(rng.normal(size=(5, 3))), 2)

    def layer(x, up, gate, down):
        return jtk.moe(x, up, down, routing, w_gate=gate)

    def loss(x, scales):
        weights = [dataclasses.replace(w, scales=s) for w, s in zip(small, scales, strict=True)]
        return (layer(x, *weights) ** 2).sum()

    def wanted_loss(x, scales):
        weights = [dataclasses.replace(w, scales=s) for w, s in zip(small, scales, strict=True)]
        return (layer(x, *(w.array() for w in weights)) ** 2).sum()

    calls = [call.call for call in jtk.explain(layer, x[0], *small)]
    assert sum("by two arrays of weights" in call for call in calls) == 1
    mapped = jax.vmap(layer, (0, None, None, None))(x, *small)
    each = jnp.stack([layer(rows, *(w.array() for w in small)) for rows in x])
    assert_close(mapped, each)
    scales = [w.scales for w in small]
    primals = x[0], scales
    tangents = jnp.ones_like(x[0]), [jnp.ones_like(s) for s in scales]
    for function, other in ((loss, wanted_loss), (jax.grad(loss), jax.grad(wanted_loss))):
        for found, expected in zip(
            jax.tree.leaves(jax.jvp(function, primals, tangents)),
            jax.tree.leaves(jax.jvp(other, primals, tangents)),
            strict=True,
        ):
            assert_close(found, expected)
    of_scales = jax.grad(loss, 1)(*primals)
    for found, expected in zip(of_scales, jax.grad(wanted_loss, 1)(*primals), strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, "bfloat16", np.dtype(jnp.bfloat16)])
def test_the_type_is_given_as_to_jax(rng, monkeypatch, dtype):
    monkeypatch.setattr(mixture_call, "_most_devices", lambda _: 1)
    up, down = quantised(rng, 3, 64, 32), quantised(rng, 3, 32, 64)
    up, down = (jtk.QuantizedWeights(w.values, w.scales, None, dtype) for w in (up, down))
    routing = jtk.Routing(jnp.ones((5, 1), jnp.bfloat16), jnp.zeros((5, 1), int))
    with jtk.gpu_target("H100"):
        calls = jtk.explain(jtk.moe, jnp.ones((5, 64), jnp.bfloat16), up, down, routing)
    assert any("scaled_ragged_dot" in call.call for call in calls)
    assert up.dtype == np.dtype(jnp.bfloat16)
    assert isinstance(up.dtype, np.dtype)


def test_the_type_is_float32_by_default(rng):
    w = quantised(rng, 64, 32)
    assert jtk.QuantizedWeights(w.values, w.scales, w.zeros, None).dtype == np.float32


def test_checkpoints_are_arrays(rng, tmp_path):
    weights = quantised(rng, 150, 40, symmetric=False)
    np.savez(tmp_path / "model.npz", *map(np.asarray, weights.factors[1:]), values=np.asarray(
        weights.values, np.int8
    ))  # fmt: skip
    stored = np.load(tmp_path / "model.npz")
    values = stored["values"].astype(jnp.int4)
    again = jtk.QuantizedWeights(values, stored["arr_0"], stored["arr_1"])
    np.testing.assert_array_equal(again.array(), weights.array())


@pytest.mark.parametrize(
    ("dtype", "symmetric"),
    [(jnp.int4, False), (jnp.int4, True), (jnp.int8, False), (jnp.float8_e4m3fn, True)],
)
def test_states_of_flax(rng, dtype, symmetric):
    def draw():
        w = jnp.asarray(rng.standard_normal((2, 150, 40)), jnp.bfloat16)
        weights = jtk.quantize_weights(w, lambda *_: True, dtype=dtype, symmetric=symmetric)
        return {"dense": {"kernel": weights}}

    stored, target = draw(), draw()
    found = serialization.from_bytes(target, serialization.to_bytes(stored))
    assert jax.tree.structure(found) == jax.tree.structure(stored)
    for x, y in zip(*map(jax.tree.leaves, (found, stored)), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    state = serialization.to_state_dict(stored)
    del state["dense"]["kernel"]["zeros"]
    with pytest.raises(ValueError, match=r"zeros, and .* at .*dense/kernel has values, scales$"):
        serialization.from_state_dict(target, state)


def test_what_is_quantised(rng):
    w, bias = jnp.ones((64, 4)), jnp.ones(4)
    params = {"a": {"kernel": w, "bias": bias}, "kernel": bias, "b": [w, jnp.ones((4, 4), int)]}
    small = jtk.quantize_weights(params)
    assert [x for x in jax.tree.leaves(small, is_leaf=is_quantised) if is_quantised(x)]
    assert is_quantised(small["a"]["kernel"])
    assert small["b"][0] is w
    assert small["kernel"] is bias
    chosen = jtk.quantize_weights(params, lambda path, _: path == "b/0", jnp.int8, block=(1, None))
    assert chosen["b"][0].values.dtype == jnp.int8
    assert chosen["a"]["kernel"] is w
    with pytest.raises(ValueError, match=r"'bias'.* has shape \(4,\); where= takes matrices"):
        jtk.quantize_weights(params, lambda path, _: path.endswith("bias"))


@pytest.mark.parametrize(
    ("error", "message", "arrays"),
    [
        (TypeError, r"int4, int8, .*, not float32 of shape \(3, 64\)", (jnp.ones((3, 64)),) * 2),
        (TypeError, r"not int8 of shape \(3,\)", (jnp.ones(3, jnp.int8), jnp.ones(3))),
        (
            ValueError, r"QuantizedWeights: scales have shape \(3, 5\); weights of shape \(3, 64\)",
            (jnp.ones((3, 64), jnp.int8), jnp.ones((3, 5))),
        ),
    ],
)  # fmt: skip
def test_errors(error, message, arrays):
    with pytest.raises(error, match=message):
        jtk.matmul(jnp.ones((2, 64)), jtk.QuantizedWeights(*arrays))


@pytest.mark.skipif(devices() is None, reason="eight CPU devices")
@pytest.mark.parametrize("spec", [P("m"), P(None, "m"), P("d", "m")])
def test_devices(rng, spec):
    mesh = jax.make_mesh((2, 4), ("d", "m"), (AxisType.Auto,) * 2, devices=devices()[:8])
    weights = quantised(rng, 512, 64, block=(1, 128), symmetric=False)
    placed = jax.device_put(weights, NamedSharding(mesh, spec))
    x = jnp.asarray(rng.normal(size=(8, 512)), jnp.float32)
    found = jax.jit(jtk.matmul)(x, placed)
    wanted = np.asarray(x, np.float64) @ np.asarray(weights.array(), np.float64)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)


# The layouts of checkpoints, as their libraries define them.


def packed(numbers, axis, order=range(8)):
    """Words of eight numbers along an axis: number ``order[i]`` of them is in bits 4 i and up."""
    numbers = np.moveaxis(numbers, axis, -1).astype(np.uint32)
    groups = numbers.reshape(*numbers.shape[:-1], -1, 8)
    words = sum(groups[..., place] << np.uint32(4 * i) for i, place in enumerate(order))
    return np.moveaxis(words, -1, axis).view(np.int32)


@pytest.mark.parametrize("group", [32, 128])
def test_checkpoints_of_awq_and_gptq(rng, group):
    converters = {}
    for _, code, _ in snippets(PAGE.read_text()):
        if "def from_" in code or "def nibbles" in code:
            exec("import jax.numpy as jnp\nimport jax_tilekern as jtk\n" + code, converters)
    k, n = 256, 24
    q, z = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (k // group, n))
    scales = np.exp(rng.normal(size=z.shape)).astype(np.float16)
    wide = scales.astype(np.float64).repeat(group, 0)
    order = 0, 2, 4, 6, 1, 3, 5, 7
    awq = converters["from_awq"](packed(q, 1, order), packed(z, 1, order), scales)
    wanted = (q - z.repeat(group, 0)) * wide
    np.testing.assert_allclose(np.asarray(awq.array(), np.float64), wanted, rtol=2.0**-10)
    gptq = converters["from_gptq"](packed(q, 0), packed(z, 1), scales)
    wanted = (q - (z + 1).repeat(group, 0)) * wide
    np.testing.assert_allclose(np.asarray(gptq.array(), np.float64), wanted, rtol=2.0**-10)
    y = jtk.matmul(jnp.ones((2, k), jnp.float16), gptq, preferred_element_type=jnp.float32)
    np.testing.assert_allclose(y[0], wanted.sum(0), rtol=1e-3, atol=0.5)


def test_an_array_of_numpy(rng):
    weights = quantised(rng, 64, 3)
    np.testing.assert_array_equal(np.asarray(weights), weights.array())
    rows = np.ones((2, 64), np.float32)
    np.testing.assert_array_equal(rows @ weights, rows @ np.asarray(weights.array()))


def test_float64(rng, x64):
    w = rng.normal(size=(64, 3))
    for given in (w, jnp.asarray(w)):
        weights = jtk.quantize_weights({"kernel": given})["kernel"]
        assert weights.dtype == np.float64
        assert weights.scales.dtype == np.float32
        np.testing.assert_array_equal(weights.values, quantised_values(w))


def quantised_values(w):
    return jtk.quantize(np.float32(w.T), dtype=jnp.int4)[0]


def test_an_exported_program_takes_them(rng):
    weights, x = quantised(rng, 64, 3, dtype=jnp.bfloat16), jnp.ones((2, 64), jnp.bfloat16)
    with jtk.policy("xla"):
        exported = jax.export.export(jax.jit(jtk.matmul))(x, weights)
        again = jax.export.deserialize(exported.serialize())
        np.testing.assert_array_equal(again.call(x, weights), jtk.matmul(x, weights))


def test_a_matrix_of_integers_is_refused(rng):
    weights = quantised(rng, 64, 3)
    integers = jtk.QuantizedWeights(weights.values, weights.scales, None, jnp.int8)
    with pytest.raises(TypeError, match=r"matrix of floats, not .*int8"):
        jtk.matmul(jnp.ones((2, 64)), integers)
