"""What models of the benchmarks are made of, and ``fp8_accuracy``: 8-bit floats in training.

Products of :func:`jax_tilekern.scaled_matmul`, and those of :func:`jax_tilekern.fp8_dot_general`
with its gradients, are compared with float64. A network on handwritten digits and a small
transformer are trained by products in bfloat16 and in 8-bit floats, from the same start and on the
same batches.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jax_tilekern as jtk
from benchmarks.commands import RowsCommand
from benchmarks.record import Record
from jax_tilekern.cli import network
from jax_tilekern.cli.digits import load_digits
from jax_tilekern.ops.products.scaled_operands import dequantized
from jax_tilekern.plans.quantize import BLOCK

Product = Callable[[Array, Array], Array]
_NUMBERS = (((1,), (0,)), ((), ()))
_ROWS, _SQUARE = (1, BLOCK), (BLOCK, BLOCK)
# Losses of so many steps are one point of a curve.
_POINTS = 40


# Models.


def normed(x: Array) -> Array:
    """Return rows over their root mean squares."""
    wide = x.astype(np.float32)
    scaled: Array = wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
    return scaled.astype(x.dtype)


def attention(qkv: Array, heads: int) -> Array:
    """Return causal attention of queries, keys and values (batch, tokens, 3 x features)."""
    batch, tokens, width = qkv.shape
    split = jnp.moveaxis(qkv.reshape(batch, tokens, 3, heads, -1), 2, 0)
    mixed = jax.nn.dot_product_attention(*split, is_causal=True)
    return mixed.reshape(batch, tokens, width // 3)


def loss_of(logits: Array, text: Array) -> Array:
    """Return the cross-entropy of the next tokens of a text."""
    logits = logits.reshape(len(text), -1, logits.shape[-1])
    right: Array = jnp.take_along_axis(jax.nn.log_softmax(logits), text[:, 1:, None], -1)
    return -right.mean()


def random_text(shape: tuple[int, int], vocabulary: int, number: Any) -> Array:
    """Return a batch of sequences in which some tokens follow from the ones before."""
    key = jax.random.fold_in(jax.random.key(1), number)
    return jnp.cumsum(jax.random.randint(key, shape, 0, 4), 1) % vocabulary


def adam(parameters: Callable[[], Any], loss: Callable[[Any, Array], Array], rate: float) -> Any:
    """Return functions that make a state and that take a step, by the loss of a text."""

    def initial() -> Any:
        params = parameters()
        mean, square = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return jnp.zeros((), np.int32), params, mean, square

    def update(state: Any, text: Array) -> tuple[Any, Array]:
        step, params, mean, square = state
        value, gradient = jax.value_and_grad(loss)(params, text)
        step = step + 1
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
        square = jax.tree.map(lambda s, g: 0.95 * s + 0.05 * g * g, square, gradient)

        def updated(p: Array, m: Array, s: Array) -> Array:
            change: Array = (m / (1 - 0.9**step)) / (jnp.sqrt(s / (1 - 0.95**step)) + 1e-8)
            return p - rate * change

        return (step, jax.tree.map(updated, params, mean, square), mean, square), value

    return initial, update


# Errors of products.


def errors(m: int = 256, n: int = 384, k: int = 4096) -> Iterator[Record]:
    """Yield the errors of products of normal numbers, and of rows of different magnitudes."""
    rng = np.random.default_rng(0)
    x, w, dy = (rng.normal(size=shape) for shape in ((m, k), (k, n), (m, n)))
    spread = np.exp(2 * rng.normal(size=(m, 1)))
    for operands, by in (("normal", 1.0), ("spread", spread)):
        given = [jnp.asarray(a, np.float32) for a in (x * by, w, dy * by)]
        for name, (found, rounded, exact) in _products(*given).items():
            yield {
                "name": f"{name}, {operands}",
                "kind": "error",
                "operands": operands,
                "product": name,
                "of_sums": _relative(found, rounded),
                "with_rounding": _relative(found, exact),
            }


def _products(x: Array, w: Array, dy: Array) -> dict[str, tuple[Any, Any, Any]]:
    """Return each product, that of the dequantised operands, and that of the operands."""
    found: dict[str, tuple[Any, Any, Any]] = {}
    pairs: dict[str, tuple[Any, Any]] = {
        "1x128 by 128x128": (_ROWS, _SQUARE),
        "1x128 by 1x128": (_ROWS, _ROWS),
        "rows by columns": ((1, None), (1, None)),
        "whole arrays": ((None, None), (None, None)),
    }
    for name, (of_x, of_w) in pairs.items():
        left, right = jtk.quantize(x, of_x), jtk.quantize(w.T, of_w)
        y = jax.jit(jtk.scaled_matmul)(left[0], right[0], left[1], right[1])
        found[name] = y, _wide(*left) @ _wide(*right).T, _wide(x) @ _wide(w)
    y, vjp = jax.vjp(lambda x, w: jtk.fp8_dot_general(x, w, _NUMBERS), x, w)
    dx, dw = vjp(dy)

    def rows(x: Array, block: Any = _ROWS) -> Any:
        return _wide(*jtk.quantize(x, block))

    square = functools.partial(rows, block=_SQUARE)
    found["forward"] = y, rows(x) @ square(w.T).T, _wide(x) @ _wide(w)
    found["gradient of activations"] = dx, rows(dy) @ square(w).T, _wide(dy) @ _wide(w).T
    found["gradient of weights"] = dw, rows(x.T) @ rows(dy.T).T, _wide(x).T @ _wide(dy)
    return found


def _wide(x: Array, scales: Array | None = None) -> Any:
    """Return numbers, or values times their scales, in float64."""
    values = np.asarray(x, np.float64)
    if scales is None:
        return values
    return values * np.asarray(dequantized(jnp.ones(x.shape, np.float32), scales), np.float64)


def _relative(found: Any, expected: Any) -> float:
    """Return the mean error of a row, relative to its norm."""
    error = np.linalg.norm(np.asarray(found, np.float64) - expected, axis=1)
    return float((error / np.linalg.norm(expected, axis=1)).mean())


# Training.


def _in_bfloat16(x: Array, w: Array) -> Array:
    return lax.dot_general(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), _NUMBERS)


def _in_8_bits(x: Array, w: Array, gradient_dtype: Any) -> Array:
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    y: Array = jtk.fp8_dot_general(x, w, _NUMBERS, gradient_dtype=gradient_dtype)
    return y


PRODUCTS: Mapping[str, Product] = {
    "bfloat16": _in_bfloat16,
    "float8": functools.partial(_in_8_bits, gradient_dtype=jnp.float8_e4m3fn),
    "float8, gradients e5m2": functools.partial(_in_8_bits, gradient_dtype=jnp.float8_e5m2),
}


def digits(product: Product, steps: int) -> Any:
    """Return the losses of the network of the demo."""
    train, _ = load_digits()
    step = network.make_step(lambda x, w: product(x, w).astype(np.float32))
    state, losses = network.initial_state(), []
    for batch in itertools.islice(network.batches(train), steps):
        state, loss = step(state, *batch)
        losses.append(loss)
    return np.asarray(losses)


def transformer(product: Product, steps: int) -> Any:
    """Return the losses of a transformer that learns which token follows.

    Its input and output embeddings are in bfloat16, as the guide advises.
    """
    layers, width, heads, vocabulary, shape = 2, 128, 4, 64, (8, 65)

    def parameters() -> dict[str, Array]:
        shapes = {"tokens": (vocabulary, width), "head": (width, vocabulary)}
        for i in range(layers):
            shapes |= {f"qkv{i}": (width, 3 * width), f"out{i}": (width, width),
                       f"up{i}": (width, 4 * width), f"down{i}": (4 * width, width)}  # fmt: skip
        keys = jax.random.split(jax.random.key(0), len(shapes))
        return {
            name: jax.random.normal(key, size) / size[0] ** 0.5
            for key, (name, size) in zip(keys, shapes.items(), strict=True)
        }

    def dense(x: Array, w: Array) -> Array:
        return product(x, w).astype(np.float32)

    def loss(params: Mapping[str, Array], text: Array) -> Array:
        x = params["tokens"][text[:, :-1].ravel()]
        for i in range(layers):
            qkv = dense(normed(x), params[f"qkv{i}"]).reshape(shape[0], -1, 3 * width)
            x += dense(attention(qkv, heads).reshape(x.shape), params[f"out{i}"])
            x += dense(jax.nn.gelu(dense(normed(x), params[f"up{i}"])), params[f"down{i}"])
        return loss_of(_in_bfloat16(normed(x), params["head"]).astype(np.float32), text)

    initial, update = adam(parameters, loss, 2e-3)

    def step(state: Any, number: Array) -> Any:
        return update(state, random_text(shape, vocabulary, number))

    train = jax.jit(lambda state: lax.scan(step, state, jnp.arange(steps))[1])
    return np.asarray(train(initial()))


MODELS: Mapping[str, Callable[[Product, int], Any]] = {
    "digits": digits,
    "transformer": transformer,
}


def last_losses(losses: Any) -> float:
    """Return the mean loss of the last tenth of the steps."""
    return float(losses[-max(1, len(losses) // 10) :].mean())


def _curves(steps: int) -> Iterator[Record]:
    for model, losses_of in MODELS.items():
        for name, product in PRODUCTS.items():
            losses = losses_of(product, steps)
            points = np.array_split(losses, min(_POINTS, steps))
            yield {
                "name": f"{model}, {name}",
                "kind": "training",
                "model": model,
                "product": name,
                "steps": steps,
                "last": last_losses(losses),
                "losses": [float(x.mean()) for x in points],
            }


def _rows(arguments: argparse.Namespace) -> Iterator[Record]:
    return itertools.chain(errors(), _curves(arguments.steps))


COMMAND = RowsCommand(
    "compare products and training in 8-bit floats with exact and 16-bit ones", _rows,
    steps={"type": int, "default": 400, "help": "of training"},
)  # fmt: skip
