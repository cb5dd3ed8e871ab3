"""``first_lowerings``: how long programs take to be lowered for a GPU that is not here.

    python -m benchmarks first_lowerings --gpu H200 --json FILE

Each time is that of a fresh process with an empty kernel cache, which
``python -m benchmarks.first_lowerings`` is. ``ours`` compiles the kernels of a program side by side
(``primitives/deferral.py``), and ``in order`` each where its call is lowered.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

import jax_tilekern as jtk
from benchmarks.commands import ROWS, RowsCommand, matches
from benchmarks.first_calls import fresh_process, programs
from benchmarks.record import Record
from jax_tilekern.primitives import deferral

_SIDES = ("ours", "in order")
_ROWS = ROWS["rows"] | {"default": ["kernel*", "mixture*"]}


def _rows(arguments: argparse.Namespace) -> Iterator[Record]:
    for program in programs(gpu=True):
        if not matches(program.name, arguments.rows):
            continue
        found: dict[str, list[dict[str, float]]] = {side: [] for side in _SIDES}
        for number in range(arguments.rounds):
            for side in _SIDES[:: -1 if number % 2 else 1]:
                found[side].append(_lowered_afresh(program.name, side, arguments.gpu))
        medians = {side: float(np.median([x["first"] for x in found[side]])) for side in _SIDES}
        yield {
            "name": f"{program.name}, for {arguments.gpu}",
            "seconds": medians,
            "ratio": {"in order": medians["in order"] / medians["ours"]},
            "compiled": found["ours"][0]["compiled"],
            "threads": len(os.sched_getaffinity(0)),
        }


def _lowered_afresh(name: str, side: str, gpu: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return fresh_process("benchmarks.first_lowerings", [name, side, gpu], Path(folder))


def _lower(name: str, side: str, gpu: str) -> dict[str, float]:
    """Lower a program for the first time."""
    (program,) = (x for x in programs(gpu=True) if x.name == name)
    types = jax.eval_shape(program.arguments)

    in_order = mock.patch.object(deferral, "plan", _planned)
    with jtk.gpu_target(gpu), in_order if side == "in order" else nullcontext():
        traced = jax.jit(program.sides["ours"]).trace(*types)
        start = time.perf_counter()
        traced.lower(lowering_platforms=("cuda",))
        return {"first": time.perf_counter() - start}


def _planned(planner: Callable[..., Any], *arguments: Any) -> Any:
    return planner(*arguments)


COMMAND = RowsCommand(
    "time the lowering of programs for a GPU, with and without kernels compiled side by side",
    _rows,
    rows=_ROWS,
    gpu={"default": "H200", "help": "as gpu_target takes it (%(default)s)"},
    rounds={"type": int, "default": 3, "help": "fresh processes of each kind"},
)

if __name__ == "__main__":
    print(json.dumps(_lower(*sys.argv[1:])))
