"""``ladder``: kernels from the naive one to the fastest, each with one idea more."""

from __future__ import annotations

import argparse
import importlib

from benchmarks.ladder.ladder_run import run_ladder
from benchmarks.ladder.report import notes, table
from jax_tilekern.cli.console import make_console, output_file
from jax_tilekern.compilation.nvrtc import nvrtc

HELP = "climb from a naive kernel to the library's own, and see what each idea gains"

# The module of each has its rungs.
_LADDERS = {
    "transpose": "transposes of a matrix",
    "dot": "dot products of vectors",
    "matmul": "matrix products, in float32 and float64",
    "matvec": "a matrix times a vector, in either order",
    "add": "sums of vectors and of matrices",
}
_SIZES = {
    "transpose": "ROWSxCOLUMNS",
    "dot": "SIZE",
    "matmul": "MxNxK",
    "matvec": "ROWSxCOLUMNS",
    "add": "SIZE or ROWSxCOLUMNS",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    what = parser.add_subparsers(dest="ladder", required=True, metavar="WHAT")
    for name, about in _LADDERS.items():
        one = what.add_parser(name, help=about, description=f"Climb the ladder of {about}.")
        one.add_argument(
            "--size", nargs="+", metavar="SIZE",
            help=f"one or several of the form {_SIZES[name]}",
        )  # fmt: skip
        one.add_argument("--rungs", metavar="PATTERN", help="only rungs whose name matches")
        one.add_argument(
            "--check", action="store_true", help="run each rung once and compare, time nothing"
        )
        one.add_argument(
            "--seconds", type=float, default=2.0, help="timing of a size (default: %(default)s)"
        )
        one.add_argument("--json", type=output_file, metavar="FILE", help="write the record here")
        one.add_argument(
            "--resume", action="store_true",
            help="keep what FILE has of the same device and kernels; measure the rest",
        )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 if a rung failed."""
    console = make_console()
    nvrtc()
    ladder = importlib.import_module(f"benchmarks.ladder.{arguments.ladder}").LADDER
    record = run_ladder(console, ladder, arguments)
    for problem in record["problems"]:
        console.print(table(record, problem))
    for note in notes(record):
        console.print(note)
    return int(any(rung["failure"] for problem in record["problems"] for rung in problem["rungs"]))
