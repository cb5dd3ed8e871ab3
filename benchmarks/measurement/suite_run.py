"""A run: the rows of a suite, measured one after the other, whatever happens to each."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from benchmarks.measurement.measure import bandwidths
from benchmarks.records.ceilings import Ceilings
from benchmarks.records.record import Record, measured, new_record, unmeasured
from benchmarks.records.record_file import continue_record, put_row, remaining
from benchmarks.records.report import cells
from benchmarks.suites.suite import Suite
from jax_tilekern.cli.console import write_json
from jax_tilekern.tuning.wall_time import ready

if TYPE_CHECKING:
    from rich.console import Console

_DEFAULT_L2_BYTES = 50 << 20
# A kernel that never ends would keep the GPU for as long as somebody pays for it.
LONGEST_ROW = 240.0


def measure_suite(
    console: Console, suite: Suite, arguments: argparse.Namespace
) -> tuple[Record, bool]:
    """Measure the products that the command line asks for, and say whether all succeeded.

    Parameters
    ----------
    console
        Progress is shown here.
    suite
        All rows.
    arguments
        The command line, parsed.

    Returns
    -------
    tuple[Record, bool]
        The record, also in the file of ``--json``, with the rows that were there before.
    """
    record = new_record(suite, arguments.command_line, bandwidths())
    l2_bytes = l2_bytes_of(record)
    rows = (suite.matching(arguments.rows) if arguments.rows else suite).rows
    if arguments.json is not None:
        continue_record(record, arguments.json)
    if arguments.resume:
        rows = remaining(record, rows)
    names = [row.name for row in suite.rows]

    def save() -> None:
        # Each time, so that a run that is cut short leaves what it has.
        if arguments.json is not None:
            write_json(arguments.json, record)

    def put(result: Record) -> None:
        put_row(record, result, names)
        save()

    whole = True
    for number, row in enumerate(rows, start=1):
        before = {key: record[key] for key in ("rows", "earlier_runs")}
        put(unmeasured(row, record["date"]))
        progress = f"{number}/{len(rows)}"
        try:
            with console.status(f"{progress} {row.name}"), deadline(row.name, LONGEST_ROW):
                result = measured(row, record["date"], arguments.seconds, l2_bytes)
        except KeyboardInterrupt:
            # Nothing is wrong with the row, nor with what an earlier run says of it.
            record.update(before)
            save()
            raise
        put(result)
        shown = "  ".join(cells(record, result, Ceilings.of(record))[:5])
        console.print(f"{progress}  {shown}  ({result['took_seconds']} s)")
        if result["failure"]:
            whole = False
            if not device_answers():
                console.print("The device no longer answers. A new run with --resume goes on.")
                break
    return record, whole


def l2_bytes_of(record: Record) -> int:
    """Return the size of the L2 of the GPU that a record is of."""
    gpus = record.get("driver", {}).get("gpus")
    return int(gpus[0]["l2_bytes"]) if gpus else _DEFAULT_L2_BYTES


@contextlib.contextmanager
def deadline(name: str, seconds: float) -> Iterator[None]:
    """End the process, by force, if the context takes longer on a GPU than any row does."""

    def give_up() -> None:
        print(f"{name} does not end. A new run with --resume goes on.", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    if jax.default_backend() != "cpu":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def device_answers() -> bool:
    """Say whether the device still computes: after a fault in a kernel it does not."""
    try:
        ready(jnp.zeros(8) + 1)
    except RuntimeError:
        return False
    return True
