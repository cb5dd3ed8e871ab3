"""Rows of suites and samples, measured: compiled side by side, checked, and timed.

Rows are taken in chunks. Threads compile every program of a chunk, and nothing else runs on the
device meanwhile: XLA's autotuner locks the GPU while it times its own candidates. Then results are
compared, one row after the other, and at last the rows are timed, many of a sample in one profile.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jax_tilekern
from benchmarks import record as records
from benchmarks.record import Record
from benchmarks.report import row_line
from benchmarks.rows import DENSE, OPERATIONS, OURS, Function, Row, in_float64, jitted
from benchmarks.suites import Suite
from benchmarks.timing import (
    PROFILE_BYTES,
    Runs,
    Times,
    rows_of_a_profile,
    times_of_rows,
    wall_rounds,
)
from jax_tilekern.cli import machine
from jax_tilekern.plans.policy import policy
from jax_tilekern.tuning.random_operands import Operands, beyond_cache, random_array
from jax_tilekern.tuning.wall_time import ready, repeated, wall_seconds

# How many times the peer's error ours may have, beyond the rounding of the result.
_ERROR_MARGIN = 4.0
# How many times the errors of both a single one of some hundred million elements may deviate.
_DEVIATION_MARGIN = 16.0
# Roundings of the accumulator that ours may be off by, whatever the peer is: the error of a single
# sum may be small by luck, and in float64 the peer is compared with itself.
_ROUNDINGS = 16.0
# The rounding of sums of float8 on Hopper's tensor cores.
_FAST_ACCUMULATION = 2.0**-13
# The most by which a right result of another peer differs from ours, relative to its norm.
_ROUGH = 0.05
# The error is measured on this many indices of each of the result's dimensions, at most.
_SAMPLED = 64
# And that of grouped GEMMs on this many groups, besides the largest.
_JUDGED_GROUPS = 3
# A call of the CPU backend costs tens of microseconds; in calls this long that is a few percent.
_LONG_CALL = 1e-3
_LONGEST_CHAIN = 64
# Rows that are compiled together: one for each thread of a GPU's machine.
_ROWS_A_CHUNK = 16
# Rounds and calls of a block, of the rows of a suite.
_ROUNDS, _MOST_CALLS = 12, 200
# Warm-up ends when two blocks in a row took the same time to within this, or after some seconds.
_STABLE, _LONGEST_WARM_UP = 0.03, 3.0
# Another peer of a sample that takes longer is not timed.
_LONGEST_CALL = 1.0
# A kernel that never ends would keep the GPU for as long as somebody pays for it.
_LONGEST_ROW = 240.0
_DEFAULT_L2_BYTES = 50 << 20
_BANDWIDTH_CALLS = 16

# Knows JAX's types as well as numpy's; has no types itself.
_finfo: Callable[[Any], Any] = jnp.finfo


# Errors: the Frobenius norm against float64, in terms of the root of the sum of the squares of all
# terms, which is what random terms add up to; and the largest difference of an element.


def errors(row: Row, operands: Operands, ours: Any, peer: Any) -> tuple[float, float, float]:
    """Return our error, the peer's, and the most by which elements of both differ.

    For grouped GEMMs the peer is the dense product of each of some groups.
    """
    if row.split:
        return _grouped_errors(row, operands, ours)
    with jax.enable_x64(True):
        found = _sampled_errors(row, operands, ours, peer)
        return float(found[0]), float(found[1]), float(found[2])


def _grouped_errors(row: Row, operands: Operands, ours: Any) -> tuple[float, float, float]:
    """Return the errors of the results of some groups: a dense product of each is what is right."""
    # Their speed is not worth XLA's autotuning.
    product, exact_product = (
        jitted(x, DENSE, xla_gpu_autotune_level=0) for x in (row, in_float64(row))
    )
    found: list[tuple[list[Any], ...]] = []
    for group in judged_groups(row):
        given = row.group_slices(group, operands, row.operands)
        peer = jax.tree.leaves(product(*given))
        with jax.enable_x64(True):
            exact = jax.tree.leaves(exact_product(*map(_wide, given)))
        found.append((row.group_slices(group, jax.tree.leaves(ours), row.results), peer, exact))
    with jax.enable_x64(True):
        each = [
            [float(x) for x in _whole_errors(*map(jnp.concatenate, zip(*of_groups, strict=True)))]
            for of_groups in zip(*(zip(*sides, strict=True) for sides in found), strict=True)
        ]
    of_ours, of_peer, deviation = np.array(each).max(0).tolist()
    return of_ours, of_peer, deviation


def judged_groups(row: Row) -> list[int]:
    """Return the groups of a grouped GEMM on which errors are measured, the largest among them."""
    spread = np.linspace(0, row.sizes["g"] - 1, _JUDGED_GROUPS).round().astype(int)
    return sorted({int(row.group_sizes.argmax()), *spread.tolist()})


@jax.jit
def _whole_errors(ours: Array, peer: Array, exact: Array) -> tuple[Array, ...]:
    if jnp.issubdtype(peer.dtype, jnp.integer):
        exact = _wide(exact.astype(jnp.int64).astype(peer.dtype))  # Integers wrap around.
    norm = jnp.linalg.norm(exact)
    of_each = (jnp.linalg.norm(_wide(x) - exact) / norm for x in (ours, peer))
    # Groups with more rows have larger sums. Where all is zero, any difference is beyond measure.
    size = jnp.sqrt(jnp.mean(jnp.square(exact), -1, keepdims=True))
    size = jnp.maximum(size, np.finfo(np.float64).tiny)
    return *of_each, jnp.max(jnp.abs(_wide(ours) - _wide(peer)) / size)


@functools.partial(jax.jit, static_argnums=0)
def _sampled_errors(row: Row, operands: Operands, ours: Array, peer: Array) -> tuple[Array, ...]:
    indices = {x: sampled_indices(row.sizes[x]) for x in row.out}
    samples = [
        _wide(_sample(x, dimensions, indices))
        for x, dimensions in zip(operands, row.operands, strict=True)
    ]
    call = jitted(in_float64(row), OPERATIONS[row.operation].sides["XLA"]())
    exact = call(*samples)
    if jnp.issubdtype(peer.dtype, jnp.integer):
        exact = _wide(exact.astype(jnp.int64).astype(peer.dtype))  # Integers wrap around.
    norm = jnp.sqrt(jnp.sum(call(*(jnp.square(jnp.abs(x)) for x in samples))))
    of_each = (
        jnp.sqrt(jnp.sum(jnp.square(jnp.abs(_wide(_sample(x, row.out, indices)) - exact)))) / norm
        for x in (ours, peer)
    )
    deviation = jnp.max(jnp.abs(_wide(ours) - _wide(peer))) / (norm / math.sqrt(exact.size))
    return *of_each, deviation


def _wide(x: Array) -> Array:
    return x.astype(jnp.complex128 if jnp.iscomplexobj(x) else jnp.float64)


def _sample(x: Array, dimensions: str, indices: Mapping[str, np.ndarray[Any, Any]]) -> Array:
    for axis, dimension in enumerate(dimensions):
        if dimension in indices:
            x = jnp.take(x, indices[dimension], axis)
    return x


def sampled_indices(size: int) -> np.ndarray[Any, Any]:
    """Return the indices of a dimension of the result on which errors are measured."""
    return np.unique(np.linspace(0, size - 1, min(size, _SAMPLED)).round().astype(int))


def fault(row: Row, ours: float, peer: float, deviation: float) -> str | None:
    """Return what is wrong with a result of these errors."""
    rounding = 0.0
    if jnp.issubdtype(row.result_type, jnp.inexact):
        rounding = float(_finfo(row.result_type).eps)
    # By default sums of float8 are those of the tensor cores, on our side, on XLA's, or on both.
    is_float8 = all(jnp.dtype(t).itemsize == 1 and "float8" in str(t) for t in row.types[:2])
    of_sums = min(rounding, float(_finfo(jnp.float32).eps))
    if is_float8 and row.precision is None:
        of_sums = _FAST_ACCUMULATION
    # The reference, which adds in float64, errs as well: the random roundings of a sum of n terms
    # add up to a third of the root of n, in terms of what random terms add up to.
    terms = math.prod(size for name, size in row.sizes.items() if name not in row.out)
    accumulated = _ROUNDINGS * of_sums + math.sqrt(terms) * float(np.finfo(np.float64).eps)
    # Written so that an error that is not a number is wrong.
    if not ours <= _ERROR_MARGIN * peer + rounding + accumulated:
        return f"wrong: relative error {ours:.1e}, the peer's {peer:.1e}"
    if not deviation <= _DEVIATION_MARGIN * (ours + peer + rounding + of_sums):
        return f"wrong: an element is {deviation:.1e} root mean squares from the peer's"
    return None


# A row.


class Case:
    """A row with its sides: ours, the peer and others that can compute it."""

    def __init__(self, row: Row) -> None:
        operation = OPERATIONS[row.operation]
        self.row, self.operation = row, operation
        self.ours: Function = jitted(row, OURS)
        self.peer: Function = jitted(row, operation.sides[operation.peer]())
        self.others: dict[str, Function] = {}
        self.failures: dict[str, str] = {}
        self.temporaries: dict[str, int] = {}

    def kernel(self, operands: Operands) -> str:
        """Return our kernel, or why XLA computes the row."""
        choices = jax_tilekern.explain(self.ours, *operands)
        names = dict.fromkeys(choice.kernel for choice in choices if choice.kernel)
        reasons = [choice.reason for choice in choices] or ["no call of a kernel is left"]
        return ", ".join(names) or f"XLA: {reasons[0]}"

    def compile(self) -> None:
        """Compile each program, the peer's first, whose autotuned choices ours finds."""
        structs = self.row.structs
        with contextlib.suppress(Exception), self.row.types_enabled():  # Fails where it is called.
            operands = jax.eval_shape(self.operation.peer_operands, structs)
            result = self.peer.lower(*operands).compile().out_info  # type: ignore[attr-defined]
            self.ours.lower(*structs).compile()  # type: ignore[attr-defined]
            for x in structs:
                random_array.lower(jax.random.key(0), x.shape, x.dtype).compile()
            if not self.row.split:
                with jax.enable_x64(True):
                    _sampled_errors.lower(self.row, structs, result, result).compile()

    def check(self, longest: float = math.inf) -> Record:
        """Return what the record has of errors and memory; ``failure`` if the result is wrong.

        Other peers are dropped that take more memory than there is, or longer, or are wrong.
        """
        operands = self.row.random_operands()
        ours = self.ours(*operands)
        peer = None if self.row.split else self.peer(*operands)
        found = errors(self.row, operands, ours, peer)
        result = {
            "kernel": self.kernel(operands),
            "error": {"ours": found[0], self.operation.peer: found[1]},
        }
        if why := fault(self.row, *found):
            return result | {"failure": why}  # The speed of a wrong result is no news.
        for name in self.row.target:
            if name != self.operation.peer and (
                failure := self._add_other(name, operands, ours, longest)
            ):
                self.failures[name] = failure
        if self.others or self.failures or self.row.temporary is not None:
            program = self.ours.lower(*self.row.structs).compile()  # type: ignore[attr-defined]
            self.temporaries["ours"] = temporary_bytes(program)
        more = {"failures": self.failures, "temporaries": self.temporaries}
        return result | {key: value for key, value in more.items() if value}

    def _add_other(self, name: str, operands: Operands, ours: Any, longest: float) -> str | None:
        """Add another peer, or return why it is not timed."""
        try:
            side = self.operation.sides[name]()
            function = jitted(self.row, side).lower(*self.row.structs).compile()
            self.temporaries[name] = temporary_bytes(function)
            # Another set of operands to rotate among, two results at once and what is temporary.
            needed = sum(x.nbytes for x in jax.tree.leaves((operands, ours, ours)))
            needed += self.temporaries[name] + (PROFILE_BYTES if longest < math.inf else 0)
            if needed > free_bytes():
                return "out of memory"
            call = partial(function, *operands)
            pairs = zip(*map(jax.tree.leaves, (ready(call()), ours)), strict=True)
            difference = max(float(_relative(*pair)) for pair in pairs)
            if not difference <= _ROUGH:
                return f"wrong: differs from ours by {difference:.0%}"
            if longest < math.inf and wall_seconds(call) > longest:
                return f"longer than {longest:g} s"
        # Whatever it raises costs this peer alone.
        except Exception as error:
            return failure_of(error)
        self.others[name] = function
        return None

    def runs(self, l2_bytes: int) -> Runs:
        """Return functions that make one call of each side, with operands not in the cache."""
        sets = beyond_cache(self.row.random_operands(), self.row.random_operands, l2_bytes)
        return {
            "ours": rotating(self.row, self.ours, sets),
            self.operation.peer: rotating(
                self.row, self.peer, list(map(self.operation.peer_operands, sets))
            ),
            **{name: rotating(self.row, side, sets) for name, side in self.others.items()},
        }

    def times_on_cpu(self, seconds: float) -> Times:
        """Measure by wall time, with operands where the caches keep them.

        A product too short to be timed alone is done several times in one call, each on the result
        of the one before, if the result can be an operand; both sides do the same. Other operations
        are not chained: XLA makes one of many transposes or additions.
        """
        operands = self.row.random_operands()
        sides = {"ours": self.ours, self.operation.peer: self.peer, **self.others}
        of_peer = self.operation.peer_operands(operands)
        runs = {
            name: partial(side, *(of_peer if name == self.operation.peer else operands))
            for name, side in sides.items()
        }
        fastest = min(min(wall_seconds(run) for _ in range(3)) for run in runs.values())
        count = min(_LONGEST_CHAIN, math.ceil(_LONG_CALL / fastest)) if self._chains() else 1
        if count > 1:
            # Random factors of this size keep the result's size as it is.
            scale = 1 / math.sqrt(self.row.sizes["k"])
            operands = operands[0], (operands[1] * scale).astype(operands[1].dtype)
            runs = {
                name: partial(jax.jit(_chain(side, count)), *operands)
                for name, side in sides.items()
            }
        wall_seconds(lambda: [run() for run in runs.values()])
        times = wall_rounds(runs, seconds)
        device = {name: tuple(x / count for x in found) for name, found in times.items()}
        return Times(device, {}, "wall time of a call")

    def _chains(self) -> bool:
        lhs, *_ = self.row.structs
        if self.row.operation != "matmul" or not jnp.issubdtype(lhs.dtype, jnp.floating):
            return False  # Integers overflow.
        result = jax.eval_shape(self.peer, *self.row.structs)
        return (result.shape, result.dtype) == (lhs.shape, lhs.dtype)


def _chain(product: Function, length: int) -> Function:
    def chained(lhs: Array, rhs: Array) -> Array:
        for _ in range(length):
            lhs = product(lhs, rhs)
        return lhs

    return chained


def rotating(row: Row, side: Function, sets: Sequence[Operands]) -> Callable[[], Any]:
    """Return what calls a side of a row with the next of several sets of operands."""
    rotation = itertools.cycle(sets)

    def run() -> Any:
        with row.types_enabled():
            return side(*next(rotation))

    return run


@jax.jit
def _relative(result: Array, ours: Array) -> Array:
    wide = ours.astype(jnp.float32)
    return jnp.asarray(jnp.linalg.norm(result.astype(jnp.float32) - wide) / jnp.linalg.norm(wide))


def temporary_bytes(program: Any) -> int:
    """Return what a compiled program takes besides operands and results."""
    return int(program.memory_analysis().temp_size_in_bytes)


def free_bytes() -> int:
    """Return the bytes that the default device has left."""
    statistics = jax.devices()[0].memory_stats()
    if statistics:
        return int(statistics["bytes_limit"]) - int(statistics["bytes_in_use"])
    return int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))


def failure_of(error: Exception) -> str:
    """Return in a line why a side has no time."""
    if isinstance(error, ModuleNotFoundError):
        return "not installed"
    what = str(error).partition("\n")[0]
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in what:
        return f"out of memory: {what}"
    return f"{type(error).__name__}: {what}"


def bandwidths() -> dict[str, float]:
    """Return the bytes per second that the default device's memory moves.

    Those of a read are of a sum of many numbers, and those of a copy, read and written together, of
    adding one to each.
    """
    numbers = jnp.ones(1 << (26 if jax.default_backend() == "cpu" else 28), jnp.float32)
    increment: Callable[[Array], Array] = jax.jit(lambda x: x + 1, donate_argnums=0)
    total = jax.jit(jnp.sum)

    def incremented() -> Array:
        nonlocal numbers
        numbers = increment(numbers)
        return numbers

    # Each side several times in a row, since the last may be waited for while the others run.
    read, copy = (
        min(wall_seconds(partial(repeated, call, _BANDWIDTH_CALLS)) for _ in range(4))
        for call in (lambda: total(numbers), incremented)
    )
    moved = _BANDWIDTH_CALLS * numbers.nbytes
    return {"read_bytes_per_second": moved / read, "copy_bytes_per_second": 2 * moved / copy}


# A run.


def measure(suite: Suite, arguments: argparse.Namespace) -> tuple[Record, bool]:
    """Measure the rows of a suite or sample that the command line asks for.

    Returns
    -------
    tuple[Record, bool]
        The record, also in the file of ``--json``, with the rows that were there before; and
        whether all rows that were measured succeeded.
    """
    sample = arguments.sample is not None
    end = time.monotonic() + 60 * (arguments.minutes or math.inf)
    record = records.new_record(
        arguments.command_line, suite=suite.name, operation=suite.operation, **suite.fields,
        **bandwidths(),
    )  # fmt: skip
    first, step = arguments.part
    rows: Sequence[Row] = (suite.matching(arguments.rows) if arguments.rows else suite).rows[
        first::step
    ]
    if arguments.json is not None and arguments.json.exists():
        record = records.joined(record, records.read(arguments.json))
    if arguments.resume:
        rows = _remaining(record, rows)
    run = _Run(record, [row.name for row in suite.rows], len(rows), arguments)
    with policy(arguments.policy):
        size = _ROWS_A_CHUNK if sample else 1
        for start in range(0, len(rows), size):
            if time.monotonic() > end or not run.measure(rows[start : start + size], end, sample):
                break
    return run.record, run.whole


def _remaining(record: Record, rows: Sequence[Row]) -> Sequence[Row]:
    """Return the rows that a record lacks or has outdated, then those that failed."""
    old = set(records.outdated(record))
    failed = {row["name"]: "failure" in row for row in record["rows"]}
    lacking = [row for row in rows if row.name not in failed or row.name in old]
    return [*lacking, *(row for row in rows if row not in lacking and failed[row.name])]


class _Run:
    """The state of a run: its record and file, and whether all rows succeeded."""

    def __init__(
        self, record: Record, names: Sequence[str], count: int, arguments: argparse.Namespace
    ) -> None:
        self.record, self.names, self.count, self.arguments = record, names, count, arguments
        gpus = machine.driver()["gpus"]
        self.l2_bytes = int(gpus[0]["l2_bytes"]) if gpus else _DEFAULT_L2_BYTES
        self.done, self.whole = 0, True

    def measure(self, rows: Sequence[Row], end: float, sample: bool) -> bool:
        """Measure some rows until a moment, and say whether the device still answers."""
        cases = list(map(Case, rows))
        # Parts are measured side by side on one machine.
        threads = max(1, len(os.sched_getaffinity(0)) // self.arguments.part[1])
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(self._compile, cases))
        begun = itertools.takewhile(lambda _: time.monotonic() <= end, cases)
        if jax.default_backend() == "cpu":
            return all(self._measure([case], sample) for case in begun)
        needed = lambda case: max(2 * case.row.bytes, 5 * self.l2_bytes)  # noqa: E731
        return all(self._measure(group, sample) for group in rows_of_a_profile(begun, needed))

    def _compile(self, case: Case) -> None:
        with policy(self.arguments.policy):  # Policies hold for a thread.
            case.compile()

    def _measure(self, cases: Sequence[Case], sample: bool) -> bool:
        right: list[tuple[Case, Record]] = []
        for case in cases:
            before = self.record
            result = fields_of(case.row)
            # What stays if the run ends in this row.
            self._put(result | {"failure": "the run ended while this row was measured"})
            try:
                with _deadline(case.row.name), case.row.types_enabled():
                    result |= case.check(_LONGEST_CALL if sample else math.inf)
            except KeyboardInterrupt:
                # Nothing is wrong with the row, nor with what an earlier run says of it.
                self.record = before
                self._save()
                raise
            # A row may exhaust the memory, or meet a bug anywhere below; others are still to come.
            except Exception as error:
                result["failure"] = f"{type(error).__name__}: {error}"
            if "failure" not in result:
                right.append((case, result))
            elif not self._finish(result):
                return False
        if not right:
            return True
        with _deadline(cases[0].row.name):
            found = self._times([case for case, _ in right], sample)
        pairs = zip(right, found, strict=True)
        return all(self._finish(result | of_row) for (_, result), of_row in pairs)

    def _times(self, cases: Sequence[Case], sample: bool) -> list[Record]:
        """Return what the record has of the times of some rows."""
        seconds = self.arguments.seconds
        if jax.default_backend() == "cpu":
            result = []
            for case in cases:
                with case.row.types_enabled():
                    result.append(case.times_on_cpu(seconds).fields())
            return result
        runs = []
        for case in cases:
            with case.row.types_enabled():
                runs.append(case.runs(self.l2_bytes))
        if sample:
            return [times.fields() for times in times_of_rows(runs, seconds)]
        (each,) = runs
        _warm_up(each)
        (times,) = times_of_rows(runs, seconds, _ROUNDS, _MOST_CALLS)
        return [times.fields() | _sm_mhz(each["ours"])]

    def _finish(self, result: Record) -> bool:
        """Record and show a row, and say whether the device still answers."""
        self._put(result)
        self.done += 1
        self.whole = self.whole and "failure" not in result
        print(f"{self.done}/{self.count}  {row_line(result)}", flush=True)
        try:
            ready(jnp.zeros(8) + 1)
        except RuntimeError:
            print("The device no longer answers. A new run with --resume goes on.")
            return False
        return True

    def _put(self, result: Record) -> None:
        rows = {row["name"]: row for row in [*self.record["rows"], result]}
        ordered = [rows[name] for name in self.names if name in rows]
        needed = {row.get("run") for row in ordered}
        runs = [run for run in self.record.get("runs", ()) if run["date"] in needed]
        self.record = self.record | {"rows": ordered} | ({"runs": runs} if runs else {})
        self._save()

    def _save(self) -> None:
        # Each time, so that a run that is cut short leaves what it has.
        if self.arguments.json is not None:
            records.write(self.arguments.json, self.record)


def fields_of(row: Row) -> Record:
    """Return what a record has of a row before it is measured."""
    text = {} if row.name.rpartition(": ")[2] == row.text else {"call": row.text}
    limits = {"share": row.share, "temporary": row.temporary}
    return {
        "name": row.name, "group": row.group, **text, "target": dict(row.target),
        **{key: value for key, value in limits.items() if value},
    }  # fmt: skip


def _sm_mhz(run: Callable[[], Any]) -> dict[str, int]:
    """Return the clock of the first GPU's SMs while it works, where the driver says it."""
    with ThreadPoolExecutor(1) as other_thread:
        looking = other_thread.submit(machine.probe_results, "nvidia_smi")
        while not looking.done():
            ready(run())
    gpus = looking.result()[0].get("nvidia_smi")
    return {"sm_mhz": int(gpus[0]["clocks.sm"].split()[0])} if gpus else {}


def _warm_up(runs: Runs) -> None:
    """Run all sides until their time is stable."""
    end, before = time.perf_counter() + _LONGEST_WARM_UP, math.inf
    while time.perf_counter() < end:
        now = sum(wall_seconds(partial(repeated, run, 20)) for run in runs.values())
        if abs(now - before) <= _STABLE * now:
            break
        before = now


@contextlib.contextmanager
def _deadline(name: str) -> Iterator[None]:
    """End the process, by force, if the context takes longer on a GPU than any row does."""

    def give_up() -> None:
        print(f"{name} does not end. A new run with --resume goes on.", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(_LONGEST_ROW, give_up)
    if jax.default_backend() != "cpu":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
