"""``first_calls``: the time of a program's first call, cold and with caches on disk, beside XLA's.

    python -m benchmarks first_calls --json FILE

Each time is that of a fresh process, which ``python -m benchmarks.first_calls`` is. ``ours`` is the
program by this library, and ``XLA`` the same in plain ``jnp``. A cold process has empty caches; a
warm one has those that the cold one left.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_tilekern as jtk
from benchmarks import moe
from benchmarks.commands import ROWS, RowsCommand, matches
from benchmarks.errors import BenchmarkError
from benchmarks.jax_kernel import lorenz
from benchmarks.programs import Program, on_gpu, random_arrays
from benchmarks.record import Record
from benchmarks.training import attention, normed
from jax_tilekern.tuning.wall_time import ready, wall_seconds

_SIDES = ("ours", "XLA")
_KINDS = ("ours", "ours, warm", "XLA", "XLA, warm")
_LONGEST_PROCESS = 300.0
_MODULE = "benchmarks.first_calls"
# What ``python -m benchmarks`` sets would make XLA's autotuning warm.
_AUTOTUNED = re.compile(r"--xla_gpu_per_fusion_autotune_cache_dir=\S*")


def _block(heads: int, x: Array, qkv: Array, out: Array, up: Array, down: Array) -> Array:
    """Return a block of a transformer."""
    x += attention(normed(x) @ qkv, heads) @ out
    return x + jax.nn.gelu(normed(x) @ up) @ down


def programs(gpu: bool) -> Iterator[Program]:
    """Yield programs of sizes for a GPU, or for a CPU."""
    n = 2048 if gpu else 512
    yield Program(
        f"product, {n} x {n} x {n}, float32 at HIGHEST",
        lambda: random_arrays(*[((n, n), np.float32)] * 2),
        {
            "ours": functools.partial(jtk.matmul, precision="highest"),
            "XLA": functools.partial(jnp.matmul, precision="highest"),
        },
    )
    lanes, steps = (10_000, 1000) if gpu else (100, 100)
    maps: Mapping[str, Callable[..., Any]] = {"ours": jtk.kernel, "XLA": jax.vmap}
    yield Program(
        f"`kernel`: Lorenz, {steps} steps of {lanes}",
        lambda: [*random_arrays(((lanes, 3), np.float32)), jnp.array([10.0, 28.0, 8 / 3])],
        {side: f(functools.partial(lorenz, steps), in_axes=(0, None)) for side, f in maps.items()},
    )
    batch, tokens, d, heads = (4, 1024, 2048, 16) if gpu else (2, 64, 128, 4)
    shapes = (batch, tokens, d), (d, 3 * d), (d, d), (d, 4 * d), (4 * d, d)
    block = moe.gradient(functools.partial(_block, heads))
    yield Program(
        f"transformer block of {d} features, with gradient, bfloat16",
        lambda: [x / 32 for x in random_arrays(*((shape, jnp.bfloat16) for shape in shapes))],
        {"ours": jtk.patch()(block), "XLA": block},
    )
    sizes = moe.Sizes(4096, 2048, 1024, 32, 4) if gpu else moe.SIZES[False]["8 experts"]
    yield Program(
        f"mixture of {sizes.experts} experts, with gradient, bfloat16",
        functools.partial(moe.operands, sizes),
        {side: moe.gradient(moe.LAYERS[side]) for side in _SIDES},
    )


def _rows(arguments: argparse.Namespace) -> Iterator[Record]:
    # This process has a device too, whose memory the fresh ones need.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return _measured(arguments)


def _measured(arguments: argparse.Namespace) -> Iterator[Record]:
    for program in programs(on_gpu()):
        if matches(program.name, arguments.rows):
            orders = (_SIDES[:: -1 if number % 2 else 1] for number in range(arguments.rounds))
            found = [_round(program.name, order) for order in orders]
            medians = {
                call: {kind: float(np.median([x[kind][call] for x in found])) for kind in _KINDS}
                for call in ("first", "later")
            }
            yield {
                "name": program.name,
                "seconds": medians["first"],
                "later_seconds": medians["later"],
                "compiled": found[0]["ours"]["compiled"],
            }


def _round(name: str, sides: Sequence[str]) -> dict[str, dict[str, float]]:
    """Run each side in a process with empty caches, and in one with those that it leaves."""
    found = {}
    for side in sides:
        with tempfile.TemporaryDirectory() as folder:
            cold = found[side] = fresh_process(_MODULE, [name, side], Path(folder))
            warm = found[f"{side}, warm"] = fresh_process(_MODULE, [name, side], Path(folder))
        if warm["compiled"] > cold["compiled"]:
            raise BenchmarkError(f"{name}: the process with filled caches compiles kernels")
    return found


def fresh_process(module: str, words: Sequence[str], caches: Path) -> dict[str, float]:
    """Run a module with caches in a folder; return what it prints, and how many kernels it keeps.

    Raises
    ------
    BenchmarkError
        If it fails; ``words``, its arguments, begin with the name of a program.
    """
    environment = {
        "XDG_CACHE_HOME": str(caches),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(caches / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_FLAGS": _AUTOTUNED.sub("", os.environ.get("XLA_FLAGS", "")).strip(),
    }
    finished = subprocess.run(
        [sys.executable, "-m", module, *words],
        env=os.environ | environment, capture_output=True, text=True, timeout=_LONGEST_PROCESS,
        check=False,
    )  # fmt: skip
    if finished.returncode != 0:
        said = finished.stderr.strip().splitlines() or ["nothing"]
        raise BenchmarkError(f"{words[0]}: a process fails: {said[-1]}")
    found: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    return found | {"compiled": len(list(caches.rglob("*.cubin")))}


def _calls(name: str, side: str) -> dict[str, float]:
    """Call one side of a program for the first time, and again."""
    (program,) = (x for x in programs(on_gpu()) if x.name == name)
    # This starts the backend, too.
    arguments = ready(program.arguments())
    call = functools.partial(jax.jit(program.sides[side]), *arguments)
    return {"first": wall_seconds(call), "later": wall_seconds(call)}


COMMAND = RowsCommand(
    "time first calls of programs, cold and with caches on disk", _rows, **ROWS,
    rounds={"type": int, "default": 3, "help": "fresh processes of each kind"},
)  # fmt: skip

if __name__ == "__main__":
    print(json.dumps(_calls(*sys.argv[1:])))
