"""A run of the command: every size of a ladder, on a GPU or compiled only."""

from __future__ import annotations

import argparse
import fnmatch
import shlex
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import jax

import jax_tilekern
from jax_tilekern.cli import machine
from jax_tilekern.cli.bench.measure import bandwidths
from jax_tilekern.cli.bench.record import device_name, now
from jax_tilekern.cli.ladder import climb, counters
from jax_tilekern.cli.ladder.climb import Record
from jax_tilekern.cli.ladder.rung import Ladder, LadderError, Problem

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1
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
    if not on_gpu:
        record["device"] = f"{_ARCH}, compiled only"
        console.print(f"JAX has no GPU here: the rungs are compiled for {_ARCH}, and none is run.")
    elif not arguments.check:
        record |= bandwidths()
    with nullcontext() if on_gpu else jax_tilekern.gpu_target(_ARCH):
        for size, problem in problems:
            with console.status(problem.title):
                entry = _climbed(problem, arguments, on_gpu=on_gpu)
            record["problems"].append({"size": size, **entry})
    if on_gpu and arguments.counters:
        try:
            _put_counters(console, record["problems"], arguments.ladder)
        except counters.NoCounters as error:
            record["no_counters"] = str(error)
    return record


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
        "command": shlex.join(["python", "-m", "jax_tilekern", *arguments.command_line]),
        "backend": jax.default_backend(),
        "device": device_name(),
        **found,
        "errors": errors,
        "no_counters": None,
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


def _put_counters(console: Console, problems: list[Record], ladder: str) -> None:
    """Run each rung once more under ``ncu``, and put what it counts in the rungs' records."""
    for size in dict.fromkeys(problem["size"] for problem in problems):
        same = [rung for p in problems if p["size"] == size for rung in p["rungs"]]
        climbed = [rung for rung in same if rung["kernels"] and not rung["failure"]]
        for name in dict.fromkeys(rung["name"] for rung in climbed):
            # One for each problem of this size that has the rung, in order.
            rungs = [rung for rung in climbed if rung["name"] == name]
            command = ["ladder", ladder, "--size", size, "--rungs", name, "--check"]
            kernel = rungs[0]["kernels"][0]["name"].partition("<")[0]
            with console.status(f"counting {name}"):
                found = counters.count(command, kernel, launches=len(rungs))
            for rung, counted in zip(rungs, found, strict=True):
                rung["counters"] = counted
