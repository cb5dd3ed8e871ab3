"""A climbed ladder as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.ladder import counters
from jax_tilekern.cli.console import duration, rate

if TYPE_CHECKING:
    from rich.console import RenderableType

Record = Mapping[str, Any]

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
    from rich.table import Table

    rungs = problem["rungs"]
    timed = any("seconds" in rung for rung in rungs)
    counted = any("counters" in rung for rung in rungs)
    headings = (
        *(_TIMES if timed else ()), *_RESOURCES, *(counters.HEADINGS if counted else ()),
    )  # fmt: skip
    result = Table(title=f"{problem['title']} on {record['device']}", title_justify="left")
    result.add_column("rung", no_wrap=True)
    for heading in headings:
        result.add_column(heading, justify="right")
    before: float | None = None
    for rung in rungs:
        if rung["failure"] or rung["skipped"]:
            word, style = ("FAILED", "bold red") if rung["failure"] else ("skipped", "dim")
            result.add_row(rung["name"], word, style=style)
            continue
        entries = [rung["name"]]
        if timed:
            entries += _time_cells(record, problem, rung, before)
            before = speed(problem, rung)
        entries += _resource_cells(rung["kernels"])
        if "counters" in rung:
            entries += counters.cells(rung["counters"])
        result.add_row(*entries)
    return result


def _time_cells(
    record: Record, problem: Record, rung: Record, before: float | None
) -> Iterator[str]:
    reached = speed(problem, rung)
    yield duration(rung["seconds"]) + (" *" if rung["on_host"] else "")
    yield rate(reached, "FLOP" if problem["bound"] == "arithmetic" else "B")
    yield f"{reached / ceiling(record, problem, rung):.0%}"
    # What jnp does is no step up from the library.
    yield f"{reached / before:.2f}" if before and not rung["peer"] else ""


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
    if record["no_counters"] is not None:
        yield record["no_counters"]
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
