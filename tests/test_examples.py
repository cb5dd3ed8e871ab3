"""The examples run, learn, and compute what JAX's own functions do."""

import functools
import importlib.util
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations
from numerics import random
from nvrtc_mark import needs_nvrtc

import jax_tilekern as jtk

# The wheel does not hold what is tested here: see tests/README.md.
pytestmark = pytest.mark.thorough

EXAMPLES = Path(__file__).parent.parent / "examples"


@functools.cache
def example(name):
    """Import a program of the examples."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses and typing look for a module by its name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# -- Mixtures of experts

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


# -- A graph network

network = example("graph_network")


@pytest.fixture
def graph(rng):
    return network.random_graph(rng, 300)


def by_ops(graph, sent, sent_score, score):
    """The attention of the example, written with JAX's own functions."""
    nodes = len(sent)
    source, target = graph.source.keys, graph.target.keys
    scores = jax.nn.leaky_relu(sent_score[source] + score[target], 0.2)
    most = jax.lax.stop_gradient(jax.ops.segment_max(scores, target, nodes))
    weights = jnp.exp(scores - most[target])
    total = jax.ops.segment_sum(weights, target, nodes)
    return jax.ops.segment_sum(weights * sent[source], target, nodes) / total


def test_losses_are_those_of_jax_and_fall(graph):
    with jax.default_matmul_precision("highest"):
        ours, accuracies = network.train(graph, steps=60)
        theirs, _ = network.train(graph, by_ops, steps=60)
    # Rounding grows as training goes on.
    np.testing.assert_allclose(ours[:10], theirs[:10], rtol=1e-5)
    np.testing.assert_allclose(ours, theirs, rtol=1e-2)
    assert ours[-1] < ours[0] / 5
    assert accuracies[-1] > 0.6
    alone, accuracies = network.train(graph, network.no_messages, steps=60)
    assert alone[-1] > 1
    assert accuracies[-1] < 0.45


def test_a_step_sorts_nothing(graph, rng):
    """The plans serve every layer and the gradient."""
    params, known = network.initial_params(rng), jnp.arange(300) % 2 == 0
    gradient = jax.grad(network.loss, has_aux=True)
    step = jax.make_jaxpr(gradient, static_argnums=3)(params, graph, known, network.attention)
    names = [eqn.primitive.name for eqn in equations(step.jaxpr)]
    assert names.count("tilekern_segment_reduce") > 10
    assert "tilekern_order_by_key" not in names


# -- Functions as kernels of lanes


@pytest.fixture
def lanes():
    return example("lanes")


def test_lanes_are_right(lanes):
    mean, variance = jax.jit(lanes.sample)()
    assert abs(mean) < 0.05
    assert abs(variance - 1) < 0.1
    infected = lanes.epidemic()
    assert max(infected) > 10 * infected[0]
    assert infected[-1] < max(infected) / 2
    lines = lanes.picture()
    assert (len(lines), len(lines[0])) == (lanes.HEIGHT, lanes.WIDTH)
    assert set(lines[0]) == {" "}
    assert "#" in "".join(lines)


def test_chains_of_nuts_agree(capsys):
    pytest.importorskip("blackjax")
    samplers = example("samplers")
    samplers.CHAINS, samplers.WARM_UP, samplers.STEPS = 32, 100, 100
    draws = samplers.main()
    assert capsys.readouterr().out.count("R-hat") == 3
    # As of long runs of several samplers.
    for i, (mean, spread) in enumerate(((4.4, 3.3), (0.8, 1.2))):
        r_hat, size = samplers.diagnostics(draws[..., i])
        assert r_hat < 1.1
        assert 100 < size < 4 * draws[..., i].size
        assert abs(draws[..., i].mean() - mean) < 5 * spread / np.sqrt(size)


def test_diagnostics_of_draws_that_are_known(rng):
    pytest.importorskip("blackjax")
    diagnostics = example("samplers").diagnostics
    noise = rng.normal(size=(64, 4000))
    r_hat, size = diagnostics(noise)
    assert abs(r_hat - 1) < 0.01
    assert 0.8 < size / noise.size < 1.25
    # An autoregression of 0.9 has a 19th of the draws' worth.
    correlated = noise.copy()
    for t in range(1, noise.shape[1]):
        correlated[:, t] = 0.9 * correlated[:, t - 1] + noise[:, t] * np.sqrt(0.19)
    assert 0.7 < diagnostics(correlated)[1] / (noise.size / 19) < 1.4
    assert diagnostics(noise + 3 * rng.normal(size=(64, 1)))[0] > 2


def test_rates_of_predators_and_prey_are_found(capsys):
    pytest.importorskip("diffrax")
    ode = example("ode")
    ode.MEMBERS = 50
    rates, losses = ode.main(updates=60)
    np.testing.assert_allclose(rates, ode.TRUTH, 0.05)
    assert losses[-1] < losses[0] / 100
    assert "update 50" in capsys.readouterr().out


@needs_nvrtc
@pytest.mark.parametrize("name", ["samplers", "ode"])
def test_each_function_of_libraries_is_a_kernel(name):
    pytest.importorskip({"samplers": "blackjax", "ode": "diffrax"}[name])
    program = example(name)
    with jtk.gpu_target("sm_90"), jtk.strict():
        if name == "ode":
            args = program.TRUTH, jnp.ones((100, 2)), jnp.ones((100, 7, 2))
            choices = jtk.explain(jax.grad(program.loss), *args)
        else:
            keys = jax.random.split(jax.random.key(0), 100)
            choices = jtk.explain(jtk.kernel(program.chain), keys)
    assert all(choice.kernel for choice in choices)


@needs_nvrtc
def test_each_function_of_lanes_is_a_kernel(lanes):
    keys, scalar = jax.random.split(jax.random.key(0), 100), jnp.float32(1)
    numbers = jnp.ones(100, jnp.int32)
    for function, in_axes, args in (
        (lanes.chain, (0, None), (keys, scalar)),
        (lanes.person, (0, None, 0, 0, None), (keys, jnp.int32(3), numbers, numbers, scalar)),
        (lanes.brightness, 0, (jnp.ones(100), jnp.ones(100))),
    ):
        with jtk.gpu_target("sm_90"):
            (choice,) = jtk.explain(jtk.kernel(function, in_axes=in_axes), *args, platform="cuda")
        assert choice.kernel is not None, choice.reason


# -- Training


def test_alignment_learns(capsys):
    alignment = example("alignment")
    alignment.CLOUDS = 100
    before, after = alignment.main(updates=40)
    assert after < before / 5
    printed = capsys.readouterr().out
    assert "matrix_svd float32" in printed
    assert "update  20" in printed


def test_a_state_space_model_learns_to_remember():
    first, last = example("state_space").main(updates=60)
    assert first > 1.5
    assert last < 0.1


def test_a_model_keeps_its_loss_with_small_weights(capsys):
    losses = example("small_weights").main(updates=30, count=10)
    assert losses["float32"] < 3.2
    assert abs(losses["int8"] - losses["float32"]) < 0.02
    assert abs(losses["int4"] - losses["float32"]) < 0.1
    assert capsys.readouterr().out.count("loss") == 3


def test_springs_learn(capsys):
    springs = example("springs")
    springs.BODIES = 50
    first, last = springs.main(updates=30)
    assert last < first / 4
    printed = capsys.readouterr().out
    assert "solve transposed" in printed
    assert "update  20" in printed


def test_parameters_of_lorenz_are_found(capsys):
    lorenz = example("lorenz")
    lorenz.MEMBERS, lorenz.STEPS = 100, 30
    parameters, losses = lorenz.main(updates=120)
    np.testing.assert_allclose(parameters, lorenz.TRUTH, 0.03)
    assert losses[-1] < losses[0] / 100
    printed = capsys.readouterr().out
    assert "kernel transposed_" in printed
    assert "update 100" in printed


# -- A transformer that does not know the library

transformer = example("transformer")


def test_a_patched_step_computes_the_same_and_learns():
    losses = [transformer.train(transformer.SMALL, 40, patched)[0] for patched in (False, True)]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert all(x[-1] < x[0] - 1 for x in losses)


@needs_nvrtc
@pytest.mark.parametrize("heads", [8, 16])
def test_a_patched_step_has_no_array_of_scores(heads):
    """The length differs from the width, so that scores have sizes of their own."""
    sizes = transformer.LARGE._replace(layers=2, vocabulary=512, length=768, heads=heads)
    params = jax.eval_shape(lambda: transformer.initial_params(sizes))
    state = jax.eval_shape(transformer.OPTIMIZER.init, params)
    text = jax.ShapeDtypeStruct((sizes.batch, sizes.length + 1), np.int32)
    step = functools.partial(transformer.training_step, heads=heads)

    def lowered():
        traced = jax.jit(lambda *args: step(*args)).trace(params, state, text)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    scores = re.compile(r"tensor<(\d+x)+768x768x")
    fused = re.compile(r"__cudnn\$fmhaSoftmax|attention_bfloat")
    with jtk.gpu_target("H200"):
        plain = lowered()
        with jtk.patch():
            patched = lowered()
    assert scores.search(plain)
    assert not fused.search(plain)
    assert not scores.search(patched)
    assert fused.search(patched)
    assert "__cudnn$fmhaSoftmaxBackward" in patched or "attention_gradient_bfloat" in patched


# -- Tokens of a large vocabulary

sampling = example("sampling")


def test_tokens_are_those_of_a_sort(capsys):
    assert sampling.main(rows=8, vocabulary=3000) == 0
    assert "rows that keep other tokens than a sort: 0" in capsys.readouterr().out


def test_draws_have_the_probabilities_of_kept_tokens(rng):
    logits = jnp.asarray(2 * rng.standard_normal((1, 40)), jnp.float32)
    draws = 4000
    found = sampling.sample(jax.random.key(1), jnp.repeat(logits, draws, 0), 1.0, 10, 0.8)
    probabilities = np.where(sampling.kept_by_sort(logits, 10, 0.8), jax.nn.softmax(logits), 0)[0]
    probabilities /= probabilities.sum()
    shares = np.bincount(found, minlength=40) / draws
    # Five standard deviations of a share.
    deviations = np.sqrt(probabilities * (1 - probabilities) / draws)
    assert np.all(np.abs(shares - probabilities) <= 5 * deviations)
    assert 1 < np.count_nonzero(probabilities) < 10
