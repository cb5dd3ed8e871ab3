"""The command line, ``python -m benchmarks``: one module a command, or several."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence

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
    operations,
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
from jax_tilekern.cli.run_command import Command, run_command
from jax_tilekern.compilation.nvrtc import NvrtcNotFound
from jax_tilekern.plans.gpu import NoGpu


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
    **operations.COMMANDS,
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
