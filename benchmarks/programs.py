"""Programs of this package against the same programs of ``jnp``, such as those of ``fused``.

A :class:`Program` declares the arguments and the sides. :class:`ProgramCommand` times the sides,
prints a line and writes a row for each program.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import jax_tilekern as jtk
from benchmarks.calls.other_peers import free_bytes
from benchmarks.measurement.side_times import times_of_sides
from benchmarks.records.record import Record, program_record
from jax_tilekern.cli.console import duration, output_file, size, write_json

# A context of sides.
KERNELS = functools.partial(jtk.policy, "kernels")

Arrays = Sequence[Any]
Sides = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class Program:
    """What is computed, and by whom.

    Attributes
    ----------
    name
        Of the row.
    arguments
        Makes the arguments of every side.
    sides
        Functions of the arguments, by name. ``XLA`` is the program of ``jnp``, and ``ours`` is
        compared with it.
    errors
        The error of some of the sides, of the arguments and of each side's result.
    wide
        Whether 64-bit types are enabled.
    peer
        The side that ours is compared with, where it has no failure.
    contexts
        By side, a context in which it is compiled.
    profiled
        Whether a GPU's times are the profiler's, which slows programs of thousands of launches and
        is that of one GPU.
    """

    name: str
    arguments: Callable[[], Arrays]
    sides: Sides
    errors: Callable[[Arrays, Mapping[str, Any]], dict[str, float]]
    wide: bool = False
    peer: str = "XLA"
    contexts: Mapping[str, Callable[[], AbstractContextManager[Any]]] = field(default_factory=dict)
    profiled: bool = True


def measured(program: Program, seconds: float) -> Record:
    """Return the row of a program: times, errors and temporaries of each side.

    A side other than ours that fails or does not fit into memory is left out; the row has the
    reason. Where that is the peer, ours is compared with another side.
    """
    with jax.enable_x64(program.wide):
        arguments = program.arguments()
        compiled: dict[str, Any] = {}
        failures: dict[str, str] = {}
        results: dict[str, Any] = {}
        for name, side in program.sides.items():
            try:
                with program.contexts.get(name, nullcontext)():
                    # Sides of one function differ in their contexts.
                    traced = jax.jit(lambda *args, side=side: side(*args))
                    program_of_side = traced.lower(*arguments).compile()
                check_memory(program_of_side)
                results[name] = jax.block_until_ready(program_of_side(*arguments))
            except Exception as error:
                if name == "ours":
                    raise
                failures[name] = failure_of(error)
            else:
                compiled[name] = program_of_side
        peers = [name for name in (program.peer, *program.sides) if name in results]
        peer = next((name for name in peers if name != "ours"), None)
        errors = program.errors(arguments, results) if peer else {}
        del results
        runs = {name: functools.partial(side, *arguments) for name, side in compiled.items()}
        times, method = times_of_sides(runs, seconds, program.profiled)
        choices = jtk.explain(program.sides["ours"], *arguments)
        kernels = {}
        for name in [name for name in program.contexts if name in compiled]:
            with program.contexts[name]():
                kernels[name] = _texts(jtk.explain(program.sides[name], *arguments))
    medians = {name: float(np.median(found)) for name, found in times.device.items()}
    return {
        "name": program.name,
        "seconds": medians,
        "method": method,
        "peer": peer,
        "ratio": medians[peer] / medians["ours"] if peer else None,
        "error": errors,
        "temporaries": {
            name: side.memory_analysis().temp_size_in_bytes for name, side in compiled.items()
        },
        **({"failures": failures} if failures else {}),
        "kernels": _texts(choices),
        **({"kernels_of_sides": kernels} if kernels else {}),
    }


def _texts(choices: Iterable[Any]) -> list[str]:
    return [f"{choice.kernel or '-'} {choice.reason}".strip() for choice in choices]


def check_memory(compiled: Any, placed: bool = True) -> None:
    """Raise a :class:`MemoryError` unless a compiled program fits into what the device has left.

    Parameters
    ----------
    compiled
        The program.
    placed
        Whether its arguments are on the device.
    """
    needed = bytes_needed(compiled)
    if placed:
        needed -= compiled.memory_analysis().argument_size_in_bytes
    if needed > free_bytes():
        raise MemoryError(f"{size(needed)} needed, {size(free_bytes())} free")


def bytes_needed(compiled: Any) -> int:
    """Return the bytes of a program's arguments, results and temporaries."""
    memory = compiled.memory_analysis()
    return int(
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def failure_of(error: Exception) -> str:
    """Return in a line why a side has no time."""
    if isinstance(error, ModuleNotFoundError):
        return "not installed"
    what = str(error).partition("\n")[0]
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in what:
        return f"out of memory: {what}"
    return f"{type(error).__name__}: {what}"


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


class ProgramCommand:
    """The command that measures some programs.

    Parameters
    ----------
    about
        What it times, for the help.
    programs
        Yields the programs that the command line asks for.
    seconds
        The default time to spend on a row.
    add_arguments
        Declares arguments of this command alone.
    """

    def __init__(
        self,
        about: str,
        programs: Callable[[argparse.Namespace], Iterable[Program]],
        seconds: float,
        add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    ) -> None:
        self.HELP = f"time {about}"
        self._programs, self._seconds, self._add_arguments = programs, seconds, add_arguments

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""
        self._add_arguments(parser)
        parser.add_argument(
            "--rows", nargs="+", metavar="PATTERN", default=["*"], help="rows by their names"
        )
        parser.add_argument(
            "--sides",
            nargs="+",
            metavar="PATTERN",
            default=["*"],
            help="sides beside ours, likewise",
        )
        parser.add_argument("--seconds", type=float, default=self._seconds, help="of each row")
        parser.add_argument(
            "--json", type=output_file, metavar="FILE", help="write the record here"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Measure, print and record."""
        record = program_record(arguments.command_line)
        for program in self._programs(arguments):
            if not _matches(program.name, arguments.rows):
                continue
            sides = {
                name: side
                for name, side in program.sides.items()
                if name == "ours" or _matches(name, arguments.sides)
            }
            program = dataclasses.replace(program, sides=sides)
            row = measured(program, arguments.seconds)
            record["rows"].append(row)
            against = f": {row['peer']} / ours {row['ratio']:.3f}" if row["peer"] else ""
            print(f"{program.name}{against}", flush=True)
            for name, time in row["seconds"].items():
                wrong = f", error {row['error'][name]:.1e}" if name in row["error"] else ""
                print(
                    f"    {name}: {duration(time)}, {size(row['temporaries'][name])} of "
                    f"temporaries{wrong}",
                    flush=True,
                )
            for name, failure in row.get("failures", {}).items():
                print(f"    {name}: {failure}", flush=True)
            for kernel in row["kernels"]:
                print(f"    {kernel}", flush=True)
            for name, kernels in row.get("kernels_of_sides", {}).items():
                print(f"    {name}:", *kernels, sep="\n        ", flush=True)
            if arguments.json:
                write_json(arguments.json, record)
        return 0
