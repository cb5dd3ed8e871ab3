"""``regret``: XLA's kernel and the library's candidates for products drawn at random.

    python -m benchmarks regret OPERATION --sample N --seed S [--json FILE]

The record has the time of every side of each product. XLA's side is the program that the library
leaves to XLA, which states some products in wider types than ``jax.numpy`` does. The command prints
what the library's choice makes of them: its speed over XLA's, and over the best of all sides.
Operands together exceed L2, as for data; ``--warm`` times the same with one set of them, too.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import record as records
from benchmarks.errors import BenchmarkError
from benchmarks.record import Record
from benchmarks.rows import OURS, Row, jitted
from benchmarks.samples import draw_sample
from benchmarks.timing import Runs, rotating, rows_of_a_profile, times_of_rows
from jax_tilekern.cli.console import output_file
from jax_tilekern.plans.candidate import CostedCandidate
from jax_tilekern.plans.gemm.select import candidates, workload_of
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.plans.policy import choose, policy
from jax_tilekern.plans.tuned import XLA
from jax_tilekern.tuning.product_timing import (
    ArrayProduct,
    differences,
    faults,
    plan_of,
    tolerance_of,
)
from jax_tilekern.tuning.random_operands import beyond_cache, random_array
from jax_tilekern.tuning.tuner import products_of

HELP = "time XLA's kernel and the library's candidates for random products"

_ROWS_A_CHUNK = 16
# Sides whose operands L2 may hold.
_WARM = "warm "
# Rows that are printed.
_WORST = 10
# XLA's product here only says what is right: its speed is that of the row's own peer. Products of
# integers are tuned, because XLA's others are wrong (docs/limits.md).
_UNTUNED = {"xla_gpu_autotune_level": 0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("operation", choices=("matmul", "decode", "matvec", "vdot"))
    parser.add_argument("--sample", type=int, metavar="N", default=200, help="products to draw")
    parser.add_argument("--seed", type=int, default=0, help="even: to fit, odd: to report")
    parser.add_argument("--candidates", type=int, metavar="K", default=8, help="how many a product")
    parser.add_argument("--without-xla", action="store_true", help="time the candidates alone")
    parser.add_argument("--warm", action="store_true", help="time with operands in L2 as well")
    parser.add_argument("--minutes", type=float, default=60, help="begin no rows after this time")
    parser.add_argument("--seconds", type=float, default=0.1, help="time to spend on a product")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the record here")


def run(arguments: argparse.Namespace) -> int:
    end = time.monotonic() + 60 * arguments.minutes
    sample = draw_sample(arguments.operation, "gpu", arguments.sample, arguments.seed)
    drawn = {"operation": arguments.operation, "count": arguments.sample}
    record = records.new_record(arguments.command_line, sample={**drawn, **sample.fields["sample"]})
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:

        def compiled() -> Iterator[tuple[list[_Timed], list[Future[None]]]]:
            """Compile chunks in threads, since NVRTC and XLA run without the interpreter's lock."""
            for start in range(0, len(sample.rows), _ROWS_A_CHUNK):
                if time.monotonic() > end:
                    return
                chunk = sample.rows[start : start + _ROWS_A_CHUNK]
                rows = [_Timed(row, arguments) for row in chunk]
                yield rows, [pool.submit(program) for row in rows for program in row.programs()]

        # XLA's autotuner needs the GPU for itself, and candidates have none.
        ahead = 1 if arguments.without_xla else 0
        chunks = compiled()
        queue = deque(itertools.islice(chunks, 1 + ahead))
        while queue:
            rows, jobs = queue.popleft()
            wait(jobs)
            record["rows"] += _measured(rows, arguments.seconds)
            if arguments.json is not None:
                records.write(arguments.json, record)
            print(f"{len(record['rows'])}/{len(sample.rows)}", flush=True)
            queue.extend(itertools.islice(chunks, 1))
    if not arguments.without_xla:
        report(record)
        if arguments.warm:
            print("operands in L2:")
            report(record, "warm_microseconds")
    return 0


def report(record: Record, of: str = "microseconds") -> dict[str, float]:
    """Print and return what the policy makes of a record's products that XLA's side is timed of."""
    timed = [row for row in record["rows"] if XLA in row[of]]
    if not timed:
        raise BenchmarkError("no product has candidates and a time of XLA's")
    times = [row[of] for row in timed]
    xla, least = np.log([t[XLA] for t in times]), np.log([min(t.values()) for t in times])
    ours = np.log([t[row["chosen"]] for t, row in zip(times, timed, strict=True)])
    result = {
        "products": len(timed),
        "over_xla": math.exp((xla - ours).mean()),
        "over_best": math.exp((least - ours).mean()),
        "worst_over_xla": math.exp((xla - ours).min()),
        "below_0.97": float(np.mean(xla - ours < math.log(0.97))),
    }
    print({name: round(value, 3) for name, value in result.items()})
    for i in np.argsort(xla - ours)[:_WORST]:
        taken = timed[i]["chosen"]
        ratio = math.exp(xla[i] - ours[i])
        print(f"{ratio:.2f}  {timed[i]['name']}: {taken} {times[i][taken]} us")
    return result


class _Timed:
    """A row's product, and what computes it: candidates, compiled, and checked against XLA's."""

    def __init__(self, row: Row, arguments: argparse.Namespace) -> None:
        self.row, self.gpu = row, current_gpu()
        self.ours = jitted(row, OURS)
        self.with_xla, self.warm = not arguments.without_xla, arguments.warm
        self.sides: dict[str, Any] = {}
        self.failures: dict[str, str] = {}
        self.by_xla: Any = None
        with row.types_enabled():
            products = products_of(self.ours, *row.structs)
        self.product = products[0] if len(products) == 1 else None
        found = NoKernel("") if self.product is None else candidates(self.product, self.gpu)
        self.found = [] if isinstance(found, NoKernel) else spread(found, arguments.candidates)

    @property
    def problem(self) -> ArrayProduct:
        """The product over arrays of JAX."""
        assert self.product is not None
        return ArrayProduct.of(self.product)

    @property
    def rotation_bytes(self) -> int:
        """The bytes of all operands that are rotated among."""
        return 2 * max(2 * self.row.bytes, 5 * self.gpu.l2_bytes)

    def programs(self) -> Iterator[Callable[[], None]]:
        """Return what compiles each side."""
        if self.found:
            yield from ([self._compile_xla] if self.with_xla else [])
            yield self._compile_check
            yield from (partial(self._compile, candidate) for candidate in self.found)

    def _compile_xla(self) -> None:
        with self.row.types_enabled(), policy("xla"):
            self.ours.lower(*self.row.structs).compile()

    def _compile_check(self) -> None:
        with self.row.types_enabled():
            problem = self.problem
            key = jax.random.key(0, impl="unsafe_rbg")
            # What operands and checks run besides the sides.
            for array in (problem.lhs, problem.rhs):
                random_array.lower(key, array.shape, array.dtype).compile()
            out = jax.ShapeDtypeStruct(problem.out.shape, problem.out.dtype)
            differences.lower(out, out).compile()
            by_xla = jax.jit(problem.by_xla).lower(*problem.structs)
            is_exact = jnp.issubdtype(out.dtype, jnp.integer)
            self.by_xla = by_xla.compile(compiler_options=None if is_exact else _UNTUNED)

    def _compile(self, candidate: CostedCandidate) -> None:
        plan = plan_of(candidate, self.gpu)
        if isinstance(plan, str):
            self.failures[candidate.key] = plan
            return
        with self.row.types_enabled():
            problem = self.problem
            lowered = jax.jit(partial(problem.by_plan, plan)).lower(*problem.structs)
            # A bug in one candidate must not keep the others from being measured.
            try:
                self.sides[candidate.key] = lowered.compile()
            except RuntimeError as error:
                self.failures[candidate.key] = f"does not compile: {error}"

    def runs(self) -> Runs:
        """Return functions that make one call of each side whose result is XLA's."""
        with self.row.types_enabled():
            problem = self.problem
            if self.by_xla is None:
                self._compile_check()  # It failed in its thread, and raises here.
            first = problem.operands(0)
            assert self.product is not None
            sides = {XLA: self.by_xla, **self.sides}
            self.failures |= faults(sides, first, tolerance_of(self.product))
            right = {key: x for key, x in self.sides.items() if key not in self.failures}
            sets = dict.fromkeys(right, beyond_cache(first, problem.operands, self.gpu.l2_bytes))
            if self.with_xla:
                make = self.row.random_operands
                right[XLA] = policy("xla")(self.ours)
                sets[XLA] = beyond_cache(make(), make, self.gpu.l2_bytes)
            if self.warm:
                right |= {_WARM + key: side for key, side in right.items()}
                sets |= {_WARM + key: x[:1] for key, x in sets.items()}
            runs = rotating(right, sets)
        return {name: self.row.types_enabled()(run) for name, run in runs.items()}

    def record(self, seconds: Mapping[str, float]) -> Record:
        """Return what the record has of the product, with the side that the policy takes."""
        timed = [x for x in self.found if x.key in seconds]
        assert self.product is not None
        asked = workload_of(self.product, timed) if timed else None
        taken = choose(asked, timed, self.gpu).candidate if asked else None
        times = {key: round(1e6 * value, 3) for key, value in seconds.items()}
        warm = {k.removeprefix(_WARM): x for k, x in times.items() if k.startswith(_WARM)}
        return {
            "name": self.row.name,
            "group": self.row.group,
            "microseconds": {k: x for k, x in times.items() if not k.startswith(_WARM)},
            **({"warm_microseconds": warm} if warm else {}),
            "chosen": XLA if taken is None else taken.key,
            **({"failures": self.failures} if self.failures else {}),
        }


def spread(found: Sequence[CostedCandidate], count: int) -> list[CostedCandidate]:
    """Return the best by the cost model, and others spread over the rest of twice its time."""
    best = list(found[: (count + 1) // 2])
    rest = [x for x in found[len(best) :] if x.cycles <= 2 * found[0].cycles]
    wanted = count - len(best)
    step = max(1, len(rest) // max(1, wanted))
    return [*best, *rest[::step][:wanted]]


def _measured(rows: Sequence[_Timed], seconds: float) -> list[Record]:
    """Return the times of compiled products."""
    result: list[Record] = []
    stated = [row for row in rows if row.found]
    for group in rows_of_a_profile(stated, lambda row: row.rotation_bytes):
        timed = [(row, runs) for row in group if (runs := row.runs())]
        found = times_of_rows([runs for _, runs in timed], seconds) if timed else []
        result += [row.record(x.medians()) for (row, _), x in zip(timed, found, strict=True)]
    return result
