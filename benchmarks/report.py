"""``report``: a record as a markdown table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks import sharded
from benchmarks.latency import report as latency_report
from benchmarks.latency.measure import KIND as LATENCY
from benchmarks.records import report as operation_report
from benchmarks.records.record_file import load_parts

HELP = "print a record as a markdown table"

# By the field "kind"; records of operations have none.
_MARKDOWN = {LATENCY: latency_report.markdown}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE",
        help="what --json wrote; several of the parts of one sample",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    file = arguments.files[0]
    content = file.read_text() if file.is_file() else "{}"
    if f'"kind": "{sharded.KIND}"' in content:
        print(sharded.markdown(json.loads(content)))
        return 0
    record = load_parts(arguments.files)
    markdown = _MARKDOWN.get(record.get("kind", ""))
    print((markdown or operation_report.markdown)(record))
    return 0
