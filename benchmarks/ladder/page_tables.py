"""The ladder's tables in ``docs/ladder.md``, in Markdown."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.ladder.report import ceiling, speed
from benchmarks.ladder.rung import SOURCES, Problem
from jax_tilekern.cli.console import duration, rate

LADDERS = ("transpose", "dot", "matmul", "matvec", "add")
_RECORDS = Path(__file__).parents[1] / "results" / "h100" / "ladder"


def ideas(ladder: str) -> Iterator[str]:
    """Yield a line for each file of a ladder: its number and the idea that it adds."""
    yield "| file | idea |"
    yield "| --- | --- |"
    files = dict.fromkeys(
        rung.source for problem in _problems(ladder) for rung in problem.rungs if rung.source
    )
    for file in sorted(files):
        number = file.rpartition("/")[2].partition("_")[0]
        yield f"| [{number}](../examples/ladder/{file}) | {first_sentence(file)} |"


def first_sentence(source: str) -> str:
    """Return the first sentence of a rung's file, which says what its idea is."""
    text = (SOURCES / source).read_text()
    comment = re.match(r"(//[^\n]*\n)+", text)
    assert comment is not None, source
    words = " ".join(line.removeprefix("//").strip() for line in comment[0].splitlines())
    return re.split(r"(?<=[.]) ", words)[0].rstrip(".")


def times(ladder: str) -> Iterator[str]:
    """Yield a table of each problem's rungs; of several sizes, the largest."""
    record = json.loads((_RECORDS / f"{ladder}.json").read_text())
    largest: dict[str, Mapping[str, Any]] = {}
    for problem in record["problems"]:
        kind = problem["title"].replace(problem["size"], "")
        largest[kind] = max(largest.get(kind, problem), problem, key=lambda x: x["bytes"])
    for i, problem in enumerate(largest.values()):
        if i:
            yield ""
        yield f"| {problem['title']} | time | rate | of ceiling |"
        yield "| --- | ---: | ---: | ---: |"
        for rung in problem["rungs"]:
            if "seconds" in rung:
                reached = speed(problem, rung)
                unit = "FLOP" if problem["bound"] == "arithmetic" else "B"
                share = reached / ceiling(record, problem, rung)
                star = " *" if rung["on_host"] else ""
                time = f"{duration(rung['seconds'])}{star}"
                yield f"| {rung['name']} | {time} | {rate(reached, unit)} | {share:.0%} |"


def _problems(ladder: str) -> list[Problem]:
    found = importlib.import_module(f"benchmarks.ladder.{ladder}").LADDER
    return [problem for size in found.defaults for problem in found.parse(size)]
