"""``matmul``, ``transpose``, ``sum``, ...: an operation's kernels against XLA's, side by side."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import jax

from benchmarks.calls.operations import OPERATIONS
from benchmarks.measurement.suite_run import measure_suite
from benchmarks.records.record import Record
from benchmarks.records.report import summary, table
from benchmarks.samples.arguments import add_sample_arguments
from benchmarks.samples.sample import draw_sample
from benchmarks.samples.sample_run import measure_sample
from benchmarks.suites.arguments import add_suite_arguments, list_suites
from benchmarks.suites.suite import SuiteError, default_suite, load_suite
from jax_tilekern.cli.console import make_console

if TYPE_CHECKING:
    from rich.console import Console


class OperationCommand:
    """The command that measures an operation of :data:`~benchmarks.calls.operations.OPERATIONS`."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.HELP = f"time {OPERATIONS[operation].about}"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's arguments."""
        add_suite_arguments(parser)
        add_sample_arguments(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command and return its exit status: 1 if a row failed."""
        console = make_console()
        if arguments.list:
            list_suites(console, self.operation, arguments.suite)
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
