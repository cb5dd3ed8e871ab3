"""The time of a scan by kernels and by XLA's operation, in microseconds."""

from __future__ import annotations

from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.scans.column_scan import ColumnScan
from jax_tilekern.plans.scans.problem import Scan
from jax_tilekern.plans.scans.row_scan import RowScan
from jax_tilekern.plans.scans.short_column_scan import ShortColumnScan
from jax_tilekern.plans.scans.short_row_scan import ShortRowScan

ScanKernel = ShortRowScan | RowScan | ShortColumnScan | ColumnScan
# Measured on an H200, where arrays are small: a kernel, what tiles that look back take more, XLA's
# cumulative reduction, and its levels of pairs (4 x 256 x 64).
_KERNEL, _LOOK_BACK, _XLA, _XLA_LEVELS = 1.5, 2.4, 3.1, 6.6
# Each tile of a sequence of columns waits for the one before: microseconds of a tile on an H200,
# 0.09 to 0.12 in sequences of 337 to 1499 tiles.
_COLUMN_TILE = 0.1
# XLA's cumulative reduction of 100,000 elements took 10.1 us, that of 1,024 elements 3.1 us. Where
# between them it needs more launches is not measured.
_LONG, _XLA_LONG = 100_000, 9.5
# The share of the memory's bandwidth at which XLA reads operands and writes results: measured on an
# H200 for cumulative sums and recurrences of 33 MB to 805 MB, 0.26 to 0.29.
_XLA_SHARE = 0.29
# The same of the kernels: 0.5 to 0.9 there, and of those of short sequences 1.05 for 17 to 50 MB,
# which L2 holds in part.
_SHARE, _SHORT_SHARE = 0.7, 1.05
# XLA's cumulative reductions of so many elements compute each result from all elements before it,
# in one fusion. Fitted to 180 calls of 2 to 33 elements, 10,000 to 4 million in all, on an H200:
# microseconds of a call, and with levels of each element of a sequence more; the share of the
# bandwidth; and microseconds of an element of each array for each element of its sequence, which
# are no more beyond 16, and more where the length is no power of two.
FUSED, _XLA_FUSION, _XLA_LEVEL, _XLA_FUSION_SHARE = 32, 0.8, 0.16, 0.9
_XLA_ELEMENT, _MOST_STEPS, _XLA_ODD_ELEMENT = 3.5e-7, 16, 2e-6


def kernel_microseconds(scan: Scan, gpu: Gpu, kernel: ScanKernel) -> float:
    launches = _KERNEL + (_LOOK_BACK if kernel.tiles > 1 else 0.0)
    share = _SHARE if isinstance(kernel, RowScan | ColumnScan) else _SHORT_SHARE
    if isinstance(kernel, ShortColumnScan | ColumnScan):
        share *= kernel.used
    waits = _COLUMN_TILE * kernel.tiles if isinstance(kernel, ColumnScan) else 0.0
    return launches + max(_memory_microseconds(scan, gpu) / share, waits)


def xla_microseconds(scan: Scan, gpu: Gpu) -> float:
    memory = _memory_microseconds(scan, gpu)
    if scan.length <= FUSED:
        launches = _XLA_FUSION + _XLA_LEVEL * scan.length * scan.in_levels
        of_element = _XLA_ELEMENT * min(scan.length, _MOST_STEPS)
        if scan.length & (scan.length - 1):
            of_element += _XLA_ODD_ELEMENT
        elements = scan.outer * scan.length * scan.columns * len(scan.inputs)
        return launches + max(memory / _XLA_FUSION_SHARE, elements * of_element)
    if scan.in_levels:
        return _XLA_LEVELS + memory / _XLA_SHARE
    return (_XLA_LONG if scan.length >= _LONG else _XLA) + memory / _XLA_SHARE


def _memory_microseconds(scan: Scan, gpu: Gpu) -> float:
    return scan.bytes / gpu.rates.memory_bandwidth / gpu.rates.cycles_per_microsecond
