"""A climbed ladder as tables: for the terminal, and in Markdown for ``docs/ladder.md``."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.ladder.rung import SOURCES, Problem
from benchmarks.records.report import terminal_table
from jax_tilekern.cli.console import duration, rate

if TYPE_CHECKING:
    from rich.console import RenderableType

Record = Mapping[str, Any]

LADDERS = ("transpose", "dot", "matmul", "matvec", "add")
RECORDS = Path(__file__).parents[1] / "results" / "h100" / "ladder"
_TIMES = ("time", "rate", "of ceiling", "x the rung before")
_RESOURCES = ("registers", "spilled", "shared memory", "warps held")


def speed(problem: Record, rung: Record) -> float:
    """Return the bytes or operations per second of a timed rung."""
    work = problem["flops"] if problem["bound"] == "arithmetic" else problem["bytes"]
    return float(work / rung["seconds"])


def ceiling(record: Record, problem: Record, rung: Record) -> float:
    """Return what a rung's speed cannot exceed, as far as measured.

    That is the memory's bandwidth or, where arithmetic counts, the maximum that any rung or ``jnp``
    reached with the same arithmetic.
    """
    if problem["bound"] != "arithmetic":
        return float(record[f"{problem['bound']}_bytes_per_second"])
    return max(
        speed(problem, other)
        for other in problem["rungs"]
        if "seconds" in other and other["arithmetic"] == rung["arithmetic"]
    )


def table(record: Record, problem: Record) -> RenderableType:
    """Return a problem's rungs as a table for a terminal; columns that nothing is in are left out.

    Parameters
    ----------
    record
        Of the whole run.
    problem
        An entry of its ``problems``.
    """
    rungs = problem["rungs"]
    timed = any("seconds" in rung for rung in rungs)
    rows: list[tuple[Sequence[str], str | None]] = []
    before: float | None = None
    for rung in rungs:
        if rung["failure"] or rung["skipped"]:
            word, style = ("FAILED", "bold red") if rung["failure"] else ("skipped", "dim")
            rows.append(((rung["name"], word), style))
            continue
        entries = [rung["name"]]
        if timed:
            entries += _time_cells(record, problem, rung)
            # What jnp does is no step up from the library.
            step = "" if before is None or rung["peer"] else f"{speed(problem, rung) / before:.2f}"
            entries.append(step)
            before = speed(problem, rung)
        entries += _resource_cells(rung["kernels"])
        rows.append((entries, None))
    headings = ("rung", *(_TIMES if timed else ()), *_RESOURCES)
    return terminal_table(f"{problem['title']} on {record['device']}", headings, rows)


def _time_cells(record: Record, problem: Record, rung: Record) -> Iterator[str]:
    reached = speed(problem, rung)
    yield duration(rung["seconds"]) + (" *" if rung["on_host"] else "")
    yield rate(reached, "FLOP" if problem["bound"] == "arithmetic" else "B")
    yield f"{reached / ceiling(record, problem, rung):.0%}"


def _resource_cells(kernels: Sequence[Record]) -> Iterator[str]:
    """Yield what the kernels take, one after the other where a rung has several."""
    yield ", ".join(str(kernel["registers"]) for kernel in kernels)
    yield ", ".join(str(kernel["spill_bytes"]) for kernel in kernels)
    yield ", ".join(str(kernel["shared_memory_bytes"]) for kernel in kernels)
    yield ", ".join(
        "?" if kernel["warps_held"] is None else f"{kernel['warps_held']:.0%}" for kernel in kernels
    )


def notes(record: Record) -> Iterator[str]:
    """Yield what a reader of the tables has to know."""
    problems = record["problems"]
    for problem in problems:
        for rung in problem["rungs"]:
            if rung["failure"]:
                yield f"{problem['title']}: {rung['name']} FAILED: {rung['failure']}"
            elif rung["skipped"]:
                yield f"{problem['title']}: {rung['name']} skipped: {rung['skipped']}."
            elif rung["library"]:
                yield f"{problem['title']}: {rung['name']} is {rung['library']}."
    rungs = [rung for problem in problems for rung in problem["rungs"] if "seconds" in rung]
    if not rungs:
        return
    bounds = {problem["bound"] for problem in problems}
    for bound in ("copy", "read"):
        if bound in bounds:
            bandwidth = rate(record[f"{bound}_bytes_per_second"], "B")
            yield f"Ceiling: {bandwidth}, the memory's bandwidth as measured by a long {bound}."
    if "arithmetic" in bounds:
        yield "Ceiling: the most that a line of the same arithmetic reached."
        tf32 = [rung["name"] for rung in rungs if rung["arithmetic"] == "TF32"]
        if tf32:
            yield f"In TF32: {', '.join(dict.fromkeys(tf32))}."
    if any(rung["on_host"] for rung in rungs):
        yield "* Part of it is done on the host, so this is the host's time from call to result."
    for method in dict.fromkeys(rung["method"] for rung in rungs if not rung["on_host"]):
        yield f"Times are {method}."


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
    record = json.loads((RECORDS / f"{ladder}.json").read_text())
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
                cells = (rung["name"], *_time_cells(record, problem, rung))
                yield f"| {' | '.join(cells)} |"


def _problems(ladder: str) -> list[Problem]:
    found = importlib.import_module(f"benchmarks.ladder.{ladder}").LADDER
    return [problem for size in found.defaults for problem in found.parse(size)]
