"""Tables of the page, in Markdown, from the records and from the rungs' files."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from records import LADDERS, Measured, NotMeasured, Records

from benchmarks.ladder.counters import top_stalls
from benchmarks.ladder.rung import SOURCES, Problem, Rung, rungs_digest
from jax_tilekern.cli.console import duration, rate

_FILES = "../examples/ladder"


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a table whose first columns are aligned to the left and the others to the right."""
    marks = ["---"] * left + ["---:"] * (len(headings) - left)
    lines = [headings, marks, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shown(value: Callable[[], str]) -> str:
    """Return a value as text, or a dash where it was not measured."""
    try:
        return value()
    except NotMeasured:
        return "-"


def _problems(ladder: str) -> list[Problem]:
    found = importlib.import_module(f"benchmarks.ladder.{ladder}").LADDER
    return [problem for size in found.defaults for problem in found.parse(size)]


def first_sentence(source: str) -> str:
    """Return the first sentence of a rung's file, which says what its idea is."""
    text = (SOURCES / source).read_text()
    comment = re.match(r"(//[^\n]*\n)+", text)
    assert comment is not None, source
    words = " ".join(line.removeprefix("//").strip() for line in comment[0].splitlines())
    return re.split(r"(?<=[.]) ", words)[0].rstrip(".")


def ideas(ladder: str) -> str:
    """Return the files of a ladder, with the idea of each and the rungs that are made of it."""
    rungs: dict[str, list[str]] = {}
    for problem in _problems(ladder):
        for rung in problem.rungs:
            if rung.source and rung.name not in rungs.setdefault(rung.source, []):
                rungs[rung.source].append(rung.name)
    return markdown(
        ("file", "idea", "rungs"),
        (
            (f"[{_number(file)}]({_FILES}/{file})", first_sentence(file), "; ".join(names))
            for file, names in sorted(rungs.items())
        ),
        left=3,
    )


def _number(file: str) -> str:
    return file.rpartition("/")[2].partition("_")[0]


def times(records: Records, ladder: str, dtype: str = "") -> str:
    """Return the times of a ladder's rungs, its sizes side by side."""
    problems = [problem for problem in records.problems(ladder) if dtype in problem["title"]]
    headings = ["rung"]
    for problem in problems:
        headings += [f"{problem['size']}: time", "rate", "of ceiling"]
    names = dict.fromkeys(rung["name"] for problem in problems for rung in problem["rungs"])
    rows = []
    for name in names:
        row = [name]
        for problem in problems:
            found = [m for m in records.rungs(ladder, problem) if m.name == name]
            row += _time_cells(found[0]) if found else ["-"] * 3
        rows.append(row)
    return markdown(headings, rows)


def _time_cells(measured: Measured) -> list[str]:
    unit = "FLOP" if measured.problem["bound"] == "arithmetic" else "B"
    star = " *" if measured.rung["on_host"] else ""
    return [
        shown(lambda: duration(measured.seconds) + star),
        shown(lambda: rate(measured.speed, unit)),
        shown(lambda: f"{measured.share:.0%}"),
    ]


_COUNTER_HEADINGS = (
    "rung", "sectors / request: ld, st", "write efficiency", "conflicts / request: ld, st",
    "compute, memory, pipe, DRAM %", "DRAM read, written", "L2 to SM, SM to L2", "SM active cycles",
    "occupancy", "registers", "stalls in cycles per instruction",
)  # fmt: skip


def counters(records: Records, ladder: str, problem: Mapping[str, Any]) -> str:
    """Return the counters of a problem's rungs, each of the kernel that takes most of its time."""
    rows = [
        (measured.name, *_counter_cells(measured))
        for measured in records.rungs(ladder, problem)
        if "counters" in measured.rung
    ]
    return markdown(_COUNTER_HEADINGS, rows) if rows else "No counters are recorded yet."


def _counter_cells(measured: Measured) -> list[str]:
    def pair(names: Sequence[str], form: Callable[[float], str]) -> str:
        return ", ".join(shown(lambda name=name: form(measured.counter(name))) for name in names)

    def of_both(what: str) -> str:
        return pair([f"{op}_{what}_per_request" for op in ("load", "store")], "{:.1f}".format)

    shares = [f"{what}_percent" for what in ("compute", "memory", "memory_pipe", "dram")]
    stalls = top_stalls(measured.kernel, 3)
    return [
        of_both("sectors"),
        shown(lambda: f"{write_efficiency(measured):.1%}"),
        of_both("conflicts"),
        pair(shares, "{:.0f}".format),
        pair(("dram_read_bytes", "dram_write_bytes"), count_bytes),
        pair(("l2_read_bytes", "l2_write_bytes"), count_bytes),
        shown(lambda: f"{measured.counter('sm_active_cycles'):,.0f}"),
        shown(lambda: f"{measured.counter('occupancy_percent'):.0f} %"),
        shown(lambda: f"{measured.counter('registers'):.0f}"),
        ", ".join(f"{reason.replace('_', ' ')} {cycles:.1f}" for reason, cycles in stalls),
    ]


def write_efficiency(measured: Measured) -> float:
    """Return the bytes of the result over those of the sectors stored.

    Raises
    ------
    NotMeasured
        Where threads store nothing.
    """
    measured.kernel  # noqa: B018  # Raises where nothing was counted.
    efficiency = measured.rung["counters"]["write_efficiency"]
    if efficiency is None:
        raise NotMeasured(f"stores of {measured.name}")
    return float(efficiency)


def count_bytes(value: float) -> str:
    """Return a number of bytes with three significant digits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def reuse(records: Records, size: str) -> str:
    """Return what the reuse formula predicts for each rung of the product, and what was counted."""
    rows = []
    for problem in records.problems("matmul"):
        if problem["size"] != size:
            continue
        item = {"float64": 8, "float32": 4, "bfloat16": 2}[problem["title"].split()[-1]]
        for measured in records.rungs("matmul", problem):
            if not measured.rung.get("tile"):
                continue
            rows.append(
                (
                    measured.name,
                    problem["title"].split()[-1],
                    "x".join(map(str, measured.rung["tile"])),
                    _digits(predicted_reuse(measured)),
                    *_reuse_cells(measured, item),
                    shown(lambda m=measured: rate(m.speed, "FLOP")),
                )
            )
    headings = (
        "rung", "type", "tile", "predicted", "of loads by threads", "of bytes from L2",
        "of bytes from DRAM", "rate",
    )  # fmt: skip
    return markdown(headings, rows, left=3) if rows else "No tiles are recorded yet."


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def predicted_reuse(measured: Measured) -> float:
    """Return the operations for each element that is loaded, 2 / (1 / w + 1 / h)."""
    height, width = measured.tile
    return 2 / (1 / width + 1 / height)


def _reuse_cells(measured: Measured, item: int) -> list[str]:
    flops = measured.problem["flops"]

    def per_element(name: str, bytes_each: int) -> str:
        elements = measured.total(name) * bytes_each / item
        return _digits(flops / elements) if elements else "-"

    return [
        shown(lambda: per_element("load_sectors", 32)),
        shown(lambda: per_element("l2_read_bytes", 1)),
        shown(lambda: per_element("dram_read_bytes", 1)),
    ]


def state(records: Records) -> str:
    """Return which device and versions the records are of, and whether the rungs have changed."""
    newest = max((records[ladder] for ladder in LADDERS), key=lambda record: str(record["date"]))
    driver, versions = newest["driver"], newest["versions"]
    text = (
        f"{newest['device']}, CUDA {driver['cuda']}, JAX {versions['jax']}, "
        f"{str(newest['date'])[:10]}"
    )
    changed = [
        ladder for ladder in LADDERS if records[ladder].get("rungs_digest") != rungs_digest(ladder)
    ]
    if changed:
        text += f". The rungs of {', '.join(changed)} have changed since they were recorded"
    if any("renamed" in records[ladder] for ladder in LADDERS):
        text += ". Names in the sources have changed since, and no machine code"
    return text


def all_rungs(ladder: str) -> list[Rung]:
    """Return the rungs of a ladder that have a CUDA file."""
    return [rung for problem in _problems(ladder) for rung in problem.rungs if rung.source]
