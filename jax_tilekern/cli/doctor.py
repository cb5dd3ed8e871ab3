"""``doctor``: what the package finds on this machine, and how to fix its problems."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_tilekern.cli import machine
from jax_tilekern.cli.console import size
from jax_tilekern.cli.problems import find_problems

HELP = "show what the package finds on this machine, and how to fix its problems"

# Words for the names of results, which records share.
_WORDS = {
    "backends": "JAX backends",
    "cpu": "CPU",
    "cpu_kernels": "CPU kernels",
    "driver": "NVIDIA driver",
    "nvidia_smi": "GPUs now",
    "nvrtc": "NVRTC (compiler)",
    "cache": "kernel cache",
    "registered_targets": "FFI handlers",
    "why_none": "none",
    "bytes": "size",
    "l2_bytes": "L2",
    "sm_count": "SMs",
    "error": "relative error",
    "cuda": "CUDA",
    "gpus": "GPUs",
    "os": "OS",
    "jax_tilekern": "jax_tilekern",
}
_HEADING_WIDTH = 18
# What a bug report has no use for: where the package and its cache are.
_NOT_REPORTED = {"installation": None, "cache": "location", "nvrtc": "path"}
_PATH = re.compile(r"(?<![\w.~])(?:\w+://|~)?(?:/[^\s/'\":;,)]+)+/?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--report",
        action="store_true",
        help="print a block of Markdown for a bug report, without paths and user names",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 if there is a problem."""
    results, errors = machine.probe_results(*machine.PROBES)
    if arguments.report:
        print("\n".join(["```text", *_report(results, errors), "```"]))
        return 0
    text_width = shutil.get_terminal_size().columns - _HEADING_WIDTH
    for name in machine.PROBES:
        why = errors.get(name, "").removeprefix("NoBackend: ")
        found = [f"unknown: {why}"] if name in errors else _lines(results[name])
        lines = [part for line in found for part in textwrap.wrap(line, text_width)]
        for heading, line in zip([_word(name), *[""] * len(lines)], lines, strict=False):
            print(f"{heading:{_HEADING_WIDTH}}{line}")
    problems = find_problems(results, errors)
    for problem in problems:
        print(f"\nProblem: {textwrap.fill(problem.what, text_width)}\n  {problem.fix}")
    if not problems:
        print("\nNo problem found.")
    return 1 if problems else 0


def _report(results: dict[str, Any], errors: dict[str, str]) -> Iterator[str]:
    """Yield the lines of a bug report, in which ``<path>`` stands for each path."""
    for name in machine.PROBES:
        omitted = _NOT_REPORTED.get(name, "")
        if omitted is None:
            continue
        result = results.get(name)
        if isinstance(result, dict):
            result = {key: value for key, value in result.items() if key != omitted}
        lines = [f"unknown: {errors[name]}"] if name in errors else _lines(result)
        for line in lines:
            yield f"{_word(name)}: {_without_paths(line)}"
    for problem in find_problems(results, errors):
        yield f"problem: {_without_paths(problem.what)}"


def _without_paths(text: str) -> str:
    # A home folder's name may have spaces.
    return _PATH.sub("<path>", text.replace(str(Path.home()), "~"))


def _word(name: str) -> str:
    return _WORDS.get(name, name.replace("_", " "))


def _lines(result: Any) -> Iterator[str]:
    """Yield a result as lines of text."""
    if isinstance(result, dict):
        for key, value in result.items():
            if value not in (None, [], {}):
                text = size(value) if key.endswith("bytes") else "; ".join(_lines(value))
                yield f"{_word(key)}: {text}"
    elif isinstance(result, list):
        if result and isinstance(result[0], dict):
            yield from ("; ".join(_lines(item)) for item in result)
        else:
            yield ", ".join(str(item).removeprefix("jax_tilekern_") for item in result) or "none"
    elif isinstance(result, float):
        yield f"{result:.2g}"
    elif isinstance(result, bool):
        yield "yes" if result else "no"
    elif isinstance(result, str) and re.fullmatch(r"[0-9a-f]{64}", result):
        yield result[:12]
    else:
        yield str(result)
