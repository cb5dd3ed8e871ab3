"""A transformer of plain `jnp`, trained without and with this library by one line.

The model does not know this library. Its training step is compiled as it is, and inside
`jtk.patch()`. Both train on the same lines of *Romeo and Juliet*, and their losses, times and
temporaries are printed side by side.

    python examples/transformer.py
    python examples/transformer.py --large    # 12 layers of 1024 features, on a GPU
"""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import jax_tilekern as jtk

PLAY = Path(__file__).parent / "data" / "romeo-and-juliet.txt"

Params = dict[str, Any]


class Sizes(NamedTuple):
    """The model's sizes, and those of a batch."""

    vocabulary: int
    layers: int
    width: int
    heads: int
    batch: int
    length: int
    dtype: Any


SMALL = Sizes(128, layers=2, width=64, heads=4, batch=16, length=64, dtype=jnp.float32)
LARGE = Sizes(50304, layers=12, width=1024, heads=16, batch=8, length=1024, dtype=jnp.bfloat16)


def initial_params(sizes: Sizes) -> Params:
    """Return random parameters."""
    width = sizes.width
    shapes = {"qkv": (width, 3 * width), "out": (width, width)}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    keys = iter(jax.random.split(jax.random.key(0), 3 + len(shapes) * sizes.layers))

    def normal(*shape: int) -> Array:
        return 0.02 * jax.random.normal(next(keys), shape, sizes.dtype)

    return {
        "tokens": normal(sizes.vocabulary, width),
        "positions": normal(sizes.length, width),
        "layers": [
            {name: normal(*shape) for name, shape in shapes.items()} for _ in range(sizes.layers)
        ],
        "head": normal(width, sizes.vocabulary),
    }


def normed(x: Array) -> Array:
    """Return rows over their root mean squares."""
    wide = x.astype(np.float32)
    scaled: Array = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
    return scaled.astype(x.dtype)


def layer(params: Params, x: Array, heads: int) -> Array:
    """Return ``[batch, length, width]`` after causal attention and a perceptron."""
    qkv = (normed(x) @ params["qkv"]).reshape(*x.shape[:2], 3, heads, -1)
    mixed = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0), is_causal=True)
    x += mixed.reshape(x.shape) @ params["out"]
    x += jax.nn.gelu(normed(x) @ params["up"]) @ params["down"]
    return x


def cross_entropy(x: Array, head: Array, labels: Array) -> Array:
    """Return the mean cross-entropy of labels by the logits of rows."""
    logits = (x @ head).astype(np.float32)
    losses: Array = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def loss(params: Params, text: Array, heads: int, cross_entropy: Any = cross_entropy) -> Array:
    """Return the mean cross-entropy of the next tokens of ``[batch, length + 1]``."""
    x = params["tokens"][text[:, :-1]] + params["positions"]
    for of_layer in params["layers"]:
        x = layer(of_layer, x, heads)
    rows = normed(x).reshape(-1, x.shape[-1])
    mean: Array = cross_entropy(rows, params["head"], text[:, 1:].ravel())
    return mean


OPTIMIZER = optax.adam(1e-3)


def training_step(
    params: Params, state: Any, text: Array, heads: int, cross_entropy: Any = cross_entropy
) -> tuple[Params, Any, Array]:
    """Return the next parameters and state of Adam, and the loss."""
    value, gradient = jax.value_and_grad(loss)(params, text, heads, cross_entropy)
    updates, state = OPTIMIZER.update(gradient, state)
    return optax.apply_updates(params, updates), state, value


def batches(sizes: Sizes, steps: int) -> Array:
    """Return lines of the play as bytes, ``[steps, batch, length + 1]``."""
    text = np.frombuffer(PLAY.read_bytes(), np.uint8)
    shape = steps, sizes.batch, 1
    starts = np.random.default_rng(0).integers(0, text.size - sizes.length, shape)
    return jnp.asarray(text[starts + np.arange(sizes.length + 1)], np.int32)


def train(sizes: Sizes, steps: int, patched: bool) -> tuple[list[float], float, int]:
    """Return the losses, the seconds of a step after the first, and the bytes of temporaries."""
    params, lines = initial_params(sizes), batches(sizes, steps)
    state = OPTIMIZER.init(params)
    step = jax.jit(training_step, static_argnames="heads", donate_argnums=(0, 1))
    with jtk.patch() if patched else contextlib.nullcontext():
        compiled = step.lower(params, state, lines[0], heads=sizes.heads).compile()
    memory: Any = compiled.memory_analysis()
    losses, times = [], []
    for text in lines:
        begin = time.perf_counter()
        params, state, value = jax.block_until_ready(compiled(params, state, text))
        times.append(time.perf_counter() - begin)
        losses.append(float(value))
    return losses, float(np.median(times[1:])), memory.temp_size_in_bytes


def main(arguments: list[str] | None = None) -> None:
    """Train both steps, and print what they take."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--large", action="store_true", help="12 layers, on a GPU")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    sizes = LARGE if options.large else SMALL
    print(f"{jax.devices()[0].device_kind}, {sizes.layers} layers of {sizes.width} features\n")
    print("                    first loss   last loss   step, ms   temporaries, MiB")
    for name, patched in (("plain JAX", False), ("with jtk.patch()", True)):
        losses, seconds, temporaries = train(sizes, options.steps, patched)
        print(
            f"{name:17} {losses[0]:12.4f}{losses[-1]:12.4f}{1e3 * seconds:11.2f}"
            f"{temporaries / 2**20:19.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
