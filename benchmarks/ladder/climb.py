"""Climbing a ladder: each rung is compiled, checked against ``jnp``, and timed with the others."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_tilekern
from benchmarks.ladder.rung import Problem, Rung
from jax_tilekern.compilation.nvrtc import CompileError
from jax_tilekern.inspection.kernel_report import KernelReport
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.tuning.product_timing import timed
from jax_tilekern.tuning.random_operands import Operands, beyond_cache, random_array
from jax_tilekern.tuning.wall_time import ready, wall_seconds

Record = dict[str, Any]

# Whole numbers up to this size are exact in every type that a rung multiplies in, TF32 too, and so
# are sums of their products up to 2**24, in any order. A billion random ones add up to less.
_LARGEST_NUMBER = 4
# Runs of a rung that ends on the host, each waited for.
_HOST_RUNS = 20


def compiled(problem: Problem, rung: Rung) -> Record:
    """Compile a rung for the current GPU and return its record.

    Returns
    -------
    Record
        With what its kernels take, or what the library chose; or with why it cannot be climbed:
        ``skipped`` if this problem or this GPU is none for it, ``failure`` if it cannot be compiled
        or launched.
    """
    record: Record = {
        "name": rung.name,
        "source": rung.source,
        "peer": rung in problem.peers,
        "on_host": rung.on_host is not None,
        "arithmetic": rung.arithmetic or problem.arithmetic,
        "kernels": [],
        "library": None,
        "skipped": _why_not(problem, rung),
        "failure": None,
    }
    if record["skipped"] is None:
        try:
            record["kernels"] = [_resources(report) for report in rung.reports(problem.operands)]
            if rung.source is None and not record["peer"]:
                record["library"] = _library(problem, rung)
        except (CompileError, ValueError) as error:
            record["failure"] = str(error)
    return record


def _why_not(problem: Problem, rung: Rung) -> str | None:
    gpu = current_gpu()
    if gpu.compute_capability < rung.compute_capability:
        major, minor = rung.compute_capability
        return f"takes compute capability {major}.{minor}, which {gpu.name} lacks"
    return rung.cannot(**problem.sizes)


def _library(problem: Problem, rung: Rung) -> str:
    """Return which kernels the library takes for a problem."""
    choices = jax_tilekern.explain(rung, *problem.operands, platform="cuda")
    return ", ".join(choice.kernel or f"XLA's ({choice.reason})" for choice in choices)


def _resources(report: KernelReport) -> Record:
    held = report.occupancy
    return {
        "name": report.call.name,
        "grid": report.grid,
        "block": report.block,
        "arch": report.arch,
        "registers": report.registers,
        "spill_bytes": report.spill_bytes,
        "shared_memory_bytes": report.shared_memory_bytes,
        "warps_held": held.fraction if held else None,
    }


def climb(
    problem: Problem,
    rungs: Mapping[str, Rung],
    records: Mapping[str, Record],
    *,
    seconds: float | None,
) -> None:
    """Check the rungs, and time those that are right; put what is found in their records.

    Parameters
    ----------
    problem
        What to compute.
    rungs
        By name.
    records
        What :func:`compiled` returned of each; those that failed are not run.
    seconds
        Time to spend on timing, or ``None`` to time nothing.
    """
    try:
        _check(problem, rungs, records)
        if seconds is not None:
            _time(problem, rungs, records, seconds)
    # Memory that does not suffice for the operands, or a device that a rung has brought to a fault.
    except RuntimeError as error:
        for record in records.values():
            if _runs(record) and "seconds" not in record:
                record["failure"] = str(error)


def _check(problem: Problem, rungs: Mapping[str, Rung], records: Mapping[str, Record]) -> None:
    """Run each rung on random numbers, and put in its record what fails or is not ``jnp``'s.

    Sums are of whole numbers so small that every order of adding gives the same, exactly.
    """
    operands = (
        _whole_numbers(problem.operands) if problem.sums else random_operands(problem, seed=0)
    )
    expected = ready(jax.jit(problem.truth or problem.peers[0])(*operands))
    for name, rung in rungs.items():
        if not _runs(records[name]):
            continue
        try:
            result = ready(jax.jit(rung)(*operands))
            if rung.on_host is not None:
                result = rung.on_host(result)
            records[name]["failure"] = _difference(result, expected)
        # A fault in a kernel, or memory that does not suffice.
        except RuntimeError as error:
            records[name]["failure"] = str(error)


def _runs(record: Record) -> bool:
    return record["skipped"] is None and record["failure"] is None


def _difference(result: Any, expected: Any) -> str | None:
    if (result.shape, result.dtype) != (expected.shape, expected.dtype):
        return f"wrong: {result.dtype}{result.shape}, not {expected.dtype}{expected.shape}"
    # Written so that what is not a number differs.
    count = int(jnp.sum(~(result == expected)))
    return f"wrong: {count} of {expected.size} elements are not jnp's" if count else None


@partial(jax.jit, static_argnums=0)
def _whole_numbers(operands: tuple[jax.ShapeDtypeStruct, ...]) -> Operands:
    most = _LARGEST_NUMBER
    return tuple(
        jax.random.randint(
            jax.random.key(seed, impl="unsafe_rbg"), operand.shape, -most, most + 1, np.int8
        ).astype(operand.dtype)
        for seed, operand in enumerate(operands)
    )


def random_operands(problem: Problem, seed: int) -> Operands:
    """Return normal numbers for a problem's operands, others for each seed."""
    count = len(problem.operands)
    return tuple(
        random_array(
            jax.random.key(seed * count + i, impl="unsafe_rbg"), operand.shape, operand.dtype
        )
        for i, operand in enumerate(problem.operands)
    )


def _time(
    problem: Problem, rungs: Mapping[str, Rung], records: Mapping[str, Record], seconds: float
) -> None:
    """Time the correct rungs, interleaved, and put ``seconds`` and ``method`` in their records.

    Operands are normal numbers that are not in the cache. What ends on the host is timed by the
    host's clock, from the call to the result.
    """
    l2_bytes = current_gpu().l2_bytes
    sets = beyond_cache(random_operands(problem, 0), partial(random_operands, problem), l2_bytes)
    # One rotation for all, or a rung would find what the one before has left in the cache.
    rotation = itertools.cycle(sets)
    on_device: dict[str, Callable[[], Any]] = {}
    for name, rung in rungs.items():
        if not _runs(records[name]):
            continue
        run = partial(_next, jax.jit(rung), rotation)
        if rung.on_host is None:
            on_device[name] = run
        else:
            whole = partial(_then, run, rung.on_host)
            records[name]["seconds"] = statistics.median(
                wall_seconds(whole) for _ in range(_HOST_RUNS)
            )
            records[name]["method"] = "wall time with the host's part"
    if on_device:
        found = timed(on_device, {}, seconds)
        for name, microseconds in found.microseconds.items():
            records[name] |= {"seconds": microseconds * 1e-6, "method": found.method}


def _next(run: Callable[..., Any], rotation: Any) -> Any:
    return run(*next(rotation))


def _then(run: Callable[[], Any], on_host: Callable[[Any], Any]) -> Any:
    return on_host(run())
