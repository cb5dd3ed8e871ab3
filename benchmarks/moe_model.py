"""``moe_model``: training steps of a mixture-of-experts transformer, by several layers of experts.

    XLA_PYTHON_CLIENT_MEM_FRACTION=.94 python -m benchmarks moe_model --json FILE

The model is the same for every side, but for its experts: ``ours`` is ``jtk.moe``. ``XLA``,
``parts`` and ``tokamax`` are the layer as a user of ``lax.ragged_dot``, of ``jtk.ragged_dot`` and
of tokamax's writes it. Parameters and Adam's means are float32, and the model computes in bfloat16.
A side that is not installed, that fails, or that does not fit into memory is a line that says so.
Sides take up to 73 GiB of an H100, so JAX has to preallocate more than the 75% of its default.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jax_tilekern as jtk
from benchmarks.moe import LAYERS
from benchmarks.programs import bytes_needed, check_memory, failure_of
from benchmarks.records.record import Record, program_record
from jax_tilekern.cli.console import duration, output_file, size, write_json

HELP = "time training steps of a mixture-of-experts transformer"
Experts = Callable[..., Any]


class Sizes(NamedTuple):
    """The sizes of the model and of a batch."""

    layers: int
    width: int
    heads: int
    hidden: int
    experts: int
    chosen: int
    vocabulary: int
    batch: int
    sequence: int


_SIZES = {
    "gpu": Sizes(12, 2048, 16, 512, 64, 8, 32768, 8, 1024),
    "cpu": Sizes(2, 32, 2, 16, 8, 2, 128, 2, 32),
}


class State(NamedTuple):
    """What a step carries: its number, the parameters, and Adam's two means."""

    step: Any
    params: Any
    mean: Any
    square: Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--sides", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--seconds", type=float, default=5.0, help="of each side")
    for name in ("layers", "hidden", "experts", "chosen", "batch", "sequence"):
        parser.add_argument(f"--{name}", type=int, help="of the model (default: by the device)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the record here")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    default = _SIZES["cpu" if jax.default_backend() == "cpu" else "gpu"]
    given = {name: getattr(arguments, name, None) for name in Sizes._fields}
    sizes = default._replace(**{name: n for name, n in given.items() if n is not None})
    record = program_record(arguments.command_line)
    parameters = _number_of_parameters(sizes)
    print(f"{parameters:,} parameters, {sizes.batch * sizes.sequence:,} tokens a step", flush=True)
    for side in arguments.sides:
        row = {"name": side, "sizes": sizes._asdict(), "parameters": parameters}
        try:
            row |= _measured(LAYERS[side], sizes, arguments.seconds)
        except Exception as error:
            if side == "ours":
                raise
            row["failure"] = failure_of(error)
            print(f"    {side}: {row['failure']}", flush=True)
        else:
            print(
                f"    {side}: {row['tokens_per_second']:,.0f} tokens/s, {duration(row['seconds'])} "
                f"a step, {size(row['bytes'])}, losses {row['losses'][0]:.4f} to "
                f"{row['losses'][-1]:.4f}",
                flush=True,
            )
        record["rows"].append(row)
        if arguments.json:
            write_json(arguments.json, record)
    return 0


def _measured(experts: Experts, sizes: Sizes, seconds: float) -> Record:
    """Return the times of steps that follow one another, what they take, and the losses."""
    initial = functools.partial(_initial, sizes)
    step = jax.jit(functools.partial(_step, experts=experts, sizes=sizes), donate_argnums=0)
    compiled: Any = step.lower(jax.eval_shape(initial), _text(0, sizes)).compile()
    check_memory(compiled, placed=False)
    state = jax.jit(initial)()
    times: list[float] = []
    losses: list[float] = []
    # The first step is no part of the times.
    while len(losses) < 4 or sum(times) < seconds:
        text = _text(len(losses), sizes)
        begin = time.perf_counter()
        state, loss = jax.block_until_ready(compiled(state, text))
        if losses:
            times.append(time.perf_counter() - begin)
        losses.append(float(loss))
    median = float(np.median(times))
    return {
        "seconds": median,
        "steps": len(times),
        "tokens_per_second": sizes.batch * sizes.sequence / median,
        "bytes": bytes_needed(compiled),
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        "losses": losses[:4],
    }


def _text(number: int, sizes: Sizes) -> Array:
    """Return a batch of sequences in which some tokens follow from the ones before."""
    key = jax.random.fold_in(jax.random.key(1), number)
    shape = sizes.batch, sizes.sequence + 1
    return jnp.cumsum(jax.random.randint(key, shape, 0, 4), 1) % sizes.vocabulary


def _initial(sizes: Sizes) -> State:
    n, d, h, e = sizes.layers, sizes.width, sizes.hidden, sizes.experts
    shapes = {
        "tokens": (sizes.vocabulary, d),
        "head": (d, sizes.vocabulary),
        "layers": {
            "qkv": (n, d, 3 * d),
            "out": (n, d, d),
            "router": (n, d, e),
            "gate": (n, e, d, h),
            "up": (n, e, d, h),
            "down": (n, e, h, d),
        },
    }
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    params = jax.tree.unflatten(
        tree,
        [
            jax.random.normal(key, shape) / shape[-2] ** 0.5
            for key, shape in zip(keys, leaves, strict=True)
        ],
    )
    mean, square = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    return State(jnp.zeros((), np.int32), params, mean, square)


def _number_of_parameters(sizes: Sizes) -> int:
    state = jax.eval_shape(functools.partial(_initial, sizes))
    return sum(x.size for x in jax.tree.leaves(state.params))


def _step(state: State, text: Array, *, experts: Experts, sizes: Sizes) -> tuple[State, Array]:
    """Take a step of Adam."""
    loss, gradient = jax.value_and_grad(_loss)(state.params, text, experts=experts, sizes=sizes)
    step = state.step + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mean, gradient)
    square = jax.tree.map(lambda s, g: 0.95 * s + 0.05 * g * g, state.square, gradient)

    def updated(p: Array, m: Array, s: Array) -> Array:
        change: Array = (m / (1 - 0.9**step)) / (jnp.sqrt(s / (1 - 0.95**step)) + 1e-8)
        return p - 3e-4 * change

    params = jax.tree.map(updated, state.params, mean, square)
    return State(step, params, mean, square), loss


def _loss(params: Any, text: Array, *, experts: Experts, sizes: Sizes) -> Array:
    """Return the cross-entropy of the next tokens."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    def layer(x: Array, p: Any) -> tuple[Array, None]:
        x += _attention(_normed(x), p, sizes.heads)
        rows = _normed(x).reshape(-1, sizes.width)
        weights, indices = jtk.route((rows @ p["router"]).astype(np.float32), sizes.chosen)
        y = experts(rows, p["up"], p["gate"], p["down"], weights.astype(jnp.bfloat16), indices)
        return x + y.reshape(x.shape), None

    x, _ = lax.scan(layer, params["tokens"][text[:, :-1]], params["layers"])
    logits = (_normed(x) @ params["head"]).astype(np.float32)
    right: Array = jnp.take_along_axis(jax.nn.log_softmax(logits), text[:, 1:, None], -1)
    return -right.mean()


def _normed(x: Array) -> Array:
    wide = x.astype(np.float32)
    normed: Array = wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
    return normed.astype(x.dtype)


def _attention(x: Array, p: Any, heads: int) -> Array:
    qkv = (x @ p["qkv"]).reshape(*x.shape[:2], 3, heads, -1)
    mixed = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True)
    out: Array = mixed.reshape(x.shape) @ p["out"]
    return out
