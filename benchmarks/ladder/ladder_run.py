"""A run of the command: every size of a ladder, on a GPU or compiled only."""

from __future__ import annotations

import argparse
import fnmatch
import json
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import jax

import jax_tilekern
from benchmarks.ladder import climb
from benchmarks.ladder.climb import Record
from benchmarks.ladder.rung import Ladder, LadderError, Problem, rungs_digest
from benchmarks.measurement.measure import bandwidths
from benchmarks.records.record import command_text, device_name, now
from jax_tilekern.cli import machine
from jax_tilekern.cli.console import write_json

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 2
# What a record must have in common with this run for its problems to be kept.
_SAME = ("schema", "ladder", "device", "backend", "source_digests", "rungs_digest")
# What rungs are compiled for where there is no GPU.
_ARCH = "sm_90a"


def run_ladder(console: Console, ladder: Ladder, arguments: argparse.Namespace) -> Record:
    """Climb a ladder as the command line asks, and return the record.

    Parameters
    ----------
    console
        Progress is shown here.
    ladder
        The ladder.
    arguments
        The command line, parsed.

    Raises
    ------
    LadderError
        If the command line names no size or no rung.
    """
    if not arguments.seconds > 0:
        raise LadderError(f"--seconds is positive, not {arguments.seconds:g}")
    sizes = arguments.size or ladder.defaults
    problems = [(size, problem) for size in sizes for problem in ladder.parse(size)]
    if arguments.rungs is not None:
        problems = _picked(problems, arguments.rungs)

    on_gpu = jax.default_backend() == "gpu"
    record = _header(arguments)
    entries = _kept(record, arguments) if arguments.resume else {}
    if not on_gpu:
        record["device"] = f"{_ARCH}, compiled only"
        console.print(f"JAX has no GPU here: the rungs are compiled for {_ARCH}, and none is run.")
    elif not arguments.check:
        record |= bandwidths()
    with nullcontext() if on_gpu else jax_tilekern.gpu_target(_ARCH):
        for size, problem in problems:
            if (size, problem.title) not in entries:
                with console.status(problem.title):
                    climbed = _climbed(problem, arguments, on_gpu=on_gpu)
                entries[size, problem.title] = {"size": size, **climbed}
            record["problems"] = list(entries.values())
            # After each problem, so that a run that is cut can be resumed.
            if arguments.json is not None:
                write_json(arguments.json, record)
    return record


def _kept(record: Record, arguments: argparse.Namespace) -> dict[tuple[str, str], Record]:
    """Return the problems in the file of ``--json`` that need not be measured again, by title.

    They are of the same device, library and rungs, and each of their rungs was timed, skipped or
    failed.

    Raises
    ------
    LadderError
        If no file was named.
    """
    if arguments.json is None:
        raise LadderError("--resume goes on with the record of --json FILE; name one")
    if not arguments.json.exists():
        return {}
    earlier = json.loads(arguments.json.read_text())
    if any(earlier.get(key) != record[key] for key in _SAME):
        return {}
    return {
        (problem["size"], problem["title"]): problem
        for problem in earlier["problems"]
        if all(r["skipped"] or r["failure"] or "seconds" in r for r in problem["rungs"])
    }


def _picked(problems: list[tuple[str, Problem]], pattern: str) -> list[tuple[str, Problem]]:
    """Return the problems with the rungs whose name is the pattern, or else matches it."""
    names = list(dict.fromkeys(rung.name for _, problem in problems for rung in problem.rungs))
    picked = {name for name in names if name == pattern} or {
        name for name in names if fnmatch.fnmatchcase(name, pattern) or pattern in name
    }
    if not picked:
        raise LadderError(f"no rung matches {pattern!r}; there are {', '.join(names)}")
    found = (
        (size, replace(problem, rungs=tuple(r for r in problem.rungs if r.name in picked)))
        for size, problem in problems
    )
    return [(size, problem) for size, problem in found if problem.rungs]


def _header(arguments: argparse.Namespace) -> Record:
    found, errors = machine.facts("versions", "driver", "nvidia_smi", "nvrtc", "source_digests")
    return {
        "schema": SCHEMA,
        "ladder": arguments.ladder,
        "date": now(),
        "command": command_text(arguments.command_line),
        "backend": jax.default_backend(),
        "device": device_name(),
        **found,
        "rungs_digest": rungs_digest(arguments.ladder),
        "errors": errors,
        "problems": [],
    }


def _climbed(problem: Problem, arguments: argparse.Namespace, *, on_gpu: bool) -> Record:
    rungs = {rung.name: rung for rung in (*problem.rungs, *problem.peers)}
    with problem.types_enabled():
        records = {name: climb.compiled(problem, rung) for name, rung in rungs.items()}
        if on_gpu:
            seconds = None if arguments.check else arguments.seconds
            climb.climb(problem, rungs, records, seconds=seconds)
    return {
        "title": problem.title,
        "sizes": problem.sizes,
        "bytes": problem.bytes,
        "flops": problem.flops,
        "bound": problem.bound,
        "rungs": list(records.values()),
    }
