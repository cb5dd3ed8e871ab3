"""Hardware counters of a rung, from Nsight Compute (``ncu``) around this same command."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

_SECTORS = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_{}.ratio"
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{}.sum"
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
_METRICS = (
    *(_SECTORS.format(op) for op in ("ld", "st")),
    *(_CONFLICTS.format(op) for op in ("ld", "st")),
    r"regex:smsp__average_warps_issue_stalled_.*_per_issue_active\.ratio",
)
# States that are none to mend, and parts of the others.
_NO_STALLS = re.compile(r"selected|not_selected|.*_not_issued")
_LONGEST_RUN = 300.0

Counters = dict[str, float | list[str]]


class NoCounters(RuntimeError):
    """There are no counters to be had; the message says why, and what mends it."""


def require_ncu() -> str:
    """Return the path of ``ncu``.

    Raises
    ------
    NoCounters
        If it is not installed.
    """
    path = shutil.which("ncu")
    if path is None:
        raise NoCounters(
            "--counters needs Nsight Compute: no ncu on the PATH. It comes with the CUDA toolkit "
            "and as a package of its own: https://developer.nvidia.com/nsight-compute"
        )
    return path


def count(command: Sequence[str], kernel: str, *, launches: int) -> list[Counters]:
    """Run a command of this package under ``ncu``, and return a kernel's counters.

    Parameters
    ----------
    command
        Arguments of ``python -m jax_tilekern``.
    kernel
        The kernel's name, without its template's arguments.
    launches
        How often the command launches it.

    Returns
    -------
    list[Counters]
        For each of its launches, in order.

    Raises
    ------
    NoCounters
        If ``ncu`` is missing, fails, or may not read the counters.
    """
    ncu = require_ncu()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        program = [sys.executable, "-m", "jax_tilekern", *command]
        options = ["--csv", "--page", "raw", "--log-file", str(log), "--kernel-name", kernel]
        # What is counted does not depend on the clocks, so they are left alone.
        options += ["--clock-control", "none"]
        try:
            finished = subprocess.run(
                [ncu, *options, "--metrics", ",".join(_METRICS), *program],
                # This process has most of the GPU's memory already.
                env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
                capture_output=True, text=True, timeout=_LONGEST_RUN, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise NoCounters(f"ncu did not end within {error.timeout:.0f} s") from error
        text = log.read_text() if log.exists() else ""
    if "ERR_NVGPUCTRPERM" in text + finished.stdout + finished.stderr:
        raise NoCounters(
            "--counters: this user may not read the GPU's counters (ERR_NVGPUCTRPERM). Run as root "
            "or see https://developer.nvidia.com/ERR_NVGPUCTRPERM"
        )
    found = parse(text)
    if finished.returncode or len(found) != launches:
        said = "\n".join((text + finished.stdout + finished.stderr).splitlines()[-5:])
        raise NoCounters(
            f"ncu counted {len(found)} of {launches} launches of {kernel}, exit status "
            f"{finished.returncode}:\n{said}"
        )
    return found


def parse(text: str) -> list[Counters]:
    """Return the counters in what ``ncu --csv --page raw`` writes, a launch an entry."""
    # Before the table stand lines of ncu's own. The row below the headings has the units.
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = csv.DictReader(lines[start:])
    return [_counters(row) for row in rows if row["ID"]]


def _counters(row: Mapping[str, str]) -> Counters:
    stalls = {
        match[1]: _number(value)
        for name, value in row.items()
        if name and (match := _STALL.fullmatch(name)) and not _NO_STALLS.fullmatch(match[1])
    }
    most = sorted(stalls, key=lambda reason: stalls[reason], reverse=True)
    found: Counters = {
        f"{what}_{op}": _number(row.get(metric.format(op), ""))
        for what, metric in (("sectors", _SECTORS), ("conflicts", _CONFLICTS))
        for op in ("ld", "st")
    }
    return found | {"stalls": [f"{name} {stalls[name]:.1f}" for name in most[:2] if stalls[name]]}


def _number(text: str) -> float:
    # Without such requests there is no ratio: "nan", or nothing.
    return 0.0 if text in ("", "nan") else float(text.replace(",", ""))


def cells(counters: Mapping[str, object]) -> Iterable[str]:
    """Return counters as entries of a table, under :data:`HEADINGS`."""
    for what, digits in (("sectors", ".1f"), ("conflicts", ".3g")):
        yield ", ".join(format(counters[f"{what}_{op}"], digits) for op in ("ld", "st"))
    yield ", ".join(counters["stalls"])  # type: ignore[arg-type]


HEADINGS = ("sectors ld, st", "conflicts ld, st", "warps stalled on")
