"""``tune``: measure the kernels for products, and store the fastest."""

from __future__ import annotations

import argparse
import faulthandler
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jax_tilekern.cli.product_call import (
    ProductCall,
    ProductCallError,
    add_product_arguments,
    product_calls,
)
from jax_tilekern.cli.run_command import INTERRUPTED
from jax_tilekern.compilation.nvrtc import NvrtcNotFound
from jax_tilekern.plans.gpu import NoGpu
from jax_tilekern.plans.tuned import current_choices
from jax_tilekern.tuning import tuner

if TYPE_CHECKING:
    from jax_tilekern.plans.gemm.problem import Product

HELP = "measure which kernel is the fastest for products, and store the choice"

# A kernel that never ends would occupy the GPU, and make the process uninterruptible.
_LONGEST_PRODUCT = 300.0
# The file descriptor; `sys.stderr` may have none.
_STDERR = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_product_arguments(parser)
    add_tuning_arguments(parser)


def add_tuning_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how products are measured and where results are written."""
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="timing of a product (default: %(default)s)"
    )
    parser.add_argument(
        "--force", action="store_true", help="measure again what these kernels were tuned for"
    )
    parser.add_argument(
        "--export", type=Path, metavar="FILE", help="write all choices for this GPU to FILE"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 if a product failed, 2 for a bad argument."""
    try:
        return tune_calls(product_calls(arguments), arguments)
    except (ProductCallError, NoGpu, NvrtcNotFound) as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2


def tune_calls(calls: Sequence[ProductCall], arguments: argparse.Namespace) -> int:
    """Tune the products of ``calls`` and return the exit status: 1 if one failed.

    Calls whose products no kernel computes are named and left out. ``arguments`` are those of
    :func:`add_tuning_arguments`.

    Raises
    ------
    ProductCallError
        If there is nothing to do, or an argument is wrong.
    NoGpu, NvrtcNotFound
        If nothing can be measured here.
    """
    if arguments.seconds <= 0:
        raise ProductCallError("--seconds is positive")
    if not calls and arguments.export is None:
        raise ProductCallError("nothing to tune: name a product, such as 'matmul bf16 512x512x512'")
    gpu = tuner.gpu_to_measure()
    products = list(dict.fromkeys(product for call in calls for product in _products(call)))
    done: list[tuner.TunedProduct] = []
    status = 0
    try:
        for number, product in enumerate(products, start=1):
            print(f"{number}/{len(products)}  {tuner.short_name(product)}", flush=True)
            limit = _LONGEST_PRODUCT + 10 * arguments.seconds
            faulthandler.dump_traceback_later(limit, exit=True, file=_STDERR)
            options = {"seconds": arguments.seconds, "force": arguments.force}
            done += tuner.tune_products([product], gpu, **options)
            for key, why in done[-1].failures.items():
                print(f"    {key}: {why}")
    except KeyboardInterrupt:
        left = len(products) - len(done)
        print(f"Interrupted. The same command continues with the other {left}.")
        status = INTERRUPTED
    # A product's own failure is in its row, so this is the device's.
    except RuntimeError as error:
        print(f"The device failed: {error}")
        status = 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    if done:
        print(f"Tuned for {gpu.name}", tuner.Tuning(done), sep="\n")
        print(f"Stored in {current_choices().folder}.")
    if arguments.export is not None:
        count = tuner.export(arguments.export, gpu)
        print(f"{count} choices written to {arguments.export}.")
    return status or int(any(row.choice is None for row in done))


def _products(call: ProductCall) -> list[Product]:
    """Return the products of a call that kernels can compute; say if there are none."""
    with call.types_enabled():
        try:
            products = tuner.products_of(call.function, *call.operands)
        except (TypeError, ValueError) as error:
            raise ProductCallError(f"{call.name!r}: {error}") from error
    if not products:
        print(f"{call.name}: no kernel computes it, so it is XLA's", file=sys.stderr)
    return products
