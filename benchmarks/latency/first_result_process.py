"""A process that calls one product for the first time, and says how long that took.

``python -m benchmarks.latency.first_result_process`` reads a product and a side as JSON, and
writes times as JSON. :mod:`benchmarks.latency.first_result` starts it.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import jax
from jax import Array, lax

from benchmarks.calls.case import Case, types_enabled
from benchmarks.calls.row import Row
from jax_tilekern.compilation import compiler
from jax_tilekern.tuning.wall_time import ready, wall_seconds


def first_calls(row: Row, side: str) -> dict[str, Any]:
    """Call one side of a product for the first time.

    Parameters
    ----------
    row
        The product.
    side
        ``"ours"`` or ``"peer"``.

    Returns
    -------
    dict[str, Any]
        ``product`` and ``copy``: seconds from the first call to the result, of the product and,
        before it, of a program of the same operands that only copies one. ``kernel``: ours, or why
        there is none. ``cache``: the folder of compiled kernels.
    """
    case = Case.of(row)
    # Random numbers start the backend and all that JAX needs for its first program.
    operands = ready(case.operands())
    copy = wall_seconds(partial(jax.jit(_copy, keep_unused=True), *operands))
    product = wall_seconds(partial(case.ours if side == "ours" else case.peer, *operands))
    return {
        "copy": copy,
        "product": product,
        "kernel": case.kernel(operands) if side == "ours" else None,
        "cache": str(compiler.cache_info().location),
    }


def _copy(lhs: Array, rhs: Array) -> Array:
    # Of another shape than the operand, or JAX would return that and run nothing.
    return lax.expand_dims(lhs, (0,))


def main() -> None:
    """Do what the standard input asks for."""
    request = json.load(sys.stdin)
    row = Row(**request["row"])
    with types_enabled(row):
        print(json.dumps(first_calls(row, request["side"])))


if __name__ == "__main__":
    main()
