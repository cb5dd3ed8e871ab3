"""``explain``: which kernel computes a product, and why."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext

from jax_tilekern.cli.product_call import add_product_arguments, product_calls
from jax_tilekern.compilation.nvrtc import NvrtcNotFound, nvrtc
from jax_tilekern.inspection.explain import Explanation, explain
from jax_tilekern.interop.gpu_target import gpu_target
from jax_tilekern.interop.outcomes import Choice

HELP = "show which kernel computes a product, and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_product_arguments(parser)
    parser.add_argument(
        "--gpu",
        metavar="GPU",
        help="plan for this GPU, such as h100 or sm_90 (default: JAX's backend)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 2 for a bad argument, or without NVRTC."""
    try:
        calls = product_calls(arguments)
        if not calls:
            raise ValueError("name a product, such as 'matmul bf16 512x512x512'")
        if arguments.gpu is not None:
            nvrtc()
        with gpu_target(arguments.gpu) if arguments.gpu is not None else nullcontext():
            choices: list[Choice] = []
            for call in calls:
                with call.types_enabled():
                    choices += explain(call.function, *call.operands)
            print(Explanation(choices))
    except (TypeError, ValueError, NvrtcNotFound) as error:
        print(error, file=sys.stderr)
        return 2
    return 0
