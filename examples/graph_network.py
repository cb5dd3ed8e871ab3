"""A graph attention network: each node learns which of its neighbours to listen to.

    python examples/graph_network.py

Each node has a random kind and a random rank. Its class is the kind of the highest-ranked node
among those with an edge to it, so a model without messages can only guess. The softmax over the
edges of a node and the weighted sum are three reductions to segments. No array of the edges'
messages is stored, in the gradient as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.example_libraries import optimizers

import jax_tilekern as jtk

NODES, MEAN_DEGREE, KINDS, WIDTH, LAYERS = 2000, 8, 4, 32, 2
RATE = 1e-2


class Graph(NamedTuple):
    """Edges, and what the nodes have."""

    source: jtk.SegmentPlan  # edges by the node where they begin
    target: jtk.SegmentPlan  # edges by the node where they end
    features: Array  # float32[nodes, KINDS + 1]
    classes: Array  # int32[nodes]


def random_graph(rng: np.random.Generator, nodes: int) -> Graph:
    """Return a graph whose edges are sorted by target, so that only the sources are sorted."""
    target = np.repeat(np.arange(nodes), 1 + rng.poisson(MEAN_DEGREE - 1, nodes))
    source = rng.integers(0, nodes, target.size)
    kind, rank = rng.integers(0, KINDS, nodes), rng.uniform(-1, 1, nodes)
    by_rank = np.lexsort((rank[source], target))
    last = np.append(np.flatnonzero(np.diff(target)), target.size - 1)
    return Graph(
        jtk.segment_plan(source, nodes),
        jtk.segment_plan(target, nodes, indices_are_sorted=True),
        jnp.column_stack([jax.nn.one_hot(kind, KINDS), rank]),
        jnp.asarray(kind[source[by_rank[last]]]),
    )


def attention(graph: Graph, sent: Array, sent_score: Array, score: Array) -> Array:
    """Return the mean of the rows sent to each node, weighted by a softmax of scores.

    Parameters
    ----------
    graph
        The edges.
    sent
        A row for each node.
    sent_score, score
        What a node adds to the scores of the edges that begin there, and that end there; shape
        ``(nodes, 1)``.
    """
    source, target = graph.source, graph.target

    def edge_score(a: Any, b: Any) -> Any:
        return jax.nn.leaky_relu(a + b, 0.2)

    def weight(a: Any, b: Any, most: Any) -> Any:
        return jnp.exp(edge_score(a, b) - most)

    def message(a: Any, b: Any, most: Any, x: Any) -> Any:
        return weight(a, b, most) * x

    reduce = functools.partial(jtk.segment_reduce, segment_ids=target)
    # The softmax does not depend on what is subtracted.
    a, b = map(jax.lax.stop_gradient, (sent_score, score))
    most = reduce(edge_score, a, b, gather=(source, target), reduction="max")
    read = (sent_score, score, most)
    total = reduce(weight, *read, gather=(source, target, target))
    return reduce(message, *read, sent, gather=(source, target, target, source)) / total


def no_messages(graph: Graph, sent: Array, sent_score: Array, score: Array) -> Array:
    """Return zeros: every node is on its own."""
    return jnp.zeros_like(sent)


Messages = Callable[[Graph, Array, Array, Array], Array]


def initial_params(rng: np.random.Generator) -> Any:
    """Return random weights."""

    def normal(rows: int, columns: int) -> Array:
        return jnp.asarray(rng.normal(0, rows**-0.5, (rows, columns)), jnp.float32)

    layer = {"own": WIDTH, "sent": WIDTH, "sent_score": 1, "score": 1}
    return {
        "first": normal(KINDS + 1, WIDTH),
        "layers": [{k: normal(WIDTH, n) for k, n in layer.items()} for _ in range(LAYERS)],
        "last": normal(WIDTH, KINDS),
    }


def logits(params: Any, graph: Graph, messages: Messages) -> Array:
    """Return the scores of each node's classes."""
    h = graph.features @ params["first"]
    for layer in params["layers"]:
        rows = {name: jtk.matmul(h, matrix) for name, matrix in layer.items()}
        own = rows.pop("own")
        h = h + jax.nn.relu(own + messages(graph, **rows))
    return h @ params["last"]


def loss(params: Any, graph: Graph, known: Array, messages: Messages) -> tuple[Array, Array]:
    """Return the loss of the nodes whose class is known, and the accuracy of the others."""
    scores = logits(params, graph, messages)
    likelihoods = jnp.take_along_axis(jax.nn.log_softmax(scores), graph.classes[:, None], -1)
    right = jnp.argmax(scores, -1) == graph.classes
    return -jnp.mean(likelihoods[:, 0], where=known), jnp.mean(right, where=~known)


def train(
    graph: Graph, messages: Messages = attention, steps: int = 200
) -> tuple[list[float], list[float]]:
    """Train a network; return the loss and the accuracy before each step."""
    rng = np.random.default_rng(1)
    params, known = initial_params(rng), jnp.asarray(rng.random(len(graph.classes)) < 0.7)
    initial_state, update, params_of = optimizers.adam(RATE)

    @jax.jit
    def step(number: Array, state: Any, graph: Graph) -> tuple[tuple[Array, Array], Any]:
        of_params = jax.value_and_grad(loss, has_aux=True)
        values, gradient = of_params(params_of(state), graph, known, messages)
        return values, update(number, gradient, state)

    state, losses, accuracies = initial_state(params), [], []
    for number in range(steps):
        (value, accuracy), state = step(jnp.int32(number), state, graph)
        losses.append(float(value))
        accuracies.append(float(accuracy))
    return losses, accuracies


def main() -> None:
    """Train with messages and without."""
    graph = random_graph(np.random.default_rng(0), NODES)
    print(graph.target)
    for messages in (attention, no_messages):
        losses, accuracies = train(graph, messages)
        print(messages.__name__)
        for number in range(49, len(losses), 50):
            print(f"  step {number + 1:3}: loss {losses[number]:.3f}, "
                  f"accuracy {accuracies[number]:.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
