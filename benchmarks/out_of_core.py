"""A product of operands larger than the memory that it may use, against what bounds it.

    python -m benchmarks out_of_core --size 65536 --limit-gib 8 --json FILE

The bound is the slower of the product's rate on the device and the bus's rate for the bytes that
the plan reads and writes, each measured alone.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.records.record import program_record
from jax_tilekern import out_of_core
from jax_tilekern.cli.console import output_file, write_json

HELP = "time a product of operands larger than the memory that it may use"

_CHECKED = 64
# Operands repeat a random block, which is quickly made.
_BLOCK = 2048


def operand(rng: np.random.Generator, size: int, dtype: Any) -> np.ndarray[Any, Any]:
    """Return a square matrix of normal numbers that repeat."""
    block = rng.standard_normal((min(_BLOCK, size),) * 2).astype(dtype)
    times = -(-size // len(block))
    return np.tile(block, (times, times))[:size, :size]


def error(a: Any, b: Any, product: Any, rng: np.random.Generator) -> float:
    """Return the largest error of some elements, in terms of what random terms add up to."""
    rows, columns = (rng.integers(0, len(a), _CHECKED) for _ in range(2))
    lhs, rhs = np.asarray(a[rows], np.float64), np.asarray(b[:, columns], np.float64).T
    exact, scale = (lhs * rhs).sum(1), np.sqrt(((lhs * rhs) ** 2).sum(1))
    return float((np.abs(np.asarray(product[rows, columns], np.float64) - exact) / scale).max())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--size", type=int, default=65536)
    parser.add_argument("--limit-gib", type=float, default=8.0)
    parser.add_argument("--type", default="bfloat16")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the record here")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and record."""
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(arguments.type)
    a, b = (operand(rng, arguments.size, dtype) for _ in range(2))
    out = np.zeros((arguments.size, arguments.size), dtype)
    limit = int(arguments.limit_gib * 2**30)
    plan = out_of_core.plan(a, b, memory_limit=limit)
    print(plan, flush=True)
    seconds = []
    for _ in range(arguments.runs):
        start = time.perf_counter()
        seen: list[out_of_core.Progress] = []
        out_of_core.matmul(a, b, out=out, memory_limit=limit, progress=seen.append)
        seconds.append(time.perf_counter() - start)
        assert seen[-1].read_bytes == plan.read_bytes
        print(f"{seconds[-1]:.2f} s, bound {plan.seconds:.2f} s", flush=True)
    wrong = error(a, b, out, rng)
    stats = jax.local_devices()[0].memory_stats() or {}
    row = {
        "plan": str(plan),
        "size": arguments.size,
        "type": arguments.type,
        "memory_limit": limit,
        "peak_bytes_in_use": stats.get("peak_bytes_in_use"),
        "read_bytes": plan.read_bytes,
        "write_bytes": plan.write_bytes,
        "seconds": seconds,
        "bound_seconds": plan.seconds,
        "error": wrong,
    }
    print(f"error {wrong:.1e}, peak {row['peak_bytes_in_use']} bytes of {limit}")
    if arguments.json:
        write_json(arguments.json, program_record(arguments.command_line) | {"rows": [row]})
    return 0
