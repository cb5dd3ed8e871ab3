"""The command line, ``python -m jax_tilekern``: one module per command."""

from __future__ import annotations

from collections.abc import Sequence

from jax_tilekern.cli import cache, demo, doctor, explain
from jax_tilekern.cli.run_command import Command, run_command

_COMMANDS: dict[str, Command] = {
    "demo": demo,
    "doctor": doctor,
    "explain": explain,
    "cache": cache,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of ``python -m jax_tilekern`` and return its exit status.

    Parameters
    ----------
    arguments
        The command line without the program's name; by default this process's own.
    """
    return run_command(
        "python -m jax_tilekern", "CUDA and CPU kernels for JAX.", _COMMANDS, arguments
    )
