"""The time of a scan by kernels and by XLA's operation, in microseconds."""

from __future__ import annotations

from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.scans.problem import Scan

# What XLA's levels of pairs take where the arrays are small, beside a launch: measured on an H200,
# 6.7 us for 4 x 256 x 64.
_XLA_LEVELS = 4.0
# The share of the memory's bandwidth at which XLA reads operands and writes results: measured on an
# H200 for cumulative sums and recurrences of 33 MB to 805 MB, 0.26 to 0.29.
_XLA_SHARE = 0.29
# The same of the kernels: 0.55 to 0.9 there.
_SHARE = 0.7


def kernel_microseconds(scan: Scan, gpu: Gpu, *, looks_back: bool) -> float:
    cycles = gpu.rates.launch_cycles + _memory_cycles(scan, gpu) / _SHARE
    if looks_back:
        cycles += gpu.rates.next_launch_cycles
    return cycles / gpu.rates.cycles_per_microsecond


def xla_microseconds(scan: Scan, gpu: Gpu) -> float:
    cycles = gpu.rates.launch_cycles + _memory_cycles(scan, gpu) / _XLA_SHARE
    levels = _XLA_LEVELS if scan.in_levels else 0.0
    return levels + cycles / gpu.rates.cycles_per_microsecond


def _memory_cycles(scan: Scan, gpu: Gpu) -> float:
    return scan.bytes / gpu.rates.memory_bandwidth
