"""``tune``: tune the products of a suite, as ``python -m jax_tilekern tune`` does named ones."""

from __future__ import annotations

import argparse
import sys

from benchmarks.calls.case import Case
from benchmarks.suites.suite import SuiteError, load_suite
from jax_tilekern.cli.product_call import ProductCall, ProductCallError
from jax_tilekern.cli.tune import add_tuning_arguments, tune_calls

HELP = "tune the products of a suite"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--suite", metavar="NAME", default="matmul-h100", help="which rows (default: %(default)s)"
    )
    parser.add_argument(
        "--rows", metavar="PATTERN", help="only rows whose name, or whose group, matches"
    )
    add_tuning_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 if a product failed, 2 for a bad argument."""
    suite = load_suite(arguments.suite)
    if suite.operation != "matmul":
        raise SuiteError(f"suite {suite.name} has no products, but {suite.operation}")
    rows = (suite.matching(arguments.rows) if arguments.rows else suite).rows
    calls = [ProductCall(row.name, Case.of(row).ours, row.structs) for row in rows]
    try:
        return tune_calls(calls, arguments)
    except ProductCallError as error:
        print(error, file=sys.stderr)
        return 2
