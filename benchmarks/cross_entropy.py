"""``cross_entropy``: the loss of a vocabulary against JAX's program with all logits in memory.

The time of the products alone, by JAX, is a bound for both sides: one for the value, three for the
gradient.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks.programs import Arrays, Program, ProgramCommand

_CHECKED = 16
# Rows, features and labels.
_SIZES = {"gpu": [(32768, 2560, 128256), (8192, 4096, 151936)], "cpu": [(512, 128, 16000)]}


def _plain(h: Any, w: Any, labels: Any) -> Any:
    """Return the loss from all logits."""
    logits = (h @ w).astype(np.float32)
    at_label = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return (jax.nn.logsumexp(logits, 1) - at_label).mean()


_LOSSES: dict[str, Callable[..., Any]] = {"ours": jtk.linear_cross_entropy, "XLA": _plain}


def _product(h: Any, w: Any, labels: Any) -> Any:
    return h @ w


def _three_products(h: Any, w: Any, labels: Any) -> Any:
    logits = h @ w
    return logits, logits @ w.T, h.T @ logits


def _operands(size: tuple[int, int, int], dtype: str) -> tuple[Any, ...]:
    """Return features, weights of logits of size 1, and labels."""
    rows, features, labels = size
    keys = jax.random.split(jax.random.key(0), 3)
    h = jax.random.normal(keys[0], (rows, features), dtype)
    w = jax.random.normal(keys[1], (features, labels), dtype) / np.sqrt(features).astype(h.dtype)
    return h, w, jax.random.randint(keys[2], (rows,), 0, labels)


def _errors(arguments: Arrays, results: Mapping[str, Any]) -> dict[str, float]:
    """Return each side's error of the mean loss of a few rows."""
    h, w, labels = (x if i == 1 else x[:_CHECKED] for i, x in enumerate(arguments))
    logits = np.asarray(h, np.float64) @ np.asarray(w, np.float64)
    at_label = np.take_along_axis(logits, np.asarray(labels)[:, None], 1)[:, 0]
    exact = (np.logaddexp.reduce(logits, 1) - at_label).mean()
    return {name: abs(float(f(h, w, labels)) - exact) for name, f in _LOSSES.items()}


def _programs(arguments: argparse.Namespace) -> Iterator[Program]:
    gradients = {name: jax.value_and_grad(f, (0, 1)) for name, f in _LOSSES.items()}
    for dtype in arguments.types:
        for size in arguments.sizes or _SIZES[jax.default_backend()]:
            name, make = "x".join(map(str, size)), functools.partial(_operands, size, dtype)
            value = {**_LOSSES, "products": _product}
            yield Program(f"{name} {dtype}, value", make, value, _errors)
            gradient = {**gradients, "products": _three_products}
            yield Program(f"{name} {dtype}, gradient", make, gradient, _errors)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sizes",
        type=lambda text: tuple(map(int, text.split("x"))),
        nargs="*",
        metavar="ROWSxFEATURESxLABELS",
        help="by default those of a model on a GPU, and a small one on a CPU",
    )
    parser.add_argument("--types", nargs="*", default=["bfloat16"])


COMMAND = ProgramCommand(
    "the cross-entropy of a vocabulary against all logits in memory", _programs, 2.0,
    _add_arguments,
)  # fmt: skip
