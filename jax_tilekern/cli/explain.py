"""``explain``: which kernel computes a product, and why."""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from jax_tilekern.cli.product_call import FORM, ProductCallError, parse_product, products_in
from jax_tilekern.compilation.nvrtc import NvrtcNotFound, nvrtc
from jax_tilekern.inspection.explain import explain
from jax_tilekern.plans.gpu import gpu_target

HELP = "show which kernel computes a product, and why"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("products", nargs="+", metavar="PRODUCT", help=FORM)
    parser.add_argument("--out", metavar="TYPE", help="type of the results")
    parser.add_argument("--precision", metavar="NAME", help="as JAX names it")
    parser.add_argument(
        "--gpu",
        metavar="GPU",
        help="plan for this GPU, such as h100 or sm_90 (default: JAX's backend)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 2 for a bad argument, or without NVRTC."""
    target: AbstractContextManager[Any] = nullcontext()
    platform = None
    try:
        if arguments.gpu is not None:
            target, platform = gpu_target(arguments.gpu), "cuda"
            nvrtc()
        with target:
            for text in products_in(arguments.products):
                call = parse_product(text, arguments.out, arguments.precision)
                with call.types_enabled():
                    print(explain(call.function, *call.operands, platform=platform))
    except (ProductCallError, TypeError, ValueError, NvrtcNotFound) as error:
        print(error, file=sys.stderr)
        return 2
    return 0
