"""``latency``: how long a call of a compiled product takes to return, beside XLA's."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks.commands import ROWS, RowsCommand, matches
from benchmarks.measure import kernels_of
from benchmarks.record import Record
from benchmarks.rows import OURS, XLA, Row, jitted
from benchmarks.timing import wall_rounds
from jax_tilekern.tuning.wall_time import ready, repeated

# Short enough for a device to keep up with calls.
_CALLS = {
    "cpu": ["float32 mk,kn->mn m8 n8 k8"],
    "gpu": ["bfloat16 mk,kn->mn m256 n256 k256", "float32 highest mk,kn->mn m512 n512 k512"],
}


def _rows(arguments: argparse.Namespace) -> Iterator[Record]:
    for text in _CALLS[jax.default_backend()]:
        if matches(text, arguments.rows):
            row = Row.of(text, "matmul")
            with row.types_enabled():
                yield {"name": text} | _returns(row, arguments.calls, arguments.seconds)


def _returns(row: Row, calls: int, seconds: float) -> Record:
    """Return the time until a call of a compiled product returns.

    Results are waited for at the end of a batch of calls. Where that makes a call much longer, the
    device does not keep up, and calls wait for it.
    """
    functions = {"ours": jitted(row, OURS), "XLA": jitted(row, XLA)}
    operands = row.random_operands()
    returned: dict[str, list[float]] = {name: [] for name in functions}

    def batch(name: str, side: Callable[..., Any]) -> Any:
        start = time.perf_counter()
        result = repeated(partial(side, *operands), calls)
        returned[name].append((time.perf_counter() - start) / calls)
        return result

    sides = {name: partial(batch, name, side) for name, side in functions.items()}
    for side in sides.values():
        ready(side())
    for warm_up in returned.values():
        warm_up.clear()
    waited = wall_rounds(sides, seconds)
    added = [x - y for x, y in zip(returned["ours"], returned["XLA"], strict=True)]
    return {
        "kernels": kernels_of(functions["ours"], operands),
        "seconds": {name: float(np.median(times)) for name, times in returned.items()}
        | {f"{name}, with results": float(np.median(x)) / calls for name, x in waited.items()},
        "added_seconds": float(np.median(added)),
    }


COMMAND = RowsCommand(
    "time how long a call takes to return", _rows, 2.0, **ROWS,
    calls={"type": int, "default": 200, "help": "calls in a batch"},
)  # fmt: skip
