"""``causal_conv1d`` against XLA's convolution, and against sums of shifted arrays."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jax_tilekern as jtk
from benchmarks.catalog.oracles import ORACLES
from benchmarks.commands import ProgramsCommand
from benchmarks.programs import Arrays, Program, differences_from, gradient_of

_BF16, _F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
# Batch, length, channels, width and type.
_SIZES = [
    (8, 2048, 4096, 4, _BF16),
    (8, 2048, 4096, 4, _F32),
    (1, 65536, 1536, 4, _BF16),
    (32, 512, 1000, 3, _BF16),
    (4, 4096, 2560, 8, _BF16),
    (64, 1, 8192, 4, _BF16),
]


def _shifted(x: Any, weights: Any, bias: Any, activation: str) -> Any:
    """Write the convolution as a sum of shifted arrays, which XLA fuses."""
    del activation
    inputs = jnp.pad(x.astype(_F32), ((0, 0), (len(weights) - 1, 0), (0, 0)))
    z = bias + sum(w * inputs[:, i : i + x.shape[1]] for i, w in enumerate(weights))
    return jax.nn.silu(z).astype(x.dtype)


def _convolution(sizes: tuple[Any, ...], of_gradient: bool) -> Program:
    batch, length, channels, width, dtype = sizes

    def operands() -> Arrays:
        keys = jax.random.split(jax.random.key(0), 4)
        shapes = [(batch, length, channels), (width, channels), (channels,)]
        shapes += [shapes[0]] if of_gradient else []
        return [
            jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=False)
        ]

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: Any, weights: Any, bias: Any) -> Any:
            return function(x, weights, bias, activation="silu")

        return gradient_of(forward) if of_gradient else forward

    sides = {
        "ours": of(jtk.causal_conv1d),
        "XLA": of(ORACLES.causal_conv1d),
        "shifts": of(_shifted),
    }
    text = f"{batch}x{length}x{channels}, width {width}, {dtype}"
    group = "gradient" if of_gradient else "forward"
    errors = functools.partial(differences_from, "shifts")
    return Program(f"{group}, {text}", operands, sides, errors, group)


def _programs(_: argparse.Namespace) -> Iterator[Program]:
    for of_gradient in (False, True):
        yield from (_convolution(sizes, of_gradient) for sizes in _SIZES)


COMMAND = ProgramsCommand("convolutions of channels along time", _programs)
