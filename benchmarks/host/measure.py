"""What this package costs the host: eager calls, tracing, and making the program of a model."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import jax_tilekern as jtk
from benchmarks.host.calls import calls, eager_times, trace_times
from benchmarks.host.model import STEPS, arguments, make_program, programs
from benchmarks.host.report import CALLS, KIND, PROGRAMS, cells
from benchmarks.records.record import SCHEMA, Record, command_text, device_name, now
from jax_tilekern.cli import machine
from jax_tilekern.cli.console import write_json
from jax_tilekern.cli.timing import Pairs, Spread

if TYPE_CHECKING:
    from rich.console import Console


def measure_host(console: Console, given: argparse.Namespace) -> Record:
    """Measure what the command line asks for, and return the record.

    Parameters
    ----------
    console
        Progress is shown here.
    given
        The command line, parsed.
    """
    # Each program is to be made, and not taken from what an earlier process made.
    jax.config.update("jax_enable_compilation_cache", False)
    facts, errors = machine.facts("versions", "cpu", "driver", "nvrtc", "source_digests")
    record: Record = {
        "schema": SCHEMA,
        "kind": KIND,
        "date": now(),
        "command": command_text(given.command_line),
        "device": device_name(),
        **facts,
        "errors": errors,
        "rows": [],
    }
    for row in _rows(given):
        record["rows"].append(row | {"run": record["date"]})
        console.print("  ".join(cells(row)))
        if given.json is not None:
            write_json(given.json, record)
    return record


def _rows(given: argparse.Namespace) -> Iterator[Record]:
    for name, (ours, theirs, operands) in calls().items():
        yield {
            "group": CALLS,
            "name": name,
            "eager": _compared(eager_times(ours, theirs, operands, given.seconds)),
            "trace": _compared(trace_times(ours, theirs, operands, given.seconds)),
        }
    here = jax.default_backend()
    platform = "cuda" if here == "gpu" else here
    for name, make in programs(given.layers).items():
        yield _program_row(name, make, platform, given, compiles=True)
        if platform != "cuda":
            with jtk.gpu_target(given.target):
                yield _program_row(name, make, "cuda", given, compiles=False)


def _program_row(
    name: str, make: Callable[..., Any], platform: str, given: argparse.Namespace, *, compiles: bool
) -> Record:
    sizes: dict[str, int] = {}
    times: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
    sides = {"ours": jtk.matmul, "peer": jnp.matmul}
    # The first round compiles kernels and is left out.
    for number in range(given.rounds + 1):
        for side in sorted(sides, reverse=bool(number % 2)):
            seconds, sizes[side] = make_program(
                make(sides[side]), arguments(given.layers), platform, compiles=compiles
            )
            if number:
                times[side].append(seconds)
    steps = {
        step: _compared(
            Pairs(*(tuple(seconds[step] for seconds in times[side]) for side in ("ours", "peer")))
        )
        for step in STEPS
        if step in times["ours"][0]
    }
    totals = (tuple(sum(seconds.values()) for seconds in times[side]) for side in ("ours", "peer"))
    return {
        "group": PROGRAMS,
        "name": name,
        "platform": platform,
        "rounds": given.rounds,
        "hlo_bytes": sizes,
        "steps": steps,
        "total": _compared(Pairs(*totals)),
    }


def _compared(pairs: Pairs) -> Record:
    """Return the seconds of both sides, and how many times as long ours takes."""
    ratio = Spread.of([ours / peer for ours, peer in zip(pairs.ours, pairs.peer, strict=True)])
    return {
        "ours": asdict(Spread.of(pairs.ours)),
        "peer": asdict(Spread.of(pairs.peer)),
        "ratio": asdict(ratio),
    }
