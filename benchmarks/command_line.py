"""The command line, ``python -m benchmarks``: one module a command, or one for all operations."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence

from benchmarks import (
    cross_entropy,
    fit_policy,
    fp8,
    fp8_accuracy,
    fused,
    jax_kernel,
    ladder,
    latency,
    linalg,
    machine_code,
    moe,
    moe_model,
    muon,
    out_of_core,
    overlapped,
    overview,
    regret,
    report,
    segments,
    sharded,
    sharded_bytes,
    strassen,
    symmetric,
    tables,
    tune,
)
from benchmarks.calls.operations import OPERATIONS
from benchmarks.errors import BenchmarkError
from benchmarks.operation_command import OperationCommand
from jax_tilekern.cli.run_command import Command, run_command
from jax_tilekern.compilation.nvrtc import NvrtcNotFound
from jax_tilekern.plans.gpu import NoGpu

_COMMANDS: dict[str, Command] = {
    **{name: OperationCommand(name) for name in OPERATIONS},
    "fused": fused.COMMAND,
    "fp8": fp8.COMMAND,
    "fp8_accuracy": fp8_accuracy,
    "linalg": linalg,
    "strassen": strassen.COMMAND,
    "symmetric": symmetric.COMMAND,
    "cross_entropy": cross_entropy.COMMAND,
    "segments": segments.COMMAND,
    "moe": moe.COMMAND,
    "jax_kernel": jax_kernel.COMMAND,
    "moe_model": moe_model,
    "muon": muon.COMMAND,
    "out_of_core": out_of_core,
    "sharded": sharded,
    "overlapped": overlapped,
    "sharded_bytes": sharded_bytes,
    "latency": latency,
    "ladder": ladder,
    "tune": tune,
    "regret": regret,
    "fit_policy": fit_policy,
    "report": report,
    "overview": overview,
    "tables": tables,
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
