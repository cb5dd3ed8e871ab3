"""The command line, ``python -m benchmarks``: one module a command, or one for all operations."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks import (
    attention,
    convolution,
    decoding,
    first_calls,
    first_lowerings,
    fit_policy,
    fp8,
    jax_kernel,
    ladder,
    latency,
    linalg,
    machine_code,
    moe,
    out_of_core,
    products,
    regret,
    report,
    sample,
    scans,
    segments,
    selection,
    sharded,
    sharded_bytes,
    small_weights,
    training,
)
from benchmarks.errors import BenchmarkError
from benchmarks.measure import measure
from benchmarks.rows import OPERATIONS
from benchmarks.samples import draw_sample
from benchmarks.suites import load_suite, suite_names
from jax_tilekern.cli.console import output_file
from jax_tilekern.cli.run_command import Command, run_command
from jax_tilekern.compilation.nvrtc import NvrtcNotFound
from jax_tilekern.plans.gpu import NoGpu


class _Operation:
    """The command that measures an operation's kernels against XLA's, side by side."""

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.HELP = f"time {OPERATIONS[operation].about}"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        options: dict[str, dict[str, Any]] = {
            "suite": {"metavar": "NAME", "help": "which rows (default: by JAX's backend)"},
            "rows": {"metavar": "PATTERN", "help": "only rows whose name, or group, matches"},
            "seconds": {"type": float, "default": 2.0, "help": "timing of a row (%(default)s)"},
            "json": {"type": output_file, "metavar": "FILE",
                     "help": "the record; rows of earlier runs that this one lacks stay"},
            "resume": {"action": "store_true", "help": "only rows that it lacks or that failed"},
            "list": {"action": "store_true", "help": "list suites and rows, and stop"},
            "sample": {"type": int, "metavar": "N", "help": "N calls drawn at random, no suite"},
            "seed": {"type": int, "default": 0,
                     "help": "of the sample: even ones are for fitting, odd ones for reporting"},
            "minutes": {"type": float, "help": "begin no row after this time"},
            "part": {"type": _part, "default": (0, 1), "metavar": "I/N",
                     "help": "only every N-th row, from row I (counted from 0)"},
            "policy": {"choices": ("auto", "kernels"), "default": "auto",
                       "help": "of the library (default: %(default)s)"},
        }  # fmt: skip
        for name, settings in options.items():
            parser.add_argument(f"--{name}", **settings)

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command and return its exit status: 1 if a row failed."""
        if arguments.list:
            for name in [arguments.suite] if arguments.suite else suite_names(self.operation):
                rows = load_suite(self.operation, name).rows
                print(name, *(f"  {row.group}: {row.name}" for row in rows), sep="\n")
            return 0
        backend = jax.default_backend()
        if arguments.sample is not None:
            suite = draw_sample(self.operation, backend, arguments.sample, arguments.seed)
        else:
            suite = load_suite(self.operation, arguments.suite or backend)
        record, whole = measure(suite, arguments)
        print(f"\n{report.markdown(record)}")
        return 0 if whole else 1


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 0 <= I < N")
    return int(number), int(count)


class _Tables:
    """The command that writes tables and figures; it takes pandas and matplotlib."""

    HELP = "write the tables and figures of README.md and of docs from the records"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare no arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        # What measures needs neither.
        from benchmarks import tables

        tables.write()
        return 0


_COMMANDS: dict[str, Command] = {
    **{name: _Operation(name) for name in OPERATIONS},
    **products.COMMANDS,
    "fp8": fp8.COMMAND,
    "fp8_accuracy": training.COMMAND,
    "linalg": linalg.COMMAND,
    "causal_conv1d": convolution.COMMAND,
    "scans": scans.COMMAND,
    "segments": segments.COMMAND,
    "selection": selection.COMMAND,
    **small_weights.COMMANDS,
    "decoding": decoding.COMMAND,
    "sample": sample.COMMAND,
    **moe.COMMANDS,
    "attention": attention.COMMAND,
    "jax_kernel": jax_kernel.COMMAND,
    "out_of_core": out_of_core.COMMAND,
    **sharded.COMMANDS,
    "sharded_bytes": sharded_bytes,
    "first_calls": first_calls.COMMAND,
    "first_lowerings": first_lowerings.COMMAND,
    "latency": latency.COMMAND,
    "ladder": ladder,
    "regret": regret,
    "fit_policy": fit_policy,
    "report": report,
    "tables": _Tables(),
    "machine_code": machine_code,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 1 if a row failed, 2 for a bad argument.

    Parameters
    ----------
    arguments
        The command line without the program's name; by default this process's own.
    """
    with tempfile.TemporaryDirectory(prefix="autotuned") as folder:
        # Both sides of a row may contain the same program. XLA's autotuner then chooses once.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_per_fusion_autotune_cache_dir={folder}"
        try:
            return run_command(
                "python -m benchmarks", "Measurements of jax_tilekern.", _COMMANDS, arguments
            )
        except (BenchmarkError, NoGpu, NvrtcNotFound) as error:
            print(error, file=sys.stderr)
            return 2
        finally:
            os.environ["XLA_FLAGS"] = flags
