"""``tune``: measure the kernels for products, and store the fastest."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jax_tilekern.cli.console import make_console
from jax_tilekern.cli.product_call import (
    FORM,
    ProductCall,
    ProductCallError,
    parse_product,
    products_in,
)
from jax_tilekern.compilation.nvrtc import NvrtcNotFound, nvrtc
from jax_tilekern.plans.gpu import Gpu, NoGpu
from jax_tilekern.plans.tuned import TunedChoices, current_choices
from jax_tilekern.tuning import tuner as tuning

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress

    from jax_tilekern.plans.gemm.problem import Product
    from jax_tilekern.tuning.tuner import TunedProduct

HELP = "measure which kernel is the fastest for products, and store the choice"

# A kernel that never ends would occupy the GPU, and make the process uninterruptible.
_LONGEST_PRODUCT = 300.0
_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("products", nargs="*", metavar="PRODUCT", help=FORM)
    parser.add_argument("--out", metavar="TYPE", help="type of the results")
    parser.add_argument("--precision", metavar="NAME", help="as JAX names it")
    add_tuning_arguments(parser)


def add_tuning_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how products are measured and where results are stored."""
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="timing of a product (default: %(default)s)"
    )
    parser.add_argument(
        "--top", type=int, default=8, metavar="N",
        help="measure the best N by the cost model (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--force",
        action="store_true",
        help="measure again what these kernels were tuned for",
    )
    parser.add_argument(
        "--export", type=Path, metavar="FILE", help="write all choices for this GPU to FILE"
    )
    parser.add_argument(
        "--folder", type=Path, help="store the results here, and not where plans look for them"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 if a product failed, 2 for a bad argument."""
    try:
        calls = [
            parse_product(text, arguments.out, arguments.precision)
            for text in products_in(arguments.products)
        ]
        return tune_calls(calls, arguments)
    except NoGpu as error:
        print(f"tune needs a GPU: {error}", file=sys.stderr)
        return 2
    except (ProductCallError, NvrtcNotFound) as error:
        print(error, file=sys.stderr)
        return 2


def tune_calls(calls: Sequence[ProductCall], arguments: argparse.Namespace) -> int:
    """Tune the products of ``calls`` and return the exit status: 1 if one failed.

    Parameters
    ----------
    calls
        Those whose products no kernel computes are named and left out.
    arguments
        What :func:`add_tuning_arguments` declares.

    Raises
    ------
    ProductCallError
        If there is nothing to do, or an argument is wrong.
    NoGpu, NvrtcNotFound
        If nothing can be measured here.
    """
    if arguments.seconds <= 0 or arguments.top < 1:
        raise ProductCallError("--seconds and --top are positive")
    if not calls and arguments.export is None:
        raise ProductCallError("nothing to tune: name a product, such as 'matmul bf16 512x512x512'")
    gpu = tuning.gpu_to_measure()
    nvrtc()
    choices = TunedChoices(arguments.folder) if arguments.folder else current_choices()
    done, status = _tuned(_products(calls), gpu, choices, arguments)
    console = make_console()
    if done:
        console.print(_table(f"Tuned for {gpu.name}", done))
        console.print(tuning.reach(done), f"Stored in {choices.file(gpu)}.", sep="\n")
    if arguments.export is not None:
        count = choices.export(arguments.export, gpu)
        console.print(f"{count} choices written to {arguments.export}.")
    return status or int(any(row.choice is None for row in done))


def _products(calls: Sequence[ProductCall]) -> list[Product]:
    """Return the products that kernels can compute, each once; say which calls have none."""
    found: list[Product] = []
    for call in calls:
        with call.types_enabled():
            try:
                products = tuning.products_of(call.function, *call.operands)
            except (TypeError, ValueError) as error:
                raise ProductCallError(f"{call.name!r}: {error}") from error
        if not products:
            print(f"{call.name}: no kernel computes it, so it is XLA's", file=sys.stderr)
        found += products
    return list(dict.fromkeys(found))


def _tuned(
    products: Sequence[Product], gpu: Gpu, choices: TunedChoices, arguments: argparse.Namespace
) -> tuple[list[TunedProduct], int]:
    """Return what was tuned, and the exit status of what ended it early."""
    done: list[TunedProduct] = []
    with _progress() as progress:
        task = progress.add_task("", total=len(products))
        try:
            for number, product in enumerate(products, start=1):
                name = tuning.short_name(product)
                progress.update(task, description=name)
                with _deadline(name, _LONGEST_PRODUCT + 10 * arguments.seconds):
                    for row in tuning.tune_products(
                        [product],
                        gpu,
                        seconds=arguments.seconds,
                        top=arguments.top,
                        force=arguments.force,
                        choices=choices,
                    ):
                        done.append(row)
                        _show(progress, f"{number}/{len(products)}", row)
                progress.advance(task)
        except KeyboardInterrupt:
            progress.console.print(
                f"Interrupted. The results so far are stored, and the same command continues "
                f"with the other {len(products) - len(done)}."
            )
            return done, _INTERRUPTED
        # A product's own failure is in its row, so this is the device's.
        except RuntimeError as error:
            progress.console.print(f"The device failed: {error}\nThe results so far are stored.")
            return done, 1
    return done, 0


# Output


def _progress() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeRemaining

    console = make_console()
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemaining(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


def _show(progress: Progress, number: str, row: TunedProduct) -> None:
    name, winner, time, *_ = row.cells()
    note = "  (tuned before)" if row.known else ""
    progress.console.print(f"{number}  {name}  {winner}  {time}{note}")
    for key, why in row.failures.items():
        progress.console.print(f"    {key}: {why}")


def _table(title: str, rows: Sequence[TunedProduct]) -> RenderableType:
    from rich.table import Table

    from jax_tilekern.tuning.tuner import TunedProduct

    table = Table(title=title, title_justify="left")
    for heading in TunedProduct.HEADINGS:
        text = heading in ("product", "winner", "model's choice")
        table.add_column(heading, justify="left" if text else "right", overflow="fold")
    for row in rows:
        table.add_row(*row.cells(), style="bold red" if row.choice is None else None)
    return table


@contextlib.contextmanager
def _deadline(name: str, seconds: float) -> Iterator[None]:
    """Kill the process if the context takes longer than any product needs."""

    def give_up() -> None:
        print(f"{name} does not end. Earlier results are stored.", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
