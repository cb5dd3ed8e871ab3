"""A run: the rows of a suite, measured one after the other, whatever happens to each."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from benchmarks.calls.row import Row
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
    run = Run(console, suite, arguments)
    run.measure_each(run.rows)
    return run.record, run.whole


class Run:
    """The state of a run: the record, its file, and the rows that the command line asks for.

    Attributes
    ----------
    record
        With the rows of earlier runs.
    rows
        What is to be measured.
    whole
        Whether all rows that were measured succeeded.
    """

    def __init__(
        self,
        console: Console,
        suite: Suite,
        arguments: argparse.Namespace,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self.console, self.arguments = console, arguments
        self.record = new_record(suite, arguments.command_line, bandwidths())
        self.l2_bytes = l2_bytes_of(self.record)
        self._names = [row.name for row in suite.rows]
        first, step = part
        chosen = (suite.matching(arguments.rows) if arguments.rows else suite).rows
        self.rows: Sequence[Row] = chosen[first::step]
        if arguments.json is not None:
            continue_record(self.record, arguments.json)
        if arguments.resume:
            self.rows = remaining(self.record, self.rows)
        self._count, self._done, self.whole = len(self.rows), 0, True

    def measure_each(self, rows: Iterable[Row], end: float = math.inf) -> bool:
        """Measure one row after the other until a moment, and say whether the device answers."""
        for row in rows:
            if time.monotonic() > end:
                break
            before = {key: self.record[key] for key in ("rows", "earlier_runs")}
            self.begin(row)
            try:
                with self.console.status(row.name), deadline(row.name, LONGEST_ROW):
                    seconds = self.arguments.seconds
                    result = measured(row, self.record["date"], seconds, self.l2_bytes)
            except KeyboardInterrupt:
                # Nothing is wrong with the row, nor with what an earlier run says of it.
                self.record.update(before)
                self._save()
                raise
            if not self.put(result):
                return False
        return True

    def begin(self, row: Row) -> None:
        """Record that a row is being measured."""
        put_row(self.record, unmeasured(row, self.record["date"]), self._names)
        self._save()

    def put(self, result: Record) -> bool:
        """Record and show a row, and say whether the device still answers."""
        put_row(self.record, result, self._names)
        self._save()
        self._done += 1
        self.whole &= not result["failure"]
        shown = "  ".join(cells(self.record, result, Ceilings.of(self.record))[:5])
        took = f"({result['took_seconds']} s)"
        self.console.print(f"{self._done}/{self._count}  {shown}  {took}")
        if result["failure"] and not device_answers():
            self.console.print("The device no longer answers. A new run with --resume goes on.")
            return False
        return True

    def _save(self) -> None:
        # Each time, so that a run that is cut short leaves what it has.
        if self.arguments.json is not None:
            write_json(self.arguments.json, self.record)


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
