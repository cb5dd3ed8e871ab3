"""``ladder``: kernels from the naive one to the fastest, each with one idea more.

A ladder's module has its problems; a problem has rungs, which compute it each in its own way.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import importlib
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

import jax_tilekern
from benchmarks import record as records
from benchmarks.errors import BenchmarkError
from benchmarks.record import Record
from benchmarks.report import table
from benchmarks.timing import bandwidths, device_times
from jax_tilekern.cli.console import duration, output_file, rate
from jax_tilekern.compilation.nvrtc import CompileError, nvrtc
from jax_tilekern.inspection.kernel_report import KernelReport
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.tuning.random_operands import Operands, beyond_cache, random_array
from jax_tilekern.tuning.wall_time import ready, wall_seconds

HELP = "climb from a naive kernel to the library's own, and see what each idea gains"

# Each is a module, which has the default sizes and the problems of a size.
LADDERS = ("transpose", "dot", "matmul", "matvec", "add")
# The rungs' CUDA files, a folder for each ladder.
SOURCES = Path(__file__).parents[2] / "examples" / "ladder"
# What rungs are compiled for where there is no GPU.
_ARCH = "sm_90a"
# Whole numbers up to this size are exact in every type that a rung multiplies in, TF32 too, and so
# are sums of their products up to 2**24, in any order. A billion random ones add up to less.
_LARGEST_NUMBER = 4
# Runs of a rung that ends on the host, each waited for.
_HOST_RUNS = 20

Sizes = tuple[int, ...]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Rung:
    """One way to compute a problem.

    Attributes
    ----------
    name
        What is shown.
    stages
        Functions of arrays; each takes what the one before returns. Some are kernels of
        :func:`jax_tilekern.cuda_kernel`.
    source
        The CUDA file whose idea it is; ``None`` for the library's own and for ``jnp``.
    cannot
        Says of a problem's named sizes why it cannot take them, or ``None`` if it can.
    on_host
        What is left to do on the host with the last stage's result. The time is then the host's.
    compute_capability
        The least that it runs on.
    arithmetic
        Where that is not the problem's.
    """

    name: str
    stages: tuple[Function, ...]
    source: str | None = None
    cannot: Callable[..., str | None] = lambda **_: None
    on_host: Function | None = None
    compute_capability: tuple[int, int] = (8, 0)
    arithmetic: str | None = None

    def __call__(self, *operands: Any) -> Any:
        """Compute the problem on the device."""
        for stage in self.stages:
            result = stage(*operands)
            operands = result if isinstance(result, tuple) else (result,)
        return result

    def reports(self, operands: tuple[Any, ...]) -> Iterator[KernelReport]:
        """Compile the kernels for the current GPU; yield what they take."""
        for stage in self.stages:
            if isinstance(stage, jax_tilekern.CudaKernel):
                yield stage.report(*operands)
            result = jax.eval_shape(stage, *operands)
            operands = result if isinstance(result, tuple) else (result,)


@dataclass(frozen=True)
class Problem:
    """What a ladder computes, at one size.

    Attributes
    ----------
    title
        What is shown.
    sizes
        By name.
    operands
        Shapes and types.
    rungs
        From the first to the library's own.
    peers
        ``jnp``'s own; the first says what is right unless there is ``truth``.
    bytes
        Read and written at the least.
    flops
        Operations, where they are what counts.
    bound
        What cannot be exceeded: the memory's bandwidth, of a copy or of reading, or arithmetic.
    arithmetic
        Name of what multiplies and adds.
    sums
        Whether results are sums of many products.
    """

    title: str
    sizes: dict[str, int]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    rungs: tuple[Rung, ...]
    peers: tuple[Rung, ...]
    bytes: int
    flops: int = 0
    bound: Literal["copy", "read", "arithmetic"] = "copy"
    arithmetic: str = "float32"
    sums: bool = False
    truth: Function | None = None

    @property
    def all_rungs(self) -> tuple[Rung, ...]:
        """The rungs and the peers."""
        return self.rungs + self.peers

    def types_enabled(self) -> AbstractContextManager[Any]:
        """Return a context in which the operands' types exist."""
        wide = any(operand.dtype.itemsize == 8 for operand in self.operands)
        return jax.enable_x64(True) if wide else nullcontext()

    def random(self, seed: int) -> Operands:
        """Return normal numbers for the operands, others for each seed."""
        return tuple(random_array(key, x.shape, x.dtype) for key, x in self._keys(seed))

    def _keys(self, seed: int) -> Iterator[tuple[Any, jax.ShapeDtypeStruct]]:
        for i, x in enumerate(self.operands):
            yield jax.random.key(seed * len(self.operands) + i, impl="unsafe_rbg"), x

    def whole_numbers(self) -> Operands:
        """Return numbers so small that every order of adding gives the same sums, exactly."""
        most = _LARGEST_NUMBER
        return tuple(
            jax.random.randint(key, x.shape, -most, most + 1, jnp.int8).astype(x.dtype)
            for key, x in self._keys(0)
        )


def kernel(file: str, **settings: Any) -> jax_tilekern.CudaKernel:
    """Return the kernel of a rung's file, ``"<ladder>/<number>_<name>.cu"``."""
    return jax_tilekern.cuda_kernel(SOURCES / file, **settings)


def rung_of(
    file: str, rung: str, cannot: Callable[..., str | None] | None = None, /,
    before: tuple[Function, ...] = (), compute_capability: tuple[int, int] = (8, 0),
    arithmetic: str | None = None, **settings: Any,
) -> Rung:  # fmt: skip
    """Return the rung of a file's kernel, whose loads may be of 16 bytes, and of stages before."""
    stages: tuple[Function, ...] = (*before, kernel(file, alignment=16, **settings))
    return Rung(
        rung, stages, file, cannot or (lambda **_: None), None, compute_capability, arithmetic
    )


def blocks(size: int, of: int) -> int:
    """Return how many blocks ``of`` elements each cover ``size`` elements."""
    return -(-size // of)


def multiples(**of: int) -> Callable[..., str | None]:
    """Return a :attr:`Rung.cannot` that wants named sizes to be multiples of numbers."""

    def cannot(**sizes: int) -> str | None:
        odd = [f"{name} {sizes[name]}" for name, n in of.items() if sizes[name] % n]
        return f"takes multiples of {max(of.values())}, not {' and '.join(odd)}" if odd else None

    return cannot


def parse(ladder: str, text: str) -> tuple[Problem, ...]:
    """Return the problems of a size, such as ``8192x8192``.

    Raises
    ------
    BenchmarkError
        If it is none.
    """
    module = importlib.import_module(f"benchmarks.ladder.{ladder}")
    numbers = [int(x) for x in text.split("x") if x.isascii() and x.isdigit()]
    right = len(numbers) == text.count("x") + 1 and len(numbers) in module.RANKS
    if not right or min(numbers) < 1:
        raise BenchmarkError(f"size {text!r} is not one such as {', '.join(module.SIZES)}")
    # Kernels count rows and columns in 32 bits.
    if math.prod(numbers) >= 2**40 or (len(numbers) > 1 and max(numbers) >= 2**31):
        raise BenchmarkError(f"size {text!r} is too large")
    found: tuple[Problem, ...] = module.problems(tuple(numbers))
    return found


@functools.cache
def problems_of(ladder: str) -> list[Problem]:
    """Return the problems of a ladder's own sizes."""
    sizes = importlib.import_module(f"benchmarks.ladder.{ladder}").SIZES
    return [problem for size in sizes for problem in parse(ladder, size)]


# The command.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ladder", choices=LADDERS)
    parser.add_argument("--size", nargs="+", metavar="SIZE", help="such as 8192x8192, or several")
    parser.add_argument("--rungs", metavar="PATTERN", help="only rungs whose name matches")
    parser.add_argument(
        "--check", action="store_true", help="run each rung once and compare, time nothing"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="timing of a size (default: %(default)s)"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the record here")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 if a rung failed."""
    nvrtc()
    name = arguments.ladder
    problems = problems_of(name)
    if arguments.size:
        problems = [problem for size in arguments.size for problem in parse(name, size)]
    if arguments.rungs:
        problems = _picked(problems, arguments.rungs)
    on_gpu = jax.default_backend() == "gpu"
    record = records.new_record(arguments.command_line)
    if not on_gpu:
        print(f"JAX has no GPU here: the rungs are compiled for {_ARCH}, and none is run.")
    elif not arguments.check:
        record |= bandwidths()
    seconds = None if arguments.check else arguments.seconds
    with nullcontext() if on_gpu else jax_tilekern.gpu_target(_ARCH):
        for problem in problems:
            with problem.types_enabled():
                rows = {rung.name: _compiled(problem, rung) for rung in problem.all_rungs}
                if on_gpu:
                    _climb(problem, rows, seconds)
            record["rows"] += rows.values()
            if arguments.json is not None:
                records.write(arguments.json, record)
            print(*_shown(record, problem, list(rows.values())), sep="\n", flush=True)
    return int(any("failure" in row for row in record["rows"]))


def _picked(problems: Sequence[Problem], pattern: str) -> list[Problem]:
    """Return the problems with the rungs whose name is the pattern, or else matches it."""
    names = list(dict.fromkeys(rung.name for problem in problems for rung in problem.rungs))
    picked = {name for name in names if name == pattern} or {
        name for name in names if fnmatch.fnmatchcase(name, pattern) or pattern in name
    }
    if not picked:
        raise BenchmarkError(f"no rung matches {pattern!r}; there are {', '.join(names)}")
    found = (replace(x, rungs=tuple(r for r in x.rungs if r.name in picked)) for x in problems)
    return [problem for problem in found if problem.rungs]


def _compiled(problem: Problem, rung: Rung) -> Record:
    """Compile a rung for the current GPU and return its row.

    It has what the kernels take, or what the library chose; or why the rung cannot be climbed:
    ``skipped`` if this problem or this GPU is none for it, ``failure`` if it cannot be compiled.
    """
    row: Record = {"problem": problem.title, "name": rung.name}
    if arithmetic := rung.arithmetic or problem.arithmetic:
        row |= {"arithmetic": arithmetic} if arithmetic != "float32" else {}
    gpu = current_gpu()
    if why := rung.cannot(**problem.sizes):
        return row | {"skipped": why}
    if gpu.compute_capability < rung.compute_capability:
        return row | {"skipped": f"takes another compute capability than {gpu.name}'s"}
    if rung.on_host is not None:
        row["on_host"] = True
    try:
        kernels = [_resources(report) for report in rung.reports(problem.operands)]
        if rung.source is None and rung not in problem.peers:
            choices = jax_tilekern.explain(rung, *problem.operands, platform="cuda")
            row["library"] = ", ".join(x.kernel or f"XLA's ({x.reason})" for x in choices)
    except (CompileError, ValueError) as error:
        return row | {"failure": str(error)}
    return row | ({"kernels": kernels} if kernels else {})


def _resources(report: KernelReport) -> Record:
    return {
        "name": report.call.name,
        "registers": report.registers,
        "spill_bytes": report.spill_bytes,
        "shared_memory_bytes": report.shared_memory_bytes,
        "warps_held": report.occupancy.fraction if report.occupancy else None,
    }


def _climb(problem: Problem, rows: Mapping[str, Record], seconds: float | None) -> None:
    """Check the rungs, and time those that are right; put what is found in their rows."""
    try:
        operands = problem.whole_numbers() if problem.sums else problem.random(0)
        expected = ready(jax.jit(problem.truth or problem.peers[0])(*operands))
        for rung in _runnable(problem, rows):
            if failure := _fault(rung, operands, expected):
                rows[rung.name]["failure"] = failure
        if seconds is not None:
            _time(problem, rows, seconds)
    # Memory that does not suffice for the operands, or a device that a rung has brought to a fault.
    except RuntimeError as error:
        for rung in _runnable(problem, rows):
            if "seconds" not in rows[rung.name]:
                rows[rung.name]["failure"] = str(error)


def _runnable(problem: Problem, rows: Mapping[str, Record]) -> list[Rung]:
    return [x for x in problem.all_rungs if not {"skipped", "failure"} & set(rows[x.name])]


def _fault(rung: Rung, operands: Operands, expected: Any) -> str | None:
    """Run a rung; return what fails, or how its result differs from the right one."""
    try:
        result = ready(jax.jit(rung)(*operands))
        result = rung.on_host(result) if rung.on_host else result
    # A fault in a kernel, or memory that does not suffice.
    except RuntimeError as error:
        return str(error)
    if (result.shape, result.dtype) != (expected.shape, expected.dtype):
        return f"wrong: {result.dtype}{result.shape}, not {expected.dtype}{expected.shape}"
    # Written so that what is not a number differs.
    count = int(jnp.sum(~(result == expected)))
    return f"wrong: {count} of {expected.size} elements are not jnp's" if count else None


def _time(problem: Problem, rows: Mapping[str, Record], seconds: float) -> None:
    """Time the correct rungs, interleaved, with operands that are not in the cache.

    What ends on the host is timed by the host's clock, from the call to the result.
    """
    # One rotation for all, or a rung would find what the one before has left in the cache.
    sets = beyond_cache(problem.random(0), problem.random, current_gpu().l2_bytes)
    rotation = itertools.cycle(sets)
    on_device: dict[str, Callable[[], Any]] = {}
    for rung in _runnable(problem, rows):
        call = functools.partial(_next, jax.jit(rung), rotation)

        if rung.on_host is None:
            on_device[rung.name] = call
        else:
            to_end = functools.partial(_whole, call, rung.on_host)
            rows[rung.name]["seconds"] = statistics.median(
                wall_seconds(to_end) for _ in range(_HOST_RUNS)
            )
    if on_device:
        found = device_times(on_device, seconds)
        for name, median in found.medians().items():
            rows[name] |= {"seconds": median, "method": found.method}


def _next(run: Function, rotation: Iterator[Operands]) -> Any:
    return run(*next(rotation))


def _whole(call: Callable[[], Any], on_host: Function) -> Any:
    return on_host(call())


# What is shown.


def time_cells(
    record: Record, problem: Problem, rows: Sequence[Record], row: Record
) -> tuple[str, ...]:
    """Return a timed rung's time, its rate, and that over what it cannot exceed.

    That is the memory's bandwidth or, where arithmetic counts, the maximum that any rung or ``jnp``
    reached with the same arithmetic.
    """
    counts = problem.bound == "arithmetic"
    work = problem.flops if counts else problem.bytes
    reached = work / row["seconds"]
    if counts:
        same = (x for x in rows if x.get("arithmetic") == row.get("arithmetic"))
        ceiling = max(work / x["seconds"] for x in same if "seconds" in x)
    else:
        ceiling = record[f"{problem.bound}_bytes_per_second"]
    star = " *" if row.get("on_host") else ""
    return (
        duration(row["seconds"]) + star, rate(reached, "FLOP" if counts else "B"),
        f"{reached / ceiling:.0%}",
    )  # fmt: skip


def _shown(record: Record, problem: Problem, rows: Sequence[Record]) -> Iterator[str]:
    """Yield a problem's rungs as a table, and why some are not in it."""
    yield f"\n{problem.title} on {record['device']}"
    heads = ["rung", "time", "rate", "of ceiling", "x the rung before"]
    resources = ("registers", "spill_bytes", "shared_memory_bytes", "warps_held")
    lines, before = [], None
    for row in rows:
        if why := row.get("failure") or row.get("skipped"):
            lines.append([row["name"], why])
            continue
        cells: tuple[str, ...] = ("", "", "")
        step = ""
        if "seconds" in row:
            cells = time_cells(record, problem, rows, row)
            step = f"{before / row['seconds']:.2f}" if before else ""
            before = row["seconds"]
        taken = (", ".join(str(k[x]) for k in row.get("kernels", ())) for x in resources)
        lines.append([row["name"], *cells, step, *taken, row.get("library", "")])
    yield from table((*heads, *resources, "kernel"), lines)
    if any(row.get("on_host") for row in rows):
        yield "* Part of it is done on the host, so this is the host's time from call to result."


def first_sentence(source: str) -> str:
    """Return the first sentence of a rung's file, which says what its idea is."""
    text = (SOURCES / source).read_text()
    comment = re.match(r"(//[^\n]*\n)+", text)
    assert comment is not None, source
    words = " ".join(line.removeprefix("//").strip() for line in comment[0].splitlines())
    return re.split(r"(?<=[.]) ", words)[0].rstrip(".")
