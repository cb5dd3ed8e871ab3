"""A mixture-of-experts transformer that learns to write like *Romeo and Juliet*.

Every token chooses two of eight experts, :func:`jax_tilekern.route`, and :func:`jax_tilekern.moe`
computes them: no token is dropped, none is padded for, and nothing waits for the host.

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.example_libraries import optimizers

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
Experts = Callable[[Params, Array, jtk.Routing], Array]


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


def sparse_experts(params: Params, x: Array, routing: jtk.Routing) -> Array:
    """Compute each token of ``[tokens, d_model]`` by the experts that it chose."""
    return jtk.moe(x, params["up"], params["down"], routing, w_gate=params["gate"])


def dense_experts(params: Params, x: Array, routing: jtk.Routing) -> Array:
    """Compute the same by every expert on every token; the reference."""
    gate, up = (jnp.einsum("td,edf->tef", x, params[name]) for name in ("gate", "up"))
    every = jnp.einsum("tef,efd->ted", jax.nn.silu(gate) * up, params["down"])
    share = jax.nn.one_hot(routing.indices, every.shape[1]) * routing.weights[..., None]
    return jnp.einsum("tce,ted->td", share, every)


def imbalance(router_logits: Array, loads: Array) -> Array:
    """Return 1 if all experts have the same load, otherwise more: a loss that keeps all at work.

    It is the auxiliary loss of Switch Transformers (Fedus, Zoph and Shazeer, JMLR 23, 2022,
    equation 4): the share of tokens that an expert gets, which has no gradient, weighted by the
    mean probability that the router gives to it.
    """
    probabilities = jax.nn.softmax(router_logits).mean(axis=0)
    return loads.size * jnp.vdot(loads / loads.sum(), probabilities)


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
            "gate": normal(b, e, d, f),
            "up": normal(b, e, d, f),
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


class Report(NamedTuple):
    """What a step tells: its cross entropy in nats a character, and the loads of each block."""

    loss: Array
    loads: Array


def loss(params: Params, text: Array, *, sizes: Sizes, experts: Experts) -> tuple[Array, Report]:
    """Return what training minimises for texts of ``[batch, sequence + 1]``, and a report."""

    def block(x: Array, params: Params) -> tuple[Array, tuple[Array, Array]]:
        x += attention(params, rms_norm(params["norms"][0], x), sizes.heads)
        rows = rms_norm(params["norms"][1], x).reshape(-1, sizes.d_model)
        router_logits = rows @ params["router"]
        routing = jtk.route(router_logits, sizes.chosen)
        loads = jtk.bincount(routing.indices.ravel(), length=sizes.experts)
        x += experts(params, rows, routing).reshape(x.shape)
        return x, (loads, imbalance(router_logits, loads))

    x = params["tokens"][text[:, :-1]] + params["positions"]
    x, (loads, of_blocks) = lax.scan(block, x, params["blocks"])
    scores = jax.nn.log_softmax(rms_norm(params["norm"], x) @ params["head"])
    right = jnp.take_along_axis(scores, text[:, 1:, None], axis=-1)
    report = Report(-right.mean(), loads)
    return report.loss + BALANCE_WEIGHT * of_blocks.mean(), report


# Training.


def train(
    params: Params, text: Array, starts: Array, *, sizes: Sizes, experts: Experts
) -> tuple[Params, Report]:
    """Train by Adam on the lines of a text that begin at ``[steps, batch]``."""
    init, update, get_params = optimizers.adam(
        lambda step: 5e-3 * jnp.minimum(1.0, (step + 1) / 20), b2=0.99
    )
    gradient = jax.grad(functools.partial(loss, sizes=sizes, experts=experts), has_aux=True)

    def step(state: Any, now: tuple[Array, Array]) -> tuple[Any, Report]:
        number, starts = now
        batch = text[starts[:, None] + jnp.arange(sizes.sequence + 1)]
        gradients, report = gradient(get_params(state), batch)
        return update(number, gradients, state), report

    state, reports = lax.scan(step, init(params), (jnp.arange(len(starts)), starts))
    return get_params(state), reports


def entropy(text: Array) -> float:
    """Return the loss in nats of who knows how often each character comes, but no more."""
    counts = np.unique(text, return_counts=True)[1]
    return float(-np.sum(counts / text.size * np.log(counts / text.size)))


def failures(
    losses: dict[str, np.ndarray[Any, Any]], bound: float, precision: str
) -> Iterator[str]:
    """Tell what is not as it must be; written so that a loss that is not a number fails."""
    starts = {name: of_steps[0] for name, of_steps in losses.items()}
    ends = {name: of_steps[-STEPS_PER_LINE:].mean() for name, of_steps in losses.items()}
    for name, end in ends.items():
        if not end < bound:
            yield f"the {name} model's loss of {end:.3f} is not below {bound:.3f}"
    allowances = SAME_START[precision], SAME_END
    for when, found, allowed in zip(("first", "last"), (starts, ends), allowances, strict=True):
        apart = abs(found["sparse"] / found["dense"] - 1)
        if not apart <= allowed:
            yield f"the {when} losses are {apart:.0e} apart, more than {allowed:.0e}"


def main(arguments: list[str] | None = None) -> int:
    """Train both models on the same lines and return the exit status: 1 if a check failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", choices=SAME_START, default="highest")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.steps % STEPS_PER_LINE:
        parser.error(f"{options.steps} steps are no positive multiple of {STEPS_PER_LINE}")

    characters, numbers = np.unique(list(PLAY.read_text()), return_inverse=True)
    text, sizes = jnp.asarray(numbers, jnp.int32), Sizes(len(characters))
    rng, bound = np.random.default_rng(options.seed), entropy(numbers)
    params = initial_params(rng, sizes)
    starts = jnp.asarray(rng.integers(0, text.size - sizes.sequence, (options.steps, BATCH)))
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}. Losses in nats a character;")
    print(f"who knows how often each character comes, but no more, has {bound:.3f}.\n")

    losses = {}
    with jax.default_matmul_precision(options.precision):
        for name, experts in (("sparse", sparse_experts), ("dense", dense_experts)):
            trained = jax.jit(functools.partial(train, sizes=sizes, experts=experts))
            _, report = trained(params, text, starts)
            losses[name] = np.asarray(report.loss)
            if name == "sparse":
                loads = report.loads[-1]
    print("  step    sparse     dense     apart")
    for last in range(STEPS_PER_LINE, options.steps + 1, STEPS_PER_LINE):
        ours, reference = (x[last - STEPS_PER_LINE : last].mean() for x in losses.values())
        print(f"{last:6}{ours:10.4f}{reference:10.4f}{abs(ours - reference):10.1e}")
    print(f"\nTokens of each expert in the last step, by block:\n{loads}")

    found = list(failures(losses, bound, options.precision))
    for failure in found:
        print(f"FAILED: {failure}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
