"""``report``: a record as a markdown table."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks import sharded
from benchmarks.records.record_file import load_parts
from benchmarks.records.report import markdown

HELP = "print a record as a markdown table"


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
    print(markdown(load_parts(arguments.files)))
    return 0
