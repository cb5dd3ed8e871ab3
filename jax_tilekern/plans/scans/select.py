"""Which kernel scans."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax_tilekern.plans.gpu import Gpu, xla_pass_us
from jax_tilekern.plans.launch import LaunchPlan, NoKernel, PredictedUs
from jax_tilekern.plans.policy import current_policy
from jax_tilekern.plans.scans.column_scan import ColumnScan
from jax_tilekern.plans.scans.cost import FUSED, ScanKernel, kernel_microseconds, xla_microseconds
from jax_tilekern.plans.scans.problem import Scan
from jax_tilekern.plans.scans.row_scan import RowScan
from jax_tilekern.plans.scans.short_column_scan import SECTOR_BYTES, ShortColumnScan
from jax_tilekern.plans.scans.short_row_scan import ShortRowScan

# XLA fuses its operation with what surrounds it, so a kernel has to be faster by as much.
_MARGIN = 1.1


def plan_scan(scan: Scan, transposed: Sequence[int], gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan scans along the innermost dimension, or along one with columns after it.

    ``transposed`` has the sizes in bytes of operands that a transpose makes. XLA reads them where
    they lie if it has one fusion, and copies them for a kernel.
    """
    if scan.length == 1 and current_policy() != "kernels":
        return NoKernel("XLA fuses sequences of one element")
    kernel = _kernel(scan, gpu)
    ours = kernel_microseconds(scan, gpu, kernel) + gpu.rates.custom_call_us
    if scan.length <= FUSED:
        ours += sum(xla_pass_us(size, gpu) for size in transposed)
    xla = xla_microseconds(scan, gpu)
    times = PredictedUs(ours, xla)
    if current_policy() != "kernels" and xla <= _MARGIN * ours:
        return NoKernel("XLA's operation is predicted to be as fast", times)
    plan = kernel.plan(gpu)
    if isinstance(plan, NoKernel):
        return plan
    return dataclasses.replace(plan, predicted_us=times)


def _kernel(scan: Scan, gpu: Gpu) -> ScanKernel:
    widest = max(x.dtype.itemsize for x in scan.inputs)
    short_rows = ShortRowScan(scan, gpu.sm_count)
    # Accesses to columns of fewer bytes move more than they use.
    if scan.columns * widest < SECTOR_BYTES and scan.outer > 1 and short_rows.thread_vectors > 0:
        return short_rows
    if scan.columns == 1:
        return RowScan(scan)
    short_columns = ShortColumnScan(scan)
    return short_columns if short_columns.fits else ColumnScan(scan, gpu.sm_count)
