"""The command line, ``python -m jax_tilekern``: one module per command."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

import jax_tilekern
from jax_tilekern.cli import bench, cache, demo, doctor, ladder, tune

_COMMANDS = {
    "demo": demo,
    "doctor": doctor,
    "bench": bench,
    "ladder": ladder,
    "tune": tune,
    "cache": cache,
}
# The exit status that a shell reports for a process ended by an interrupt.
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Parameters
    ----------
    arguments
        The command line without the program's name; by default this process's own.
    """
    parser = argparse.ArgumentParser(
        prog="python -m jax_tilekern", description="CUDA and CPU kernels for JAX."
    )
    parser.add_argument(
        "--version", action="version", version=f"jax_tilekern {jax_tilekern.__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in _COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=module.HELP, description=module.HELP))
    given = sys.argv[1:] if arguments is None else list(arguments)
    parsed = parser.parse_args(given)
    parsed.command_line = given
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without the superscript three shows a question mark.
        sys.stdout.reconfigure(errors="replace")
    try:
        status: int = _COMMANDS[parsed.command].run(parsed)
    except KeyboardInterrupt:
        print(f"{parsed.command}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    return status
