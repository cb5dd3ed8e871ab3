"""Records as files: read, and continued by a later run of the same suite on the same device."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.calls.row import Row
from benchmarks.errors import BenchmarkError
from benchmarks.records.record import SCHEMA, Record

# What records did not have from the first; a row's run is that of its record.
_NEW_FIELDS: Record = {"operation": "matmul", "means": {}, "earlier_runs": []}
_NEW_ROW_FIELDS: Record = {"group": "all", "target": 0.97, "share": 0.0, "rhs_type": None}
_NEW_ROW_FIELDS |= {"others": {}, "temporary": None}


class RecordError(BenchmarkError):
    """A file that is not a record of this version, or not one that a run can continue."""


def load_record(path: Path) -> Record:
    """Read a record.

    Raises
    ------
    RecordError
        If the file is none.
    """
    try:
        record: Record = json.loads(path.read_text())
        schema, rows = record["schema"], record["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is not a record of a benchmark: {error!r}") from error
    if schema != SCHEMA:
        raise RecordError(f"{path} has schema {schema}, and this version reads {SCHEMA}")
    run = {"run": record["date"]}
    return _NEW_FIELDS | record | {"rows": [_NEW_ROW_FIELDS | run | row for row in rows]}


def continue_record(record: Record, path: Path) -> None:
    """Put the rows of the record in a file, if there is one, into a new record.

    Raises
    ------
    RecordError
        If the file is of another suite or device, or no record.
    """
    if not path.exists():
        return
    _add(record, load_record(path), path)


def load_parts(paths: Sequence[Path]) -> Record:
    """Read the records of the parts of one sample, which several processes measured, as one.

    Raises
    ------
    RecordError
        If they are of different suites or devices, or a file is no record.
    """
    *parts, last = paths
    record = load_record(last)
    for path in parts:
        _add(record, load_record(path), path)
    return record


def _add(record: Record, earlier: Record, path: Path) -> None:
    """Put the rows of an earlier record and their runs before those of a record."""
    for key in ("suite", "device"):
        if earlier[key] != record[key]:
            raise RecordError(f"{path} is of {key} {earlier[key]!r}, and this is {record[key]!r}")
    last = {key: value for key, value in earlier.items() if key not in ("rows", "earlier_runs")}
    record["earlier_runs"] = [*earlier["earlier_runs"], last, *record["earlier_runs"]]
    record["rows"] = [*earlier["rows"], *record["rows"]]
    _drop_runs_without_rows(record)


def put_row(record: Record, row: Record, names: Iterable[str]) -> None:
    """Put a row into a record in the place of its name.

    Parameters
    ----------
    record
        It is changed.
    row
        Takes the place of the row of that name, if there is one.
    names
        Of the suite's rows, in order; rows of other names are dropped.
    """
    rows = {known["name"]: known for known in [*record["rows"], row]}
    record["rows"] = [rows[name] for name in names if name in rows]
    _drop_runs_without_rows(record)


def _drop_runs_without_rows(record: Record) -> None:
    needed = {row["run"] for row in record["rows"]}
    record["earlier_runs"] = [run for run in record["earlier_runs"] if run["date"] in needed]


def runs(record: Record) -> dict[str, Record]:
    """Return the runs that a record's rows are of, by date: the last is the record itself."""
    return {run["date"]: run for run in [*record["earlier_runs"], record]}


def outdated(record: Record) -> list[str]:
    """Return the names of rows that other kernels, or another JAX, were measured for."""
    found = runs(record)
    return [row["name"] for row in record["rows"] if _code(found[row["run"]]) != _code(record)]


def _code(run: Mapping[str, Any]) -> tuple[Any, ...]:
    return run["source_digests"], run["versions"]["jax"], run["versions"]["jaxlib"]


def remaining(record: Record, rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows that a record lacks or has outdated, then those that failed."""
    old = set(outdated(record))
    failed = {row["name"]: row["failure"] is not None for row in record["rows"]}
    lacking = [row for row in rows if row.name not in failed or row.name in old]
    return (*lacking, *(row for row in rows if row not in lacking and failed[row.name]))
