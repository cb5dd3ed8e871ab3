"""The network of ``examples/graph_network.py`` is that of ``jax.ops``, sorts once, and learns."""

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations

# The wheel does not hold what is tested here: see tests/README.md.
pytestmark = pytest.mark.thorough

_FILE = Path(__file__).parent.parent / "examples" / "graph_network.py"
_SPEC = importlib.util.spec_from_file_location("example_graph_network", _FILE)
network = importlib.util.module_from_spec(_SPEC)
# Where typing looks for a module by its name.
sys.modules["example_graph_network"] = network
_SPEC.loader.exec_module(network)


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
