"""A model of flax trains the same with fused layers, and with `fuse`, as without."""

import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations
from numerics import random

import jax_tilekern as jtk

nn = pytest.importorskip("flax.linen")
optax = pytest.importorskip("optax")

WIDTH, HIDDEN, STEPS = 16, 40, 30
# A float32 product has an error of a few roundings of 6e-8, and over these steps the parameters
# diverge by about their sum.
DRIFT = 2e-5


@pytest.fixture(autouse=True)
def plain_float32():
    with jax.default_matmul_precision("highest"):
        yield


def linear(x, w, b, activation=None):
    y = x @ w + b
    return y if activation is None else activation(y)


def gated_linear(x, w_gate, w_up):
    return jax.nn.silu(x @ w_gate) * (x @ w_up)


class Network(nn.Module):
    """A gated unit with a residual, between two linear layers."""

    fused: bool = False

    @nn.compact
    def __call__(self, x):
        dense, gate = (jtk.linear, jtk.gated_linear) if self.fused else (linear, gated_linear)

        def matrix(name, rows, columns):
            return self.param(name, nn.initializers.lecun_normal(), (rows, columns))

        def bias(name, columns):
            return self.param(name, nn.initializers.normal(0.1), (columns,))

        x = dense(x, matrix("in", WIDTH, WIDTH), bias("b_in", WIDTH), jax.nn.gelu)
        y = nn.LayerNorm()(x)
        y = gate(y, matrix("gate", WIDTH, HIDDEN), matrix("up", WIDTH, HIDDEN))
        x = x + nn.Dense(WIDTH)(y)
        return dense(x, matrix("out", WIDTH, 1), bias("b_out", 1))


def loss(apply, params, x, y):
    return jnp.mean((apply(params, x) - y) ** 2)


def gradient_of(way):
    """The loss and its gradient, fused in one of the ways that there are."""
    plain, fused = (functools.partial(loss, Network(fused).apply) for fused in (False, True))
    return {
        "unfused": jax.value_and_grad(plain),
        "layers": jax.value_and_grad(fused),
        "fuse outside": jtk.fuse(jax.value_and_grad(plain)),
        "fuse inside": jax.value_and_grad(jtk.fuse(plain)),
        "both": jtk.fuse(jax.value_and_grad(fused)),
    }[way]


def task():
    rng = np.random.default_rng(0)
    x = random(rng, (48, WIDTH), np.float32)
    return x, jnp.sin(x.sum(1, keepdims=True))


@functools.cache
def losses(way):
    gradient, optimizer = gradient_of(way), optax.adam(1e-2)
    x, y = task()
    params = Network().init(jax.random.key(0), x)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        value, changes = gradient(params, x, y)
        changes, state = optimizer.update(changes, state)
        return optax.apply_updates(params, changes), state, value

    values = []
    for _ in range(STEPS):
        params, state, value = step(params, state)
        values.append(float(value))
    return np.array(values)


@pytest.mark.parametrize("way", ["layers", "fuse outside", "fuse inside", "both"])
@pytest.mark.thorough
def test_thirty_steps_have_the_same_losses(way):
    np.testing.assert_allclose(losses(way), losses("unfused"), rtol=DRIFT)
    assert losses(way)[-1] < losses(way)[0] / 3


_FILE = Path(__file__).parent.parent / "examples" / "frameworks.py"


@pytest.mark.parametrize("name", ["flax.linen", "flax.nnx", "Equinox", "Haiku"])
@pytest.mark.one_in(4)
# test_fifty_steps_have_the_same_losses trains one framework by default.
@pytest.mark.thorough
def test_a_fused_step_of_a_framework(name):
    """The whole training step of an attention block: gradient and optimizer."""
    pytest.importorskip({"Equinox": "equinox", "Haiku": "haiku"}.get(name, "flax"))
    spec = importlib.util.spec_from_file_location("example_frameworks", _FILE)
    frameworks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(frameworks)
    model, optimizer = frameworks.made(name, False), optax.adam(3e-3)
    step = frameworks.training_step(model, optimizer)

    def train(step):
        params, state = model.params, optimizer.init(model.params)
        for _ in range(STEPS):
            value, params, state = step(params, state, *frameworks.task())
        return value

    np.testing.assert_allclose(train(jax.jit(jtk.fuse(step))), train(jax.jit(step)), rtol=DRIFT)


def test_each_way_fuses_what_it_says():
    x, y = task()
    params = Network().init(jax.random.key(0), x)

    def fused(way):
        jaxpr = jax.make_jaxpr(gradient_of(way))(params, x, y).jaxpr
        return [eqn.primitive.name for eqn in equations(jaxpr)].count(
            "tilekern_contract_with_epilogue"
        )

    # Four layers forward; beside them, what fuses only after differentiation.
    assert fused("unfused") == 0
    assert fused("layers") == 3
    assert fused("fuse inside") == 4
    assert fused("fuse outside") > 4
    assert fused("both") > 4
