"""``host``: what the library costs the host."""

from __future__ import annotations

import argparse

from benchmarks.host.measure import measure_host
from benchmarks.host.report import summary, tables
from jax_tilekern.cli.console import make_console, output_file

HELP = "time calls outside of jit, tracing, and making the program of a model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--layers", type=int, default=32, help="layers of the model (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="programs of each kind (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="timing of a call (default: %(default)s)"
    )
    parser.add_argument(
        "--target", metavar="ARCH", default="sm_90",
        help="the GPU to lower for where there is none (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the record here")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    console = make_console()
    record = measure_host(console, arguments)
    console.print()
    for table in tables(record):
        console.print(table)
    console.print(summary())
    return 0
