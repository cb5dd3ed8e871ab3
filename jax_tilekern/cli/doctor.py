"""``doctor``: what the package finds on this machine, and how to fix its problems."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from jax_tilekern.cli import machine
from jax_tilekern.cli.console import make_console
from jax_tilekern.cli.problems import Problem, find_problems

HELP = "show what the package finds on this machine, and how to fix its problems"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 if there is a problem."""
    facts, errors = machine.facts(*machine.PROBES)
    problems = find_problems(facts, errors)
    if arguments.json:
        report = {
            "schema": 2,
            "facts": facts,
            "errors": errors,
            "problems": [asdict(problem) for problem in problems],
        }
        print(json.dumps(report, indent=1))
    else:
        _show(facts, errors, problems)
    return 1 if problems else 0


def _show(facts: Mapping[str, Any], errors: Mapping[str, str], problems: list[Problem]) -> None:
    from rich.table import Table

    console = make_console()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name in machine.PROBES:
        heading = name.replace("_", " ")
        if name in errors:
            table.add_row(heading, f"failed: {errors[name]}")
            continue
        for i, line in enumerate(_lines(facts[name])):
            table.add_row(heading if i == 0 else "", line)
    console.print(table)
    for problem in problems:
        console.print(f"\nProblem: {problem.what}", style="bold red")
        console.print(f"  {problem.fix}", soft_wrap=True)
    if not problems:
        console.print("\nNo problem found.", style="bold green")


def _lines(fact: Any) -> Iterator[str]:
    """Yield a fact as lines of text."""
    if isinstance(fact, dict):
        for key, value in fact.items():
            if value not in (None, [], {}):
                yield f"{key}: {'; '.join(_lines(value))}"
    elif isinstance(fact, list):
        if fact and isinstance(fact[0], dict):
            yield from ("; ".join(_lines(item)) for item in fact)
        else:
            yield ", ".join(map(str, fact)) or "none"
    else:
        yield str(fact)
