"""Arguments of the commands that measure the rows of a suite."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from benchmarks.suites.suite import load_suite, suite_names
from jax_tilekern.cli.console import output_file

if TYPE_CHECKING:
    from rich.console import Console


def add_suite_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what every command that measures the rows of a suite takes."""
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


def list_suites(console: Console, operation: str, name: str | None) -> None:
    """Print the rows of a suite, or of all suites of an operation."""
    for each in [name] if name else suite_names(operation):
        suite = load_suite(each)
        console.print(f"{each}: {suite.about}", style="bold")
        for row in suite.rows:
            console.print(f"  {row.group}: {row.name}")
