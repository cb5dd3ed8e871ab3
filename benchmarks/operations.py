"""A command for each operation: the calls of its suites, or calls drawn at random, against XLA."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

import jax

from benchmarks.commands import ProgramsCommand
from benchmarks.programs import Program
from benchmarks.record import Record
from benchmarks.row_programs import program_of
from benchmarks.rows import OPERATIONS
from benchmarks.samples import draw_sample
from benchmarks.suites import Suite, load_suite, suite_names
from benchmarks.timing import bandwidths


def _suite(operation: str, arguments: argparse.Namespace) -> Suite:
    backend = jax.default_backend()
    if arguments.sample is not None:
        return draw_sample(operation, backend, arguments.sample, arguments.seed)
    return load_suite(operation, arguments.suite or backend)


def _programs(operation: str, arguments: argparse.Namespace) -> Iterator[Program]:
    drawn = arguments.sample is not None
    for row in _suite(operation, arguments).rows:
        yield program_of(row, arguments.policy, drawn=drawn)


def _header(operation: str, arguments: argparse.Namespace) -> Record:
    suite = _suite(operation, arguments)
    return {"suite": suite.name, "operation": operation, **suite.fields, **bandwidths()}


def _command(operation: str) -> ProgramsCommand:
    names = " or ".join(suite_names(operation))
    return ProgramsCommand(
        OPERATIONS[operation].about, partial(_programs, operation), 2.0,
        partial(_header, operation),
        suite={"metavar": "NAME", "help": f"{names} (default: by JAX's backend)"},
        sample={"type": int, "metavar": "N", "help": "N calls drawn at random, no suite"},
        seed={"type": int, "default": 0,
              "help": "of the sample: even ones are for fitting, odd ones for reporting"},
        policy={"choices": ("auto", "kernels"), "default": "auto", "help": "of the library"},
    )  # fmt: skip


COMMANDS = {operation: _command(operation) for operation in OPERATIONS}
