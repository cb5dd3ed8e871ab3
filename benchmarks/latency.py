"""``latency``: what a call costs apart from the device's work, beside XLA's.

Products of the group ``returns`` are called again and again. Each time of the group ``first`` is
that of a fresh process, which ``python -m benchmarks.latency`` is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax

from benchmarks.errors import BenchmarkError
from benchmarks.measure import Case
from benchmarks.programs import ROWS, RowsCommand, matches
from benchmarks.record import Record
from benchmarks.rows import Row
from benchmarks.suites import expanded
from benchmarks.timing import wall_rounds
from jax_tilekern.tuning.wall_time import ready, repeated, wall_seconds

# Short enough for a device to keep up with calls, and of every kind of kernel.
_CALLS = {
    "cpu": {
        "returns": ["float32 mk,kn->mn m8 n8 k8"],
        "first": ["float32 mk,kn->mn m512 n512 k512"],
    },
    "gpu": {
        "returns": [
            "bfloat16 mk,kn->mn m256 n256 k256",
            "float32 highest mk,kn->mn m512 n512 k512",
        ],
        "first": [
            "bfloat16 {mk,kn->mn m4096 n4096 k4096|km,kn->mn m2048 n2048 k2048}",
            "{float32 highest|int8 to int32|float8_e4m3fn to bfloat16} mk,kn->mn m2048 n2048 k2048",
        ],
    },
}
# Processes of a round: ours with an empty and with a filled cache of kernels, and XLA's.
_KINDS = ("cold", "warm", "XLA")
_LONGEST_PROCESS = 120.0


def _rows(arguments: argparse.Namespace) -> Iterator[Record]:
    # This process has a device too, whose memory the fresh ones need.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return _measured(arguments)


def _measured(arguments: argparse.Namespace) -> Iterator[Record]:
    for group, text in _texts():
        if not matches(f"{group}: {text}", arguments.rows):
            continue
        row = Row.of(text, "matmul")
        with row.types_enabled():
            if group == "returns":
                found = _returns(row, arguments.calls, arguments.seconds)
            else:
                found = _first_result(row, arguments.rounds)
        yield {"name": f"{group}: {text}", "group": group, **found}


def _texts() -> Iterator[tuple[str, str]]:
    for group, patterns in _CALLS[jax.default_backend()].items():
        yield from ((group, text) for pattern in patterns for text in expanded(pattern))


def _returns(row: Row, calls: int, seconds: float) -> Record:
    """Return the time until a call of a compiled product returns.

    Results are waited for at the end of a batch of calls. Where that makes a call much longer, the
    device does not keep up, and calls wait for it.
    """
    case = Case(row)
    operands = row.random_operands()
    returned: dict[str, list[float]] = {"ours": [], "XLA": []}

    def batch(name: str, side: Callable[..., Any]) -> Any:
        start = time.perf_counter()
        result = repeated(partial(side, *operands), calls)
        returned[name].append((time.perf_counter() - start) / calls)
        return result

    sides = {"ours": partial(batch, "ours", case.ours), "XLA": partial(batch, "XLA", case.peer)}
    for side in sides.values():
        ready(side())
    for warm_up in returned.values():
        warm_up.clear()
    waited = wall_rounds(sides, seconds)
    added = [x - y for x, y in zip(returned["ours"], returned["XLA"], strict=True)]
    return {
        "kernel": case.kernel(operands),
        "seconds": {name: float(np.median(times)) for name, times in returned.items()}
        | {f"{name}, with results": float(np.median(x)) / calls for name, x in waited.items()},
        "added_seconds": float(np.median(added)),
    }


def _first_result(row: Row, rounds: int) -> Record:
    """Return the time from the first call of a product to its result, in fresh processes.

    What a process adds is its time less that of a program of the same operands, which only copies
    one of them: what JAX needs for any program.
    """
    found = [_round(row, xla_first=bool(number % 2)) for number in range(rounds)]
    added = [{kind: x[kind]["product"] - x[kind]["copy"] for kind in _KINDS} for x in found]
    return {
        "kernel": found[0]["cold"]["kernel"],
        "seconds": {kind: float(np.median([x[kind]["product"] for x in found])) for kind in _KINDS},
        "added_seconds": float(np.median([x["cold"] - x["XLA"] for x in added])),
        "processes": found,
    }


def _round(row: Row, *, xla_first: bool) -> dict[str, Any]:
    """Run a process of each kind; the cold one fills the cache for the warm one."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        kinds = ("XLA", "cold", "warm") if xla_first else _KINDS
        found = {kind: _fresh_process(row, kind, cache) for kind in kinds}
    if found["warm"]["compiled"] > found["cold"]["compiled"]:
        raise BenchmarkError(f"{row.name}: the process with a filled cache compiles kernels")
    return found


def _fresh_process(row: Row, kind: str, cache: Path) -> dict[str, Any]:
    """Return what :func:`_first_calls` finds in a process of its own, with a folder of caches."""
    environment = {"XDG_CACHE_HOME": str(cache), "JAX_ENABLE_COMPILATION_CACHE": "false"}
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.latency", row.text, "XLA" if kind == "XLA" else "ours"],
        env=os.environ | environment, capture_output=True, text=True, timeout=_LONGEST_PROCESS,
        check=False,
    )  # fmt: skip
    if finished.returncode != 0:
        said = finished.stderr.strip().splitlines() or ["nothing"]
        raise BenchmarkError(f"{row.name}: a process fails: {said[-1]}")
    found: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return found | {"compiled": len(list(cache.rglob("*.cubin")))}


def _first_calls(text: str, side: str) -> dict[str, Any]:
    """Call one side of a product for the first time, after a program that only copies."""
    row = Row.of(text, "matmul")
    with row.types_enabled():
        case = Case(row)
        # Random numbers start the backend and all that JAX needs for its first program.
        operands = ready(row.random_operands())
        # The result has another shape, because JAX would return an unchanged operand.
        copied = jax.jit(lambda lhs, rhs: lax.expand_dims(lhs, (0,)), keep_unused=True)
        copy = wall_seconds(partial(copied, *operands))
        product = wall_seconds(partial(case.ours if side == "ours" else case.peer, *operands))
        kernel = case.kernel(operands) if side == "ours" else None
    return {"copy": copy, "product": product, "kernel": kernel}


COMMAND = RowsCommand(
    "time how long a call takes to return, and how long the first one takes", _rows, 2.0, **ROWS,
    calls={"type": int, "default": 200, "help": "calls in a batch"},
    rounds={"type": int, "default": 5, "help": "fresh processes of each kind"},
)  # fmt: skip

if __name__ == "__main__":
    print(json.dumps(_first_calls(*sys.argv[1:])))
