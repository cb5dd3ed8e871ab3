"""``examples/moe.py`` is the dense model and learns; the modules of ``moe_layers.py`` train."""

import functools
import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import random

import jax_tilekern as jtk

# The wheel does not hold what is tested here: see tests/README.md.
pytestmark = pytest.mark.thorough

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name):
    """Import a program of the examples."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses and typing look for a module by its name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


moe = example("moe")
TINY = moe.Sizes(61, sequence=8, d_model=16, heads=2, blocks=1, experts=4, d_expert=8)


def test_the_model_is_the_dense_one_and_learns(rng):
    text = jnp.asarray(np.unique(list(moe.PLAY.read_text()), return_inverse=True)[1], jnp.int32)
    starts = jnp.asarray(rng.integers(0, text.size - TINY.sequence, (60, 8)), jnp.int32)
    params = moe.initial_params(rng, TINY)
    reports = {}
    with jax.default_matmul_precision("highest"):
        for experts in (moe.sparse_experts, moe.dense_experts):
            train = jax.jit(functools.partial(moe.train, sizes=TINY, experts=experts))
            _, reports[experts] = train(params, text, starts)
    sparse, dense = reports.values()
    np.testing.assert_allclose(sparse.loss[:5], dense.loss[:5], rtol=1e-5)
    np.testing.assert_allclose(sparse.loss[0], np.log(TINY.vocabulary), rtol=0.05)
    assert sparse.loss[-5:].mean() < sparse.loss[:5].mean() - 0.4
    np.testing.assert_array_equal(sparse.loads.sum(axis=-1), np.full((60, 1), 2 * 8 * 8))


def test_the_program_fails_where_losses_differ():
    losses = {"sparse": np.full(40, 2.0), "dense": np.full(40, 2.0)}
    assert not list(moe.failures(losses, 3.0, "highest"))
    losses["sparse"][-1] = np.nan
    assert len(list(moe.failures(losses, 3.0, "highest"))) == 2
    losses = {"sparse": np.full(40, 2.1), "dense": np.full(40, 2.0)}
    assert len(list(moe.failures(losses, 3.0, "highest"))) == 2


@pytest.mark.parametrize("name", ["flax.nnx", "Equinox"])
def test_modules(rng, name):
    for package in ("flax", "equinox", "optax"):
        pytest.importorskip(package)
    layers = example("moe_layers")
    with jax.default_matmul_precision("highest"):
        params, apply = layers.LAYERS[name]()
        x = random(rng, (3, 20, layers.FEATURES), np.float32)
        tokens = x.reshape(-1, layers.FEATURES)
        if name == "Equinox":
            gate, up, down = params.gate, params.up, params.down
            router = params.router.weight.T
        else:
            gate, up, down = (params[matrix][...] for matrix in ("gate", "up", "down"))
            router = params["router"]["kernel"][...]
        weights, indices = jtk.route(tokens @ router, layers.CHOSEN)
        hidden = jax.nn.silu(jnp.einsum("td,edh->eth", tokens, gate))
        every = jnp.einsum("eth,ehd->etd", hidden * jnp.einsum("td,edh->eth", tokens, up), down)
        share = jax.nn.one_hot(indices, layers.EXPERTS) * weights[..., None]
        wanted = jnp.einsum("tke,etd->td", share, every).reshape(x.shape)
        np.testing.assert_allclose(apply(params, x), wanted, rtol=1e-4, atol=1e-4)
    losses = layers.train((params, apply), 60)
    assert losses[-1] < losses[0] / 2
