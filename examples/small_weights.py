"""A small Llama-like model that learns a play, and continues it with weights in 4 bits.

The model has RMSNorm, rotary positions, grouped-query attention and SwiGLU. It is trained in
float32 by plain JAX. :func:`jax_tilekern.quantize_weights` then rounds the matrices of its layers
to int4, and the same code decodes a text with a cache of keys and values: the products of
``jtk`` take arrays and quantised weights alike.

    python examples/small_weights.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.example_libraries import optimizers

import jax_tilekern as jtk

PLAY = Path(__file__).parent / "data" / "romeo-and-juliet.txt"
SYMBOLS = 128
BATCH, LENGTH = 16, 64
PROMPT = b"ROMEO."

Params = dict[str, Any]


class Sizes(NamedTuple):
    """The model's sizes."""

    layers: int = 2
    width: int = 128
    heads: int = 4
    key_heads: int = 2
    hidden: int = 256

    @property
    def head(self) -> int:
        return self.width // self.heads


def initial_params(rng: np.random.Generator, sizes: Sizes) -> Params:
    def kernel(k: int, n: int) -> Params:
        return {"kernel": jnp.asarray(rng.normal(size=(k, n)) / np.sqrt(k), jnp.float32)}

    def block() -> Params:
        width, keys = sizes.width, sizes.key_heads * sizes.head
        return {
            "query": kernel(width, width), "key": kernel(width, keys), "value": kernel(width, keys),
            "out": kernel(width, width), "gate": kernel(width, sizes.hidden),
            "up": kernel(width, sizes.hidden), "down": kernel(sizes.hidden, width),
            "before_attention": jnp.ones(width), "before_hidden": jnp.ones(width),
        }  # fmt: skip

    return {
        "embedding": jnp.asarray(rng.normal(size=(SYMBOLS, sizes.width)), jnp.float32),
        "blocks": [block() for _ in range(sizes.layers)],
        "last": jnp.ones(sizes.width),
        "logits": kernel(sizes.width, SYMBOLS),
    }


def normalised(x: Array, scale: Array) -> Array:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def rotated(x: Array, positions: Array) -> Array:
    """Rotate pairs of numbers of ``(batch, time, heads, head)`` by angles of their positions."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] / 100.0 ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate((a * cos - b * sin, a * sin + b * cos), -1)


def attended(p: Params, x: Array, cache: Any, start: Any, sizes: Sizes) -> tuple[Array, Any]:
    """Attend to the tokens of a cache, to which those of ``x``, from ``start`` on, are added."""
    batch, time, _ = x.shape
    positions = start + jnp.arange(time)
    query, key, value = (
        jtk.matmul(x, p[name]["kernel"]).reshape(batch, time, -1, sizes.head)
        for name in ("query", "key", "value")
    )
    new = rotated(key, positions), value
    keys, values = cache = tuple(
        lax.dynamic_update_slice(old, y, (0, start, 0, 0))
        for old, y in zip(cache, new, strict=True)
    )
    mask = jnp.arange(keys.shape[1]) <= positions[:, None]
    found = jax.nn.dot_product_attention(rotated(query, positions), keys, values, mask=mask[None])
    return jtk.matmul(found.reshape(x.shape), p["out"]["kernel"]), cache


def logits_of(
    params: Params, tokens: Array, caches: list[Any], start: Any, sizes: Sizes
) -> tuple[Array, list[Any]]:
    x, updated = params["embedding"][tokens], []
    for p, cache in zip(params["blocks"], caches, strict=True):
        y, cache = attended(p, normalised(x, p["before_attention"]), cache, start, sizes)
        x, updated = x + y, [*updated, cache]
        y = normalised(x, p["before_hidden"])
        hidden = jtk.gated_linear(y, p["gate"]["kernel"], p["up"]["kernel"])
        x = x + jtk.matmul(hidden, p["down"]["kernel"])
    return jtk.matmul(normalised(x, params["last"]), params["logits"]["kernel"]), updated


def empty_caches(sizes: Sizes, batch: int, length: int) -> list[Any]:
    one = jnp.zeros((batch, length, sizes.key_heads, sizes.head))
    return [(one, one) for _ in range(sizes.layers)]


def loss(params: Params, tokens: Array, sizes: Sizes) -> Array:
    caches = empty_caches(sizes, tokens.shape[0], tokens.shape[1] - 1)
    logits, _ = logits_of(params, tokens[:, :-1], caches, 0, sizes)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
    return -chosen.mean()


def batches(text: np.ndarray, count: int, rng: np.random.Generator) -> Array:
    starts = rng.integers(0, text.size - LENGTH, (count, BATCH, 1))
    return jnp.asarray(text[starts + np.arange(LENGTH + 1)], jnp.int32)


def train(params: Params, lines: Array, sizes: Sizes) -> Params:
    initial, update, get = optimizers.adam(3e-3)

    def step(state: Any, i_and_tokens: Any) -> tuple[Any, None]:
        i, tokens = i_and_tokens
        return update(i, jax.grad(loss)(get(state), tokens, sizes), state), None

    state, _ = lax.scan(step, initial(params), (jnp.arange(len(lines)), lines))
    trained: Params = get(state)
    return trained


def decoded(params: Params, prompt: Array, count: int, sizes: Sizes) -> Array:
    """Return the ``count`` most likely tokens after a prompt, one after the other."""
    caches = empty_caches(sizes, 1, prompt.size + count)
    logits, caches = logits_of(params, prompt[None], caches, 0, sizes)

    def step(carry: Any, position: Array) -> tuple[Any, Array]:
        token, caches = carry
        logits, caches = logits_of(params, token[:, None], caches, position, sizes)
        return (logits[:, -1].argmax(-1), caches), token[0]

    first = logits[:, -1].argmax(-1)
    _, tokens = lax.scan(step, (first, caches), prompt.size + jnp.arange(count))
    return tokens


def bytes_of(params: Params) -> int:
    bits = (4 if x.dtype == jnp.int4 else 8 * x.dtype.itemsize for x in jax.tree.leaves(params))
    sizes = (x.size for x in jax.tree.leaves(params))
    return sum(b * n for b, n in zip(bits, sizes, strict=True)) // 8


def main(updates: int = 100, count: int = 60) -> dict[str, float]:
    """Train, quantise and decode; return the loss of held-out text by the type of the weights."""
    sizes = Sizes()
    rng = np.random.default_rng(0)
    text = np.frombuffer(PLAY.read_bytes(), np.uint8) % SYMBOLS
    seen, unseen = np.split(text, [text.size * 9 // 10])
    params = jax.jit(train, static_argnums=2)(
        initial_params(rng, sizes), batches(seen, updates, rng), sizes
    )
    models = {"float32": params}
    for dtype in (jnp.int8, jnp.int4):
        models[np.dtype(dtype).name] = jtk.quantize_weights(params, dtype=dtype, block=(1, 64))
    held_out, losses = batches(unseen, 1, rng)[0], {}
    decode = jax.jit(decoded, static_argnums=(2, 3))
    for name, model in models.items():
        losses[name] = float(jax.jit(loss, static_argnums=2)(model, held_out, sizes))
        tokens = decode(model, jnp.asarray(np.frombuffer(PROMPT, np.uint8), int), count, sizes)
        line = bytes(np.asarray(tokens, np.uint8)).decode("ascii", "replace")
        print(
            f"{name}: {bytes_of(model)} bytes, loss {losses[name]:.3f}: {PROMPT.decode()}{line!r}"
        )
    return losses


if __name__ == "__main__":
    main()
