"""Programs of this package against the same programs of ``jnp``.

A :class:`Program` declares the arguments and the sides, which :func:`measured` times.
:class:`RowsCommand` is any command whose record has a row for each of several measurements.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern as jtk
from benchmarks import record as records
from benchmarks.errors import BenchmarkError
from benchmarks.measure import failure_of, free_bytes, temporary_bytes
from benchmarks.record import Record
from benchmarks.report import row_line
from benchmarks.timing import Runs, Times, device_times
from jax_tilekern.cli.console import output_file, size
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.tuning.random_operands import copies_beyond_cache

# An error that no margin is about.
_ROUNDING = 1e-6
# What the line of a row has, and what it leaves to the record.
_OF_A_LINE = ("name", "seconds", "ratio", "failure", "group", "method", "target")
# A context of sides.
KERNELS = functools.partial(jtk.policy, "kernels")

Arrays = Sequence[Any]
Sides = Mapping[str, Callable[..., Any]]
Errors = dict[str, float]


def on_gpu() -> bool:
    """Return whether sizes are those for a GPU."""
    return jax.default_backend() != "cpu"


def random_arrays(*structs: Any, seed: int = 0) -> list[Any]:
    """Return normal numbers of shapes and types, given as such or as tuples of both."""
    keys = jax.random.split(jax.random.key(seed), len(structs))
    pairs = ((x.shape, x.dtype) if hasattr(x, "shape") else x for x in structs)
    return [jax.random.normal(key, *pair) for key, pair in zip(keys, pairs, strict=True)]


def relative(results: Mapping[str, Any], right: Any) -> Errors:
    """Return the largest difference of each result from what is right, over its largest element."""
    wide = np.asarray(right, np.float64)
    largest = max(float(np.abs(wide).max()), 1e-30)
    return {
        side: float(np.abs(np.asarray(x, np.float64) - wide).max()) / largest
        for side, x in results.items()
    }


def differences(_: Arrays, results: Mapping[str, Any]) -> Errors:
    """Return the errors of first results; XLA's is right, or else the first other side's."""
    first = {side: jax.tree.leaves(x)[0] for side, x in results.items()}
    other = next(x for side, x in first.items() if side != "ours")
    return relative(first, first.get("XLA", other))


@dataclass(frozen=True)
class Program:
    """What is computed, and by whom.

    Attributes
    ----------
    name, group
        Of the row, and the line of tables that it is part of, if any.
    arguments
        Makes the arguments of every side.
    sides
        Functions of the arguments, by name. ``XLA`` is the program of ``jnp``.
    errors
        The error of some of the sides, of the arguments and of each side's result.
    wide
        Whether 64-bit types are enabled.
    peer
        The side that ours is compared with, where it has no failure.
    contexts
        By side, a context in which it is compiled.
    timing
        Returns the times of compiled sides that make one call each. The profiler, which
        ``device_times`` takes, slows programs of thousands of launches and is that of one GPU.
    margin
        How many times the peer's error ours may have; a result beyond it has no time.
    beyond_cache
        Whether calls on a GPU alternate among copies of the arguments that exceed its L2.
    """

    name: str
    arguments: Callable[[], Arrays]
    sides: Sides
    errors: Callable[[Arrays, Mapping[str, Any]], Errors] = differences
    group: str = ""
    wide: bool = False
    peer: str = "XLA"
    contexts: Mapping[str, Callable[[], AbstractContextManager[Any]]] = field(default_factory=dict)
    timing: Callable[[Runs, float], Times] = device_times
    margin: float = math.inf
    beyond_cache: bool = False


@dataclass
class CompiledProgram:
    """A program's arguments and compiled sides, and why others did not compile."""

    program: Program
    arguments: Arrays
    sides: dict[str, Any]
    kernels: dict[str, list[str]]
    failures: dict[str, str]


def compiled(program: Program) -> CompiledProgram:
    """Compile the sides of a program. One other than ours that fails is left out."""
    with jax.enable_x64(program.wide):
        found = CompiledProgram(program, program.arguments(), {}, {}, {})
        for name, side in program.sides.items():
            try:
                with program.contexts.get(name, nullcontext)():
                    # Sides of one function differ in their contexts.
                    traced = jax.jit(lambda *args, side=side: side(*args))
                    found.sides[name] = traced.lower(*found.arguments).compile()
                    if name == "ours" or name in program.contexts:
                        found.kernels[name] = [
                            f"{choice.kernel or '-'} {choice.reason}".strip()
                            for choice in jtk.explain(side, *found.arguments)
                        ]
            except Exception as error:
                if name == "ours":
                    raise
                found.failures[name] = failure_of(error)
    return found


@dataclass
class CheckedProgram:
    """A program whose sides have run, and what its row has besides times."""

    found: CompiledProgram
    runs: Runs
    peer: str | None
    fields: Record

    @property
    def is_right(self) -> bool:
        """Whether the row has times."""
        return "failure" not in self.fields

    def row(self, times: Times) -> Record:
        """Return the row with the times of its sides."""
        fields, of_ours = times.fields(), self.found.kernels["ours"]
        more = {
            "wall_seconds": fields.get("wall_seconds"),
            "failures": self.found.failures,
            "kernels_of_sides": {
                side: x
                for side, x in self.found.kernels.items()
                if side in self.runs and x != of_ours
            },
        }
        return self.fields | {
            "seconds": fields["seconds"],
            "ratio": {self.peer: fields["ratio"][self.peer]} if self.peer else {},
            "method": fields["method"],
            "temporaries": {name: temporary_bytes(self.found.sides[name]) for name in self.runs},
            **{key: value for key, value in more.items() if value},
        }


def checked(found: CompiledProgram) -> CheckedProgram:
    """Run the sides of a program.

    A side other than ours that fails or does not fit into memory is left out; the row has the
    reason. Where that is the peer, ours is compared with another side.
    """
    program, arguments = found.program, found.arguments
    with jax.enable_x64(program.wide):
        results: dict[str, Any] = {}
        for name, side in found.sides.items():
            try:
                check_memory(side)
                results[name] = jax.block_until_ready(side(*arguments))
            except Exception as error:
                if name == "ours":
                    raise
                found.failures[name] = failure_of(error)
        peers = [name for name in (program.peer, *program.sides) if name in results]
        peer = next((name for name in peers if name != "ours"), None)
        errors = program.errors(arguments, results) if peer else {}
        fields = {
            "name": program.name,
            **({"group": program.group} if program.group else {}),
            "error": errors,
            "kernels": found.kernels["ours"],
        }
        if peer and errors.get("ours", 0) > program.margin * errors.get(peer, 0) + _ROUNDING:
            fields["failure"] = f"error {errors['ours']:.1e}, {peer}'s {errors[peer]:.1e}"
        sets = _sets(found, list(results))
        runs = {name: _rotating(found.sides[name], sets) for name in results}
    return CheckedProgram(found, runs, peer, fields)


def _sets(found: CompiledProgram, names: Sequence[str]) -> list[Arrays]:
    """Return the arguments of calls in turn, so many that each side finds none of its own in L2."""
    if not (found.program.beyond_cache and on_gpu()):
        return [found.arguments]
    read = min(found.sides[name].memory_analysis().argument_size_in_bytes for name in names)
    copied = functools.partial(jax.tree.map, jnp.copy, found.arguments)
    more = copies_beyond_cache(read, current_gpu().l2_bytes) - 1
    return [found.arguments, *(copied() for _ in range(more))]


def _rotating(side: Callable[..., Any], sets: Sequence[Arrays]) -> Callable[[], Any]:
    turns = itertools.cycle(sets)
    return lambda: side(*next(turns))


def measured(program: Program, seconds: float) -> Record:
    """Return the row of a program: times, errors and temporaries of each side."""
    found = checked(compiled(program))
    if not found.is_right:
        return found.fields
    with jax.enable_x64(program.wide):
        return found.row(program.timing(found.runs, seconds))


def check_memory(compiled: Any, placed: bool = True) -> None:
    """Raise a :class:`MemoryError` unless a compiled program fits into what the device has left.

    ``placed`` says whether its arguments are on the device.
    """
    needed = bytes_needed(compiled)
    if placed:
        needed -= compiled.memory_analysis().argument_size_in_bytes
    if needed > free_bytes():
        raise MemoryError(f"{size(needed)} needed, {size(free_bytes())} free")


def bytes_needed(compiled: Any) -> int:
    """Return the bytes of a program's arguments, results and temporaries."""
    memory = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return int(total - memory.alias_size_in_bytes)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches one of some shell patterns, with its backticks or without."""
    plain = name.replace("`", "")
    return any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns for text in (name, plain))


# Arguments of commands of several rows.
ROWS: Any = {
    "rows": {"nargs": "+", "metavar": "PATTERN", "default": ["*"], "help": "rows by their names"}
}


class RowsCommand:
    """A command that measures rows, shows each of them, and writes a record.

    Parameters
    ----------
    about
        What it does, for the help.
    rows
        Yields the rows of the record that the command line asks for.
    seconds
        The default time to spend on a row, if that is an argument.
    arguments
        Those of this command alone, by name, with the keywords of ``add_argument``.
    """

    def __init__(
        self,
        about: str,
        rows: Callable[[argparse.Namespace], Iterable[Record]],
        seconds: float | None = None,
        /,
        **arguments: Mapping[str, Any],
    ) -> None:
        self.HELP, self._rows, self._arguments = about, rows, dict(arguments)
        if seconds is not None:
            self._arguments["seconds"] = {"type": float, "default": seconds, "help": "of each row"}
        self._arguments["json"] = {
            "type": output_file, "metavar": "FILE", "help": "write the record here"
        }  # fmt: skip

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        for name, settings in self._arguments.items():
            parser.add_argument(f"--{name.replace('_', '-')}", **settings)

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command and return its exit status: 1 if a row failed."""
        rows = self._rows(arguments)
        record = records.new_record(arguments.command_line)
        for row in rows:
            record["rows"].append(row)
            print(row_line(row), flush=True)
            for title, found in row.items():
                if found and title not in _OF_A_LINE:
                    print(f"    {title}: {found}", flush=True)
            if arguments.json:
                records.write(arguments.json, record)
        if not record["rows"] and "rows" in self._arguments:
            raise BenchmarkError(f"no row has a name like {' or '.join(arguments.rows)}")
        return int(any("failure" in row for row in record["rows"]))


def program_command(
    about: str,
    programs: Callable[[argparse.Namespace], Iterable[Program]],
    seconds: float = 0.5,
    **arguments: Mapping[str, Any],
) -> RowsCommand:
    """Return the command that times the programs that the command line asks for."""

    def rows(arguments: argparse.Namespace) -> Iterator[Record]:
        for program in programs(arguments):
            if matches(program.name, arguments.rows):
                sides = {
                    name: side
                    for name, side in program.sides.items()
                    if name == "ours" or matches(name, arguments.sides)
                }
                yield measured(dataclasses.replace(program, sides=sides), arguments.seconds)

    sides = ROWS["rows"] | {"help": "sides beside ours"}
    return RowsCommand(f"time {about}", rows, seconds, **ROWS, sides=sides, **arguments)
