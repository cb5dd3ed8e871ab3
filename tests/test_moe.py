"""``route`` and ``moe``: values and derivatives against dense experts in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from numerics import random

import jax_tilekern as jtk

T, D, H, E, K = 40, 12, 16, 6, 3
TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}


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
    return jtk.moe(x, up, down, indices, weights, precision="highest", **arrays, **kwargs)


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("save", ["hidden", "inputs"])
def test_values_and_gradients(rng, gate, biases, save):
    arrays, (weights, indices) = _operands(rng, biases=biases, gate=gate)
    indices = indices.at[0, 0].set(-1).at[1, 1].set(E).at[2].set(3)
    f = functools.partial(ours, save=save)
    np.testing.assert_allclose(
        f(arrays, weights, indices), dense(arrays, weights, indices), **TOLERANCE
    )

    def loss(f):
        return jax.jit(jax.grad(lambda a, w: jnp.sum(jnp.sin(f(a, w, indices))), (0, 1)))

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, **TOLERANCE),
        loss(f)(arrays, weights),
        loss(dense)(arrays, weights),
    )


def test_every_derivative(rng):
    arrays, (weights, indices) = _operands(rng, biases=True)
    with jax.enable_x64(True):
        arrays, weights = jax.tree.map(
            lambda a: jnp.asarray(np.asarray(a, np.float64)), (arrays, weights)
        )
        f = jax.jit(lambda a, w: ours(a, w, indices))
        check_grads(f, (arrays, weights), 2, modes=("fwd", "rev"), atol=1e-3, rtol=1e-3, eps=1e-4)


def test_what_is_saved(rng):
    """The operands and two hidden values: no rows, and no results of experts."""
    arrays, (weights, indices) = _operands(rng)
    _, pull = jax.vjp(lambda a, w: ours(a, w, indices), arrays, weights)
    saved = [x for x in jax.tree.leaves(pull) if x.ndim == 2 and x.shape[0] == T * K]
    assert sum(x.shape[1] == H for x in saved) == 2
    assert not any(x.shape[1] == D for x in saved)


def test_vmap_and_scan_over_layers(rng):
    models = [_operands(rng) for _ in range(3)]
    arrays, routings = (
        jax.tree.map(lambda *x: jnp.stack(x), *each) for each in zip(*models, strict=True)
    )
    found = jax.vmap(lambda a, r: ours(a, *r))(arrays, routings)
    wanted = jax.vmap(lambda a, r: dense(a, *r))(arrays, routings)
    np.testing.assert_allclose(found, wanted, **TOLERANCE)

    def through(f):
        def step(x, layer):
            a, r = layer
            return x + f({**a, "x": x}, *r), None

        return jax.jit(jax.grad(lambda x: jax.lax.scan(step, x, (arrays, routings))[0].sum()))

    x = arrays["x"][0]
    np.testing.assert_allclose(through(ours)(x), through(dense)(x), rtol=2e-3, atol=2e-3)


def test_experts_of_a_device(rng):
    """Parts of the experts add up to the whole."""
    arrays, (weights, indices) = _operands(rng)
    parts = []
    for first in (0, 2, 4):
        own = {k: v if k == "x" else v[first : first + 2] for k, v in arrays.items()}
        parts.append(ours(own, weights, indices, group_offset=first))
    np.testing.assert_allclose(sum(parts), dense(arrays, weights, indices), **TOLERANCE)


@pytest.mark.parametrize("which", ["one expert", "no token", "no choice"])
def test_extremes(rng, which):
    arrays, (weights, indices) = _operands(rng)
    if which == "one expert":
        indices = jnp.full_like(indices, 2)
    elif which == "no token":
        arrays["x"], weights, indices = arrays["x"][:0], weights[:0], indices[:0]
    else:
        weights, indices = weights[:, :0], indices[:, :0]
    found = ours(arrays, weights, indices)
    np.testing.assert_allclose(found, dense(arrays, weights, indices), **TOLERANCE)


def test_bfloat16(rng):
    arrays, (weights, indices) = _operands(rng, jnp.bfloat16)
    found = ours(arrays, weights.astype(jnp.bfloat16), indices)
    assert found.dtype == jnp.bfloat16
    wide = jax.tree.map(lambda x: x.astype(np.float32), arrays)
    exact = dense(wide, weights.astype(jnp.bfloat16).astype(np.float32), indices)
    np.testing.assert_allclose(found.astype(np.float32), exact, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_route(rng, score):
    logits = random(rng, (T, 16), np.float32)
    function = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[score]
    weights, indices = jtk.route(logits, 4, score_function=score)
    scores = np.asarray(function(logits))
    np.testing.assert_array_equal(indices, np.argsort(-scores, 1, stable=True)[:, :4])
    picked = np.take_along_axis(scores, np.asarray(indices), 1)
    np.testing.assert_allclose(weights, picked / picked.sum(1, keepdims=True), rtol=1e-5)
    check_grads(
        lambda x: jtk.route(x, 4, score_function=score).weights, (logits,), 1, atol=0.02, rtol=0.02
    )
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
def test_indices_of_every_type(experts, dtype, index, offset, used):
    one, x, weight = jnp.ones((experts, 2, 2)), jnp.ones((1, 2)), jnp.ones((1, 1))
    indices = np.full((1, 1), index, dtype)

    def total(up):
        return jtk.moe(x, up, one, indices, weight, activation=abs, group_offset=offset).sum()

    assert jnp.flatnonzero(jax.grad(total)(one).sum((1, 2))).tolist() == used


def test_weights_of_tiny_scores():
    weights, _ = jtk.route(jnp.array([[-200.0, -201.0, -300.0]]), 2, score_function="sigmoid")
    np.testing.assert_allclose(weights, jax.nn.softmax(jnp.array([[-200.0, -201.0]])), rtol=1e-5)


def test_errors(rng):
    arrays, (weights, indices) = _operands(rng)
    with pytest.raises(ValueError, match=r"w_down does not fit: x \(40, 12\)"):
        ours({**arrays, "w_down": arrays["w_up"]}, weights, indices)
    with pytest.raises(TypeError, match="indices are integers"):
        ours(arrays, weights, weights)
    with pytest.raises(ValueError, match="neither 'hidden' nor 'inputs'"):
        ours(arrays, weights, indices, save="all")
    with pytest.raises(ValueError, match="groups have equal sizes"):
        jtk.route(weights, 2, num_groups=2, chosen_groups=1)
    with pytest.raises(ValueError, match="2 experts to choose from"):
        jtk.route(jnp.ones((3, 4)), 3, num_groups=2, chosen_groups=1)
    with pytest.raises(ValueError, match=r"a bias of shape \(3, 4\) for 4 experts"):
        jtk.route(jnp.ones((3, 4)), 2, bias=jnp.ones((3, 4)))
    with pytest.raises(TypeError, match="logits are floats, not int32"):
        jtk.route(jnp.ones((3, 4), np.int32), 2)
    with pytest.raises(TypeError, match="group_offset is an integer"):
        ours(arrays, weights, indices, group_offset=0.5)
