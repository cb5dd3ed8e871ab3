"""``muon``: a step of the optimizer against optax's, and Newton-Schulz iterations by themselves."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks.programs import Arrays, Program, ProgramCommand


class Sizes(NamedTuple):
    """The matrices of a transformer, and a stack of matrices."""

    layers: int
    width: int
    hidden: int
    stack: tuple[int, int, int]


# On a GPU about 1e9 parameters.
_SIZES = {"gpu": Sizes(16, 2048, 8192, (4, 4096, 11008)), "cpu": Sizes(2, 64, 256, (2, 64, 192))}
_NORMAL = jax.random.normal


def _parameters(sizes: Sizes) -> list[dict[str, Any]]:
    d, h = sizes.width, sizes.hidden
    shapes = {"q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "up": (d, h), "gate": (d, h)}
    shapes["down"] = (h, d)
    keys = iter(jax.random.split(jax.random.key(0), sizes.layers * len(shapes)))
    return [
        {name: _NORMAL(next(keys), shape, jnp.float32) for name, shape in shapes.items()}
        for _ in range(sizes.layers)
    ]


def _step(optimizer: Any, params: Any) -> Any:
    """Return the updates of the first step, whose gradients are the parameters."""
    return optimizer.update(params, optimizer.init(params), params)[0]


def _differences(_: Arrays, results: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest difference from XLA's result, relative to its largest element."""
    first = {side: np.asarray(jax.tree.leaves(x)[0], np.float32) for side, x in results.items()}
    largest = float(np.abs(first["XLA"]).max())
    return {side: float(np.abs(x - first["XLA"]).max()) / largest for side, x in first.items()}


def by_jnp(x: Any) -> Any:
    """Return five steps as users write them."""
    a, b, c = (3.4445, -4.7750, 2.0315)
    norm = jnp.linalg.norm(x.astype(np.float32), axis=(-2, -1), keepdims=True)
    x = (x / norm).astype(x.dtype)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _programs(arguments: argparse.Namespace) -> Iterator[Program]:
    # An optional dependency.
    import optax

    sizes = _SIZES["cpu" if jax.default_backend() == "cpu" else "gpu"]
    steps: dict[str, Callable[..., Any]] = {
        "ours": functools.partial(_step, jtk.muon(0.02)),
        "standard": functools.partial(_step, jtk.muon(0.02, ns="standard")),
        "XLA": functools.partial(_step, optax.contrib.muon(0.02)),
    }
    yield Program("step", lambda: (_parameters(sizes),), steps, _differences)
    iterations: dict[str, Callable[..., Any]] = {
        "ours": jtk.linalg.newton_schulz,
        "standard": functools.partial(jtk.linalg.newton_schulz, method="standard"),
        "XLA": by_jnp,
    }
    for dtype in ("float32", "bfloat16"):

        def stack(dtype: str = dtype) -> tuple[Any, ...]:
            return (_NORMAL(jax.random.key(0), sizes.stack, jnp.float32).astype(dtype),)

        name = "x".join(map(str, sizes.stack))
        yield Program(f"newton_schulz {name} {dtype}", stack, iterations, _differences)


COMMAND = ProgramCommand("steps of Muon and Newton-Schulz iterations", _programs, 1.0)
