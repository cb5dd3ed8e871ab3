"""``latency``: what a call costs apart from the device's work, beside XLA's.

The suites ``latency-cpu`` and ``latency-h100`` have the products. Those of the group ``dispatch``
are called again and again. Each time of the group ``first result`` is that of a fresh process,
which ``python -m benchmarks.latency`` is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax import lax

from benchmarks.calls.case import Case, types_enabled
from benchmarks.calls.row import Row
from benchmarks.errors import BenchmarkError
from benchmarks.records.record import Record, program_record, spreads
from benchmarks.records.report import terminal_table
from benchmarks.suites.suite import default_suite, load_suite
from jax_tilekern.cli.console import duration, make_console, output_file, write_json
from jax_tilekern.cli.timing import Pairs, Spread, interleaved
from jax_tilekern.tuning.wall_time import ready, repeated, wall_seconds

HELP = "time how long a call takes to return, and how long the first one takes"

# Processes of a round: ours with an empty and with a filled cache of kernels, and XLA's.
_KINDS = ("cold", "warm", "XLA")
_LONGEST_PROCESS = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--suite", metavar="NAME", help="which rows (default: by JAX's backend)")
    parser.add_argument(
        "--rows", metavar="PATTERN", help="only rows whose name, or whose group, matches"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="of a row of dispatch")
    parser.add_argument("--calls", type=int, default=200, help="calls in a batch")
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes of each kind")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the record here")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    # This process has a device too, whose memory the fresh ones need.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    console = make_console()
    suite = load_suite(arguments.suite or default_suite("latency", jax.default_backend()))
    record = program_record(arguments.command_line)
    for row in (suite.matching(arguments.rows) if arguments.rows else suite).rows:
        with console.status(row.name), types_enabled(row):
            if row.group == "dispatch":
                found = _dispatch(Case.of(row), arguments.calls, arguments.seconds)
            else:
                found = _first_result(row, arguments.rounds)
        record["rows"].append({"name": row.name, "group": row.group, **found})
        if arguments.json is not None:
            write_json(arguments.json, record)
    groups = dict.fromkeys(row["group"] for row in record["rows"])
    for group in groups:
        rows = [row for row in record["rows"] if row["group"] == group]
        headings = ("row", "kernel", *rows[0]["seconds"], "added by ours")
        console.print(terminal_table(group, headings, ((_cells(row), None) for row in rows)))
    return 0


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    medians = (duration(spread["median"]) for spread in row["seconds"].values())
    added = row["added_seconds"]["median"]
    sign = "-" if added < 0 else ""
    return (row["name"], row["kernel"], *medians, sign + duration(abs(added)))


def _dispatch(case: Case, calls: int, seconds: float) -> Record:
    """Return the time until a call of a compiled product returns.

    Results are waited for at the end of a batch of calls. Where that makes a call much longer, the
    device does not keep up, and calls wait for it.
    """
    operands = case.operands()
    returned: dict[str, list[float]] = {"ours": [], "XLA": []}

    def batch(name: str, side: Callable[..., Any]) -> Any:
        start = time.perf_counter()
        result = repeated(partial(side, *operands), calls)
        returned[name].append((time.perf_counter() - start) / calls)
        return result

    sides = partial(batch, "ours", case.ours), partial(batch, "XLA", case.peer)
    for side in sides:
        ready(side())
    for warm_up in returned.values():
        warm_up.clear()
    waited = interleaved(*sides, seconds=seconds).divided(calls)
    pairs = Pairs(tuple(returned["ours"]), tuple(returned["XLA"]))
    times, with_results = spreads(pairs), spreads(waited)
    return {
        "kernel": case.kernel(operands),
        "seconds": {
            "ours": times["ours"],
            "XLA": times["peer"],
            "ours, with results": with_results["ours"],
            "XLA, with results": with_results["peer"],
        },
        "added_seconds": _spread([x - y for x, y in zip(pairs.ours, pairs.peer, strict=True)]),
    }


def _first_result(row: Row, rounds: int) -> Record:
    """Return the time from the first call of a product to its result, in fresh processes.

    What a process adds is its time less that of a program of the same operands, which only copies
    one of them: what JAX needs for any program.
    """
    found = [_round(row, xla_first=bool(number % 2)) for number in range(rounds)]
    return {
        "kernel": found[0]["cold"]["kernel"],
        "seconds": {kind: _spread([x[kind]["product"] for x in found]) for kind in _KINDS},
        "added_seconds": _spread([_added(x["cold"]) - _added(x["XLA"]) for x in found]),
        "processes": found,
    }


def _added(process: Mapping[str, float]) -> float:
    return process["product"] - process["copy"]


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
        [sys.executable, "-m", "benchmarks.latency"],
        input=json.dumps({"row": asdict(row), "side": "peer" if kind == "XLA" else "ours"}),
        env=os.environ | environment, capture_output=True, text=True, timeout=_LONGEST_PROCESS,
        check=False,
    )  # fmt: skip
    if finished.returncode != 0:
        said = finished.stderr.strip().splitlines() or ["nothing"]
        raise BenchmarkError(f"{row.name}: a process fails: {said[-1]}")
    found: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return found | {"compiled": len(list(cache.rglob("*.cubin")))}


def _first_calls(row: Row, side: str) -> dict[str, Any]:
    """Call one side of a product for the first time, after a program that only copies."""
    case = Case.of(row)
    # Random numbers start the backend and all that JAX needs for its first program.
    operands = ready(case.operands())
    # The result has another shape than the operand, because JAX would return an unchanged operand.
    copied = jax.jit(lambda lhs, rhs: lax.expand_dims(lhs, (0,)), keep_unused=True)
    copy = wall_seconds(partial(copied, *operands))
    product = wall_seconds(partial(case.ours if side == "ours" else case.peer, *operands))
    kernel = case.kernel(operands) if side == "ours" else None
    return {"copy": copy, "product": product, "kernel": kernel}


def _spread(values: list[float]) -> dict[str, float]:
    return asdict(Spread.of(values))


def _main() -> None:
    request = json.load(sys.stdin)
    row = Row(**request["row"])
    with types_enabled(row):
        print(json.dumps(_first_calls(row, request["side"])))


if __name__ == "__main__":
    _main()
