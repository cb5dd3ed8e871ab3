"""``strassen``: a level of Strassen's algorithm against the product without one."""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks.programs import Program, ProgramCommand


def _errors(operands: Any, products: Any) -> dict[str, float]:
    """Return root-mean-square errors of some rows, relative to the terms' own size."""
    lhs, rhs = (np.asarray(x, np.float64) for x in (operands[0][:64], operands[1]))
    exact, scale = lhs @ rhs, np.sqrt(lhs**2 @ rhs**2)
    return {name: float(np.std((x[:64] - exact) / scale)) for name, x in products.items()}


def _operands(size: int, dtype: str) -> list[Any]:
    return list(jax.random.normal(jax.random.key(0), (2, size, size), dtype))


def _programs(_: argparse.Namespace) -> Iterator[Program]:
    size = 16384 if jax.default_backend() == "gpu" else 256
    sides: Any = {"XLA": jnp.matmul, "ours": jtk.strassen_matmul, "matmul": jtk.matmul}
    sides = {name: partial(side, precision="highest") for name, side in sides.items()}
    for dtype in ("float32", "float64"):
        operands = partial(_operands, size, dtype)
        yield Program(f"{size} {dtype}", operands, sides, _errors, wide=dtype == "float64")


COMMAND = ProgramCommand("a level of Strassen's algorithm", _programs, 1.0)
