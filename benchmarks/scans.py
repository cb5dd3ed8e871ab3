"""``scans``: cumulative reductions, recurrences and other scans against JAX's own."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_tilekern as jtk
from benchmarks.commands import ProgramsCommand
from benchmarks.programs import KERNELS, Arrays, Program, gradient_of

_BF16, _F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


def _normal(*shape: int, dtype: Any = _F32, seed: int = 1) -> Any:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def _coefficients(*shape: int, dtype: Any = _F32) -> Any:
    return jax.random.uniform(jax.random.key(0), shape, np.float32, 0.5, 1).astype(dtype)


def _by_associative_scan(a: Any, b: Any) -> Any:
    def combine(x: Any, y: Any) -> Any:
        return x[0] * y[0], y[0] * x[1] + y[1]

    return lax.associative_scan(combine, (a, b), axis=1)[1]


def _program(
    name: str, operands: Callable[[], Arrays], ours: Any, theirs: Any, group: str
) -> Program:
    """Return a program whose third side has kernels whatever is predicted."""
    sides = {"ours": ours, "kernel": ours, "XLA": theirs}
    return Program(name, operands, sides, group=group, contexts={"kernel": KERNELS})


def _cumulative(name: str, shape: tuple[int, ...], dtype: Any = _F32) -> Program:
    axis = len(shape) - 1
    return _program(
        f"{name} {' x '.join(map(str, shape))}, {dtype}",
        lambda: (_normal(*shape, dtype=dtype),),
        lambda x: getattr(jtk, name)(x, axis),
        lambda x: getattr(lax, name)(x, axis),
        f"`{name}`",
    )


def _recurrences(shape: tuple[int, ...], dtype: Any = _F32) -> Iterator[Program]:
    """Yield a recurrence along axis 1, and its gradient."""
    title = f"{' x '.join(map(str, shape))}, {dtype}"

    def operands(*, gradient: bool) -> Arrays:
        cotangent = [_normal(*shape, dtype=dtype, seed=2)] if gradient else []
        return _coefficients(*shape, dtype=dtype), _normal(*shape, dtype=dtype), *cotangent

    ours: Callable[..., Any] = functools.partial(jtk.linear_recurrence, axis=1)
    yield _program(
        f"recurrence {title}", functools.partial(operands, gradient=False),
        ours, _by_associative_scan, "`linear_recurrence`",
    )  # fmt: skip
    yield _program(
        f"gradient {title}", functools.partial(operands, gradient=True),
        gradient_of(ours), gradient_of(_by_associative_scan), "`linear_recurrence`, gradient",
    )  # fmt: skip


def _log_sums(scan: Callable[..., Any]) -> Callable[..., Any]:
    """Return a scan by a function of the user's: maxima, and sums of exponentials below them."""

    def combine(x: Any, y: Any) -> Any:
        most = jnp.maximum(x[0], y[0])
        return most, x[1] * jnp.exp(x[0] - most) + y[1] * jnp.exp(y[0] - most)

    return lambda m, s: scan(combine, (m, s), axis=1)


def _programs(_: argparse.Namespace) -> Iterator[Program]:
    large: tuple[tuple[int, ...], ...] = ((2**24,), (4096, 4096), (64, 65536))
    small: tuple[tuple[int, ...], ...] = ((1024,), (100_000,), (256, 1000), (1_000_000,))
    for shape in large:
        yield _cumulative("cumsum", shape)
    yield from _recurrences((8, 2048, 4096))
    yield from _recurrences((1, 65536, 128))
    for shape in small:
        yield _cumulative("cumsum", shape)
    for shape in ((4, 256, 64), (1, 4096, 256)):
        yield from _recurrences(shape)
    yield _cumulative("cumsum", (64, 65536), _BF16)
    for name in ("cummax", "cumlogsumexp"):
        yield _cumulative(name, (4096, 4096))
    yield from _recurrences((8, 2048, 4096), _BF16)
    yield from _recurrences((512, 16384))
    yield _program(
        "maxima and sums of exponentials 512 x 16384, float32",
        lambda: (_normal(512, 16384), jnp.ones((512, 16384))),
        _log_sums(jtk.associative_scan), _log_sums(lax.associative_scan), "`associative_scan`",
    )  # fmt: skip


COMMAND = ProgramsCommand("scans", _programs)
