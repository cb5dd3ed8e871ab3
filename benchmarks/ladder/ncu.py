"""Nsight Compute (``ncu``): running a program under it, and reading the CSV that it writes."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.errors import BenchmarkError

# Where the CUDA toolkit puts it without a link on the PATH.
_TOOLKIT = "/usr/local/cuda/bin"
# What units count in nanoseconds and bytes; versions of ncu differ in which of them they call base.
_UNITS = {
    "ns": 1, "nsecond": 1, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9,
    "second": 1e9, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9,
}  # fmt: skip


class NoCounters(BenchmarkError):
    """No counters can be read; the message says why, and what fixes it."""


class Launch(NamedTuple):
    """One profiled kernel launch.

    Attributes
    ----------
    name
        The kernel's name without namespaces, template arguments and parameters.
    grid, block
        Its launch shape.
    metrics
        By the profiler's names; times in nanoseconds, sizes in bytes. A metric that does not exist
        for the launch, such as a ratio over no requests, is missing.
    """

    name: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    metrics: Mapping[str, float]


def require_ncu() -> str:
    """Return the path of ``ncu``.

    Raises
    ------
    NoCounters
        If it is not installed.
    """
    path = shutil.which("ncu") or shutil.which("ncu", path=_TOOLKIT)
    if path is None:
        raise NoCounters(
            "--counters needs Nsight Compute: no ncu on the PATH. It comes with the CUDA toolkit "
            "and as a package of its own: https://developer.nvidia.com/nsight-compute"
        )
    return path


def profile(
    program: Sequence[str],
    metrics: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str],
    seconds: float,
) -> list[Launch]:
    """Run a program and return the kernels that it launched between ``cuProfilerStart`` and stop.

    Parameters
    ----------
    program
        The command line.
    metrics
        The profiler's names of what is counted.
    log
        Where ``ncu`` writes its table.
    environment
        Variables that the program gets besides those of this process.
    seconds
        When to give up.

    Returns
    -------
    list[Launch]
        In the order of the launches.

    Raises
    ------
    NoCounters
        If ``ncu`` is missing, fails, or may not read the counters.
    """
    ncu = require_ncu()
    options = [
        "--profile-from-start", "off", "--csv", "--page", "raw", "--print-units", "base",
        "--print-kernel-base", "function", "--log-file", str(log),
        # The clocks belong to the machine's owner.
        "--clock-control", "none",
    ]  # fmt: skip
    try:
        finished = subprocess.run(
            [ncu, *options, "--metrics", ",".join(metrics), *program],
            env=os.environ | dict(environment),
            capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise NoCounters(f"ncu did not end within {error.timeout:.0f} s") from error
    text = log.read_text() if log.exists() else ""
    said = text + finished.stdout + finished.stderr
    if "ERR_NVGPUCTRPERM" in said:
        raise NoCounters(
            "--counters: this user may not read the GPU's counters (ERR_NVGPUCTRPERM). Run as root "
            "or see https://developer.nvidia.com/ERR_NVGPUCTRPERM"
        )
    launches = parse(text)
    # What was counted before a program failed is as good as if it had not.
    if not launches:
        last = "\n".join(said.splitlines()[-12:])
        raise NoCounters(f"ncu counted no launches, exit status {finished.returncode}:\n{last}")
    return launches


def parse(text: str) -> list[Launch]:
    """Return the launches in what ``ncu --csv --page raw`` writes."""
    # Lines of ncu's own and of the program surround the table. The row below the headings has the
    # units, and no ID.
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = list(csv.DictReader(line for line in lines[start:] if line.startswith('"')))
    units = next((row for row in rows if not row["ID"]), {})
    return [_launch(row, units) for row in rows if row["ID"]]


def _launch(row: Mapping[str, str], units: Mapping[str, str]) -> Launch:
    metrics = {}
    for name, text in row.items():
        # The other columns describe the launch.
        value = _number(text) if name and "__" in name else None
        if value is not None:
            metrics[name] = value * _UNITS.get(units.get(name, ""), 1)
    # The function's name follows the namespaces, in front of template arguments and parameters.
    name = re.split(r"[<(]", row["Kernel Name"].removeprefix("void "))[0].rpartition("::")[2]
    return Launch(name, _shape(row["Grid Size"]), _shape(row["Block Size"]), metrics)


def _shape(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _number(text: str | None) -> float | None:
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    # A ratio over nothing prints as nan.
    return value if value == value else None
