"""``bench``: this package's kernels against XLA's, in one process, side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jax_tilekern.cli.console import make_console, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from jax_tilekern.cli.bench.record import Record
    from jax_tilekern.cli.bench.suite import Suite

HELP = "time this package's kernels against XLA's"
_DEFAULT_L2_BYTES = 50 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    what = parser.add_subparsers(dest="bench_command", required=True, metavar="WHAT")

    matmul = what.add_parser("matmul", help="matrix products", description="Time matrix products.")
    matmul.add_argument("--suite", metavar="NAME", help="which rows (default: by JAX's backend)")
    matmul.add_argument("--rows", metavar="PATTERN", help="only rows whose name matches")
    matmul.add_argument(
        "--seconds", type=float, default=2.0, help="timing of a row (default: %(default)s)"
    )
    matmul.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    matmul.add_argument("--plot", type=Path, metavar="FILE", help="draw a roofline plot here")
    matmul.add_argument("--list", action="store_true", help="list suites and rows, and stop")

    table = what.add_parser(
        "table",
        help="a record as a markdown table",
        description="Print a record as a markdown table.",
    )
    table.add_argument("file", type=Path, metavar="FILE", help="what --json wrote")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 if a row failed, 2 for a bad argument."""
    # Imported here: the other commands need none of it.
    from jax_tilekern.cli.bench.plot import NoMatplotlib
    from jax_tilekern.cli.bench.record import RecordError, load_record
    from jax_tilekern.cli.bench.report import markdown
    from jax_tilekern.cli.bench.suite import SuiteError

    try:
        if arguments.bench_command == "table":
            print(markdown(load_record(arguments.file)))
            return 0
        return _matmul(arguments)
    except (SuiteError, RecordError, NoMatplotlib) as error:
        print(error, file=sys.stderr)
        return 2


def _matmul(arguments: argparse.Namespace) -> int:
    import jax

    from jax_tilekern.cli.bench.suite import DEFAULT_SUITES, load_suite, suite_names

    console = make_console()
    names = [arguments.suite] if arguments.suite else None
    if arguments.list:
        for name in names or suite_names("matmul"):
            suite = load_suite(name)
            console.print(f"{name}: {suite.about}", style="bold")
            for row in suite.rows:
                console.print(f"  {row.name}")
        return 0

    suite = load_suite(arguments.suite or DEFAULT_SUITES[jax.default_backend()])
    if arguments.rows:
        suite = suite.matching(arguments.rows)
    record = _measure(console, suite, arguments)
    return 1 if any(row["failure"] for row in record["rows"]) else 0


def _measure(console: Console, suite: Suite, arguments: argparse.Namespace) -> Record:
    from jax_tilekern.cli.bench.measure import read_bandwidth
    from jax_tilekern.cli.bench.plot import plot, require_matplotlib
    from jax_tilekern.cli.bench.record import measured, new_record
    from jax_tilekern.cli.bench.report import cells, summary, table

    if arguments.plot is not None:
        require_matplotlib()
    record = new_record(suite, arguments.command_line, read_bandwidth())
    gpus = record.get("driver", {}).get("gpus")
    l2_bytes = gpus[0]["l2_bytes"] if gpus else _DEFAULT_L2_BYTES
    for number, row in enumerate(suite.rows, start=1):
        with console.status(f"{number}/{len(suite.rows)} {row.name}"):
            result = measured(row, arguments.seconds, l2_bytes)
        record["rows"].append(result)
        console.print(f"{number}/{len(suite.rows)}  {'  '.join(cells(result)[:5])}")
        # After each row, so that a run that is cut short leaves what it has.
        if arguments.json is not None:
            write_json(arguments.json, record)
    console.print()
    console.print(table(record))
    console.print(summary(record))
    if arguments.plot is not None:
        plot(record, arguments.plot)
    return record
