"""One checkout's side of ``before_after``: plans, compiles and times its kernels on request.

``benchmarks`` is that of the newer checkout, and ``jax_tilekern`` may be of the older one. So only
what both have is imported from it. A request is a line of JSON on the standard input, which names
a method of :class:`Worker` and its arguments, and an answer is a line on the standard output.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from jax.profiler import ProfileData

import jax_tilekern
from benchmarks.calls.case import types_enabled
from benchmarks.calls.operations import OPERATIONS, OURS
from benchmarks.calls.row import Row
from benchmarks.machine_code import kernel_digest
from benchmarks.suites.suite import load_suite
from jax_tilekern.ops import planned_kernel
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.plans.launch import NoKernel
from jax_tilekern.tuning.device_time import ANNOTATION, blocks
from jax_tilekern.tuning.random_operands import Operands, beyond_cache, random_array
from jax_tilekern.tuning.wall_time import ready, repeated, wall_seconds

# Seconds between blocks, as in jax_tilekern.tuning.device_time.
_PAUSE = 2e-3
# Larger results are not compared: they take too long to copy to the host.
_MAX_COMPARED_BYTES = 128 << 20
_SAMPLED = 256
# Operands of more than this many times the size of L2 have no copies.
_SINGLE_SET = 8

Planner = Callable[..., Any]


class Job(NamedTuple):
    """A row with the keys of its kernels, in the order in which its problems are first planned."""

    row: str
    keys: list[str]


class Program(NamedTuple):
    """A row, digests of its kernels' machine code, and what calls it, unless nothing is to run."""

    row: Row
    machine_code: list[str]
    call: Any


class Worker:
    """Answers requests.

    Parameters
    ----------
    target
        The architecture to plan and compile for, with nothing to be run; by default this GPU's.
    threads
        How many programs are compiled at a time.
    """

    def __init__(self, target: str | None = None, threads: int = 8) -> None:
        self._target = target
        self._rows: dict[str, Row] = {}
        self._pool = ThreadPoolExecutor(threads)
        self._programs: dict[str, Future[Program]] = {}
        self._runs: dict[str, Callable[[], Any]] = {}
        self._order: list[str] = []

    def where(self) -> dict[str, Any]:
        """Return which package this is, and the device."""
        return {"package": jax_tilekern.__file__, "device": jax.devices()[0].device_kind}

    def choices(self, suites: Sequence[str], pattern: str) -> dict[str, Any]:
        """Return, for each problem of each row, the key of its kernel and all that are offered.

        A problem that is planned several times counts once. The key is ``None`` where XLA computes
        it. A row that cannot be planned has the error's message.
        """
        found: dict[str, Any] = {}
        for name in suites:
            suite = load_suite(name)
            for row in suite.rows:
                label = f"{suite.operation}: {row.name}"
                if pattern in label or pattern in row.group:
                    self._rows[label] = row
                    found[label] = _message_of(partial(self._choices, row))
        return found

    def _choices(self, row: Row) -> list[dict[str, Any]]:
        planned: dict[Sequence[Any], dict[str, Any]] = {}

        def choose(planner: Planner, arguments: Sequence[Any], gpu: Any) -> NoKernel:
            if arguments not in planned:
                key, offered = _choice(planner, arguments, gpu)
                planned[arguments] = {"key": key, "offered": offered}
            return NoKernel("only the choice is asked for")

        with self._planning(row, choose):
            self._lowered(row)
        return [*planned.values()]

    def compile(self, jobs: Mapping[str, Sequence[Any]]) -> None:
        """Begin to compile rows by kernels of given keys, in order."""
        for name, job in jobs.items():
            self._programs[name] = self._pool.submit(self._compiled, Job(*job))

    def _compiled(self, job: Job) -> Program:
        row, keys = self._rows[job.row], iter(job.keys)
        key_of: dict[Sequence[Any], str] = {}
        digests: set[str] = set()

        def forced(planner: Planner, arguments: Sequence[Any], gpu: Any) -> Any:
            if arguments not in key_of:
                key_of[arguments] = next(keys)
            key = key_of[arguments]
            candidate = next(c for c in _offered(planner, arguments, gpu) if c.key == key)
            plan = candidate.plan(gpu)
            entries = (launch.entry for launch in plan.launches)
            digests.update(kernel_digest(entry.cubin, entry.symbol) for entry in entries)
            return plan

        with self._planning(row, forced):
            lowered = self._lowered(row)
            if left := [*keys]:
                raise RuntimeError(f"nothing was planned for {left}")
            if self._target is not None:
                return Program(row, sorted(digests), None)
            for struct in row.structs:
                random_array.lower(jax.random.key(0), struct.shape, struct.dtype).compile()
            return Program(row, sorted(digests), lowered.compile())

    def wait(self, jobs: Sequence[str]) -> dict[str, Any]:
        """Wait until jobs are compiled; return digests of their machine code, or errors."""
        return {name: _message_of(partial(self._machine_code, name)) for name in jobs}

    def _machine_code(self, name: str) -> list[str]:
        return self._programs[name].result().machine_code

    def load(self, jobs: Sequence[str]) -> dict[str, Any]:
        """Make operands of jobs in place of those loaded before, and run each.

        An answer has the seconds of a call, digests of the kernels' machine code, and what the
        result is to be compared by: a digest of its bytes and a sample of its values.
        """
        self._runs.clear()
        sets: dict[Row, list[Operands]] = {}
        return {name: _message_of(partial(self._load, name, sets)) for name in jobs}

    def _load(self, name: str, sets: dict[Row, list[Operands]]) -> dict[str, Any]:
        row, machine_code, program = self._programs[name].result()
        with types_enabled(row):
            if row not in sets:
                # Nothing of this is left to run when a profile starts.
                sets[row] = jax.block_until_ready(_operand_sets(row))
            digest, sample = _fingerprint(program(*sets[row][0]))
        rotation = itertools.cycle(sets[row])
        run = self._runs[name] = lambda: program(*next(rotation))
        # The other side may occupy the GPU too, so that a time can be too long.
        seconds = min(wall_seconds(partial(repeated, run, 2)) / 2 for _ in range(4))
        return {
            "seconds": seconds, "machine_code": machine_code, "digest": digest, "sample": sample
        }  # fmt: skip

    def start(self) -> None:
        """Start a profile."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = 1
        self._order = []
        self._folder = tempfile.TemporaryDirectory()
        jax.profiler.start_trace(self._folder.name, profiler_options=options)

    def block(self, job: str, calls: int) -> float:
        """Make a block of calls; return the seconds of a call by the host's clock."""
        time.sleep(_PAUSE)
        self._order.append(job)
        with jax.profiler.TraceAnnotation(ANNOTATION):
            return wall_seconds(partial(repeated, self._runs[job], calls)) / calls

    def stop(self, calls: Mapping[str, int]) -> dict[str, list[float]]:
        """End the profile; return the device's seconds of a call in each block of each job."""
        with self._folder as folder:
            jax.profiler.stop_trace()
            (file,) = Path(folder).rglob("*.xplane.pb")
            found = blocks(ProfileData.from_file(str(file)), calls, self._order)
        return {
            name: [block.device_seconds(calls[name]) for block in found if block.side == name]
            for name in calls
        }

    def _planning(self, row: Row, plan: Planner) -> AbstractContextManager[Any]:
        return _Planning(row, plan, self._target)

    def _lowered(self, row: Row) -> Any:
        function = OPERATIONS[row.operation].call(row.call, OURS)
        # A new function: what JAX has lowered before has other kernels.
        new = jax.jit(lambda *operands: function(*operands))
        return new.trace(*row.structs).lower(lowering_platforms=("cuda",))


_plan: ContextVar[Planner] = ContextVar("plan")


class _Planning:
    """A context in which calls of kernels are planned by a function, for a target."""

    def __init__(self, row: Row, plan: Planner, target: str | None) -> None:
        gpu = nullcontext() if target is None else jax_tilekern.gpu_target(target)
        # An older package has no policies.
        kernels = getattr(jax_tilekern, "policy", nullcontext)("kernels")
        self._contexts: list[AbstractContextManager[Any]] = [types_enabled(row), gpu, kernels]
        self._planner = plan

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()
        self._token = _plan.set(self._planner)

    def __exit__(self, *error: Any) -> None:
        _plan.reset(self._token)
        for context in reversed(self._contexts):
            context.__exit__(*error)


class _Chosen(Exception):
    """A planner compiles the candidate of this key."""


def _probe(candidate: Any) -> Any:
    """Return a candidate that tells that it was chosen, in place of being compiled."""

    def plan(self: Any, gpu: Any) -> Any:
        raise _Chosen(candidate.key)

    kind = type(candidate)
    probe = copy.copy(candidate)
    # Dataclasses are frozen for attributes, and not for their class.
    object.__setattr__(
        probe, "__class__", type(kind.__name__, (kind,), {"plan": plan, "compile": plan})
    )
    return probe


def _finder(planner: Planner) -> tuple[Any, str]:
    """Return where a planner finds its function of candidates: module and name."""
    module = sys.modules[planner.__module__]
    return module, "candidates" if hasattr(module, "candidates") else "sum_candidates"


def _offered(planner: Planner, arguments: Sequence[Any], gpu: Any) -> list[Any]:
    module, name = _finder(planner)
    found = getattr(module, name)(*arguments, gpu)
    return [] if isinstance(found, NoKernel) else found


def _choice(planner: Planner, arguments: Sequence[Any], gpu: Any) -> tuple[str | None, list[str]]:
    """Return the key of the kernel that a planner chooses, if any, and those it chooses from."""
    module, name = _finder(planner)
    found = _offered(planner, arguments, gpu)
    if not found:
        return None, []
    key = None
    with mock.patch.object(module, name, return_value=[*map(_probe, found)]):
        try:
            planner(*arguments, gpu)
        except _Chosen as chosen:
            key = str(chosen)
    return key, [candidate.key for candidate in found]


def _operand_sets(row: Row) -> list[Operands]:
    """Return operands to rotate among; those that exceed L2 by far evict themselves."""
    l2_bytes, first = current_gpu().l2_bytes, row.random_operands(0)
    if sum(x.nbytes for x in first) > _SINGLE_SET * l2_bytes:
        return [first]
    return beyond_cache(first, row.random_operands, l2_bytes)


def _fingerprint(result: Any) -> tuple[str | None, list[float]]:
    """Return a digest of a result, unless it is large, and a sample of its values."""
    arrays = jax.tree.leaves(ready(result))
    if sum(x.nbytes for x in arrays) > _MAX_COMPARED_BYTES:
        return None, []
    digest, sample = hashlib.sha256(), []
    for array in arrays:
        flat = np.asarray(array).reshape(-1)
        digest.update(flat.view(np.uint8).data)
        picked = flat[np.linspace(0, flat.size - 1, _SAMPLED).astype(int)].astype(np.complex128)
        sample += [*picked.real.tolist(), *picked.imag.tolist()]
    return digest.hexdigest(), sample


def _message_of(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or its error as a text: other rows are still to come."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500]


def _requests() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def main(**settings: Any) -> None:
    """Answer requests until the input ends."""
    # Whatever else prints does so on the standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(**settings)

    def planned(planner: Planner, arguments: Sequence[Any], gpu: Any, *, state: Any) -> Any:
        return _plan.get()(planner, arguments, gpu)

    with mock.patch.object(planned_kernel, "_plan_once", planned):
        for request in _requests():
            call = partial(getattr(worker, request.pop("do")), **request)
            try:
                answer = {"result": call()}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)
