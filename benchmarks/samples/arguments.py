"""Arguments of the commands that measure a sample instead of a suite."""

from __future__ import annotations

import argparse
import os

from jax_tilekern import _core

# By our name for an instruction set: XLA's.
_LIMITS = {"avx2": "AVX2", "avx512": "AVX512"}


def add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of samples."""
    parser.add_argument(
        "--sample", type=int, metavar="N", help="measure N calls drawn at random, not a suite"
    )
    parser.add_argument(
        "--seed", type=int, default=0,
        help="of the sample: even ones are for fitting, odd ones for reporting (default: 0)",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, help="begin no row of the sample after this time")
    parser.add_argument(
        "--part", type=_part, default=(0, 1), metavar="I/N",
        help="only every N-th row of the sample, from row I (counted from 0)",
    )  # fmt: skip
    parser.add_argument(
        "--policy", choices=("auto", "kernels"), default="auto",
        help="of the library while the sample is measured (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--instruction-set", choices=_LIMITS,
        help="of both sides on a CPU; by default the best that it has",
    )  # fmt: skip


def limit_instruction_set(name: str | None) -> None:
    """Limit the kernels of both sides, before JAX makes its first program."""
    if name is not None:
        _core.set_cpu_instruction_set(name)
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_max_isa={_LIMITS[name]}"


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 0 <= I < N")
    return int(number), int(count)
