"""Programs of this package against the same programs of ``jnp``, such as those of ``fused``.

A :class:`Program` declares the arguments and the sides. :class:`ProgramCommand` times the sides,
prints a line and writes a row for each program.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import jax_tilekern as jtk
from benchmarks.measurement.side_times import times_of_sides
from benchmarks.records.record import Record, program_record
from jax_tilekern.cli.console import duration, output_file, size, write_json

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
        The side that ours is compared with.
    """

    name: str
    arguments: Callable[[], Arrays]
    sides: Sides
    errors: Callable[[Arrays, Mapping[str, Any]], dict[str, float]]
    wide: bool = False
    peer: str = "XLA"


def measured(program: Program, seconds: float) -> Record:
    """Return the row of a program: times, errors and temporaries of each side."""
    with jax.enable_x64(program.wide):
        arguments = program.arguments()
        compiled: dict[str, Any] = {
            name: jax.jit(side).lower(*arguments).compile() for name, side in program.sides.items()
        }
        runs = {name: functools.partial(side, *arguments) for name, side in compiled.items()}
        errors = program.errors(arguments, {name: run() for name, run in runs.items()})
        times, method = times_of_sides(runs, seconds)
        choices = jtk.explain(program.sides["ours"], *arguments)
    medians = {name: float(np.median(found)) for name, found in times.device.items()}
    return {
        "name": program.name,
        "seconds": medians,
        "method": method,
        "peer": program.peer,
        "ratio": medians[program.peer] / medians["ours"],
        "error": errors,
        "temporaries": {
            name: side.memory_analysis().temp_size_in_bytes for name, side in compiled.items()
        },
        "kernels": [f"{choice.kernel or '-'} {choice.reason}".strip() for choice in choices],
    }


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
        parser.add_argument("--rows", metavar="PATTERN", default="*", help="rows by their names")
        parser.add_argument("--seconds", type=float, default=self._seconds, help="of each row")
        parser.add_argument(
            "--json", type=output_file, metavar="FILE", help="write the record here"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Measure, print and record."""
        record = program_record(arguments.command_line)
        for program in self._programs(arguments):
            if not fnmatch.fnmatch(program.name, arguments.rows):
                continue
            row = measured(program, arguments.seconds)
            record["rows"].append(row)
            print(f"{program.name}: {program.peer} / ours {row['ratio']:.3f}", flush=True)
            for name, time in row["seconds"].items():
                wrong = f", error {row['error'][name]:.1e}" if name in row["error"] else ""
                print(
                    f"    {name}: {duration(time)}, {size(row['temporaries'][name])} of "
                    f"temporaries{wrong}",
                    flush=True,
                )
            for kernel in row["kernels"]:
                print(f"    {kernel}", flush=True)
            if arguments.json:
                write_json(arguments.json, record)
        return 0
