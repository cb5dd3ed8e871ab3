"""``strassen``: where levels of Strassen's algorithm pay, against the product without them."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks.programs import Arrays, Program, ProgramCommand

_CHECKED = 64


def _errors(arguments: Arrays, products: Mapping[str, Any]) -> dict[str, float]:
    """Return each side's root-mean-square error on some rows, relative to the terms' own size."""
    lhs, rhs = (np.asarray(x, np.float64) for x in (arguments[0][:_CHECKED], arguments[1]))
    exact, scale = lhs @ rhs, np.sqrt((lhs**2) @ (rhs**2))
    return {
        name: float(np.sqrt(np.mean(((np.asarray(x[:_CHECKED], np.float64) - exact) / scale) ** 2)))
        for name, x in products.items()
    }


def _operands(size: int, dtype: str) -> list[Any]:
    keys = jax.random.split(jax.random.key(0))
    return [jax.random.normal(key, (size, size), dtype) for key in keys]


def _programs(arguments: argparse.Namespace) -> Iterator[Program]:
    product = functools.partial(jtk.strassen_matmul, precision="highest")
    sides = {
        "XLA": functools.partial(jnp.matmul, precision="highest"),
        "ours": functools.partial(product, levels=0),
        **{
            f"{level} levels": functools.partial(product, levels=level)
            for level in range(1, arguments.levels + 1)
        },
    }
    for dtype in arguments.types:
        for size in arguments.sizes:
            yield Program(
                f"{size} {dtype}", functools.partial(_operands, size, dtype), sides, _errors,
                wide=dtype == "float64",
            )  # fmt: skip


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, nargs="*", default=[4096, 8192, 16384])
    parser.add_argument("--types", nargs="*", default=["float32", "float64"])
    parser.add_argument("--levels", type=int, default=2)


COMMAND = ProgramCommand(
    "levels of Strassen's algorithm against the product without them", _programs, 1.0,
    _add_arguments,
)  # fmt: skip
