"""A mixture-of-experts transformer that learns to write like *Romeo and Juliet*.

Every token chooses two of eight experts. The tokens are sorted by expert, and each of the experts'
two layers is then one grouped GEMM, :func:`jax_tilekern.ragged_dot`, whose group sizes only the
device knows: no token is dropped, none is padded for, and nothing waits for the host.

The same model with a dense mixture, in which every expert computes every token and all but two
results are thrown away, starts from the same weights and sees the same batches. The losses of the
two are printed side by side and must stay together.

    python examples/moe.py
    python examples/moe.py --steps 40 --precision default    # short; TF32 on a GPU
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jax_tilekern as jtk

PLAY = Path(__file__).parent / "data" / "romeo-and-juliet.txt"
BATCH = 32
STEPS_PER_LINE = 20
BALANCE_WEIGHT = 0.01
# How far the two models' losses may be apart, relatively. At the first step by rounding alone; on
# a GPU the default precision rounds operands to 11 bits, float32 has 24. At the end by what
# training makes of it: where the second and the third choice of a token are about equal, rounding
# decides between two experts.
SAME_START = {"highest": 1e-5, "default": 1e-2}
SAME_END = 0.02

Params = dict[str, Any]
# Of each step, by the name of a model.
Losses = dict[str, np.ndarray[Any, Any]]


class Sizes(NamedTuple):
    """The model's sizes."""

    vocabulary: int
    sequence: int = 32
    d_model: int = 64
    heads: int = 4
    blocks: int = 2
    experts: int = 8
    chosen: int = 2
    d_expert: int = 64


# The mixture: which experts a token goes to, and two ways to compute them.


class Routing(NamedTuple):
    """Where each token goes."""

    experts: Array  # int32[tokens, chosen]
    weights: Array  # float32[tokens, chosen], the experts' shares of the result; their sum is 1
    loads: Array  # int32[experts], how many tokens each gets
    imbalance: Array  # 1 if all get as much, otherwise more: a loss that keeps all at work


def route(router: Array, x: Array, chosen: int) -> Routing:
    """Choose the experts of each of ``[tokens, d_model]`` by a matrix ``[d_model, experts]``.

    The imbalance is the auxiliary loss of Switch Transformers (Fedus, Zoph and Shazeer, JMLR 23,
    2022, equation 4): the share of tokens that an expert gets, which has no gradient, weighted by
    the mean probability that the router gives to it.
    """
    experts = router.shape[1]
    probabilities = jax.nn.softmax(x @ router)
    weights, choice = lax.top_k(probabilities, chosen)
    weights /= weights.sum(axis=-1, keepdims=True)
    loads = jnp.bincount(choice.reshape(-1), length=experts)
    imbalance = experts * jnp.vdot(loads / choice.size, probabilities.mean(axis=0))
    return Routing(choice, weights, loads, imbalance)


def grouped_experts(params: Params, x: Array, routing: Routing) -> Array:
    """Compute each token by the experts that it chose, each expert on its own tokens.

    The weights are ``"up"``, ``[experts, d_model, 2 * d_expert]``, the gates' and after them the
    values', and ``"down"``, ``[experts, d_expert, d_model]``.
    """
    tokens, chosen = routing.experts.shape
    # A row for each pair of a token and an expert, in the order of the experts. That the indices
    # are a permutation spares the gradient, which is a scatter, its atomic additions.
    order = jnp.argsort(routing.experts.reshape(-1))
    rows = jnp.repeat(x, chosen, axis=0).at[order].get(unique_indices=True)

    hidden = gated(jtk.ragged_dot(rows, params["up"], routing.loads))
    rows = jtk.ragged_dot(hidden, params["down"], routing.loads)

    pairs = jnp.zeros_like(rows).at[order].set(rows, unique_indices=True)
    return jnp.einsum("tc,tcd->td", routing.weights, pairs.reshape(tokens, chosen, -1))


def dense_experts(params: Params, x: Array, routing: Routing) -> Array:
    """Compute the same by every expert on every token; the reference."""
    hidden = gated(jnp.einsum("td,edf->tef", x, params["up"]))
    every = jnp.einsum("tef,efd->ted", hidden, params["down"])
    share = jax.nn.one_hot(routing.experts, every.shape[1]) * routing.weights[..., None]
    return jnp.einsum("tce,ted->td", share, every)


def gated(x: Array) -> Array:
    """Return the second half of the last axis times the SiLU of the first."""
    gate, value = jnp.split(x, 2, axis=-1)
    return jax.nn.silu(gate) * value


Experts = Callable[[Params, Array, Routing], Array]


# The transformer around it.


def initial_params(rng: np.random.Generator, sizes: Sizes) -> Params:
    """Return random parameters; matrices keep the variance of what goes through them."""

    def normal(*shape: int, scale: float = 1.0) -> Array:
        return jnp.asarray(rng.normal(0, scale * shape[-2] ** -0.5, shape), jnp.float32)

    b, d, f, e = sizes.blocks, sizes.d_model, sizes.d_expert, sizes.experts
    deep = (2 * b) ** -0.5
    return {
        "tokens": normal(sizes.vocabulary, d),
        "positions": normal(sizes.sequence, d),
        "blocks": {
            "norms": jnp.ones((b, 2, d)),
            "qkv": normal(b, d, 3 * d),
            "out": normal(b, d, d, scale=deep),
            "router": normal(b, d, e),
            "up": normal(b, e, d, 2 * f),
            "down": normal(b, e, f, d, scale=deep),
        },
        "norm": jnp.ones(d),
        "head": normal(d, sizes.vocabulary, scale=0.1),
    }


def rms_norm(scale: Array, x: Array) -> Array:
    """Scale each row to a root mean square of ``scale``."""
    return scale * x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attention(params: Params, x: Array, heads: int) -> Array:
    """Causal self-attention of ``[batch, sequence, d_model]``."""
    qkv = (x @ params["qkv"]).reshape(*x.shape[:2], 3, heads, -1)
    mixed = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True)
    out: Array = mixed.reshape(x.shape) @ params["out"]
    return out


def logits(
    params: Params, tokens: Array, *, sizes: Sizes, experts: Experts
) -> tuple[Array, Routing]:
    """Return each next token's scores, ``[batch, sequence, vocabulary]``, and blocks' routings."""

    def block(x: Array, params: Params) -> tuple[Array, Routing]:
        x += attention(params, rms_norm(params["norms"][0], x), sizes.heads)
        rows = rms_norm(params["norms"][1], x).reshape(-1, sizes.d_model)
        routing = route(params["router"], rows, sizes.chosen)
        return x + experts(params, rows, routing).reshape(x.shape), routing

    x = params["tokens"][tokens] + params["positions"]
    x, routing = lax.scan(block, x, params["blocks"])
    return rms_norm(params["norm"], x) @ params["head"], routing


# Training.


class State(NamedTuple):
    """What training carries: the step's number, the parameters, and Adam's two means."""

    step: Array
    params: Params
    mean: Params
    square: Params


class Report(NamedTuple):
    """What a step tells: its cross entropy in nats a character, and the loads of each block."""

    loss: Array
    loads: Array


def initial_state(params: Params) -> State:
    """Return the state before the first step."""
    mean, square = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    return State(jnp.zeros((), jnp.int32), params, mean, square)


def adam(state: State, gradient: Params, rate: Array) -> State:
    """Take one step of Adam (Kingma and Ba, ICLR 2015, algorithm 1)."""
    step = state.step + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mean, gradient)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, state.square, gradient)
    mean_weight, square_weight = 1 - 0.9**step, 1 - 0.99**step

    def updated(p: Array, m: Array, s: Array) -> Array:
        return p - rate * (m / mean_weight) / (jnp.sqrt(s / square_weight) + 1e-8)

    return State(step, jax.tree.map(updated, state.params, mean, square), mean, square)


def loss(params: Params, text: Array, *, sizes: Sizes, experts: Experts) -> tuple[Array, Report]:
    """Return what training minimises for texts of ``[batch, sequence + 1]``, and a report."""
    scores, routing = logits(params, text[:, :-1], sizes=sizes, experts=experts)
    right = jnp.take_along_axis(jax.nn.log_softmax(scores), text[:, 1:, None], axis=-1)
    report = Report(-right.mean(), routing.loads)
    return report.loss + BALANCE_WEIGHT * routing.imbalance.mean(), report


def train(
    state: State, text: Array, starts: Array, *, sizes: Sizes, experts: Experts, rate: float = 5e-3
) -> tuple[State, Report]:
    """Train without returning to the host, on lines of a text that begin at ``[steps, batch]``."""

    def step(state: State, starts: Array) -> tuple[State, Report]:
        batch = text[starts[:, None] + jnp.arange(sizes.sequence + 1)]
        gradient, report = jax.grad(loss, has_aux=True)(
            state.params, batch, sizes=sizes, experts=experts
        )
        return adam(state, gradient, rate * jnp.minimum(1.0, (state.step + 1) / 20)), report

    return lax.scan(step, state, starts)


def sample(params: Params, key: Array, start: Array, *, length: int, sizes: Sizes) -> Array:
    """Return ``length`` characters that the model writes after ``start``, ``[sequence]``."""

    def write(window: Array, key: Array) -> tuple[Array, Array]:
        scores, _ = logits(params, window[None], sizes=sizes, experts=grouped_experts)
        char = jax.random.categorical(key, scores[0, -1] / 0.8)
        return jnp.append(window[1:], char), char

    return lax.scan(write, start, jax.random.split(key, length))[1]


# The program.


def load_text(file: Path) -> tuple[Array, str]:
    """Return a text as numbers, and the characters that they stand for."""
    text = file.read_text()
    alphabet = "".join(sorted(set(text)))
    return jnp.asarray([alphabet.index(char) for char in text], jnp.int32), alphabet


def entropy(text: Array) -> float:
    """Return the loss in nats of who knows how often each character comes, but no more."""
    counts = np.unique(text, return_counts=True)[1]
    return float(-np.sum(counts / text.size * np.log(counts / text.size)))


def failures(losses: Losses, bound: float, precision: str) -> Iterator[str]:
    """Tell what is not as it must be; written so that a loss that is not a number fails."""
    ends = {name: of_steps[-STEPS_PER_LINE:].mean() for name, of_steps in losses.items()}
    for name, end in ends.items():
        if not end < bound:
            yield f"the {name} model's loss of {end:.3f} is not below {bound:.3f}"
    starts = {name: of_steps[0] for name, of_steps in losses.items()}
    allowances = SAME_START[precision], SAME_END
    for when, found, allowed in zip(("first", "last"), (starts, ends), allowances, strict=True):
        apart = abs(found["grouped"] / found["dense"] - 1)
        if not apart <= allowed:
            yield f"the {when} losses are {apart:.0e} apart, more than {allowed:.0e}"


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", choices=SAME_START, default="highest")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.steps % STEPS_PER_LINE:
        parser.error(f"{options.steps} steps are no positive multiple of {STEPS_PER_LINE}")
    return options


def compare(options: argparse.Namespace, text: Array, sizes: Sizes) -> tuple[Losses, Params]:
    """Train both models on the same lines of a text; return each step's losses, and weights."""
    rng = np.random.default_rng(options.seed)
    state = initial_state(initial_params(rng, sizes))
    shape = (options.steps // STEPS_PER_LINE, STEPS_PER_LINE, BATCH)
    starts = jnp.asarray(rng.integers(0, text.size - sizes.sequence, shape))
    models = {"grouped": grouped_experts, "dense": dense_experts}
    states = dict.fromkeys(models, state)
    losses: Losses = dict.fromkeys(models, np.zeros(0))
    seconds: dict[str, list[float]] = {name: [] for name in models}
    # Compiled before it starts, so that times are those of steps.
    steps = {
        name: jax.jit(functools.partial(train, sizes=sizes, experts=experts))
        .lower(state, text, starts[0])
        .compile()
        for name, experts in models.items()
    }

    def show(step: int, losses_of: slice) -> None:
        ours, reference = (of_steps[losses_of].mean() for of_steps in losses.values())
        print(f"{step:6}{ours:10.4f}{reference:10.4f}{abs(ours - reference):10.1e}", flush=True)

    print("  step   grouped     dense     apart")
    for number, some_starts in enumerate(starts, start=1):
        for name in models:
            begin = time.perf_counter()
            states[name], report = jax.block_until_ready(
                steps[name](states[name], text, some_starts)
            )
            seconds[name].append(time.perf_counter() - begin)
            losses[name] = np.append(losses[name], report.loss)
        if number == 1:
            show(1, slice(1))  # Of the first step alone; the other lines have means.
        show(number * STEPS_PER_LINE, slice(-STEPS_PER_LINE, None))

    print()
    for name, times in seconds.items():
        tokens = STEPS_PER_LINE * BATCH * sizes.sequence
        print(f"{name:8}{tokens / np.median(times):12,.0f} tokens/s")
    print(f"\nTokens of each expert in the last step, by block:\n{report.loads[-1]}\n")
    return losses, states["grouped"].params


def main(arguments: list[str] | None = None) -> int:
    """Train both models side by side and return the exit status: 1 if a check failed."""
    options = parsed(arguments)
    text, alphabet = load_text(PLAY)
    bound, sizes = entropy(text), Sizes(len(alphabet))
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}. Losses in nats a character;")
    print(f"who knows how often each character comes, but no more, has {bound:.3f}.\n")

    with jax.default_matmul_precision(options.precision):
        losses, params = compare(options, text, sizes)
        start = text[: sizes.sequence]
        write = jax.jit(functools.partial(sample, length=400, sizes=sizes))
        written = write(params, jax.random.key(options.seed), start)
    print("".join(alphabet[char] for char in (*start.tolist(), *written.tolist())))

    found = list(failures(losses, bound, options.precision))
    for failure in found:
        print(f"FAILED: {failure}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
