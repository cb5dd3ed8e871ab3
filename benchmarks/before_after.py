"""Time the kernels of two checkouts, old against new, in one run on a GPU.

    python -m benchmarks before_after --old FOLDER [--json FILE]

``--old`` is another checkout of this repository with its extension built. A process of each
checkout makes the calls of the suites, each with the kernels that the old one chooses, so that
the kernels' code is compared and not the choice. Blocks of calls of both alternate, on the same
operands. XLA's own products are in neither. Where the new checkout chooses other kernels now, those
are timed beside.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.errors import BenchmarkError
from benchmarks.records.record import command_text, now
from benchmarks.suites.suite import load_suite
from jax_tilekern.cli import machine
from jax_tilekern.cli.console import output_file, write_json

HELP = "time the kernels of another checkout against those of this one"

_ROOT = Path(__file__).parent.parent
_SUITES = tuple(f"{x}-h100" for x in ("matmul", "ragged_dot", "transpose", "sum", "matvec", "vdot"))
_ROUNDS = 5
# The length of a block, and the most calls in one.
_BLOCK_SECONDS, _MAX_CALLS = 6e-3, 100
# Rows under one profile, and what their operands may take.
_MAX_ROWS, _MAX_BYTES = 8, 8 << 30
# No group's mean may be below it.
_LEAST_MEAN = 0.99
_WORKER = (
    "import json, sys, benchmarks; sys.path.insert(0, sys.argv[1]);"
    "from benchmarks.before_after_worker import main; main(**json.loads(sys.argv[2]))"
)

Choices = Mapping[str, Any]
Row = dict[str, Any]


class WorkerError(BenchmarkError):
    """A process of a checkout failed; the message says which and how."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--old", type=Path, required=True, metavar="FOLDER", help="the checkout")
    parser.add_argument("--suites", nargs="+", default=_SUITES, metavar="NAME")
    parser.add_argument("--rows", default="", metavar="TEXT", help="rows that contain this text")
    parser.add_argument(
        "--renamed", nargs="+", default=(), metavar="OLD=NEW", help="parts of the kernels' keys"
    )
    parser.add_argument("--seconds", type=float, default=3600, help="begin no row after these")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the record here")
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="plan and compile for an H100, without a GPU, and time nothing",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 if a group's mean is below the limit."""
    deadline = time.monotonic() + arguments.seconds
    target = "sm_90" if arguments.compile_only else None
    sides = {"old": Side(arguments.old, target), "new": Side(_ROOT, target)}
    try:
        record = _record(arguments, sides)
        for group, (total, common) in counts(record["rows"]).items():
            print(f"{group}: {common} of {total} rows have a kernel in both", flush=True)
        _begin_compiling(sides, record["rows"])
        if arguments.compile_only:
            return _compiled(sides, record["rows"])
        for batch in _batches(record["rows"]):
            if time.monotonic() > deadline:
                break
            try:
                _measure(sides, batch)
            except WorkerError as error:
                # A kernel may have left the GPU unusable.
                print(error)
                break
            if arguments.json is not None:
                write_json(arguments.json, record)
    finally:
        for side in sides.values():
            side.close()
    return _report(record["rows"])


class Side:
    """The process of a checkout."""

    def __init__(self, checkout: Path, target: str | None) -> None:
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.checkout = checkout.resolve()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _WORKER, str(self.checkout),
             json.dumps({"target": target, "threads": max(2, (os.cpu_count() or 2) // 2)})],
            # Both share the GPU's memory.
            env={**os.environ, "PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                 "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def send(self, do: str, **arguments: Any) -> Callable[[], Any]:
        """Send a request; return what waits for the answer."""
        assert self._process.stdin is not None
        print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
        return self._answer

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        # Also closes the pipes.
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the process ended"}
        if "error" in answer:
            raise WorkerError(f"{self.checkout}: {answer['error']}")
        return answer["result"]


def _both(sides: Mapping[str, Side], do: str, **arguments: Any) -> dict[str, Any]:
    waiting = {name: side.send(do, **arguments) for name, side in sides.items()}
    return {name: answer() for name, answer in waiting.items()}


def _record(arguments: argparse.Namespace, sides: Mapping[str, Side]) -> dict[str, Any]:
    where = _both(sides, "where")
    for name, side in sides.items():
        if not Path(where[name]["package"]).is_relative_to(side.checkout):
            raise WorkerError(f"{side.checkout} was to be measured, not {where[name]['package']}")
    found = _both(sides, "choices", suites=list(arguments.suites), pattern=arguments.rows)
    renamed = dict(text.split("=", 1) for text in arguments.renamed)
    groups = {
        f"{suite.operation}: {row.name}": (f"{suite.operation}: {row.group}", row.bytes)
        for suite in map(load_suite, arguments.suites)
        for row in suite.rows
    }
    facts, errors = machine.facts("versions", "driver", "nvidia_smi", "nvrtc")
    return {
        "command": command_text(arguments.command_line),
        "date": now(),
        "device": where["new"]["device"],
        "commits": {name: _commit(side.checkout) for name, side in sides.items()},
        **facts,
        "errors": errors,
        "rows": [
            {"name": name, "group": groups[name][0], "bytes": groups[name][1], **same}
            for name, same in common(found["old"], found["new"], renamed).items()
        ],
    }


def _commit(checkout: Path) -> str | None:
    """Return a checkout's commit, or ``None`` of a copy that is no repository."""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


def common(old: Choices, new: Choices, renamed: Mapping[str, str]) -> dict[str, Row]:
    """Return for each row the old checkout's keys, or under ``why`` why it is not compared.

    ``keys`` has their present names and ``old_keys`` the old ones. ``chosen`` has those that the
    new checkout chooses where they are others, ``None`` for XLA.

    Parameters
    ----------
    old, new
        By row, for each problem in it, the ``key`` that is chosen and those that are ``offered``.
        A row that cannot be planned has a message in their place.
    renamed
        Present names of parts of the old keys.
    """
    return {
        name: _common(old[name], new.get(name, "there is no such row"), renamed) for name in old
    }


def _common(old: Any, new: Any, renamed: Mapping[str, str]) -> Row:
    for side, choices in (("old", old), ("new", new)):
        if isinstance(choices, str):
            return {"why": f"{side}: {choices}"}
    old_keys, chosen = ([choice["key"] for choice in choices] for choices in (old, new))
    if not old_keys or None in old_keys:
        return {"why": "XLA computes it in the old checkout"}
    if len(old_keys) != len(chosen):
        return {"why": f"it has {len(old_keys)} problems in the old checkout, {len(chosen)} now"}
    keys = [_present(key, renamed) for key in old_keys]
    gone = [key for key, choice in zip(keys, new, strict=True) if key not in choice["offered"]]
    if gone:
        return {"why": f"no longer offered: {', '.join(gone)}", "chosen": chosen}
    found = {"old_keys": old_keys, "keys": keys}
    return found if chosen == keys else {**found, "chosen": chosen}


def _present(key: str, renamed: Mapping[str, str]) -> str:
    for old, new in renamed.items():
        key = key.replace(old, new)
    return key


def counts(rows: Sequence[Row]) -> dict[str, tuple[int, int]]:
    """Return how many rows each group has, and how many of them have a kernel in both."""
    groups = dict.fromkeys(row["group"] for row in rows)
    return {
        group: (len(of_group), sum("keys" in row for row in of_group))
        for group in groups
        if (of_group := [row for row in rows if row["group"] == group])
    }


def _jobs(row: Row) -> dict[str, dict[str, list[str]]]:
    """Return the keys of each job of a row by side; a job has the row's name, or a longer one."""
    jobs = {"old": {row["name"]: row["old_keys"]}, "new": {row["name"]: row["keys"]}}
    if "chosen" in row and None not in row["chosen"]:
        jobs["new"][f"{row['name']}, as chosen"] = row["chosen"]
    return jobs


def _begin_compiling(sides: Mapping[str, Side], rows: Sequence[Row]) -> None:
    """Begin to compile all rows, in the order in which they are measured."""
    ordered = [row for batch in _batches(rows) for row in batch]
    for name, side in sides.items():
        jobs = {
            job: (row["name"], keys) for row in ordered for job, keys in _jobs(row)[name].items()
        }
        side.send("compile", jobs=jobs)()


def _compiled(sides: Mapping[str, Side], rows: Sequence[Row]) -> int:
    """Wait until all is compiled; print errors, and how many rows have the same machine code."""
    common_rows = [row for row in rows if "keys" in row]
    waiting = {
        name: side.send("wait", jobs=[job for row in common_rows for job in _jobs(row)[name]])
        for name, side in sides.items()
    }
    found = {name: answer() for name, answer in waiting.items()}
    errors = [
        f"{name}: {job}: {answer}"
        for name, answers in found.items()
        for job, answer in answers.items()
        if isinstance(answer, str)
    ]
    for group in dict.fromkeys(row["group"] for row in common_rows):
        names = [row["name"] for row in common_rows if row["group"] == group]
        same = sum(found["old"][name] == found["new"][name] for name in names)
        print(f"{group}: machine code is the same in {same} of {len(names)} rows")
    print("\n".join(errors))
    return 1 if errors else 0


def _batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Return the rows that are compared, a few at a time, the first of each group first."""
    rank: dict[str, int] = {}
    ranked = []
    for row in rows:
        if "keys" in row:
            rank[row["group"]] = rank.get(row["group"], 0) + 1
            ranked.append((rank[row["group"]], row))
    batch: list[Row] = []
    for _, row in sorted(ranked, key=lambda pair: pair[0]):
        if len(batch) == _MAX_ROWS or sum(x["bytes"] for x in [*batch, row]) > _MAX_BYTES:
            if batch:
                yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


class _Block(NamedTuple):
    side: str
    job: str


def _measure(sides: Mapping[str, Side], batch: Sequence[Row]) -> None:
    """Time the rows of a batch, and put the times into them."""
    waiting = {
        name: side.send("load", jobs=[job for row in batch for job in _jobs(row)[name]])
        for name, side in sides.items()
    }
    loaded = {name: answer() for name, answer in waiting.items()}
    measured = []
    for row in batch:
        errors = {
            f"{name}: {loaded[name][job]}"
            for name, jobs in _jobs(row).items()
            for job in jobs
            if isinstance(loaded[name][job], str)
        }
        if errors:
            row["why"] = "; ".join(sorted(errors))
            continue
        old, new = (loaded[name][row["name"]] for name in ("old", "new"))
        row |= agreement(old, new)
        row["same_machine_code"] = old["machine_code"] == new["machine_code"]
        row["calls"] = min(_MAX_CALLS, max(1, round(_BLOCK_SECONDS / old["seconds"])))
        measured.append(row)
    if measured:
        _time(sides, measured)


def agreement(old: Mapping[str, Any], new: Mapping[str, Any]) -> Row:
    """Return whether results have the same bytes, and the largest difference of their samples.

    The difference is in terms of the root mean square of the old sample.
    """
    if old["digest"] is None or new["digest"] is None:
        return {"identical": None}
    size = math.sqrt(statistics.fmean(x * x for x in old["sample"])) or 1.0
    pairs = zip(old["sample"], new["sample"], strict=True)
    difference = max(abs(x - y) for x, y in pairs) / size
    return {"identical": old["digest"] == new["digest"], "difference": difference}


def _time(sides: Mapping[str, Side], rows: Sequence[Row]) -> None:
    """Put times into rows: of one profile, of one each, or wall times, the first that is clear."""
    calls: dict[str, dict[str, int]] = {name: {} for name in sides}
    wall: dict[_Block, list[float]] = {}
    _both(sides, "start")
    for row in rows:
        blocks = [_Block(name, job) for name, jobs in _jobs(row).items() for job in jobs]
        for name, job in blocks:
            calls[name][job] = row["calls"]
        for number in range(_ROUNDS):
            # Each is first in turn.
            for block in [*blocks[number % len(blocks) :], *blocks[: number % len(blocks)]]:
                seconds = sides[block.side].send("block", job=block.job, calls=row["calls"])()
                wall.setdefault(block, []).append(seconds)
    method = "device time by the profiler"
    stopped = {name: side.send("stop", calls=calls[name]) for name, side in sides.items()}
    times: dict[_Block, list[float]] = {}
    errors = []
    for name, answer in stopped.items():
        try:
            times |= {_Block(name, job): found for job, found in answer().items()}
        except WorkerError as error:
            errors.append(str(error))
    if errors and len(rows) > 1:
        for row in rows:
            _time(sides, [row])
        return
    if errors:
        times, method = wall, f"wall time ({'; '.join(errors)})"
    for row in rows:
        row["method"] = method
        for name, jobs in _jobs(row).items():
            for job in jobs:
                label = name if job == row["name"] else "chosen"
                row[f"{label}_us"] = [1e6 * x for x in times[_Block(name, job)]]
        row["ratio"] = ratio(row["old_us"], row["new_us"])
        if "chosen_us" in row:
            row["chosen_ratio"] = ratio(row["old_us"], row["chosen_us"])


def ratio(old: Sequence[float], new: Sequence[float]) -> float:
    """Return old / new, the median over rounds."""
    return statistics.median(x / y for x, y in zip(old, new, strict=True))


class Summary(NamedTuple):
    """Rows of a group.

    Attributes
    ----------
    rows
        How many were timed.
    mean
        The geometric mean of old / new.
    worst
        The name of the row with the least, and the least.
    chosen
        The geometric mean with the kernels that the new checkout chooses, where these are others.
    """

    rows: int
    mean: float
    worst: tuple[str, float]
    chosen: float


def summaries(rows: Sequence[Row]) -> dict[str, Summary]:
    """Return a summary of each group that has a timed row."""
    found = {}
    for group in dict.fromkeys(row["group"] for row in rows):
        timed = [row for row in rows if row["group"] == group and "ratio" in row]
        if timed:
            worst = min(timed, key=lambda row: float(row["ratio"]))
            found[group] = Summary(
                len(timed),
                statistics.geometric_mean(row["ratio"] for row in timed),
                (worst["name"], worst["ratio"]),
                statistics.geometric_mean(
                    row["chosen_ratio" if "chosen_ratio" in row else "ratio"] for row in timed
                ),
            )
    return found


def _report(rows: Sequence[Row]) -> int:
    """Print a line for each group, and the rows that stand out; return the exit status."""
    below = 0
    for group, (number, mean, (name, least), chosen) in summaries(rows).items():
        mark = "" if mean >= _LEAST_MEAN else f" (below {_LEAST_MEAN})"
        below += bool(mark)
        print(f"{group}: {number} rows, {mean:.3f}{mark}, worst {least:.3f} {name}, "
              f"as chosen now {chosen:.3f}")  # fmt: skip
    for row in rows:
        if "ratio" not in row:
            if "XLA computes" not in row.get("why", ""):
                print(f"not timed: {row['name']}: {row.get('why', 'no time was left')}")
        elif row["ratio"] < _LEAST_MEAN or row.get("chosen_ratio", 1) < _LEAST_MEAN:
            now = f", as chosen now {row['chosen_ratio']:.3f}" if "chosen_ratio" in row else ""
            code = "same" if row["same_machine_code"] else "new"
            print(f"{row['name']}: {row['ratio']:.3f}{now}, {code} machine code, "
                  f"{statistics.median(row['old_us']):.1f} us, {row['keys'][0]}")  # fmt: skip
    timed = [row for row in rows if "ratio" in row]
    same = [row["ratio"] for row in timed if row["same_machine_code"]]
    if same:
        print(f"{len(same)} of {len(timed)} rows have the same machine code: "
              f"{min(same):.3f} to {max(same):.3f}")  # fmt: skip
    different = [row for row in timed if row["identical"] is False]
    print(f"{sum(row['identical'] is True for row in timed)} of {len(timed)} results are identical")
    for row in different:
        print(f"differs by {row['difference']:.1e}: {row['name']}")
    return 1 if below else 0
