"""Where levels of Strassen's algorithm pay: times and errors against the product without them.

python -m benchmarks strassen --sizes 4096 8192 16384 --json FILE
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks.measurement.side_times import Side, device_times
from benchmarks.records.record import program_record
from jax_tilekern.cli.console import output_file, write_json
from jax_tilekern.tuning.wall_time import repeated, wall_seconds

HELP = "time levels of Strassen's algorithm against the product without them"

_ROUNDS = 4
_CHECKED = 64


def errors(products: dict[str, Any], a: Any, b: Any) -> dict[str, float]:
    """Return each side's root-mean-square error on some rows, relative to the terms' own size."""
    lhs, rhs = np.asarray(a[:_CHECKED], np.float64), np.asarray(b, np.float64)
    exact, scale = lhs @ rhs, np.sqrt((lhs**2) @ (rhs**2))
    return {
        name: float(np.sqrt(np.mean(((np.asarray(x[:_CHECKED], np.float64) - exact) / scale) ** 2)))
        for name, x in products.items()
    }


def row(size: int, dtype: Any, levels: int, seconds: float) -> dict[str, Any]:
    """Measure a square product with no to some levels, and XLA's."""
    a, b = (
        jax.random.normal(key, (size, size), dtype) for key in jax.random.split(jax.random.key(0))
    )
    precision = jax.lax.Precision.HIGHEST
    functions: dict[str, Any] = {"XLA": functools.partial(jnp.matmul, precision=precision)}
    for level in range(levels + 1):
        functions[f"{level} levels"] = functools.partial(
            jtk.strassen_matmul, levels=level, precision=precision
        )
    runs = {name: functools.partial(jax.jit(f), a, b) for name, f in functions.items()}
    wrong = errors({name: run() for name, run in runs.items()}, a, b)
    if jax.default_backend() == "cpu":
        times = {name: [wall_seconds(run) for _ in range(_ROUNDS)] for name, run in runs.items()}
    else:
        sides = {}
        for name, run in runs.items():
            call = min(wall_seconds(functools.partial(repeated, run, 2)) / 2 for _ in range(2))
            calls = max(1, int(seconds / (len(runs) * _ROUNDS * call)))
            sides[name] = Side(run, calls, _ROUNDS)
        times = {name: list(found) for name, found in device_times(sides).device.items()}
    medians = {name: float(np.median(found)) for name, found in times.items()}
    return {"size": size, "type": str(np.dtype(dtype)), "seconds": medians, "error": wrong}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--sizes", type=int, nargs="*", default=[4096, 8192, 16384])
    parser.add_argument("--types", nargs="*", default=["float32", "float64"])
    parser.add_argument("--levels", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each row")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the record here")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and record."""
    record = program_record(arguments.command_line)
    rows = record["rows"]
    for dtype in arguments.types:
        for size in arguments.sizes:
            with jax.enable_x64(dtype == "float64"):
                rows.append(row(size, np.dtype(dtype), arguments.levels, arguments.seconds))
            for name, seconds in rows[-1]["seconds"].items():
                rate, wrong = 2 * size**3 / seconds / 1e12, rows[-1]["error"][name]
                print(f"{size} {dtype} {name:8} {seconds * 1e3:9.3f} ms {rate:7.2f} TFLOP/s "
                      f"error {wrong:.1e}", flush=True)  # fmt: skip
            if arguments.json:
                write_json(arguments.json, record)
    return 0
