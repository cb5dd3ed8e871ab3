"""``decoding``: tokens that a Llama-like model of 8 billion weights decodes in a second.

    python -m benchmarks decoding --json FILE

A call decodes some tokens, one after the other, with a cache of keys and values. ``ours`` has
matrices of int4 in groups of 128, and ``bfloat16`` those that they stand for, by ``jnp``; anything
else is one program. Weights are random.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jax_tilekern as jtk
from benchmarks.commands import ROWS, RowsCommand, matches
from benchmarks.measure import measured
from benchmarks.programs import Arrays, Program, on_gpu
from benchmarks.record import Record
from benchmarks.timing import wall_times
from benchmarks.training import normed

_BF16 = jnp.bfloat16
_GROUP = 128
_BATCHES = 1, 16
# Tokens of a call, and those that the cache has before.
_TOKENS, _BEFORE = 16, 112

Product = Callable[[Array, Any], Any]


class Model(NamedTuple):
    """The sizes of a model."""

    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int

    @property
    def head(self) -> int:
        """Features of a head."""
        return self.width // self.heads

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Results and contracted elements of a layer's products."""
        keys = 2 * self.key_heads * self.head
        return {
            "qkv": (self.width + keys, self.width),
            "out": (self.width, self.width),
            "gate_up": (2 * self.hidden, self.width),
            "down": (self.width, self.hidden),
        }

    def parameters(self) -> dict[str, Any]:
        """Return the embedding, and the layers and the logits with quantised matrices."""
        keys = iter(jax.random.split(jax.random.key(0), 2 + self.layers * len(self.matrices)))
        shape = self.vocabulary, self.width
        return {
            "embedding": jax.random.normal(next(keys), shape, _BF16),
            "logits": _weights(next(keys), shape),
            "layers": [
                {name: _weights(next(keys), x) for name, x in self.matrices.items()}
                for _ in range(self.layers)
            ],
        }

    def decode(self, product: Product, params: Any, tokens: Array) -> tuple[Array, Array]:
        """Return logits of the tokens after the first ones, and all tokens that follow."""
        shape = tokens.shape[0], _BEFORE + _TOKENS, self.key_heads, self.head
        caches = [(jnp.ones(shape, _BF16),) * 2 for _ in params["layers"]]

        def step(state: Any, position: Array) -> tuple[Any, Array]:
            tokens, caches, first = state
            logits, caches = self._logits(product, params, tokens, caches, position)
            tokens = logits.argmax(-1).astype(np.int32)
            return (tokens, caches, jnp.where(position == _BEFORE, logits, first)), tokens

        first = jnp.zeros((tokens.shape[0], self.vocabulary), _BF16)
        positions = _BEFORE + jnp.arange(_TOKENS)
        (_, _, first), following = lax.scan(step, (tokens, caches, first), positions)
        return first, following

    def _logits(
        self, product: Product, params: Any, tokens: Array, caches: Any, position: Any
    ) -> tuple[Array, Any]:
        x = params["embedding"][tokens]
        updated: list[Any] = []
        for layer, cache in zip(params["layers"], caches, strict=True):
            y, cache = self._attended(product(normed(x), layer["qkv"]), cache, position)
            x, updated = x + product(y, layer["out"]), [*updated, cache]
            gate, up = jnp.split(product(normed(x), layer["gate_up"]), 2, -1)
            x += product(jax.nn.silu(gate) * up, layer["down"])
        return product(normed(x), params["logits"]), updated

    def _attended(self, qkv: Array, cache: Any, position: Any) -> tuple[Array, Any]:
        rows, width = qkv.shape[0], self.key_heads * self.head
        query, *new = jnp.split(qkv, (self.width, self.width + width), -1)
        keys, values = cache = tuple(
            lax.dynamic_update_slice(old, y.reshape(rows, 1, -1, self.head), (0, position, 0, 0))
            for old, y in zip(cache, new, strict=True)
        )
        mask = jnp.arange(keys.shape[1]) <= position
        query = query.reshape(rows, 1, self.heads, self.head)
        found = jax.nn.dot_product_attention(query, keys, values, mask=mask[None, None, None])
        return found.reshape(rows, self.width), cache


MODELS = {
    True: Model(32, 4096, 32, 8, 14336, 128256),
    False: Model(2, 64, 4, 2, 128, 256),
}


@functools.partial(jax.jit, static_argnums=1)
def _weights(key: Array, shape: tuple[int, int]) -> jtk.QuantizedWeights:
    """Return the transpose of random integers, with a scale for columns of variance 1."""
    n, k = shape
    values = jax.random.randint(key, shape, -7, 8, np.int8).astype(jnp.int4)
    scale = np.float32((k * np.mean(np.arange(-7, 8) ** 2)) ** -0.5)
    return jtk.QuantizedWeights(values, jnp.full((n, -(-k // _GROUP)), scale), None, _BF16)


def _is_quantized(x: Any) -> bool:
    return isinstance(x, jtk.QuantizedWeights)


def _as_arrays(params: Any) -> Any:
    array = jax.jit(lambda x: x.array())
    return jax.tree.map(
        lambda x: array(x) if _is_quantized(x) else x, params, is_leaf=_is_quantized
    )


def _arguments(model: Model, batch: int) -> Arrays:
    params = model.parameters()
    return params, _as_arrays(params), jnp.arange(batch, dtype=np.int32)


def _programs(model: Model) -> Iterator[tuple[int, Program]]:
    def ours(params: Any, _: Any, tokens: Any) -> Any:
        return model.decode(jtk.matmul, params, tokens)

    def of_bfloat16(_: Any, params: Any, tokens: Any) -> Any:
        return model.decode(jnp.matmul, params, tokens)

    for batch in _BATCHES:
        yield (
            batch,
            Program(
                f"int4, {model.layers} layers, batch of {batch}",
                functools.partial(_arguments, model, batch),
                {"ours": ours, "bfloat16": of_bfloat16},
                group="decoding by int4",
                peer="bfloat16",
                timing=wall_times,
            ),
        )


def _rows(arguments: argparse.Namespace) -> Iterator[Record]:
    model = MODELS[on_gpu()]
    if arguments.layers is not None:
        model = model._replace(layers=arguments.layers)
    for batch, program in _programs(model):
        if matches(program.name, arguments.rows):
            row = measured(program, arguments.seconds)
            rates = {side: batch * _TOKENS / time for side, time in row["seconds"].items()}
            # Layers have the same products.
            kernels = list(dict.fromkeys(row["kernels"]))
            yield row | {"tokens_in_a_second": rates, "kernels": kernels}


COMMAND = RowsCommand(
    "time a model that decodes by weights of 4 bits", _rows, 2.0, **ROWS,
    layers={"type": int, "help": "of the model (default: by the device)"},
)  # fmt: skip
