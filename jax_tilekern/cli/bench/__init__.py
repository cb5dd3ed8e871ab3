"""``bench``: this package's kernels against XLA's, in one process, side by side."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from jax_tilekern.cli.bench.operations import OPERATIONS
from jax_tilekern.cli.console import make_console

HELP = "time this package's kernels against XLA's"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    what = parser.add_subparsers(dest="bench_command", required=True, metavar="WHAT")

    for name, operation in OPERATIONS.items():
        command = what.add_parser(
            name, help=operation.about, description=f"Time {operation.about}."
        )
        _add_suite_arguments(command)
        command.add_argument("--plot", type=Path, metavar="FILE", help="draw the record here")

    latency = what.add_parser(
        "latency",
        help="what a call costs apart from the device's work",
        description="Time how long a call takes to return, and how long the first one takes.",
    )
    _add_suite_arguments(latency)
    latency.add_argument(
        "--calls", type=int, default=200, help="calls in a batch (default: %(default)s)"
    )
    latency.add_argument(
        "--rounds", type=int, default=5,
        help="fresh processes of each kind for a first result (default: %(default)s)",
    )  # fmt: skip
    latency.set_defaults(plot=None)

    sharded = what.add_parser(
        "sharded",
        help="programs shared among all devices",
        description="Time programs that all devices share against JAX's own.",
    )
    sharded.add_argument("--rows", metavar="PATTERN", help="only rows whose 'group: name' matches")
    sharded.add_argument(
        "--seconds", type=float, default=2.0, help="timing of a row (default: %(default)s)"
    )
    sharded.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    sharded.set_defaults(plot=None)

    table = what.add_parser(
        "table",
        help="a record as a markdown table",
        description="Print a record as a markdown table.",
    )
    table.add_argument("file", type=Path, metavar="FILE", help="what --json wrote")
    table.add_argument("--plot", type=Path, metavar="FILE", help="draw its plot here too")


def _add_suite_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what every command that measures the rows of a suite takes."""
    parser.add_argument("--suite", metavar="NAME", help="which rows (default: by JAX's backend)")
    parser.add_argument(
        "--rows", metavar="PATTERN", help="only rows whose name, or whose group, matches"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="timing of a row (default: %(default)s)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE",
        help="write the record here; rows of earlier runs that this one does not measure stay",
    )  # fmt: skip
    parser.add_argument(
        "--resume", action="store_true", help="only rows that the record lacks or that failed"
    )
    parser.add_argument("--list", action="store_true", help="list suites and rows, and stop")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 if a row failed, 2 for a bad argument."""
    # Imported here: the other commands need none of it.
    from jax_tilekern.cli.bench.plot import NoMatplotlib, require_matplotlib
    from jax_tilekern.cli.bench.record_file import RecordError
    from jax_tilekern.cli.bench.suite import SuiteError

    commands = {"latency": _latency, "sharded": _sharded, "table": _table}
    try:
        if arguments.plot is not None:
            require_matplotlib()
        return commands.get(arguments.bench_command, _operation)(arguments)
    except (SuiteError, RecordError, NoMatplotlib) as error:
        print(error, file=sys.stderr)
        return 2


def _table(arguments: argparse.Namespace) -> int:
    from jax_tilekern.cli.bench import latency, latency_report, report, sharded
    from jax_tilekern.cli.bench.plot import plot
    from jax_tilekern.cli.bench.record_file import RecordError, load_record

    content = arguments.file.read_text() if arguments.file.is_file() else "{}"
    if f'"kind": "{sharded.KIND}"' in content:
        print(sharded.markdown(json.loads(content)))
        return 0
    record = load_record(arguments.file)
    of_latencies = record.get("kind") == latency.KIND
    if of_latencies and arguments.plot is not None:
        raise RecordError(f"{arguments.file} is a record of latencies, which have no plot")
    print(latency_report.markdown(record) if of_latencies else report.markdown(record))
    if arguments.plot is not None:
        plot(record, arguments.plot)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from jax_tilekern.cli.bench.suite import load_suite, suite_names

    console = make_console()
    for name in [arguments.suite] if arguments.suite else suite_names(arguments.bench_command):
        suite = load_suite(name)
        console.print(f"{name}: {suite.about}", style="bold")
        for row in suite.rows:
            console.print(f"  {row.group}: {row.name}")
    return 0


def _operation(arguments: argparse.Namespace) -> int:
    import jax

    from jax_tilekern.cli.bench.plot import plot
    from jax_tilekern.cli.bench.report import summary, table
    from jax_tilekern.cli.bench.suite import SuiteError, default_suite, load_suite
    from jax_tilekern.cli.bench.suite_run import measure_suite

    if arguments.list:
        return _list(arguments)
    console = make_console()
    operation = arguments.bench_command
    suite = load_suite(arguments.suite or default_suite(operation, jax.default_backend()))
    if suite.operation != operation:
        raise SuiteError(f"suite {suite.name} is of {suite.operation}, not of {operation}")
    record, whole = measure_suite(console, suite, arguments)
    console.print()
    console.print(table(record))
    console.print(summary(record))
    if arguments.plot is not None:
        plot(record, arguments.plot)
    return 0 if whole else 1


def _sharded(arguments: argparse.Namespace) -> int:
    from jax_tilekern.cli.bench.sharded import measure_sharded

    _, whole = measure_sharded(make_console(), arguments)
    return 0 if whole else 1


def _latency(arguments: argparse.Namespace) -> int:
    import jax

    from jax_tilekern.cli.bench.first_result import leave_memory
    from jax_tilekern.cli.bench.latency import measure_latency
    from jax_tilekern.cli.bench.latency_report import summary, tables
    from jax_tilekern.cli.bench.suite import default_suite, load_suite

    if arguments.list:
        return _list(arguments)
    leave_memory()
    console = make_console()
    suite = load_suite(arguments.suite or default_suite("latency", jax.default_backend()))
    record, whole = measure_latency(console, suite, arguments)
    console.print()
    for table in tables(record):
        console.print(table)
    console.print(summary(record))
    return 0 if whole else 1
