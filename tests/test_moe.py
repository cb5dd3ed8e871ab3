"""``route`` and ``moe``: values and derivatives against dense experts in float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import check_derivatives, random
from nvrtc_mark import needs_nvrtc

import jax_tilekern as jtk
from jax_tilekern.ops.mixture import moe

T, D, H, E, K = 40, 12, 16, 6, 3
TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """What a process with one device traces; see ``test_moe_sharding.py`` for several."""
    monkeypatch.setattr(moe, "is_one_call", lambda *_: False)


def _operands(rng, dtype=np.float32, biases=False, gate=True):
    names = {"x": (T, D), "w_up": (E, D, H), "w_down": (E, H, D)}
    if gate:
        names["w_gate"] = (E, D, H)
    if biases:
        names |= {"b_up": (E, H), "b_down": (E, D)} | ({"b_gate": (E, H)} if gate else {})
    arrays = {name: random(rng, shape, dtype) / 2 for name, shape in names.items()}
    routing = jtk.route(random(rng, (T, E), np.float32), K)
    return arrays, routing


def dense(arrays, weights, indices, activation=jax.nn.silu):
    """Every expert computes every token."""
    x = arrays["x"]
    up = jnp.einsum("td,edh->eth", x, arrays["w_up"], precision="highest")
    up = up + arrays.get("b_up", jnp.zeros((1, 1)))[:, None]
    if "w_gate" in arrays:
        gate = jnp.einsum("td,edh->eth", x, arrays["w_gate"], precision="highest")
        hidden = activation(gate + arrays.get("b_gate", jnp.zeros((1, 1)))[:, None]) * up
    else:
        hidden = activation(up)
    y = jnp.einsum("eth,ehd->etd", hidden, arrays["w_down"], precision="highest")
    y = y + arrays.get("b_down", jnp.zeros((1, 1)))[:, None]
    chosen = jax.nn.one_hot(indices, arrays["w_up"].shape[0], dtype=weights.dtype)
    return jnp.einsum("tke,tk,etd->td", chosen, weights, y, precision="highest")


def ours(arrays, weights, indices, **kwargs):
    arrays = dict(arrays)
    x, up, down = (arrays.pop(name) for name in ("x", "w_up", "w_down"))
    return jtk.moe(x, up, down, weights, indices, precision="highest", **arrays, **kwargs)


def test_remat_and_repeated_runs_have_the_same_bits(rng):
    arrays, (weights, indices) = _operands(rng, biases=True)

    def gradient(f):
        return jax.jit(jax.grad(lambda a, w: jnp.sum(jnp.sin(f(a, w, indices))), (0, 1)))

    first, *others = (
        gradient(f)(arrays, weights)
        for f in (ours, functools.partial(ours, save="inputs"), jax.checkpoint(ours), ours)
    )
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


@needs_nvrtc
def test_gradients_take_no_atomics(rng):
    """Those of biases, too, are sums in a fixed order."""
    arrays, (weights, indices) = _operands(rng, biases=True)
    gradient = jax.jit(jax.grad(lambda a, w: jnp.sum(jnp.sin(ours(a, w, indices))), (0, 1)))
    with jtk.gpu_target("sm_90"):
        lowered = gradient.trace(arrays, weights).lower(lowering_platforms=("cuda",))
    scatters = re.findall(r'"stablehlo\.scatter".*?}\)', lowered.as_text(), re.DOTALL)
    # There may be one of the places of pairs, which are unique.
    assert not [scatter for scatter in scatters if "stablehlo.add" in scatter]


def test_what_is_saved(rng):
    """The operands and two hidden values: no rows, and no results of experts."""
    arrays, (weights, indices) = _operands(rng)
    _, pull = jax.vjp(lambda a, w: ours(a, w, indices), arrays, weights)
    saved = [x for x in jax.tree.leaves(pull) if x.ndim == 2 and x.shape[0] == T * K]
    assert sum(x.shape[1] == H for x in saved) == 2
    assert not any(x.shape[1] == D for x in saved)


def test_export_with_a_symbolic_number_of_tokens(rng):
    arrays, (weights, indices) = _operands(rng)
    (tokens,) = jax.export.symbolic_shape("tokens")
    matrices = {name: x for name, x in arrays.items() if name != "x"}

    def layer(x, weights, indices):
        return ours({"x": x, **matrices}, weights, indices)

    def gradient(*args):
        return jax.grad(lambda *a: layer(*a).sum())(*args)

    args = arrays["x"], weights, indices
    symbolic = [jax.ShapeDtypeStruct((tokens, *x.shape[1:]), x.dtype) for x in args]
    for function in (layer, gradient):
        exported = jax.export.export(jax.jit(function), disabled_checks=jtk.export_checks())
        found = exported(*symbolic).call(*args)
        np.testing.assert_allclose(found, jax.jit(function)(*args), **TOLERANCE)


def test_export_with_a_symbolic_number_of_experts(rng):
    arrays, (weights, indices) = _operands(rng)
    (experts,) = jax.export.symbolic_shape("experts")
    matrices = {name: x for name, x in arrays.items() if name != "x"}

    def layer(matrices):
        return ours({"x": arrays["x"], **matrices}, weights, indices)

    symbolic = {
        name: jax.ShapeDtypeStruct((experts, *x.shape[1:]), x.dtype) for name, x in matrices.items()
    }
    exported = jax.export.export(jax.jit(layer), disabled_checks=jtk.export_checks())
    np.testing.assert_allclose(exported(symbolic).call(matrices), layer(matrices), **TOLERANCE)


def test_experts_of_a_device(rng):
    """Parts of the experts add up to the whole."""
    arrays, (weights, indices) = _operands(rng)
    parts = []
    for first in (0, 2, 4):
        own = {k: v if k == "x" else v[first : first + 2] for k, v in arrays.items()}
        parts.append(ours(own, weights, indices, group_offset=first))
    np.testing.assert_allclose(sum(parts), dense(arrays, weights, indices), **TOLERANCE)


@pytest.mark.parametrize("wide", ["x", "w_up", "w_gate", "w_down"])
def test_types_are_promoted(rng, wide):
    """The wider of the first matrices are not rounded to the type of the others."""
    arrays, (weights, indices) = _operands(rng, jnp.bfloat16)
    arrays[wide] = random(rng, arrays[wide].shape, np.float32) / 2
    found = ours(arrays, weights, indices)
    assert found.dtype == np.float32
    # Hidden values are rounded where only the last matrices are wide.
    bound = TOLERANCE if wide != "w_down" else {"rtol": 2e-2, "atol": 2e-2}
    exact = jax.tree.map(lambda x: x.astype(np.float32), arrays)
    np.testing.assert_allclose(found, dense(exact, weights, indices), **bound)


def test_lists_and_types_by_name(rng):
    """JAX has no 64-bit types by default."""
    arrays, (weights, indices) = _operands(rng)
    with pytest.raises(TypeError, match=r"moe requires ndarray or scalar arguments, got .*list"):
        ours(arrays, weights.tolist(), indices)
    with pytest.warns(UserWarning, match="float64 requested in moe is not available"):
        result = ours(arrays, weights, indices, preferred_element_type="float64")
    assert result.dtype == np.float32


def test_vmap_over_nothing(rng):
    """A Jacobian of an empty array is such a ``vmap``."""
    arrays, (weights, indices) = _operands(rng, biases=True)

    def layer(x):
        return ours({**arrays, "x": x}, weights[: len(x)], indices[: len(x)])

    gradient = jax.grad(lambda x: layer(x).sum())
    assert jax.vmap(layer)(jnp.zeros((0, T, D))).shape == (0, T, D)
    assert jax.vmap(gradient, 1, 2)(jnp.zeros((T, 0, D))).shape == (T, D, 0)
    for jacobian in (jax.jacrev, jax.jacfwd):
        assert jacobian(layer)(jnp.zeros((0, D))).shape == (0, D, 0, D)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_route(rng, score):
    # Differences do not change which scores are the largest.
    logits = rng.permuted(np.tile(np.linspace(-2, 2, 16, dtype=np.float32), (T, 1)), axis=1)
    function = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[score]
    weights, indices = jtk.route(logits, 4, score_function=score)
    scores = np.asarray(function(logits))
    np.testing.assert_array_equal(indices, np.argsort(-scores, 1, stable=True)[:, :4])
    assert jtk.route(logits, 0, score_function=score).weights.shape == (T, 0)
    assert jtk.route(logits[:0], 4, score_function=score).weights.shape == (0, 4)
    picked = np.take_along_axis(scores, np.asarray(indices), 1)
    np.testing.assert_allclose(weights, picked / picked.sum(1, keepdims=True), rtol=1e-5)
    check_derivatives(lambda x: jtk.route(x, 4, score_function=score).weights, (logits,), 1)
    narrow = logits.astype(jnp.float8_e4m3fn)
    assert jtk.route(narrow, 4, score_function=score).weights.dtype == narrow.dtype
    bias = jnp.zeros(16).at[5].set(10.0)
    _, biased = jtk.route(logits, 2, score_function=score, bias=bias)
    assert (biased[:, 0] == 5).all()
    _, grouped = jtk.route(logits, 4, score_function=score, num_groups=4, chosen_groups=2)
    assert all(len(set(row // 4)) <= 2 for row in np.asarray(grouped))


@pytest.mark.parametrize(
    ("experts", "dtype", "index", "offset", "used"),
    [
        (256, np.uint8, 200, None, [200]), (300, np.uint8, 200, None, [200]),
        (256, np.uint8, 5, 250, []), (300, np.int8, -1, None, []), (4, np.uint8, 0, 256, []),
        (4, np.int8, -56, 200, []), (4, np.int32, -(2**31), 2**31 - 1, []),
        (4, np.int32, 2**31 - 1, -1, []), (4, np.int32, 6, 5, [1]),
    ],
)  # fmt: skip
@pytest.mark.one_in(3)
def test_indices_of_every_type(experts, dtype, index, offset, used):
    one, x, weight = jnp.ones((experts, 2, 2)), jnp.ones((1, 2)), jnp.ones((1, 1))
    indices = np.full((1, 1), index, dtype)

    def total(up):
        return jtk.moe(x, up, one, weight, indices, activation=abs, group_offset=offset).sum()

    assert jnp.flatnonzero(jax.grad(total)(one).sum((1, 2))).tolist() == used


def test_weights_of_tiny_scores():
    weights, _ = jtk.route(jnp.array([[-200.0, -201.0, -300.0]]), 2, score_function="sigmoid")
    np.testing.assert_allclose(weights, jax.nn.softmax(jnp.array([[-200.0, -201.0]])), rtol=1e-5)


def test_takes_what_route_returns(rng):
    arrays, routing = _operands(rng)
    layer = functools.partial(
        jtk.moe, *(arrays[name] for name in ("x", "w_up", "w_down")), w_gate=arrays["w_gate"]
    )
    np.testing.assert_array_equal(layer(routing), layer(*routing))
    found, wanted = (
        jax.jit(jax.grad(lambda weights, f=f: f(weights).sum()))(routing.weights)
        for f in (
            lambda weights: layer(routing._replace(weights=weights)),
            lambda weights: layer(weights, routing.indices),
        )
    )
    np.testing.assert_array_equal(found, wanted)
    with pytest.raises(TypeError, match="a Routing, which has the indices; pass no others"):
        layer(routing, routing.indices)


def test_errors(rng):
    arrays, (weights, indices) = _operands(rng)
    with pytest.raises(ValueError, match=r"w_down does not fit: x \(40, 12\)"):
        ours({**arrays, "w_down": arrays["w_up"]}, weights, indices)
    with pytest.raises(TypeError, match="indices are integers"):
        ours(arrays, weights, weights)
    with pytest.raises(ValueError, match="save is 'all'; it is 'hidden' or 'inputs'"):
        ours(arrays, weights, indices, save="all")
    with pytest.raises(ValueError, match="num_groups is 3, which does not divide 4"):
        jtk.route(jnp.ones((3, 4)), 2, num_groups=3, chosen_groups=1)
    with pytest.raises(ValueError, match="chosen_groups is 3, of 2 groups"):
        jtk.route(jnp.ones((3, 4)), 2, num_groups=2, chosen_groups=3)
    with pytest.raises(ValueError, match="2 experts to choose from"):
        jtk.route(jnp.ones((3, 4)), 3, num_groups=2, chosen_groups=1)
    with pytest.raises(ValueError, match=r"a bias of shape \(3, 4\) for 4 experts"):
        jtk.route(jnp.ones((3, 4)), 2, bias=jnp.ones((3, 4)))
    with pytest.raises(TypeError, match=r"route: k is 2\.0; it is an integer"):
        jtk.route(jnp.ones((3, 4)), 2.0)
    with pytest.raises(TypeError, match=r"num_groups is 2\.0; it is an integer"):
        jtk.route(jnp.ones((3, 4)), 2, num_groups=2.0, chosen_groups=1)
    with pytest.raises(TypeError, match="a bias of complex64 has no order"):
        jtk.route(jnp.ones((3, 4)), 2, bias=jnp.ones(4, complex))
    with pytest.raises(TypeError, match="logits are floats, not int32"):
        jtk.route(jnp.ones((3, 4), np.int32), 2)
    with pytest.raises(TypeError, match=r"group_offset of moe is an integer .* int32\[2\]"):
        ours(arrays, weights, indices, group_offset=np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="score_function is 'relu'; it is 'softmax' or 'sigmoid'"):
        jtk.route(jnp.ones((3, 4)), 2, score_function="relu")
    with pytest.raises(TypeError, match=r"weights is None; it is an array \(tokens, k\)"):
        ours(arrays, None, indices)


def test_errors_of_types(rng):
    """Types that would lose the values of an array."""
    arrays, (weights, indices) = _operands(rng, biases=True)
    with pytest.raises(TypeError, match="w_up is float8_e4m3fn: cast it to bfloat16 or wider"):
        ours({**arrays, "w_up": arrays["w_up"].astype(jnp.float8_e4m3fn)}, weights, indices)
    for name in ("b_up", "b_gate", "b_down"):
        with pytest.raises(TypeError, match=f"{name} does not fit: {name} complex64, x float32"):
            ours({**arrays, name: arrays[name] * 1j}, weights, indices)
    integers = jax.tree.map(lambda x: x.astype(np.int32), arrays)
    with pytest.raises(TypeError, match=r"weights does not fit: .* cast x to float32"):
        ours(integers, weights, indices)
    with pytest.raises(TypeError, match=r"x is key<fry>; it is an array of numbers"):
        ours({**arrays, "x": jax.random.split(jax.random.key(0), (T, D))}, weights, indices)


@pytest.mark.parametrize(
    ("activation", "message"),
    [
        ("silu", "the activation is 'silu'; it must be a function of scalars"),
        (jax.nn.softmax, "the activation softmax does not take scalars"),
        (lambda x: x * np.ones(3), r"closes over an array .* an activation is a function of"),
        (lambda x: (x, x), r"returns \(.*\); it must return one scalar"),
        (lambda x: None, "returns nothing"),
        (jtk.row_sum, "it must return one scalar"),
        (lambda x: x * 1j, "returns complex64 for float32"),
    ],
)
def test_errors_of_activations(rng, activation, message):
    arrays, (weights, indices) = _operands(rng)
    with pytest.raises(TypeError, match=message):
        ours(arrays, weights, indices, activation=activation)


@needs_nvrtc
@pytest.mark.defaults
def test_kernels_of_a_layer():
    """XLA gathers the weights, which are single numbers, and kernels the rows."""
    shapes = (4096, 256), (8, 256, 512), (8, 512, 256)
    x, up, down = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    weights, indices = jax.eval_shape(lambda x: jtk.route(x[:, :8], 2), x)

    def gradient(x, up, down, weights, indices):
        return jax.grad(lambda *a: jtk.moe(*a[:3], a[3], indices).sum(), (0, 1, 2, 3))(
            x, up, down, weights
        )

    with jtk.gpu_target("sm_90"):
        calls = jtk.explain(gradient, x, up, down, weights, indices, platform="cuda")
    found = {
        (call.call, call.operands[0]): call.kernel
        for call in calls
        if "rows of experts" in call.call
    }
    assert found == {
        ("spread rows of experts", "bf16[4096,256]"): "spread rows of bfloat16",
        ("spread rows of experts", "bf16[8192,1]"): None,
        ("combine rows of experts", "bf16[8192,1]"): None,
        ("combine rows of experts", "bf16[8192,256]"): "combine rows of bfloat16",
    }
