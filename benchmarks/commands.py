"""Commands that measure rows, and write a record of them."""

from __future__ import annotations

import argparse
import fnmatch
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from benchmarks import record as records
from benchmarks.errors import BenchmarkError
from benchmarks.measure import device_answers, rows_of
from benchmarks.programs import Program
from benchmarks.record import Record
from benchmarks.report import markdown, row_line
from jax_tilekern.cli.console import output_file

# What the line of a row has, and what it leaves to the record.
_OF_A_LINE = ("name", "seconds", "ratio", "failure", "group", "method", "target")

Arguments = Mapping[str, Mapping[str, Any]]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches one of some shell patterns, with its backticks or without."""
    plain = name.replace("`", "")
    return any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns for text in (name, plain))


ROWS: Any = {
    "rows": {"nargs": "+", "metavar": "PATTERN", "default": ["*"], "help": "rows by their names"}
}
_JSON: Any = {"type": output_file, "metavar": "FILE", "help": "write the record here"}


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 0 <= I < N")
    return int(number), int(count)


_OF_PROGRAMS: Arguments = {
    "rows": ROWS["rows"] | {"help": "rows whose name or group matches, or has this part"},
    "sides": ROWS["rows"] | {"help": "sides beside ours"},
    "json": _JSON | {"help": "the record; rows of earlier runs that this one lacks stay"},
    "resume": {"action": "store_true", "help": "only rows that it lacks or that failed"},
    "list": {"action": "store_true", "help": "list the rows, and stop"},
    "minutes": {"type": float, "default": math.inf, "help": "begin no rows after this time"},
    "part": {"type": _part, "default": (0, 1), "metavar": "I/N",
             "help": "only every N-th row, from row I (counted from 0)"},
}  # fmt: skip


class _Command(ABC):
    """A command with a record: its arguments.

    Parameters
    ----------
    about
        What it does, for the help.
    seconds
        The default time to spend on a row, if that is an argument.
    arguments
        Those of this command alone, by name, with the keywords of ``add_argument``.
    """

    def __init__(self, about: str, seconds: float | None, arguments: Arguments) -> None:
        self.HELP, self._arguments = about, dict(arguments)
        if seconds is not None:
            self._arguments["seconds"] = {"type": float, "default": seconds, "help": "of each row"}

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        for name, settings in self._arguments.items():
            parser.add_argument(f"--{name.replace('_', '-')}", **settings)

    @abstractmethod
    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command and return its exit status: 1 if a row failed."""


class RowsCommand(_Command):
    """A command that makes rows of its own kind, which ``rows`` yields for a command line."""

    def __init__(
        self,
        about: str,
        rows: Callable[[argparse.Namespace], Iterable[Record]],
        seconds: float | None = None,
        /,
        **arguments: Mapping[str, Any],
    ) -> None:
        super().__init__(about, seconds, arguments | {"json": _JSON})
        self._rows = rows

    def run(self, arguments: argparse.Namespace) -> int:
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


class ProgramsCommand(_Command):
    """A command that times programs.

    Parameters
    ----------
    about, seconds, arguments
        What is timed, and as those of every command.
    programs
        Yields the programs that there are for a command line.
    header
        What the record has of the command line besides.
    """

    def __init__(
        self,
        about: str,
        programs: Callable[[argparse.Namespace], Iterable[Program]],
        seconds: float = 0.5,
        header: Callable[[argparse.Namespace], Record] = lambda _: {},
        /,
        **arguments: Mapping[str, Any],
    ) -> None:
        super().__init__(f"time {about}", seconds, {**_OF_PROGRAMS, **arguments})
        self._programs, self._header = programs, header

    def run(self, arguments: argparse.Namespace) -> int:
        if arguments.list:
            rows = (f"{x.group}: {x.name}" for x in self._programs(arguments))
            print(*rows, sep="\n")
            return 0
        run = _Run(arguments, self._header(arguments))
        # Parts are measured side by side on one machine.
        threads = max(1, len(os.sched_getaffinity(0)) // arguments.part[1])
        wanted = run.wanted(self._programs(arguments))
        try:
            for row in rows_of(wanted, arguments.seconds, threads, run.begin):
                if not run.finish(row):
                    break
        finally:
            # An interrupted run says nothing of the row that it was in.
            if run.names:
                run.save()
        if not run.names:
            raise BenchmarkError(f"no row has a name like {' or '.join(arguments.rows)}")
        print(f"\n{markdown(run.record)}")
        return int(not run.whole)


class _Run:
    """The state of a run: its record and file, the rows that it met, and whether all succeeded."""

    def __init__(self, arguments: argparse.Namespace, header: Record) -> None:
        self.arguments, self.whole = arguments, True
        self.names: list[str] = []
        self.record = records.new_record(arguments.command_line, **header)
        if arguments.json and arguments.json.exists():
            self.record = records.joined(self.record, records.read(arguments.json))

    def wanted(self, programs: Iterable[Program]) -> Iterator[Program]:
        """Yield the programs to measure.

        With ``--resume``, these are those that the record lacks or has outdated, then those that
        failed.
        """
        end = time.monotonic() + 60 * self.arguments.minutes
        for program in self._lacking(programs):
            if time.monotonic() > end:
                return
            yield program.with_sides(lambda side: matches(side, self.arguments.sides))

    def _lacking(self, programs: Iterable[Program]) -> Iterator[Program]:
        first, step = self.arguments.part
        old, failed = set(records.outdated(self.record)), []
        known = {row["name"]: "failure" in row for row in self.record["rows"]}
        for program in programs:
            if not _picks(self.arguments.rows, program):
                continue
            self.names.append(program.name)
            if (len(self.names) - 1) % step != first:
                continue
            if not self.arguments.resume or program.name not in known or program.name in old:
                yield program
            elif known[program.name]:
                failed.append(program)
        yield from failed

    def begin(self, row: Record) -> None:
        """Write what stays if the run ends in a row."""
        if self.arguments.json:
            before, self.record = self.record, self._with(row)
            self.save()
            self.record = before

    def finish(self, row: Record) -> bool:
        """Record and show a row, and say whether the device still answers."""
        self.record = self._with(row)
        self.save()
        self.whole = self.whole and "failure" not in row
        print(row_line(row), flush=True)
        if not device_answers():
            print("The device no longer answers. A new run with --resume goes on.")
            return False
        return True

    def _with(self, row: Record) -> Record:
        rows = {x["name"]: x for x in [*self.record["rows"], row]}
        return self.record | {"rows": [*rows.values()]}

    def save(self) -> None:
        """Write the record, its rows in the order of the programs."""
        rows = {x["name"]: x for x in self.record["rows"]}
        ordered = [rows[x] for x in dict.fromkeys([*self.names, *rows]) if x in rows]
        needed = {row.get("run") for row in ordered}
        runs = [run for run in self.record.get("runs", ()) if run["date"] in needed]
        self.record |= {"rows": ordered} | ({"runs": runs} if runs else {})
        # After each row, so that a run that is cut short leaves what it has.
        if self.arguments.json:
            records.write(self.arguments.json, self.record)


def _picks(patterns: Iterable[str], program: Program) -> bool:
    return any(
        matches(name, [pattern]) or pattern in name
        for pattern in patterns
        for name in (program.name, program.group)
    )
