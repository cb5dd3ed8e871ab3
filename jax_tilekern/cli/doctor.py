"""``doctor``: what the package finds on this machine, and how to fix its problems."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from jax_tilekern.cli import machine
from jax_tilekern.cli.console import make_console
from jax_tilekern.cli.console import size as _size
from jax_tilekern.cli.problems import Problem, find_problems

HELP = "show what the package finds on this machine, and how to fix its problems"


# Words for the names of facts, which records share.
_HEADINGS = {
    "backends": "JAX backends",
    "cpu": "CPU",
    "cpu_kernels": "CPU kernels",
    "decided_by": "decided by",
    "driver": "NVIDIA driver",
    "nvidia_smi": "GPUs now",
    "nvrtc": "NVRTC (compiler)",
    "cache": "kernel cache",
    "registered_targets": "FFI handlers",
    "trial_product": "trial product",
    "source_digests": "source digests",
}
_WORDS = {
    "why_none": "none",
    "restricted_to": "restricted to",
    "bytes": "size",
    "l2_bytes": "L2",
    "sm_count": "SMs",
    "error": "relative error",
    "cuda": "CUDA",
    "gpus": "GPUs",
    "cpu": "CPU",
    "os": "OS",
    "jax_tilekern": "jax_tilekern",
}


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

    console = make_console(piped_width=80)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name in machine.PROBES:
        heading = _HEADINGS.get(name, name.replace("_", " "))
        if name in errors:
            why = errors[name].removeprefix("NoBackend: ")
            table.add_row(heading, f"unknown: {why}")
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
                word = _WORDS.get(key, key.replace("_", " "))
                text = _size(value) if key.endswith("bytes") else "; ".join(_lines(value))
                yield f"{word}: {text}"
    elif isinstance(fact, list):
        if fact and isinstance(fact[0], dict):
            yield from ("; ".join(_lines(item)) for item in fact)
        else:
            yield ", ".join(str(item).removeprefix("jax_tilekern_") for item in fact) or "none"
    elif isinstance(fact, float):
        yield f"{fact:.2g}"
    elif isinstance(fact, bool):
        yield "yes" if fact else "no"
    elif isinstance(fact, str) and re.fullmatch(r"[0-9a-f]{64}", fact):
        yield fact[:12]
    else:
        yield str(fact)
