"""Batches of small matrices against ``jnp.linalg``, side by side.

    python -m benchmarks linalg --json benchmarks/results/<device>/linalg.json

A row counts only if the results are as accurate as JAX's. Times are device times on a GPU, and wall
times on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks.measurement.side_times import Side, device_times, pairs
from benchmarks.records.record import command_text, now
from jax_tilekern.cli import machine
from jax_tilekern.cli.console import output_file, write_json
from jax_tilekern.cli.timing import Pairs, Spread, interleaved
from jax_tilekern.tuning.wall_time import repeated, wall_seconds

HELP = "time batches of small matrices against jnp.linalg"

SIZES = (2, 3, 4, 8, 16, 32, 64)
OPERATIONS = ("inv", "solve", "cholesky")
_ROUNDS = 8
_SAMPLED = 64
# Elements of the operands and the result of one matrix.
_ELEMENTS: dict[str, Callable[[int], int]] = {
    "inv": lambda n: 2 * n * n,
    "solve": lambda n: n * n + 2 * n,
    "cholesky": lambda n: 2 * n * n,
}


def operands(name: str, count: int, n: int, dtype: Any) -> tuple[Any, ...]:
    """Return random matrices, positive definite ones for ``cholesky``, and right-hand sides."""
    keys = jax.random.split(jax.random.key(n), 2)
    a = jax.random.normal(keys[0], (count, n, n), dtype)
    if name == "cholesky":
        return (jax.jit(lambda a: a @ a.mT / n + jnp.eye(n, dtype=dtype))(a),)
    if name == "solve":
        return a, jax.random.normal(keys[1], (count, n, 1), dtype)
    return (a,)


def errors(name: str, args: Sequence[Any], result: Any) -> float:
    """Return the largest residual of a sample, relative to what makes it up."""
    step = max(1, len(result) // _SAMPLED)
    # The last ones are in a block of their own.
    rows = np.unique(np.r_[np.arange(0, len(result), step), len(result) - 1])
    a, x = (np.asarray(v[rows], np.float64) for v in (args[0], result))
    if name == "inv":
        wrong, scale = a @ x - np.eye(a.shape[-1]), np.abs(a) @ np.abs(x)
    elif name == "solve":
        wrong, scale = a @ x - np.asarray(args[1][rows], np.float64), np.abs(a) @ np.abs(x)
    else:
        wrong, scale = x @ x.swapaxes(-1, -2) - a, np.abs(x) @ np.abs(x.swapaxes(-1, -2))
    return float((np.abs(wrong).max((-2, -1)) / scale.max((-2, -1))).max())


def measure(
    ours: Callable[..., Any], peer: Callable[..., Any], seconds: float
) -> tuple[Pairs, str]:
    """Return times of a call of both, in blocks that alternate."""
    if jax.default_backend() == "cpu":
        return interleaved(ours, peer, seconds=seconds), "wall time of a call"
    sides = {}
    for side, run in (("ours", ours), ("peer", peer)):
        call = min(wall_seconds(functools.partial(repeated, run, 4)) / 4 for _ in range(2))
        calls = min(100, max(1, int(seconds / (2 * _ROUNDS * call))))
        sides[side] = Side(run, calls, _ROUNDS)
    return pairs(device_times(sides).busy, "peer"), "device time by the profiler"


def row(name: str, count: int, n: int, dtype: Any, seconds: float) -> dict[str, Any]:
    """Check and measure one operation on matrices of one size."""
    args = operands(name, count, n, dtype)
    ours, peer = (jax.jit(getattr(module, name)) for module in (jtk.linalg, jnp.linalg))
    wrong = {side: errors(name, args, f(*args)) for side, f in (("ours", ours), ("peer", peer))}
    (choice,) = jtk.explain(getattr(jtk.linalg, name), *args)
    found: dict[str, Any] = {
        "operation": name, "n": n, "count": count, "type": str(np.dtype(dtype)),
        "kernel": choice.kernel or f"XLA: {choice.reason}", "error": wrong,
        "bytes": count * _ELEMENTS[name](n) * np.dtype(dtype).itemsize,
    }  # fmt: skip
    # Either may lose a factor to the other's luck, but not an order of magnitude.
    if wrong["ours"] > 10 * wrong["peer"] + 1e-6:
        return found | {"failure": f"error {wrong['ours']:.1e}, of JAX's {wrong['peer']:.1e}"}
    times, method = measure(functools.partial(ours, *args), functools.partial(peer, *args), seconds)
    spreads = {
        "ours": Spread.of(times.ours), "peer": Spread.of(times.peer), "ratio": times.ratio
    }  # fmt: skip
    return found | {"method": method, "seconds": {k: vars(v) for k, v in spreads.items()}}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--count", type=int, default=100_000, help="matrices of a batch")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--types", nargs="*", default=["float32"])
    parser.add_argument("--seconds", type=float, default=0.3, help="of each row")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the record here")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and record; return how many rows are wrong."""
    record, problems = machine.facts("versions", "cpu", "driver", "nvidia_smi", "nvrtc")
    rows: list[dict[str, Any]] = []
    record |= {
        "command": command_text(arguments.command_line),
        "date": now(),
        "device": jax.devices()[0].device_kind,
        "errors": problems,
        "rows": rows,
    }
    for dtype, name, n in itertools.product(arguments.types, OPERATIONS, arguments.sizes):
        start = time.perf_counter()
        with jax.enable_x64(dtype == "float64"):
            rows.append(row(name, arguments.count, n, np.dtype(dtype), arguments.seconds))
        last = rows[-1]
        if "failure" in last:
            print(f"{name:9} {n:3} {dtype}  {last['failure']}", flush=True)
        else:
            ours, peer, ratio = (last["seconds"][k]["median"] for k in ("ours", "peer", "ratio"))
            rate, took = last["bytes"] / ours / 1e9, time.perf_counter() - start
            wrong = " ".join(f"{last['error'][side]:.1e}" for side in ("ours", "peer"))
            print(
                f"{name:9} {n:3} {dtype}  ours {ours * 1e6:9.1f} us {rate:7.1f} GB/s  "
                f"jnp {peer * 1e6:9.1f} us  ratio {ratio:6.2f}  errors {wrong}  {last['kernel']}  "
                f"({took:.1f} s)",
                flush=True,
            )
        if arguments.json:
            write_json(arguments.json, record)
    return sum("failure" in x for x in rows)
