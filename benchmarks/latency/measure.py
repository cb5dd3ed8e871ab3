"""What a call costs apart from the device's work: rows, and how each is measured."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from benchmarks.calls.case import Case
from benchmarks.calls.row import Row
from benchmarks.latency.dispatch import dispatch_cost
from benchmarks.latency.first_result import LONGEST_PROCESS, first_result
from benchmarks.latency.limits import DISPATCH, FIRST_RESULT
from benchmarks.latency.report import cells
from benchmarks.measurement.suite_run import measure_rows
from benchmarks.records.record import Record, attempted, new_record
from benchmarks.suites.suite import Suite, SuiteError

if TYPE_CHECKING:
    from rich.console import Console

# Which record this is, as its field ``kind`` has it.
KIND = "latency"


def measure_latency(
    console: Console, suite: Suite, arguments: argparse.Namespace
) -> tuple[Record, bool]:
    """Measure the rows that the command line asks for, and say whether all succeeded.

    Parameters
    ----------
    console
        Progress is shown here.
    suite
        All rows, in the groups :data:`DISPATCH` and :data:`FIRST_RESULT`.
    arguments
        The command line, parsed.
    """
    unknown = {row.group for row in suite.rows} - {DISPATCH, FIRST_RESULT}
    if unknown:
        raise SuiteError(f"suite {suite.name} has no latencies, but {', '.join(sorted(unknown))}")
    record = new_record(suite, arguments.command_line, {}) | {"kind": KIND}

    def measurement(row: Row) -> Record:
        if row.group == DISPATCH:
            return dispatch_cost(Case.of(row), calls=arguments.calls, seconds=arguments.seconds)
        return first_result(row, rounds=arguments.rounds)

    return measure_rows(
        console,
        suite,
        record,
        arguments,
        measure=lambda row: attempted(row, record["date"], lambda: measurement(row)),
        show=cells,
        longest_row=arguments.seconds + (3 * arguments.rounds + 1) * LONGEST_PROCESS,
    )
