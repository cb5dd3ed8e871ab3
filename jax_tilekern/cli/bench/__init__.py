"""``bench``: this package's kernels against XLA's, in one process, side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jax_tilekern.cli.console import make_console

HELP = "time this package's kernels against XLA's"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    what = parser.add_subparsers(dest="bench_command", required=True, metavar="WHAT")

    matmul = what.add_parser("matmul", help="matrix products", description="Time matrix products.")
    matmul.add_argument("--suite", metavar="NAME", help="which rows (default: by JAX's backend)")
    matmul.add_argument(
        "--rows", metavar="PATTERN", help="only rows whose name, or whose group, matches"
    )
    matmul.add_argument(
        "--seconds", type=float, default=2.0, help="timing of a row (default: %(default)s)"
    )
    matmul.add_argument(
        "--json", type=Path, metavar="FILE",
        help="write the record here; rows of earlier runs that this one does not measure stay",
    )  # fmt: skip
    matmul.add_argument(
        "--resume", action="store_true", help="only rows that the record lacks or that failed"
    )
    matmul.add_argument("--plot", type=Path, metavar="FILE", help="draw a roofline plot here")
    matmul.add_argument("--list", action="store_true", help="list suites and rows, and stop")

    table = what.add_parser(
        "table",
        help="a record as a markdown table",
        description="Print a record as a markdown table.",
    )
    table.add_argument("file", type=Path, metavar="FILE", help="what --json wrote")
    table.add_argument("--plot", type=Path, metavar="FILE", help="draw its plot here too")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 if a row failed, 2 for a bad argument."""
    # Imported here: the other commands need none of it.
    from jax_tilekern.cli.bench.plot import NoMatplotlib, plot, require_matplotlib
    from jax_tilekern.cli.bench.record_file import RecordError, load_record
    from jax_tilekern.cli.bench.report import markdown
    from jax_tilekern.cli.bench.suite import SuiteError

    try:
        if arguments.plot is not None:
            require_matplotlib()
        if arguments.bench_command == "table":
            record = load_record(arguments.file)
            print(markdown(record))
            if arguments.plot is not None:
                plot(record, arguments.plot)
            return 0
        return _matmul(arguments)
    except (SuiteError, RecordError, NoMatplotlib) as error:
        print(error, file=sys.stderr)
        return 2


def _matmul(arguments: argparse.Namespace) -> int:
    import jax

    from jax_tilekern.cli.bench.plot import plot
    from jax_tilekern.cli.bench.report import summary, table
    from jax_tilekern.cli.bench.suite import DEFAULT_SUITES, load_suite, suite_names
    from jax_tilekern.cli.bench.suite_run import measure_suite

    console = make_console()
    names = [arguments.suite] if arguments.suite else None
    if arguments.list:
        for name in names or suite_names("matmul"):
            suite = load_suite(name)
            console.print(f"{name}: {suite.about}", style="bold")
            for row in suite.rows:
                console.print(f"  {row.group}: {row.name}")
        return 0

    suite = load_suite(arguments.suite or DEFAULT_SUITES[jax.default_backend()])
    record, whole = measure_suite(console, suite, arguments)
    console.print()
    console.print(table(record))
    console.print(summary(record))
    if arguments.plot is not None:
        plot(record, arguments.plot)
    return 0 if whole else 1
