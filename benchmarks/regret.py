"""Times XLA's kernel and the library's candidates for products drawn at random.

    python -m benchmarks regret OPERATION --sample N --seed S [--json FILE]

The record has the time of every side of each product. XLA's side is the program that the library
leaves to XLA, which states some products in wider types than ``jax.numpy`` does. The command prints
what the library's choice makes of them: its speed over XLA's, and over the best of all sides.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.calls.case import Case, rotating, types_enabled
from benchmarks.calls.row import Row
from benchmarks.errors import BenchmarkError
from benchmarks.measurement.side_times import Runs, rows_of_a_profile, times_of_rows
from benchmarks.records.record import Record, program_record
from benchmarks.samples.product_candidates import ProductCandidates
from benchmarks.samples.sample import draw_sample, purpose
from jax_tilekern.cli.console import make_console, output_file, write_json
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.select import candidates, workload_of
from jax_tilekern.plans.gpu import Gpu, current_gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.policy import choose, policy
from jax_tilekern.plans.tuned import XLA, product_text
from jax_tilekern.tuning.random_operands import Operands, beyond_cache

HELP = "time XLA's kernel and the library's candidates for random products"

_OPERATIONS = ("matmul", "decode", "matvec", "vdot")
_ROWS_A_CHUNK = 16
# Rows that are printed.
_WORST = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("operation", choices=_OPERATIONS)
    parser.add_argument("--sample", type=int, metavar="N", default=200, help="products to draw")
    parser.add_argument("--seed", type=int, default=0, help="even: to fit, odd: to report")
    parser.add_argument("--candidates", type=int, metavar="K", default=8, help="how many a product")
    parser.add_argument("--without-xla", action="store_true", help="time the candidates alone")
    parser.add_argument("--minutes", type=float, default=60, help="begin no rows after this time")
    parser.add_argument("--seconds", type=float, default=0.1, help="time to spend on a product")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the record here")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    end = time.monotonic() + 60 * arguments.minutes
    console = make_console()
    record = program_record(arguments.command_line)
    record["sample"] = {
        "operation": arguments.operation, "count": arguments.sample, "seed": arguments.seed,
        "purpose": purpose(arguments.seed),
    }  # fmt: skip
    rows = draw_sample(arguments.operation, "gpu", arguments.sample, arguments.seed).rows
    chunks = (rows[i : i + _ROWS_A_CHUNK] for i in range(0, len(rows), _ROWS_A_CHUNK))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        compiled = _compiled(chunks, arguments, pool, end)
        # XLA's autotuner needs the GPU for itself, and candidates have none.
        for chunk in _ahead(compiled, 1 if arguments.without_xla else 0):
            record["rows"] += _measured(chunk, arguments)
            if arguments.json is not None:
                write_json(arguments.json, record)
            console.print(f"{len(record['rows'])}/{len(rows)}")
    if not arguments.without_xla:
        report(record, current_gpu())
        if arguments.json is not None:
            write_json(arguments.json, record)
    return 0


def report(record: Record, gpu: Gpu) -> dict[str, float]:
    """Print and return what the policy makes of a record's products that XLA's side is timed of.

    The record gets each choice.
    """
    gains: list[tuple[float, float, str]] = []
    for row in record["rows"]:
        times = row["microseconds"]
        if XLA not in times:
            continue
        taken = row["chosen"] = _chosen(row, gpu)
        ours, least = times[taken], min(times.values())
        name = f"{row['name']}: {taken} {ours} us, XLA {times[XLA]}"
        gains.append((math.log(times[XLA] / ours), math.log(least / ours), name))
    if not gains:
        raise BenchmarkError("no product has candidates and a time of XLA's")
    over_xla, over_best, _ = (list(x) for x in zip(*gains, strict=True))
    result = {
        "products": len(gains),
        "over_xla": math.exp(statistics.fmean(over_xla)),
        "over_best": math.exp(statistics.fmean(over_best)),
        "worst_over_xla": math.exp(min(over_xla)),
        "below_0.97": statistics.fmean(x < math.log(0.97) for x in over_xla),
    }
    print({name: round(value, 3) for name, value in result.items()})
    for gain, _, name in sorted(gains)[:_WORST]:
        print(f"{math.exp(gain):.2f}  {name}")
    return result


def _product_of_text(text: str) -> Product:
    """Return the product of a text of :func:`product_text`."""
    head, _, arrays = text.partition(": ")
    arithmetic, _, sizes = head.partition(" ")
    *batch, m, n, k = map(int, sizes.split("x"))
    found = [re.fullmatch(r"\w+ (\w+)\[([\d,]+)\]", array) for array in arrays.split(", ")]
    lhs, rhs, out = (np.dtype(getattr(ml_dtypes, x[1], x[1])) for x in found if x)
    strides = (tuple(map(int, x[2].split(","))) for x in found if x)
    return Product(MatmulGeometry(tuple(batch), m, n, k, *strides), lhs, rhs, out, arithmetic)


def _chosen(row: Record, gpu: Gpu) -> str:
    """Return which of a product's timed sides the policy takes."""
    product = _product_of_text(row["product"])
    found = candidates(product, gpu)
    timed = (
        [] if isinstance(found, NoKernel) else [x for x in found if x.key in row["microseconds"]]
    )
    taken = choose(workload_of(product, timed), timed, gpu).candidate if timed else None
    return XLA if taken is None else taken.key


class _Timed:
    """A product, and what computes it."""

    def __init__(self, row: Row, arguments: argparse.Namespace) -> None:
        self.row = row
        self.case = Case.of(row)
        self.gpu: Gpu = current_gpu()
        self.candidates = ProductCandidates.of(self.case, arguments.candidates, self.gpu)
        self.with_xla = not arguments.without_xla

    def programs(self) -> Iterator[Any]:
        """Return what compiles each side."""
        if self.candidates is None:
            return
        if self.with_xla:
            yield self._compile_xla
        yield from self.candidates.programs()

    def _compile_xla(self) -> None:
        with types_enabled(self.row), policy("xla"):
            self.case.ours.lower(*self.row.structs).compile()  # type: ignore[attr-defined]

    @property
    def rotation_bytes(self) -> int:
        """The bytes of all operands that are rotated among."""
        return 2 * max(2 * self.row.bytes, 5 * self.gpu.l2_bytes)

    def runs(self) -> Runs:
        """Return functions that make one call of each side whose result is XLA's."""
        assert self.candidates is not None
        runs = {}
        with types_enabled(self.row):
            operands: Callable[[int], Operands] = self.candidates.problem.operands
            first = operands(0)
            self.candidates.check(first)
            rotation = itertools.cycle(beyond_cache(first, operands, self.gpu.l2_bytes))
            for key, side in self.candidates.sides.items():
                runs[key] = rotating(self.row, side, rotation)
            if self.with_xla:
                operands = self.case.operands
                sets = beyond_cache(operands(), operands, self.gpu.l2_bytes)
                runs[XLA] = policy("xla")(rotating(self.row, self.case.ours, itertools.cycle(sets)))
        return runs

    def record(self, seconds: Mapping[str, Sequence[float]]) -> Record:
        """Return what the record has of the product."""
        assert self.candidates is not None
        middle = {key: sorted(times)[len(times) // 2] for key, times in seconds.items()}
        return {
            "name": self.row.name,
            "group": self.row.group,
            "product": product_text(self.candidates.product),
            "microseconds": {key: round(1e6 * value, 3) for key, value in middle.items()},
            "failures": self.candidates.failures,
        }


def _compiled(
    chunks: Iterable[Sequence[Row]], arguments: argparse.Namespace, pool: Executor, end: float
) -> Iterator[tuple[list[_Timed], list[Future[None]]]]:
    """Compile chunks in threads, since NVRTC and XLA run without the interpreter's lock."""
    for chunk in chunks:
        if time.monotonic() > end:
            return
        rows = [_Timed(row, arguments) for row in chunk]
        yield rows, [pool.submit(program) for row in rows for program in row.programs()]


def _ahead(
    compiled: Iterator[tuple[list[_Timed], list[Future[None]]]], count: int
) -> Iterator[list[_Timed]]:
    """Yield compiled chunks, while so many further ones are being compiled."""
    queue = deque(itertools.islice(compiled, 1 + count))
    while queue:
        rows, jobs = queue.popleft()
        wait(jobs)
        yield rows
        queue.extend(itertools.islice(compiled, 1))


def _measured(rows: Sequence[_Timed], arguments: argparse.Namespace) -> list[Record]:
    """Return the times of compiled products."""
    result: list[Record] = []
    stated = [row for row in rows if row.candidates is not None]
    for group in rows_of_a_profile(stated, lambda row: row.rotation_bytes):
        runs = [row.runs() for row in group]
        timed = [(row, run) for row, run in zip(group, runs, strict=True) if run]
        found = times_of_rows([run for _, run in timed], arguments.seconds) if timed else []
        result += [row.record(x.device) for (row, _), (x, _) in zip(timed, found, strict=True)]
    return result
