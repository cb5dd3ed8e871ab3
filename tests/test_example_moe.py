"""The mixture of ``examples/moe.py`` is the dense one, its routing loses no token, it learns."""

import functools
import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import random

# The wheel does not hold what is tested here: see tests/README.md.
pytestmark = pytest.mark.thorough

_FILE = Path(__file__).parent.parent / "examples" / "moe.py"
_SPEC = importlib.util.spec_from_file_location("example_moe", _FILE)
moe = importlib.util.module_from_spec(_SPEC)
# Where dataclasses and typing look for a module by its name.
sys.modules["example_moe"] = moe
_SPEC.loader.exec_module(moe)

TOKENS, D_MODEL, D_EXPERT, EXPERTS, CHOSEN = 37, 12, 10, 5, 2
TINY = moe.Sizes(61, sequence=8, d_model=16, heads=2, blocks=1, experts=4, d_expert=8)


def layer(rng, dtype=np.float64):
    params = {
        "router": random(rng, (D_MODEL, EXPERTS), dtype),
        "up": random(rng, (EXPERTS, D_MODEL, 2 * D_EXPERT), dtype),
        "down": random(rng, (EXPERTS, D_EXPERT, D_MODEL), dtype),
    }
    return params, random(rng, (TOKENS, D_MODEL), dtype)


def mixture(experts, params, x):
    return experts(params, x, moe.route(params["router"], x, CHOSEN))


def test_the_layer_is_the_dense_one(rng, x64):
    """In float64, and so are the gradients of everything, the router's too, and mapped ones."""
    params, x = layer(rng)
    t = random(rng, x.shape, np.float64)

    def loss(experts, params, x):
        return jnp.vdot(t, jnp.sin(mixture(experts, params, x)))

    @functools.partial(jax.jit, static_argnums=0)
    def results(experts, params, x):
        gradient = jax.grad(functools.partial(loss, experts), argnums=(0, 1))
        several = jnp.stack([x, 2 * x])
        return (
            mixture(experts, params, x),
            gradient(params, x),
            jax.vmap(gradient, (None, 0))(params, several),
        )

    grouped, dense = (
        results(experts, params, x) for experts in (moe.grouped_experts, moe.dense_experts)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11 * np.abs(b).max()),
        grouped,
        dense,
    )


@pytest.mark.thorough
def test_the_loss_falls(rng):
    text, _ = moe.load_text(moe.PLAY)
    steps, batch = 40, 8
    starts = jnp.asarray(rng.integers(0, text.size - TINY.sequence, (steps, batch)), jnp.int32)
    train = jax.jit(
        functools.partial(moe.train, rate=1e-2, sizes=TINY, experts=moe.grouped_experts)
    )
    state, report = train(moe.initial_state(moe.initial_params(rng, TINY)), text, starts)
    assert int(state.step) == steps
    np.testing.assert_allclose(report.loss[0], np.log(TINY.vocabulary), rtol=0.05)
    assert report.loss[-5:].mean() < report.loss[:5].mean() - 0.4
    tokens = batch * TINY.sequence
    np.testing.assert_array_equal(report.loads.sum(axis=-1), np.full((steps, 1), 2 * tokens))
