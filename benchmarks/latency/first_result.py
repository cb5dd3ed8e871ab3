"""How long a process waits for the first result of a product, with nothing compiled and with.

Every time is that of a process of its own. What a side *adds* is its time less the time that a
program of the same operands took in the same process, before, which only copies one of them: what
JAX needs to trace, lower, compile and run any program at all. A copy needs no code to be
generated, so this takes away the least that can be.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.calls.row import Row
from benchmarks.records.record import Record
from jax_tilekern.cli.timing import Pairs, Spread

# Processes of a round: ours with an empty and with a filled cache of kernels, and XLA's.
KINDS = ("cold", "warm", "XLA")
# Seconds after which a process is ended.
LONGEST_PROCESS = 120.0


class CacheUnused(RuntimeError):
    """A process was not as cold, or not as warm, as it should have been."""


def leave_memory() -> None:
    """Keep this process, which has a device too, from taking most of the memory of a GPU.

    To be called before JAX starts its backend. The processes started here do the same.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def first_result(row: Row, *, rounds: int) -> Record:
    """Return what the record of a row has of first results.

    Parameters
    ----------
    row
        The product.
    rounds
        How many processes of each kind.

    Raises
    ------
    CacheUnused
        If the cache of compiled kernels was not where it should be, or a warm process compiled.
    RuntimeError
        If a process failed; the message has what it said at last.
    """
    found = [_round(row, xla_first=bool(number % 2)) for number in range(rounds)]
    seconds = {
        kind: {what: [one[kind][what] for one in found] for what in ("product", "copy")}
        for kind in KINDS
    }

    def spread(kind: str, of: Callable[[float, float], float]) -> dict[str, float]:
        times = seconds[kind]
        return asdict(Spread.of(list(map(of, times["product"], times["copy"]))))

    pairs = Pairs(tuple(seconds["cold"]["product"]), tuple(seconds["XLA"]["product"]))
    return {
        "kernel": found[0]["cold"]["kernel"],
        "failure": None,
        "method": "first call to first result, each in a fresh process",
        "rounds": rounds,
        "compiled": found[0]["cold"]["compiled"],
        "first_seconds": {kind: spread(kind, lambda product, copy: product) for kind in KINDS},
        "copy_seconds": {kind: spread(kind, lambda product, copy: copy) for kind in KINDS},
        "added_seconds": {
            kind: spread(kind, lambda product, copy: product - copy) for kind in KINDS
        },
        "ratio": asdict(pairs.ratio),
    }


def _round(row: Row, *, xla_first: bool) -> dict[str, Mapping[str, Any]]:
    """Run a process of each kind; the cold one fills the cache for the warm one."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        xla = partial(in_fresh_process, row, "peer", cache)
        if xla_first:
            times = {"XLA": xla()}
            times |= _cold_and_warm(row, cache)
        else:
            times = _cold_and_warm(row, cache)
            times["XLA"] = xla()
    return times


def _cold_and_warm(row: Row, cache: Path) -> dict[str, Mapping[str, Any]]:
    cold = in_fresh_process(row, "ours", cache)
    if not Path(cold["cache"]).is_relative_to(cache):
        raise CacheUnused(f"compiled kernels are in {cold['cache']}, not in {cache}")
    written = _files(cache)
    warm = in_fresh_process(row, "ours", cache)
    if _files(cache) != written:
        raise CacheUnused("the process with a filled cache compiled kernels nevertheless")
    return {"cold": {**cold, "compiled": len(written)}, "warm": warm}


def _files(cache: Path) -> set[Path]:
    return set(cache.rglob("*.cubin"))


def in_fresh_process(row: Row, side: str, cache: Path) -> Mapping[str, Any]:
    """Return what :func:`first_calls` of ``first_result_process`` finds in a process of its own.

    Parameters
    ----------
    row, side
        What it is told.
    cache
        The folder in which the process has its caches. JAX's own of compiled programs is off.
    """
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(cache),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.latency.first_result_process"],
        input=json.dumps({"row": asdict(row), "side": side}),
        env=environment, capture_output=True, text=True, timeout=LONGEST_PROCESS, check=False,
    )  # fmt: skip
    if finished.returncode != 0:
        said = finished.stderr.strip().splitlines() or ["nothing"]
        raise RuntimeError(f"a process ended with status {finished.returncode} and said {said[-1]}")
    result: Mapping[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return result
