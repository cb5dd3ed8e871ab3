"""A product of operands larger than the memory that it may use.

    python -m benchmarks out_of_core --size 65536 --limit-gib 8 --json FILE

The two times are of the first call, which compiles, and of the second one.
"""

import argparse
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.commands import RowsCommand
from benchmarks.record import Record
from jax_tilekern import out_of_core
from jax_tilekern.tuning.wall_time import wall_seconds


def _rows(arguments: argparse.Namespace) -> Iterator[Record]:
    size, limit = arguments.size, int(arguments.limit_gib * 2**30)
    # A random block that repeats is quickly made.
    block = np.random.default_rng(0).standard_normal((min(2048, size),) * 2)
    a = np.tile(block.astype(jnp.dtype(arguments.type)), (-(-size // len(block)),) * 2)[
        :size, :size
    ]
    out, plan = np.zeros_like(a), out_of_core.plan(a, a, memory_limit=limit)
    row = {
        "name": f"{size} {arguments.type}",
        "grid": plan.grid,
        "read_bytes": plan.read_bytes,
        "seconds": {
            side: wall_seconds(lambda: out_of_core.matmul(a, a, out=out, memory_limit=limit))
            for side in ("first call", "ours")
        },
        "peak_bytes_in_use": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }
    lhs, rhs = np.asarray(a[:64], np.float64), np.asarray(a[:, :64], np.float64)
    wrong = (np.asarray(out[:64, :64], np.float64) - lhs @ rhs) / np.sqrt(lhs**2 @ rhs**2)
    row["error"] = float(np.abs(wrong).max())
    yield row


COMMAND = RowsCommand(
    "time a product of operands larger than the memory that it may use", _rows,
    size={"type": int, "default": 65536},
    type={"default": "bfloat16"},
    limit_gib={"type": float, "default": 8.0},
)  # fmt: skip
