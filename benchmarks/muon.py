"""``muon``: a step of the optimizer against optax's, and Newton-Schulz iterations by themselves.

With several GPUs the step is that of parameters that they share, and of replicated ones.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

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


def _errors_of(exact: Callable[[Any], Any]) -> Callable[..., dict[str, float]]:
    """Return errors of the first matrix: the Frobenius norm, relative to that in float64."""

    def errors(arguments: Arrays, results: Mapping[str, Any]) -> dict[str, float]:
        def first(tree: Any) -> Any:
            x = jax.tree.leaves(tree)[0]
            return np.asarray(x.reshape(-1, *x.shape[-2:])[0], np.float64)

        with jax.enable_x64(True):
            wanted = np.asarray(jax.jit(exact)(first(arguments)))
        norm = np.linalg.norm(wanted)
        return {
            side: float(np.linalg.norm(first(x) - wanted) / norm) for side, x in results.items()
        }

    return errors


def by_jnp(x: Any) -> Any:
    """Return five steps as users write them."""
    a, b, c = (3.4445, -4.7750, 2.0315)
    wide = x.astype(jnp.promote_types(x.dtype, np.float32))
    norm = jnp.linalg.norm(wide, axis=(-2, -1), keepdims=True)
    x = (x / norm).astype(x.dtype)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _sharded_steps(sizes: Sizes) -> Iterator[Program]:
    """Yield steps of parameters that all devices share, or that each of them has."""
    # An optional dependency.
    import optax

    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("d",), axis_types=(AxisType.Auto,))
    optimizers = {"ours": jtk.muon(0.02, mesh=mesh), "XLA": optax.contrib.muon(0.02)}
    for name, spec in (("rows", P("d")), ("replicated", P())):
        sharding = NamedSharding(mesh, spec)

        def parameters(sharding: Any = sharding) -> tuple[Any, ...]:
            return (jax.device_put(_parameters(sizes), sharding),)

        def step(optimizer: Any, params: Any, sharding: Any = sharding) -> Any:
            return jax.lax.with_sharding_constraint(_step(optimizer, params), sharding)

        steps = {side: functools.partial(step, x) for side, x in optimizers.items()}
        title = f"step on {count} devices, {name}"
        errors = _errors_of(functools.partial(_step, optimizers["XLA"]))
        yield Program(title, parameters, steps, errors, profiled=False)


def _programs(arguments: argparse.Namespace) -> Iterator[Program]:
    # An optional dependency.
    import optax

    sizes = _SIZES["cpu" if jax.default_backend() == "cpu" else "gpu"]
    steps: dict[str, Callable[..., Any]] = {
        "ours": functools.partial(_step, jtk.muon(0.02)),
        "standard": functools.partial(_step, jtk.muon(0.02, ns="standard")),
        "XLA": functools.partial(_step, optax.contrib.muon(0.02)),
    }
    if jax.device_count() > 1:
        yield from _sharded_steps(sizes)
    else:
        yield Program("step", lambda: (_parameters(sizes),), steps, _errors_of(steps["XLA"]))
    iterations: dict[str, Callable[..., Any]] = {
        "ours": jtk.linalg.newton_schulz,
        "standard": functools.partial(jtk.linalg.newton_schulz, method="standard"),
        "XLA": by_jnp,
    }
    for dtype in ("float32", "bfloat16"):

        def stack(dtype: str = dtype) -> tuple[Any, ...]:
            return (_NORMAL(jax.random.key(0), sizes.stack, jnp.float32).astype(dtype),)

        name = "x".join(map(str, sizes.stack))
        yield Program(f"newton_schulz {name} {dtype}", stack, iterations, _errors_of(by_jnp))


COMMAND = ProgramCommand("steps of Muon and Newton-Schulz iterations", _programs, 1.0)
