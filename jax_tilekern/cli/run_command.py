"""A command line of subcommands, one module each."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax_tilekern

# The exit status that a shell reports of a process that an interrupt ended.
INTERRUPTED = 130


class Command(Protocol):
    """A subcommand; a module is one."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None:
        """Declare the command's arguments."""

    def run(self, arguments: argparse.Namespace, /) -> int:
        """Run the command and return its exit status."""


def run_command(
    program: str,
    description: str,
    commands: Mapping[str, Command],
    arguments: Sequence[str] | None,
) -> int:
    """Run a command and return its exit status.

    Parameters
    ----------
    program, description
        What ``--help`` says.
    commands
        By the name that selects them.
    arguments
        The command line without the program's name; ``None`` for this process's own. A command
        finds it in its arguments' ``command_line``.
    """
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument(
        "--version", action="version", version=f"jax_tilekern {jax_tilekern.__version__}"
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in commands.items():
        command.add_arguments(
            subparsers.add_parser(name, help=command.HELP, description=command.HELP)
        )
    given = sys.argv[1:] if arguments is None else list(arguments)
    parsed = parser.parse_args(given)
    parsed.command_line = given
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without, say, a cubed sign shows a question mark.
        sys.stdout.reconfigure(errors="replace")
    try:
        return commands[parsed.command].run(parsed)
    except KeyboardInterrupt:
        print(f"{parsed.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
