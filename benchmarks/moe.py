"""Mixture-of-experts layers and their routing, and training steps of a transformer of them.

    XLA_PYTHON_CLIENT_MEM_FRACTION=.94 python -m benchmarks moe_model --json FILE

``ours`` is ``jtk.moe``. ``XLA``, ``parts`` and ``tokamax`` are the layer as a user of
``lax.ragged_dot``, of ``jtk.ragged_dot`` and of tokamax's writes it: weights multiply the experts'
results, and these are added to tokens. ``kernels`` is ours under ``policy("kernels")``. A side that
is not installed, or that does not fit into the GPU's memory, is a line that says so.

The model's parameters and Adam's means are float32, and it computes in bfloat16. Sides take up to
73 GiB of an H100, so JAX has to preallocate more than the 75% of its default.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jax_tilekern as jtk
from benchmarks.commands import ProgramsCommand, RowsCommand
from benchmarks.measure import bytes_needed, check_memory, failure_of, temporary_bytes
from benchmarks.programs import KERNELS, Program, on_gpu
from benchmarks.record import Record
from benchmarks.rows import FORWARD, tokamax
from benchmarks.training import adam, attention, loss_of, normed, random_text

Experts = Callable[..., Any]


class Sizes(NamedTuple):
    """The layer's sizes, and whether the first experts have most of the tokens."""

    tokens: int
    features: int
    hidden: int
    experts: int
    chosen: int
    zipf: bool = False


_LARGE = Sizes(16384, 2048, 768, 128, 8)
SIZES = {
    True: {
        "64 experts": Sizes(16384, 2560, 1280, 64, 4),
        "128 experts": _LARGE,
        "128 experts, Zipf": _LARGE._replace(zipf=True),
        **{
            f"128 experts, decode of {tokens}": _LARGE._replace(tokens=tokens)
            for tokens in (1, 4, 16, 64, 256)
        },
    },
    False: {
        "8 experts": Sizes(256, 128, 128, 8, 2),
        "8 experts, Zipf": Sizes(256, 128, 128, 8, 2, zipf=True),
        "8 experts, decode of 1": Sizes(1, 128, 128, 8, 2),
    },
}


def operands(sizes: Sizes) -> tuple[Any, ...]:
    """Return the arguments of a layer."""
    keys = jax.random.split(jax.random.key(0), 5)
    t, d, h, e, k, _ = sizes

    def normal(key: Any, *shape: int) -> Any:
        return jax.random.normal(key, shape, jnp.bfloat16) / np.sqrt(shape[-2]).astype(jnp.bfloat16)

    arrays = (normal(keys[0], t, d), *(normal(key, e, d, h) for key in keys[1:3]))
    return *arrays, normal(keys[3], e, h, d), *jtk.route(_logits(sizes, keys[4]), k)


def _logits(sizes: Sizes, key: Any) -> Any:
    """Return logits whose largest are draws without replacement, by equal or Zipf's weights."""
    logits = jax.random.gumbel(key, (sizes.tokens, sizes.experts))
    return logits - jnp.log(jnp.arange(1, sizes.experts + 1)) if sizes.zipf else logits


def _router_output(sizes: Sizes) -> tuple[Any]:
    return (_logits(sizes, jax.random.key(1)),)


def _layer(x: Any, up: Any, gate: Any, down: Any, weights: Any, indices: Any) -> Any:
    return jtk.moe(x, up, down, weights, indices, w_gate=gate)


def _by_parts(
    ragged_dot: Any, x: Any, up: Any, gate: Any, down: Any, weights: Any, indices: Any
) -> Any:
    """Return the layer as users of a grouped GEMM write it."""
    tokens, chosen = indices.shape
    order = jnp.argsort(indices.ravel())
    sizes = jnp.bincount(indices.ravel(), length=up.shape[0])
    rows = x[order // chosen]
    hidden = jax.nn.silu(ragged_dot(rows, gate, sizes)) * ragged_dot(rows, up, sizes)
    results = ragged_dot(hidden, down, sizes) * weights.ravel()[order][:, None]
    return jnp.zeros_like(results).at[order].set(results).reshape(tokens, chosen, -1).sum(1)


def _by_tokamax(x: Any, w: Any, group_sizes: Any) -> Any:
    return tokamax().ragged_dot_general(x, w, group_sizes, FORWARD)


LAYERS: dict[str, Experts] = {
    "ours": _layer,
    "XLA": functools.partial(_by_parts, jax.lax.ragged_dot),
    "parts": functools.partial(_by_parts, jtk.ragged_dot),
    "tokamax": functools.partial(_by_parts, _by_tokamax),
}


def gradient(function: Experts) -> Experts:
    """Return the gradient of the squares of a layer's results by its first five arguments."""

    def loss(*args: Any) -> Any:
        return jnp.sum(function(*args).astype(np.float32) ** 2)

    return lambda *args: jax.grad(loss, (0, 1, 2, 3, 4))(*args)


def _route_by_jax(chosen: int, logits: Any) -> Any:
    scores, indices = jax.lax.top_k(jax.nn.softmax(logits.astype(np.float32)), chosen)
    order = jnp.argsort(indices.ravel())
    sizes = jnp.bincount(indices.ravel(), length=logits.shape[1])
    return scores / scores.sum(1, keepdims=True), indices, order, sizes


def _route(chosen: int, logits: Any) -> Any:
    weights, indices = jtk.route(logits, chosen)
    plan = jtk.segment_plan(indices.ravel(), logits.shape[1])
    return weights, indices, plan.order, jnp.diff(plan.bounds)[1:-1]


def _programs(_: argparse.Namespace) -> Iterator[Program]:
    contexts: dict[str, Any] = {"kernels": KERNELS} if on_gpu() else {}
    layers = LAYERS | dict.fromkeys(contexts, _layer)
    for name, sizes in SIZES[on_gpu()].items():
        given, few = functools.partial(operands, sizes), "decode" in name
        kinds = {"forward": layers}
        if not few:
            kinds["forward and backward"] = {side: gradient(f) for side, f in layers.items()}
        for kind, sides in kinds.items():
            group = f"`moe` against its parts, {'decode' if few else kind}"
            yield Program(f"{name}, {kind}", given, sides, group=group, contexts=contexts)
        routes = {"ours": _route, "XLA": _route_by_jax, **dict.fromkeys(contexts, _route)}
        yield Program(
            f"{name}, routing",
            functools.partial(_router_output, sizes),
            {side: functools.partial(f, sizes.chosen) for side, f in routes.items()},
            contexts=contexts,
        )


# Training steps of a transformer.


class _Model(NamedTuple):
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

    def parameters(self) -> dict[str, Array]:
        """Return the first parameters; those of layers are stacked."""
        n, d, h, e = self.layers, self.width, self.hidden, self.experts
        layers = {"qkv": (d, 3 * d), "out": (d, d), "router": (d, e),
                  "gate": (e, d, h), "up": (e, d, h), "down": (e, h, d)}  # fmt: skip
        shapes: dict[str, tuple[int, ...]] = {
            "tokens": (self.vocabulary, d),
            "head": (d, self.vocabulary),
        }
        shapes |= {name: (n, *shape) for name, shape in layers.items()}
        keys = jax.random.split(jax.random.key(0), len(shapes))
        return {
            name: jax.random.normal(key, shape) / shape[-2] ** 0.5
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def loss(self, experts: Experts, params: Any, text: Array) -> Array:
        """Return the cross-entropy of the next tokens."""
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        tokens, head = params.pop("tokens"), params.pop("head")

        def layer(x: Array, p: Any) -> tuple[Array, None]:
            x += attention(normed(x) @ p["qkv"], self.heads) @ p["out"]
            rows = normed(x).reshape(-1, self.width)
            weights, indices = jtk.route((rows @ p["router"]).astype(np.float32), self.chosen)
            y = experts(rows, p["up"], p["gate"], p["down"], weights.astype(jnp.bfloat16), indices)
            return x + y.reshape(x.shape), None

        x, _ = lax.scan(layer, tokens[text[:, :-1]], params)
        return loss_of((normed(x) @ head).astype(np.float32), text)


_MODELS = {
    True: _Model(12, 2048, 16, 512, 64, 8, 32768, 8, 1024),
    False: _Model(2, 32, 2, 16, 8, 2, 128, 2, 32),
}


def _training(arguments: argparse.Namespace) -> Iterator[Record]:
    given = {name: getattr(arguments, name, None) for name in _Model._fields}
    model = _MODELS[on_gpu()]._replace(**{k: n for k, n in given.items() if n is not None})
    row: Record = {
        "name": f"{model.layers} layers",
        "group": "training step of a mixture of experts, against {peer}",
        "sizes": model._asdict(),
        "parameters": sum(x.size for x in jax.tree.leaves(jax.eval_shape(model.parameters))),
    }
    fields = ("seconds", "ratio", "steps", "bytes", "temporaries", "losses", "failures")
    row |= {field: {} for field in fields}
    for side in arguments.sides:
        try:
            found = _measured(LAYERS[side], model, arguments.seconds)
        except Exception as error:
            if side == "ours":
                raise
            row["failures"][side] = failure_of(error)
        else:
            for field, value in found.items():
                row[field][side] = value
            if side != "ours" and "ours" in row["seconds"]:
                row["ratio"][side] = found["seconds"] / row["seconds"]["ours"]
    yield row


def _measured(experts: Experts, model: _Model, seconds: float) -> Record:
    """Return the times of steps that follow one another, what they take, and the losses."""
    initial, update = adam(model.parameters, functools.partial(model.loss, experts), 3e-4)
    shape = model.batch, model.sequence + 1
    step = jax.jit(update, donate_argnums=0)
    text = functools.partial(random_text, shape, model.vocabulary)
    compiled: Any = step.lower(jax.eval_shape(initial), text(0)).compile()
    check_memory(compiled, placed=False)
    state = jax.jit(initial)()
    times: list[float] = []
    losses: list[float] = []
    # The first step is no part of the times.
    while len(losses) < 4 or sum(times) < seconds:
        batch = text(len(losses))
        begin = time.perf_counter()
        state, loss = jax.block_until_ready(compiled(state, batch))
        if losses:
            times.append(time.perf_counter() - begin)
        losses.append(float(loss))
    return {
        "seconds": float(np.median(times)),
        "steps": len(times),
        "bytes": bytes_needed(compiled),
        "temporaries": temporary_bytes(compiled),
        "losses": losses[:4],
    }


COMMANDS = {
    "moe": ProgramsCommand("mixture-of-experts layers", _programs, 1.0),
    "moe_model": RowsCommand(
        "time training steps of a mixture-of-experts transformer", _training, 5.0,
        sides={"nargs": "+", "choices": LAYERS, "default": list(LAYERS)},
        **{
            name: {"type": int, "help": "of the model (default: by the device)"}
            for name in ("layers", "hidden", "experts", "chosen", "batch", "sequence")
        },
    ),
}  # fmt: skip
