"""A run over the rows of a sample: all programs compiled side by side, then many rows a second.

Rows are taken in chunks. First, threads compile every program of a chunk, and nothing else runs on
the device: XLA's autotuner locks the GPU for itself while it times its own candidates. Then each
row's results are compared, one row after the other, and at last the rows are timed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import jax

from benchmarks.calls.case import Case, rotating, types_enabled
from benchmarks.calls.other_peers import OtherPeer, compile_others, other_peers
from benchmarks.calls.row import Row
from benchmarks.measurement.measure import Measurement
from benchmarks.measurement.side_times import (
    PROFILE_BYTES,
    DeviceTimes,
    Runs,
    pairs,
    rows_of_a_profile,
    times_of_rows,
)
from benchmarks.measurement.suite_run import LONGEST_ROW, Run, deadline
from benchmarks.records.record import (
    Record,
    attempted,
    checked,
    others_of,
    times_of,
)
from benchmarks.samples.sample import purpose
from benchmarks.suites.suite import Suite
from jax_tilekern.plans.policy import policy
from jax_tilekern.tuning.random_operands import beyond_cache

if TYPE_CHECKING:
    from rich.console import Console

# Rows that are compiled together: one for each thread of a GPU's machine. XLA's autotuning of more
# rows takes longer than a minute.
_ROWS_A_CHUNK = 16
# Another peer that takes longer is not timed.
_LONGEST_CALL = 1.0


def measure_sample(
    console: Console, suite: Suite, arguments: argparse.Namespace
) -> tuple[Record, bool]:
    """Measure the rows of a sample, and say whether all that were measured succeeded.

    Parameters
    ----------
    console
        Progress is shown here.
    suite
        The sample.
    arguments
        The command line, parsed: of a suite, and ``seed``, ``minutes``, ``part``, ``policy``.
    """
    end = time.monotonic() + 60 * (arguments.minutes or math.inf)
    run = _SampleRun(console, suite, arguments, arguments.part)
    run.record["sample"] = {"seed": arguments.seed, "purpose": purpose(arguments.seed)}
    with policy(arguments.policy):
        for chunk in _chunks(run.rows, _ROWS_A_CHUNK):
            if time.monotonic() > end or not run.measure(chunk, end):
                break
    return run.record, run.whole


class _SampleRun(Run):
    """A run that compiles rows together, and on a GPU times them together."""

    def measure(self, rows: Sequence[Row], end: float) -> bool:
        """Measure some rows until a moment, and say whether the device still answers."""
        sampled = [_SampledRow(row) for row in rows]
        with self.console.status(f"compiling {len(rows)} rows"):
            self._compile(sampled)
        if jax.default_backend() == "cpu":
            return self.measure_each(rows, end)
        begun = itertools.takewhile(lambda _: time.monotonic() <= end, sampled)
        groups = rows_of_a_profile(begun, lambda row: row.rotation_bytes(self.l2_bytes))
        return all(map(self._measure_together, groups))

    def _compile(self, rows: Sequence[_SampledRow]) -> None:
        """Compile everything in threads: NVRTC and XLA run without the interpreter's lock."""
        # Parts are measured side by side on one machine.
        _, parts = self.arguments.part
        threads = max(1, len(os.sched_getaffinity(0)) // parts)
        # What fails here fails again where it is called, and is recorded there.
        with ThreadPoolExecutor(threads) as pool:
            jobs = [pool.submit(self._compile_row, row) for row in rows]
            wait(jobs)

    def _compile_row(self, row: _SampledRow) -> None:
        # Policies hold for a thread.
        with policy(self.arguments.policy):
            row.compile()

    def _measure_together(self, rows: Sequence[_SampledRow]) -> bool:
        right: list[tuple[_SampledRow, Record]] = []
        for row in rows:
            self.begin(row.row)
            with deadline(row.row.name, LONGEST_ROW):
                result = attempted(row.row, self.record["date"], row.check)
            if result["failure"]:
                if not self.put(result):
                    return False
            else:
                right.append((row, result))
        with deadline(rows[0].row.name, LONGEST_ROW):
            runs = [row.runs(self.l2_bytes) for row, _ in right]
            times = times_of_rows(runs, self.arguments.seconds) if runs else []
        for (row, result), (found, method) in zip(right, times, strict=True):
            self.put(result | row.times(found, method))
        return True


class _SampledRow:
    """A row, what of it is compiled ahead, and what is timed."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.case = Case.of(row)
        self.others: Mapping[str, OtherPeer] = {}

    def compile(self) -> None:
        """Compile each program, the peer's first, whose autotuned choices ours finds."""
        for program in (*self.case.programs(), self._compile_others):
            # What fails is recorded where it is called.
            with contextlib.suppress(Exception):
                program()

    def _compile_others(self) -> None:
        with types_enabled(self.row):
            compile_others(self.row)

    def check(self) -> Record:
        """Return what the record has of the row's errors; drop what is wrong or takes too much."""
        operands = self.case.operands()
        found = checked(self.case, operands)
        if found["failure"]:
            return found
        if self.row.others:
            self.others = other_peers(
                self.row,
                operands,
                self.case.ours(*operands),
                reserved=PROFILE_BYTES,
                longest=_LONGEST_CALL,
            )
        return found

    def rotation_bytes(self, l2_bytes: int) -> int:
        """Return the bytes of the operands that are rotated among, estimated."""
        return max(2 * self.row.bytes, 5 * l2_bytes)

    def runs(self, l2_bytes: int) -> Runs:
        """Return functions that make one call of each side."""
        with types_enabled(self.row):
            sets = beyond_cache(self.case.operands(), self.case.operands, l2_bytes)
            rotation = itertools.cycle(sets)
            result = {
                "ours": rotating(self.row, self.case.ours, rotation),
                "peer": rotating(self.row, self.case.peer, map(self.case.peer_operands, rotation)),
            }
            for name, other in self.others.items():
                if other.function:
                    result[f"other {name}"] = rotating(self.row, other.function, rotation)
        return result

    def times(self, found: DeviceTimes, method: str) -> Record:
        """Return what the record has of the row's times."""
        kernels = {name: found.kernels[name] for name in ("ours", "peer")}
        of_row = pairs(found.device, "peer")
        wall = pairs(found.host, "peer")
        others = {
            name: pairs(found.device, f"other {name}")
            for name, other in self.others.items()
            if other.function
        }
        result = times_of(Measurement(of_row, others, method, 1, wall, kernels))
        result |= others_of(self.row, self.others, others)
        return result


def _chunks(rows: Sequence[Row], size: int) -> Iterable[Sequence[Row]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))
