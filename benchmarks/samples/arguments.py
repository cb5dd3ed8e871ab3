"""Arguments of the commands that measure a sample instead of a suite."""

from __future__ import annotations

import argparse


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


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 0 <= I < N")
    return int(number), int(count)
