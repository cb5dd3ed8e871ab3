"""The program that ``ladder --counters`` runs under ``ncu``: it launches each rung once.

Only launches between ``cuProfilerStart`` and ``cuProfilerStop`` are profiled, so that compilation,
autotuning and the making of operands cost no replays. A marker kernel, which costs replays too, is
launched only where the kernels themselves do not tell one rung from the next.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jax_tilekern
from benchmarks.ladder.climb import random_operands
from benchmarks.ladder.counters import MARKER, Wanted
from benchmarks.ladder.rung import Ladder
from jax_tilekern.tuning.wall_time import ready

_marker = jax_tilekern.cuda_kernel(
    f"__global__ void {MARKER}(int* out) {{ *out = gridDim.x; }}",
    out=lambda index: jax.ShapeDtypeStruct((), np.dtype(np.int32)),
    grid=lambda index: index + 1,
    block=1,
)


@contextmanager
def profiled() -> Iterator[None]:
    """Have the profiler record what is launched in this context."""
    driver = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    # JAX works in the primary context, which is current only in its own threads.
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    _check(driver.cuCtxSetCurrent(context))
    _check(driver.cuProfilerStart())
    try:
        yield
    finally:
        _check(driver.cuProfilerStop())


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver returned error {status}")


def launch(
    ladder: Ladder,
    wanted: Sequence[Wanted],
    *,
    until: float,
    mark: Callable[[int], Any] = lambda index: ready(_marker(index=index)),
    recording: Callable[[], Any] = profiled,
) -> None:
    """Launch the wanted rungs in order, with markers where one is needed to tell them apart.

    Parameters
    ----------
    ladder
        The rungs' ladder.
    wanted
        The rungs; those of a problem are adjacent.
    until
        No rung is launched at or after this time of :func:`time.monotonic`.
    mark, recording
        Launch a marker, and return the context in which launches are recorded.
    """
    of_problem = itertools.groupby(
        enumerate(wanted), key=lambda item: (item[1].size, item[1].title)
    )
    for (size, title), items in of_problem:
        if time.monotonic() >= until:
            break
        (problem,) = (p for p in ladder.parse(size) if p.title == title)
        rungs = {rung.name: rung for rung in (*problem.rungs, *problem.peers)}
        with problem.types_enabled():
            operands = random_operands(problem, seed=0)
            runs = [(index, jax.jit(rungs[one.name])) for index, one in items]
            for _, run in runs:
                # Compiled, autotuned and loaded, unrecorded.
                ready(run(*operands))
            with recording():
                for index, run in runs:
                    if time.monotonic() >= until:
                        break
                    if index == 0 or not wanted[index].follows(wanted[index - 1]):
                        mark(index)
                    ready(run(*operands))


def main() -> None:
    """Launch what the file named on the command line asks for."""
    start = time.monotonic()
    order = json.loads(Path(sys.argv[1]).read_text())
    ladder = importlib.import_module(f"benchmarks.ladder.{order['ladder']}").LADDER
    wanted = [Wanted(*one) for one in order["wanted"]]
    launch(ladder, wanted, until=start + order["seconds"])


if __name__ == "__main__":
    main()
