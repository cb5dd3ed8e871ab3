"""The cross-entropy of a vocabulary against JAX's program with all logits in memory.

    python -m benchmarks cross_entropy --json benchmarks/results/<device>/cross_entropy.json

Times are device times on a GPU, and wall times on a CPU. Temporaries are XLA's own count. The time
of the products alone, by JAX, is a bound for both sides: one for the value, three for the gradient.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks.measurement.memory import temporaries
from benchmarks.measurement.side_times import Side, device_times
from benchmarks.records.record import program_record
from jax_tilekern.cli.console import output_file, write_json
from jax_tilekern.tuning.wall_time import ready, repeated, wall_seconds

HELP = "time the cross-entropy of a vocabulary against all logits in memory"

_ROUNDS = 4
_CHECKED = 16
# Rows, features and labels.
_SIZES = {"gpu": [(32768, 2560, 128256), (8192, 4096, 151936)], "cpu": [(512, 128, 16000)]}


def plain(h: Any, w: Any, labels: Any) -> Any:
    """Return the loss from all logits."""
    logits = (h @ w).astype(np.float32)
    at_label = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return (jax.nn.logsumexp(logits, 1) - at_label).mean()


FUNCTIONS: dict[str, Callable[..., Any]] = {"ours": jtk.linear_cross_entropy, "jnp": plain}


def operands(rows: int, features: int, labels: int, dtype: Any) -> tuple[Any, ...]:
    """Return features, weights of logits of size 1, and labels."""
    keys = jax.random.split(jax.random.key(0), 3)
    h = jax.random.normal(keys[0], (rows, features), dtype)
    w = jax.random.normal(keys[1], (features, labels), dtype) / np.sqrt(features).astype(dtype)
    return h, w, jax.random.randint(keys[2], (rows,), 0, labels)


def errors(h: Any, w: Any, labels: Any) -> dict[str, float]:
    """Return each side's error of the mean loss of a few rows."""
    h, labels = h[:_CHECKED], labels[:_CHECKED]
    logits = np.asarray(h, np.float64) @ np.asarray(w, np.float64)
    top = logits.max(1)
    lse = top + np.log(np.exp(logits - top[:, None]).sum(1))
    exact = (lse - np.take_along_axis(logits, np.asarray(labels)[:, None], 1)[:, 0]).mean()
    return {name: abs(float(f(h, w, labels)) - exact) for name, f in FUNCTIONS.items()}


def products(h: Any, w: Any, *, gradient: bool) -> Callable[[], Any]:
    """Return a call of the products of the value, or of the gradient, and nothing else."""

    def call(h: Any, w: Any, cotangent: Any) -> Any:
        if not gradient:
            return h @ w
        return h @ w, cotangent @ w.T, h.T @ cotangent

    cotangent = jnp.ones((h.shape[0], w.shape[1]), h.dtype) if gradient else None
    return functools.partial(jax.jit(call), h, w, cotangent)


def medians(runs: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Return the median time of a call of each side."""
    if jax.default_backend() == "cpu":
        times = {name: [wall_seconds(run) for _ in range(_ROUNDS)] for name, run in runs.items()}
    else:
        sides = {}
        for name, run in runs.items():
            call = min(wall_seconds(functools.partial(repeated, run, 2)) / 2 for _ in range(2))
            calls = max(1, int(seconds / (len(runs) * _ROUNDS * call)))
            sides[name] = Side(run, calls, _ROUNDS)
        times = {name: list(found) for name, found in device_times(sides).device.items()}
    return {name: float(np.median(found)) for name, found in times.items()}


def row(size: Sequence[int], dtype: Any, seconds: float) -> dict[str, Any]:
    """Measure the value alone, and the value with both gradients."""
    rows, features, labels = size
    args = operands(rows, features, labels, dtype)
    found: dict[str, Any] = {
        "rows": rows, "features": features, "labels": labels, "type": str(np.dtype(dtype)),
        "error": errors(*args),
    }  # fmt: skip
    for what in ("value", "gradient"):
        compiled = {
            name: jax.jit(jax.value_and_grad(f, (0, 1)) if what == "gradient" else f)
            .lower(*args)
            .compile()
            for name, f in FUNCTIONS.items()
        }
        runs: dict[str, Callable[[], Any]] = {
            name: functools.partial(program, *args) for name, program in compiled.items()
        }
        runs["products"] = products(*args[:2], gradient=what == "gradient")
        for run in runs.values():
            ready(run())
        found[what] = {
            "seconds": medians(runs, seconds),
            "temporaries": {name: temporaries(program) for name, program in compiled.items()},
        }
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--sizes",
        type=lambda text: tuple(map(int, text.split("x"))),
        nargs="*",
        metavar="ROWSxFEATURESxLABELS",
        help="by default those of a model on a GPU, and a small one on a CPU",
    )
    parser.add_argument("--types", nargs="*", default=["bfloat16"])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the record here")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and record."""
    record = program_record(arguments.command_line)
    rows = record["rows"]
    sizes = arguments.sizes or _SIZES["cpu" if jax.default_backend() == "cpu" else "gpu"]
    for dtype in arguments.types:
        for size in sizes:
            rows.append(row(size, jnp.dtype(dtype), arguments.seconds))
            for what in ("value", "gradient"):
                for name in FUNCTIONS:
                    seconds, nbytes = (rows[-1][what][x][name] for x in ("seconds", "temporaries"))
                    wrong = rows[-1]["error"][name]
                    print(f"{'x'.join(map(str, size))} {dtype} {what:8} {name:8} "
                          f"{seconds * 1e3:9.2f} ms {nbytes / 2**30:7.3f} GiB of temporaries, "
                          f"error of the loss {wrong:.1e}", flush=True)  # fmt: skip
                seconds = rows[-1][what]["seconds"]["products"]
                print(f"{'x'.join(map(str, size))} {dtype} {what:8} products "
                      f"{seconds * 1e3:9.2f} ms", flush=True)  # fmt: skip
            if arguments.json:
                write_json(arguments.json, record)
    return 0
