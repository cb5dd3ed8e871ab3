"""``latency``: what a call costs apart from the device's work."""

from __future__ import annotations

import argparse

import jax

from benchmarks.latency.first_result import leave_memory
from benchmarks.latency.measure import measure_latency
from benchmarks.latency.report import summary, tables
from benchmarks.suites.arguments import add_suite_arguments, list_suites
from benchmarks.suites.suite import default_suite, load_suite
from jax_tilekern.cli.console import make_console

HELP = "time how long a call takes to return, and how long the first one takes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_suite_arguments(parser)
    parser.add_argument(
        "--calls", type=int, default=200, help="calls in a batch (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5,
        help="fresh processes of each kind for a first result (default: %(default)s)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 if a row failed."""
    console = make_console()
    if arguments.list:
        list_suites(console, "latency", arguments.suite)
        return 0
    leave_memory()
    suite = load_suite(arguments.suite or default_suite("latency", jax.default_backend()))
    record, whole = measure_latency(console, suite, arguments)
    console.print()
    for table in tables(record):
        console.print(table)
    console.print(summary(record))
    return 0 if whole else 1
