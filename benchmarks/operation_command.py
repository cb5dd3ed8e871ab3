"""``matmul``, ``transpose``, ``sum``, ...: an operation's kernels against XLA's, side by side."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import jax

from benchmarks.calls.operations import OPERATIONS
from benchmarks.measurement.suite_run import measure_suite
from benchmarks.records.record import Record
from benchmarks.records.report import summary, table
from benchmarks.samples.sample import draw_sample
from benchmarks.samples.sample_run import measure_sample
from benchmarks.suites.suite import SuiteError, default_suite, load_suite, suite_names
from jax_tilekern.cli.console import make_console, output_file

if TYPE_CHECKING:
    from rich.console import Console


class OperationCommand:
    """The command that measures an operation of :data:`~benchmarks.calls.operations.OPERATIONS`."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.HELP = f"time {OPERATIONS[operation].about}"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""
        _add_suite_arguments(parser)
        _add_sample_arguments(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command and return its exit status: 1 if a row failed."""
        console = make_console()
        if arguments.list:
            _list_suites(console, self.operation, arguments.suite)
            return 0
        if arguments.sample is not None:
            record, whole = self._measure_sample(console, arguments)
        else:
            record, whole = self._measure_suite(console, arguments)
        console.print()
        console.print(table(record))
        console.print(summary(record))
        return 0 if whole else 1

    def _measure_suite(
        self, console: Console, arguments: argparse.Namespace
    ) -> tuple[Record, bool]:
        suite = load_suite(arguments.suite or default_suite(self.operation, jax.default_backend()))
        if suite.operation != self.operation:
            raise SuiteError(f"suite {suite.name} is of {suite.operation}, not of {self.operation}")
        return measure_suite(console, suite, arguments)

    def _measure_sample(
        self, console: Console, arguments: argparse.Namespace
    ) -> tuple[Record, bool]:
        device = jax.default_backend()
        sample = draw_sample(self.operation, device, arguments.sample, arguments.seed)
        return measure_sample(console, sample, arguments)


def _add_suite_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the rows of a suite take."""
    parser.add_argument("--suite", metavar="NAME", help="which rows (default: by JAX's backend)")
    parser.add_argument(
        "--rows", metavar="PATTERN", help="only rows whose name, or whose group, matches"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="timing of a row (default: %(default)s)"
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE",
        help="write the record here; rows of earlier runs that this one does not measure stay",
    )  # fmt: skip
    parser.add_argument(
        "--resume", action="store_true", help="only rows that the record lacks or that failed"
    )
    parser.add_argument("--list", action="store_true", help="list suites and rows, and stop")


def _list_suites(console: Console, operation: str, name: str | None) -> None:
    """Print the rows of a suite, or of all suites of an operation."""
    for each in [name] if name else suite_names(operation):
        suite = load_suite(each)
        console.print(f"{each}: {suite.about}", style="bold")
        for row in suite.rows:
            console.print(f"  {row.group}: {row.name}")


def _add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of samples."""
    parser.add_argument(
        "--sample", type=int, metavar="N", help="measure N calls drawn at random, not a suite"
    )
    parser.add_argument(
        "--seed", type=int, default=0,
        help="of the sample: even ones are for fitting, odd ones for reporting (default: 0)",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, help="begin no row of the sample after this time")
    parser.add_argument(
        "--part", type=_part, default=(0, 1), metavar="I/N",
        help="only every N-th row of the sample, from row I (counted from 0)",
    )  # fmt: skip
    parser.add_argument(
        "--policy", choices=("auto", "kernels"), default="auto",
        help="of the library while the sample is measured (default: %(default)s)",
    )  # fmt: skip


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 0 <= I < N")
    return int(number), int(count)
