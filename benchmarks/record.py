"""Records: a header, then a line of JSON for each row.

The header has the command, the machine and the versions, in ``common`` the fields that all rows
share, and in ``runs`` the headers of earlier runs whose rows are kept; ``run`` of these rows is the
run's date.
"""

from __future__ import annotations

import datetime
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.errors import BenchmarkError
from jax_tilekern.cli import machine
from jax_tilekern.files import replace_text

Record = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
_DIGITS = 6
_PROGRAM = ("python", "-m", "benchmarks")


def new_record(command: Sequence[str], **fields: Any) -> Record:
    """Return a record without rows, of a command line's arguments."""
    return {
        "command": command_text(command),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_name(),
        **environment(),
        **fields,
        "rows": [],
    }


def environment() -> Record:
    """Return the versions of the software and digests of the library's sources."""
    found, _ = machine.probe_results(
        "versions", "cpu", "driver", "nvidia_smi", "nvrtc", "source_digests"
    )
    cpu, gpus = found.get("cpu", {}), found.get("nvidia_smi")
    versions = {
        **found.get("versions", {}),
        "cuda": found.get("driver", {}).get("cuda"),
        "driver": gpus[0]["driver_version"] if gpus else None,
        "nvrtc": found.get("nvrtc", {}).get("version"),
    }
    return {
        "versions": {name: version for name, version in versions.items() if version},
        "cpu": f"{cpu['model']}, {cpu['threads']} threads: {' '.join(cpu['instruction_sets'])}",
        "source_digests": {
            name: digest[:16] for name, digest in found.get("source_digests", {}).items()
        },
    }


def command_text(arguments: Sequence[str]) -> str:
    """Return the command line of ``python -m benchmarks`` with these arguments."""
    return shlex.join([*_PROGRAM, *arguments])


def device_name() -> str:
    """Return the GPU's name, or the CPU's model with its threads."""
    if jax.default_backend() != "cpu":
        return str(jax.devices()[0].device_kind)
    cpu = machine.cpu()
    return f"{cpu['model']}, {cpu['threads']} threads"


def write(path: Path, record: Record) -> None:
    """Write a record, its numbers with six digits."""
    rows = [_rounded(row) for row in record["rows"]]
    common = dict(rows[0]) if len(rows) > 1 else {}
    for row in rows:
        common = {k: v for k, v in common.items() if k != "name" and k in row and row[k] == v}
    header = {k: v for k, v in record.items() if k != "rows"} | (
        {"common": common} if common else {}
    )
    lines = [header, *({k: v for k, v in row.items() if k not in common} for row in rows)]
    texts = (json.dumps(line, separators=(",", ":"), ensure_ascii=False) for line in lines)
    replace_text(path, "\n".join(texts) + "\n")


def read(path: Path) -> Record:
    """Read a record.

    Raises
    ------
    BenchmarkError
        If the file is none.
    """
    try:
        header, *rows = (json.loads(line) for line in path.read_text().splitlines())
        common = header.pop("common", {})
        return {**header, "rows": [{**common, **row} for row in rows]}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BenchmarkError(f"{path} is not a record of a benchmark: {error!r}") from error


def joined(record: Record, earlier: Record) -> Record:
    """Return a record with the rows of an earlier one that it lacks, and the runs that made them.

    Raises
    ------
    BenchmarkError
        If they are of different commands, suites or devices.
    """
    commands = [{**x, "command": _name_of(x["command"])} for x in (earlier, record)]
    for key in ("command", "suite", "device"):
        before, now = (x.get(key) for x in commands)
        if before != now:
            raise BenchmarkError(f"the records are of {key} {before!r} and {now!r}")
    names = {row["name"] for row in record["rows"]}
    kept = [{"run": earlier["date"]} | x for x in earlier["rows"] if x["name"] not in names]
    last = {key: earlier[key] for key in ("date", "command", "versions", "source_digests")}
    needed = {row["run"] for row in kept} | {row.get("run") for row in record["rows"]}
    known = [*earlier.get("runs", []), last, *record.get("runs", [])]
    runs = [run for run in known if run["date"] in needed]
    return record | {"runs": runs, "rows": [*kept, *record["rows"]]}


def _name_of(command: str) -> str:
    """Return which of the benchmarks' commands a command line is."""
    return shlex.split(command)[len(_PROGRAM)]


def outdated(record: Record) -> list[str]:
    """Return the names of rows that other kernels, or another JAX, were measured for."""

    def code(run: Record) -> tuple[Any, ...]:
        return run["source_digests"], run["versions"]["jax"], run["versions"]["jaxlib"]

    old = {run["date"] for run in record.get("runs", ()) if code(run) != code(record)}
    return [row["name"] for row in record["rows"] if row.get("run") in old]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(x) for key, x in value.items()}
    return [_rounded(x) for x in value] if isinstance(value, list | tuple) else value
