"""A product of operands larger than the memory that it may use, against what bounds it.

    python -m benchmarks out_of_core --size 65536 --limit-gib 8 --json FILE

The bound is the slower of the product's rate on the device and the bus's rate for the bytes that
the plan reads and writes, each measured alone.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import record as records
from jax_tilekern import out_of_core
from jax_tilekern.cli.console import output_file
from jax_tilekern.tuning.wall_time import wall_seconds

HELP = "time a product of operands larger than the memory that it may use"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=65536)
    parser.add_argument("--limit-gib", type=float, default=8.0)
    parser.add_argument("--type", default="bfloat16")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the record here")


def run(arguments: argparse.Namespace) -> int:
    size, limit = arguments.size, int(arguments.limit_gib * 2**30)
    # A random block that repeats is quickly made.
    block = np.random.default_rng(0).standard_normal((min(2048, size),) * 2)
    a = np.tile(block.astype(jnp.dtype(arguments.type)), (-(-size // len(block)),) * 2)[
        :size, :size
    ]
    out, plan = np.zeros_like(a), out_of_core.plan(a, a, memory_limit=limit)
    row = {
        "name": f"{size} {arguments.type}",
        "plan": str(plan),
        "seconds": [
            wall_seconds(lambda: out_of_core.matmul(a, a, out=out, memory_limit=limit))
            for _ in range(2)
        ],
        "bound_seconds": plan.seconds,
        "peak_bytes_in_use": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }
    lhs, rhs = np.asarray(a[:64], np.float64), np.asarray(a[:, :64], np.float64)
    wrong = (np.asarray(out[:64, :64], np.float64) - lhs @ rhs) / np.sqrt(lhs**2 @ rhs**2)
    row["error"] = float(np.abs(wrong).max())
    print(*(f"{name}: {value}" for name, value in row.items()), sep="\n")
    if arguments.json:
        record = records.new_record(arguments.command_line)
        records.write(arguments.json, record | {"rows": [row]})
    return 0
