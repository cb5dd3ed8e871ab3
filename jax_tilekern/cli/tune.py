"""``tune``: measure the kernels for products, and keep which is the fastest."""

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

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress

    from jax_tilekern.cli.bench.row import Row
    from jax_tilekern.plans.gemm.problem import Product
    from jax_tilekern.tuning.tune import TunedProduct

HELP = "measure which kernel is the fastest for products, and keep it"

_TYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
}
# Of the result, where it is not the operands' own.
_RESULTS = {"int8": "int32", "float8_e4m3fn": "bfloat16", "float8_e5m2": "bfloat16"}
# How operands lie in memory, without and with a batch before.
_LHS = {"N": "mk", "T": "km"}
_RHS = {"N": "kn", "T": "nk"}
# A kernel that never ends would keep the GPU for as long as somebody pays for it, and the process
# from being interrupted.
_LONGEST_PRODUCT = 300.0
_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "products", nargs="*", metavar="PRODUCT",
        help="M,N,K,TYPE or B,M,N,K,TYPE for a batch, with :NT, :TN or :TT where operands lie "
        "transposed; for example 4096,4096,4096,bf16:NT",
    )  # fmt: skip
    parser.add_argument(
        "--op", choices=("matmul",), default="matmul", help="which operation (%(default)s)"
    )
    parser.add_argument("--suite", metavar="NAME", help="every row of a suite of bench, too")
    parser.add_argument("--rows", metavar="PATTERN", help="only rows of it that match")
    parser.add_argument("--out", metavar="TYPE", help="type of the results of PRODUCTs")
    parser.add_argument("--precision", metavar="NAME", help="of PRODUCTs, as JAX has it")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="timing of a product (default: %(default)s)"
    )
    parser.add_argument(
        "--top", type=int, default=8, metavar="N",
        help="measure the best N by the cost model (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--force", action="store_true", help="measure again what is tuned for these kernels"
    )
    parser.add_argument(
        "--export", type=Path, metavar="FILE", help="write all that is tuned for this GPU here"
    )
    parser.add_argument(
        "--folder", type=Path, help="keep the results here, and not where plans look for them"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 if a product failed, 2 for a bad argument."""
    # Imported here: the other commands need none of it.
    from jax_tilekern.cli.bench.suite import SuiteError
    from jax_tilekern.compilation import compiler
    from jax_tilekern.plans.gpu import NoGpu
    from jax_tilekern.plans.tuned import current_choices
    from jax_tilekern.tuning import tune as tuning

    try:
        rows = _rows(arguments)
        gpu = tuning.gpu_to_measure()
        compiler.nvrtc()
        products = _products(rows)
    except (SuiteError, NoGpu, compiler.NvrtcNotFound) as error:
        print(error, file=sys.stderr)
        return 2

    choices = tuning.TunedChoices(arguments.folder) if arguments.folder else current_choices()
    console = make_console()
    done: list[TunedProduct] = []
    status = 0
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
                f"Interrupted. What was measured is kept, and the same command goes on "
                f"with the other {len(products) - len(done)}."
            )
            status = _INTERRUPTED
        # What fails of a product is in its row; this is the device.
        except RuntimeError as error:
            progress.console.print(f"The device failed: {error}\nWhat was measured is kept.")
            status = 1
    if done:
        console.print(_table(f"Tuned for {gpu.name}", done))
        console.print(tuning.reach(done), f"Kept in {choices.file(gpu)}.", sep="\n")
    if arguments.export is not None:
        count = choices.export(arguments.export, gpu)
        console.print(f"{count} choices written to {arguments.export}.")
    return status or int(any(row.choice is None for row in done))


# What to tune


def _rows(arguments: argparse.Namespace) -> list[Row]:
    from jax_tilekern.cli.bench.suite import SuiteError, load_suite

    if arguments.seconds <= 0 or arguments.top < 1:
        raise SuiteError("--seconds and --top are positive")
    rows = [parse_product(text, arguments.out, arguments.precision) for text in arguments.products]
    if arguments.suite:
        suite = load_suite(arguments.suite)
        if suite.operation != "matmul":
            raise SuiteError(f"suite {suite.name} has no products, but {suite.operation}")
        rows += (suite.matching(arguments.rows) if arguments.rows else suite).rows
    elif arguments.rows:
        raise SuiteError("--rows picks rows of --suite")
    if not rows and arguments.export is None:
        raise SuiteError("nothing to tune: name a product, such as 4096,4096,4096,bf16, or --suite")
    return rows


def parse_product(text: str, out: str | None = None, precision: str | None = None) -> Row:
    """Return the product that a command line names.

    Parameters
    ----------
    text
        ``M,N,K,TYPE`` or ``B,M,N,K,TYPE``, and ``:NT`` for a transposed right operand, ``:TN`` for
        a left one, ``:TT`` for both.
    out
        Type of the result; by default the operands', or what sums of theirs are.
    precision
        As ``jax.lax.dot_general`` takes it.

    Raises
    ------
    SuiteError
        If it is none.
    """
    from jax_tilekern.cli.bench.row import Row
    from jax_tilekern.cli.bench.suite import SuiteError, product_out

    fields, _, orders = text.partition(":")
    *numbers, type_ = fields.split(",")
    orders = orders.upper() or "NN"
    try:
        lhs, rhs = (_LHS[orders[0]], _RHS[orders[1]]) if len(orders) == 2 else (None, None)
        sizes = [int(number) for number in numbers]
    except (KeyError, ValueError):
        lhs = rhs = None
        sizes = []
    if lhs is None or rhs is None or len(sizes) not in (3, 4) or min(sizes) < 1:
        raise SuiteError(
            f"{text!r} is not M,N,K,TYPE or B,M,N,K,TYPE with positive sizes, and :NN, :NT, :TN "
            "or :TT"
        )
    batch = "b" * (len(sizes) - 3)
    type_ = _type_name(type_, text)
    return Row(
        name=text,
        group="command line",
        floor=0.0,
        type=type_,
        lhs=batch + lhs,
        rhs=batch + rhs,
        out=product_out(batch + lhs, batch + rhs),
        sizes=dict(zip(f"{batch}mnk", sizes, strict=True)),
        result=_type_name(out, text) if out else _RESULTS.get(type_),
        precision=precision,
    )


def _type_name(name: str, text: str) -> str:
    import jax.numpy as jnp

    from jax_tilekern.cli.bench.suite import SuiteError

    try:
        return str(jnp.dtype(_TYPES.get(name, name)))
    except TypeError as error:
        raise SuiteError(f"{text!r}: {error}") from error


def _products(rows: Sequence[Row]) -> list[Product]:
    """Return the products that kernels can compute, each once; say which rows have none."""
    import jax

    from jax_tilekern.cli.bench.case import Case, types_enabled
    from jax_tilekern.cli.bench.suite import SuiteError
    from jax_tilekern.tuning.tune import products_of

    found: list[Product] = []
    for row in rows:
        with types_enabled(row):
            shapes = map(row.shape, row.operands)
            lhs, rhs = map(jax.ShapeDtypeStruct, shapes, row.types)
            try:
                products = products_of(Case.of(row).ours, lhs, rhs)
            except (TypeError, ValueError) as error:
                raise SuiteError(f"{row.name!r}: {error}") from error
        if not products:
            print(f"{row.name}: no kernel computes it, so it is XLA's", file=sys.stderr)
        found += products
    return list(dict.fromkeys(found))


# What is shown


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

    from jax_tilekern.tuning.tune import TunedProduct

    table = Table(title=title, title_justify="left")
    for heading in TunedProduct.HEADINGS:
        text = heading in ("product", "winner", "model's choice")
        table.add_column(heading, justify="left" if text else "right", overflow="fold")
    for row in rows:
        table.add_row(*row.cells(), style="bold red" if row.choice is None else None)
    return table


@contextlib.contextmanager
def _deadline(name: str, seconds: float) -> Iterator[None]:
    """End the process, by force, if the context takes longer than any product does."""

    def give_up() -> None:
        print(f"{name} does not end. What was measured before is kept.", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
