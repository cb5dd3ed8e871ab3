"""``report``: a record as a markdown table, and as a plot."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks import sharded
from benchmarks.host import report as host_report
from benchmarks.latency import report as latency_report
from benchmarks.latency.measure import KIND as LATENCY
from benchmarks.records import report as operation_report
from benchmarks.records import sharded_plot
from benchmarks.records.plot import plot, require_matplotlib
from benchmarks.records.record_file import RecordError, load_parts
from jax_tilekern.cli.console import output_file

HELP = "print a record as a markdown table"

# By the field "kind"; records of operations have none.
_MARKDOWN = {LATENCY: latency_report.markdown, host_report.KIND: host_report.markdown}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE",
        help="what --json wrote; several of the parts of one sample",
    )  # fmt: skip
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="draw its plot here too")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if arguments.plot is not None:
        require_matplotlib()
    file = arguments.files[0]
    content = file.read_text() if file.is_file() else "{}"
    if f'"kind": "{sharded.KIND}"' in content:
        print(sharded.markdown(json.loads(content)))
        if arguments.plot is not None:
            sharded_plot.plot(json.loads(content), arguments.plot)
        return 0
    record = load_parts(arguments.files)
    markdown = _MARKDOWN.get(record.get("kind", ""))
    if markdown is not None and arguments.plot is not None:
        raise RecordError(f"{file} is a record of {record['kind']}, which has no plot")
    print((markdown or operation_report.markdown)(record))
    if arguments.plot is not None:
        plot(record, arguments.plot)
    return 0
