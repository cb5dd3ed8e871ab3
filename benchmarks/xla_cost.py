"""Fits the cost model of XLA's products to measured samples, and reports its error.

    python -m benchmarks xla_cost RECORD... [--json FILE]

Records are of ``python -m benchmarks matmul --sample``. The error on unseen rows is that of each
half of the rows, predicted from a fit to the other half that starts at data-sheet rates. The
constants that ``--json`` writes are fitted to all rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

from benchmarks.calls.row import Row
from benchmarks.errors import BenchmarkError
from benchmarks.records.record import command_text, timed
from benchmarks.records.record_file import load_record
from benchmarks.tune import product_call
from jax_tilekern.cli.console import output_file, write_json
from jax_tilekern.ops import contraction
from jax_tilekern.plans.gemm import xla
from jax_tilekern.plans.gemm.problem import Product
from jax_tilekern.plans.gemm.select import candidates
from jax_tilekern.plans.gemm.xla_cost import (
    XlaArithmetic,
    XlaCosts,
    load_costs,
    xla_microseconds,
)
from jax_tilekern.plans.gpu import Gpu, gpu_target, known_gpu
from jax_tilekern.plans.launch import NoKernel

HELP = "fit the cost model of XLA's products to measured samples"

# The fit follows the rows that it predicts within this factor.
_LARGEST_ERROR = math.log(2)
_STEPS, _FIRST_STEP, _LAST_STEP = 2500, 0.4, 0.03


class Measured(NamedTuple):
    """A product and its times in microseconds.

    Attributes
    ----------
    product
        The product.
    xla, ours
        Measured; ``ours`` is ``None`` where XLA computed our call.
    cycles
        What our kernel takes by its own cost model.
    """

    product: Product
    xla: float
    ours: float | None
    cycles: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("records", metavar="RECORD", nargs="+", type=Path)
    parser.add_argument("--gpu", default="sm_90", help="what was measured (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", type=output_file, help="write the constants here")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    gpu = known_gpu(arguments.gpu)
    measured = [
        found
        for path in arguments.records
        for row in timed(load_record(path))
        if (found := _measured(row, gpu)) is not None
    ]
    if len(measured) < 2:
        raise BenchmarkError("the records have no products of matrices with times")
    shipped = load_costs()
    ours = [
        abs(math.log(xla.our_microseconds(m.product, m.cycles, gpu) / m.ours))
        for m in measured
        if m.ours is not None
    ]
    print(f"our kernels: error of {_percentiles(ours)}")
    _report("as shipped", [(m, shipped) for m in measured], gpu)
    start = start_of_fit(gpu)
    halves = measured[::2], measured[1::2]
    fitted = [fit(half, start, gpu) for half in halves]
    unseen = [(m, c) for half, c in zip(halves, fitted[::-1], strict=True) for m in half]
    _report("fitted to the other half", unseen, gpu)
    if arguments.json:
        costs = fit(measured, start, gpu)
        _report("fitted to all", [(m, costs) for m in measured], gpu)
        about = {"command": command_text(["xla_cost", *map(str, arguments.records)])}
        write_json(arguments.json, about | dataclasses.asdict(costs))
    return 0


def _measured(row: dict[str, Any], gpu: Gpu) -> Measured | None:
    """Return a row's product and times, unless it has a vector for an operand."""
    names = [field.name for field in dataclasses.fields(Row)]
    call = product_call(Row(**{name: row[name] for name in names if name in row}))
    stated: list[Product] = []

    def state(product: Product, _: Gpu) -> NoKernel:
        stated.append(product)
        return NoKernel("only the product is asked for")

    with (
        mock.patch.object(contraction, "plan_matmul", state),
        gpu_target(gpu.arch),
        call.types_enabled(),
    ):
        traced = jax.jit(call.function).trace(*call.operands)
        traced.lower(lowering_platforms=("cuda",))
    found = candidates(stated[0], gpu) if stated else NoKernel("")
    if isinstance(found, NoKernel) or min(stated[0].geometry.m, stated[0].geometry.n) == 1:
        return None
    if stated[0].arithmetic == "f32_emulated":
        # XLA multiplies these by other algorithms than float32.
        return None
    ours, peer = (1e6 * row["seconds"][side]["median"] for side in ("ours", "peer"))
    own = None if row["kernel"].startswith("XLA") else ours
    return Measured(stated[0], peer, own, found[0].cycles)


def start_of_fit(gpu: Gpu) -> XlaCosts:
    """Return constants that nothing was fitted to: half of each arithmetic's peak rate."""
    rates = gpu.rates
    macs = {**rates.mma_macs, **rates.wgmma_macs}
    arithmetics = {
        name: XlaArithmetic(1e-6 * macs[name] * rates.cycles_per_microsecond, 0.01)
        for name in ("bf16", "tf32", "int8", "fp8", "f32", "f64")
    }
    return XlaCosts(
        launch=1.5,
        memory=1.1,
        not_hidden=0.3,
        reduction=2,
        split=0.1,
        padding=2,
        padded_memory=2,
        unaligned_compute=1.3,
        unaligned_memory=1.2,
        neither_k_major=1.3,
        arithmetics=arithmetics,
    )


def fit(measured: Sequence[Measured], start: XlaCosts, gpu: Gpu) -> XlaCosts:
    """Return constants that predict XLA's times, by a random search from others.

    The loss is the mean of the errors of the logarithms, each at most that of a factor of 2.
    """
    rng = np.random.default_rng(0)
    best = np.log(start.values())
    least = _loss(measured, start, gpu)
    for step in np.geomspace(_FIRST_STEP, _LAST_STEP, _STEPS):
        tried = best.copy()
        tried[rng.integers(tried.size)] += step * rng.standard_normal()
        loss = _loss(measured, start.with_values(np.exp(tried).tolist()), gpu)
        if loss < least:
            best, least = tried, loss
    return start.with_values(np.exp(best).tolist())


def _loss(measured: Sequence[Measured], costs: XlaCosts, gpu: Gpu) -> float:
    errors = [abs(_error(m, costs, gpu)) for m in measured]
    return float(np.mean(np.minimum(errors, _LARGEST_ERROR)))


def _error(measured: Measured, costs: XlaCosts, gpu: Gpu) -> float:
    return math.log(xla_microseconds(measured.product, gpu, costs) / measured.xla)


def _report(name: str, rows: Sequence[tuple[Measured, XlaCosts]], gpu: Gpu) -> None:
    """Print the model's errors, and what it makes of products that our kernels computed."""
    errors = [abs(_error(m, costs, gpu)) for m, costs in rows]
    print(f"{name}: error of {_percentiles(errors)}")
    kept, chosen, best = [], [], []
    for m, costs in rows:
        if m.ours is None:
            continue
        ratio = m.xla / m.ours
        with mock.patch.object(xla, "load_costs", lambda costs=costs: costs):
            left = xla.predicted_to_be_xlas(m.product, m.cycles, gpu) is not None
        kept.append(math.log(ratio))
        chosen.append(0.0 if left else math.log(ratio))
        best.append(max(0.0, math.log(ratio)))
    for what, logs in (("all kept", kept), ("as chosen", chosen), ("as well as can be", best)):
        ratios = np.exp(logs)
        print(
            f"  XLA / ours of {len(ratios)} rows, {what}: mean {np.exp(np.mean(logs)):.3f}, "
            f"10th percentile {np.quantile(ratios, 0.1):.2f}, worst {ratios.min():.2f}, "
            f"{np.mean(ratios < 0.97):.0%} below 0.97"
        )


def _percentiles(errors: Sequence[float]) -> str:
    return (
        f"{len(errors)} rows {np.median(errors):.0%} in the median, "
        f"90th percentile {np.quantile(errors, 0.9):.0%}"
    )
