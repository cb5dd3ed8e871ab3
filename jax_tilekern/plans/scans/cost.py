"""The time of a scan by kernels and by XLA's operation, in microseconds."""

from __future__ import annotations

from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.scans.column_scan import ColumnScan
from jax_tilekern.plans.scans.problem import Scan
from jax_tilekern.plans.scans.row_scan import RowScan
from jax_tilekern.plans.scans.short_column_scan import ShortColumnScan
from jax_tilekern.plans.scans.short_row_scan import ShortRowScan

# Measured on an H200, where arrays are small: a kernel, what tiles that look back take more, XLA's
# cumulative reduction, and its levels of pairs (4 x 256 x 64).
_KERNEL, _LOOK_BACK, _XLA, _XLA_LEVELS = 1.4, 2.4, 3.1, 6.6
# XLA's cumulative reduction of 100,000 elements took 10.1 us, that of 1,024 elements 3.1 us. Where
# between them it needs more launches is not measured.
_LONG, _XLA_LONG = 100_000, 9.5
# The share of the memory's bandwidth at which XLA reads operands and writes results: measured on an
# H200 for cumulative sums and recurrences of 33 MB to 805 MB, 0.26 to 0.29.
_XLA_SHARE = 0.29
# The same of the kernels: 0.5 to 0.9 there.
_SHARE = 0.7
# The same of kernels whose warps have whole sequences, by calls of 17 and 34 MB: 0.95 to 1.05.
_SHORT_SHARE = 0.95
# XLA's cumulative reductions of so few elements are a fusion.
_SHORT, _XLA_FUSION, _XLA_FUSION_SHARE = 16, 1.1, 0.9

ScanKernel = ShortRowScan | RowScan | ShortColumnScan | ColumnScan


def kernel_microseconds(scan: Scan, gpu: Gpu, kernel: ScanKernel) -> float:
    launches = _KERNEL + (_LOOK_BACK if kernel.tiles > 1 else 0.0)
    share = _SHARE if isinstance(kernel, RowScan | ColumnScan) else _SHORT_SHARE
    return launches + _memory_microseconds(scan, gpu) / share


def xla_microseconds(scan: Scan, gpu: Gpu) -> float:
    memory = _memory_microseconds(scan, gpu)
    if scan.length <= _SHORT and not scan.in_levels:
        return _XLA_FUSION + memory / _XLA_FUSION_SHARE
    if scan.in_levels:
        return _XLA_LEVELS + memory / _XLA_SHARE
    return (_XLA_LONG if scan.length >= _LONG else _XLA) + memory / _XLA_SHARE


def _memory_microseconds(scan: Scan, gpu: Gpu) -> float:
    return scan.bytes / gpu.rates.memory_bandwidth / gpu.rates.cycles_per_microsecond
