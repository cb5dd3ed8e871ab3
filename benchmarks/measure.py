"""Programs, measured: compiled side by side, checked, and timed.

Programs are taken in chunks. Threads compile every side of a chunk, and nothing else runs on the
device meanwhile: XLA's autotuner locks the GPU while it times its own candidates. Then results are
compared, one program after the other, and at last the sides are timed, many programs in one profile
where theirs is the usual timing.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jax_tilekern as jtk
from benchmarks.programs import Arrays, Errors, Program, WrongResult, on_gpu
from benchmarks.record import Record
from benchmarks.timing import Runs, Times, device_times, rotating, rows_of_a_profile, times_of_rows
from jax_tilekern.cli.console import size
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.tuning.random_operands import copies_beyond_cache
from jax_tilekern.tuning.wall_time import ready, wall_seconds

# An error that no margin is about.
_ROUNDING = 1e-6


@dataclass
class CompiledProgram:
    """A program's arguments and compiled sides, and why others did not compile."""

    program: Program
    arguments: Arrays
    sides: dict[str, Any]
    kernels: dict[str, list[str]]
    failures: dict[str, str]


def compiled(program: Program) -> CompiledProgram:
    """Compile the sides of a program. One that fails is left out, unless it is required."""
    with jax.enable_x64(program.wide):
        found = CompiledProgram(program, program.arguments(), {}, {}, {})
        for name, side in program.sides.items():
            try:
                taken = program.taken_by(name, found.arguments)
                with program.contexts.get(name, nullcontext)():
                    # Sides of one function differ in their contexts.
                    traced = jax.jit(lambda *args, side=side: side(*args))
                    found.sides[name] = traced.lower(*taken).compile()
                    if name == "ours" or name in program.contexts:
                        found.kernels[name] = kernels_of(side, taken)
            except Exception as error:
                if name in program.required:
                    raise
                found.failures[name] = failure_of(error)
        program.also_compiled()
    return found


def kernels_of(side: Callable[..., Any], arguments: Arrays) -> list[str]:
    """Return the kernel of each call of this package's, ``-`` where XLA has it, and why."""
    choices = jtk.explain(side, *arguments)
    return [f"{choice.kernel or '-'} {choice.reason}".strip() for choice in choices]


@dataclass
class CheckedProgram:
    """A program whose sides have run, those that are timed, and what its row has besides times."""

    found: CompiledProgram
    names: Sequence[str]
    peer: str | None
    fields: Record

    @property
    def is_right(self) -> bool:
        """Whether the row has times."""
        return "failure" not in self.fields

    @property
    def rotation_bytes(self) -> int:
        """The bytes of all arguments that calls alternate among."""
        return self._copies * self._argument_bytes

    @property
    def _argument_bytes(self) -> int:
        """The fewest bytes that a side reads of the program's own arguments."""
        names = [name for name in self.names if name not in self.found.program.arguments_of]
        sides = (self.found.sides[name] for name in names)
        return min(int(side.memory_analysis().argument_size_in_bytes) for side in sides)

    @property
    def _copies(self) -> int:
        """So many that each side finds none of its own in L2."""
        if not (self.found.program.beyond_cache and on_gpu()):
            return 1
        return copies_beyond_cache(self._argument_bytes, current_gpu().l2_bytes)

    def runs(self) -> Runs:
        """Return what makes one call of each side."""
        first, program = self.found.arguments, self.found.program
        copied = functools.partial(jax.tree.map, jnp.copy, first)
        with jax.enable_x64(program.wide):
            sets = [first, *(copied() for _ in range(self._copies - 1))]
            taken = {name: [program.taken_by(name, x) for x in sets] for name in self.names}
        return rotating(self.found.sides, taken)

    def row(self, times: Times) -> Record:
        """Return the row with the times of its sides."""
        fields, of_ours = times.fields(), self.found.kernels["ours"]
        target = self.found.program.fields.get("target", {})
        compared = [
            name for name in self.names if name != "ours" and (name == self.peer or name in target)
        ]
        more = {
            "wall_seconds": fields.get("wall_seconds"),
            "sm_mhz": fields.get("sm_mhz"),
            "failures": self.found.failures,
            "kernels_of_sides": {
                side: x
                for side, x in self.found.kernels.items()
                if side in self.names and x != of_ours
            },
        }
        return self.fields | {
            "seconds": fields["seconds"],
            "ratio": {name: fields["ratio"][name] for name in compared},
            "spread": {name: fields["spread"][name] for name in compared},
            "method": fields["method"],
            "temporaries": {name: temporary_bytes(self.found.sides[name]) for name in self.names},
            **{key: value for key, value in more.items() if value},
        }


def checked(found: CompiledProgram) -> CheckedProgram:
    """Run the sides of a program.

    A side that is not required and fails, is wrong, takes too long or does not fit into memory is
    left out; the row has the reason. Where that is the peer, ours is compared with another side.
    """
    program, arguments = found.program, found.arguments
    with jax.enable_x64(program.wide):
        results: dict[str, Any] = {}
        for name, side in found.sides.items():
            try:
                check_memory(side, copies=2 if program.beyond_cache else 1)
                taken = program.taken_by(name, arguments)
                results[name] = ready(side(*taken))
                if name not in program.required and program.longest_call < math.inf:
                    _check_time(functools.partial(side, *taken), program.longest_call)
            except Exception as error:
                if name in program.required:
                    raise
                results.pop(name, None)
                found.failures[name] = failure_of(error)
        fields = {
            "name": program.name,
            **({"group": program.group} if program.group else {}),
            **program.fields,
            "error": {},
            "kernels": found.kernels["ours"],
        }
        try:
            fields["error"] = program.errors(arguments, results) if len(results) > 1 else {}
        except WrongResult as wrong:
            fields |= {"error": wrong.errors, "failure": str(wrong)}
        names = [name for name in results if not _is_wrong(program, name, fields["error"])]
        for name in results.keys() - names:
            found.failures[name] = f"wrong: differs by {fields['error'].pop(name):.0%}"
        peers = [x for x in (program.peer, *program.sides) if x in names and x != "ours"]
        peer = next(iter(peers), None)
        ours, theirs = (fields["error"].get(x, 0.0) for x in ("ours", peer))
        if "failure" not in fields and peer and ours > program.margin * theirs + _ROUNDING:
            fields["failure"] = f"error {ours:.1e}, {peer}'s {theirs:.1e}"
    return CheckedProgram(found, names, peer, fields)


def _is_wrong(program: Program, side: str, errors: Errors) -> bool:
    other = side not in ("ours", program.peer)
    return other and program.rough < math.inf and not errors.get(side, 0.0) <= program.rough


def _check_time(run: Any, longest: float) -> None:
    if wall_seconds(run) > longest:
        raise TimeoutError(f"a call takes longer than {longest:g} s")


def measured(program: Program, seconds: float) -> Record:
    """Return the row of a program: times, errors and temporaries of each side."""
    found = checked(compiled(program))
    return found.row(_times([found], seconds)[0]) if found.is_right else found.fields


def _times(programs: Sequence[CheckedProgram], seconds: float) -> Sequence[Times]:
    """Return the times of programs, of several by one profile."""
    if len(programs) > 1:
        return times_of_rows([x.runs() for x in programs], seconds)
    (one,) = programs
    with jax.enable_x64(one.found.program.wide):
        return [one.found.program.timing(one.runs(), seconds)]


def rows_of(
    programs: Iterable[Program], seconds: float, threads: int, begun: Callable[[Record], None]
) -> Iterator[Record]:
    """Yield a row of each program.

    Parameters
    ----------
    programs
        What is measured.
    seconds
        Time to spend on the calls of a row.
    threads
        Those that compile.
    begun
        Is called before a program runs, with its row if the process ends in it.
    """
    with ThreadPoolExecutor(threads) as pool:
        remaining = iter(programs)
        for program in remaining:
            chunk = [program, *itertools.islice(remaining, program.side_by_side - 1)]
            # NVRTC and XLA compile without the interpreter's lock.
            jobs = [pool.submit(compiled, x) for x in chunk]
            wait(jobs)
            right: list[CheckedProgram] = []
            for one, job in zip(chunk, jobs, strict=True):
                begun(_failed(one, "the run ended while this row was measured"))
                # A row may exhaust the memory, or meet a bug below; others are still to come.
                try:
                    with _deadline(one):
                        found = checked(job.result())
                except Exception as error:
                    yield _failed(one, f"{type(error).__name__}: {error}")
                    continue
                if found.is_right:
                    right.append(found)
                else:
                    yield found.fields
            for group in _profiles(right):
                yield from _timed_rows(group, seconds)


def _profiles(programs: Sequence[CheckedProgram]) -> Iterable[Sequence[CheckedProgram]]:
    """Return the programs that each profile serves; those with a timing of their own are alone."""
    if on_gpu() and all(x.found.program.timing is device_times for x in programs):
        return rows_of_a_profile(programs, lambda x: x.rotation_bytes)
    return [[x] for x in programs]


def _timed_rows(programs: Sequence[CheckedProgram], seconds: float) -> Iterator[Record]:
    try:
        with _deadline(programs[0].found.program):
            times = _times(programs, seconds)
    except Exception as error:
        failure = {"failure": f"{type(error).__name__}: {error}"}
        yield from (x.fields | failure for x in programs)
    else:
        yield from (x.row(found) for x, found in zip(programs, times, strict=True))


def _failed(program: Program, why: str) -> Record:
    group = {"group": program.group} if program.group else {}
    return {"name": program.name, **group, **program.fields, "failure": why}


@contextmanager
def _deadline(program: Program) -> Iterator[None]:
    """End the process, by force, if the context takes longer on a GPU than the program may."""

    def give_up() -> None:
        line = f"{program.name} does not end. A new run with --resume goes on."
        print(line, file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(program.deadline, give_up) if program.deadline < math.inf else None
    if timer and on_gpu():
        timer.start()
    try:
        yield
    finally:
        if timer:
            timer.cancel()


def device_answers() -> bool:
    """Return whether the device still computes."""
    try:
        ready(jnp.zeros(8) + 1)
    except RuntimeError:
        return False
    return True


# Memory and failures.


def check_memory(compiled: Any, placed: bool = True, copies: int = 1) -> None:
    """Raise a :class:`MemoryError` unless a compiled program fits into what the device has left.

    Parameters
    ----------
    compiled
        The program.
    placed
        Whether its arguments are on the device.
    copies
        How many sets of them there are at least.
    """
    arguments = compiled.memory_analysis().argument_size_in_bytes
    needed = bytes_needed(compiled) + (copies - 1 - placed) * arguments
    if needed > free_bytes():
        raise MemoryError(f"{size(needed)} needed, {size(free_bytes())} free")


def bytes_needed(compiled: Any) -> int:
    """Return the bytes of a program's arguments, results and temporaries."""
    memory = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return int(total - memory.alias_size_in_bytes)


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
