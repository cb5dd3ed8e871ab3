"""The time of a function of lanes as one kernel and under ``vmap``, in microseconds.

The numbers are fitted to recorded wall times, of which none is held out (docs/tuning-log.md). The
ratio of both sides is off by a factor of 3 as a rule and of 14 at worst, and right about which one
is faster. They tell loops over a few numbers from passes over arrays.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from jax_tilekern.plans.gpu import Gpu

# Cycles of an instruction of a thread, of which neighbours are independent, and of an access to
# memory, which the next instruction waits for.
_INSTRUCTION, _ACCESS = 1.0, 100.0
# Cycles of a scheduler for an instruction of a warp, because some become a part of another one; of
# an SM for an access of a warp; and schedulers of an SM.
_ISSUE, _WARP_ACCESS, _SCHEDULERS = 0.57, 3.2, 4
_WARP = 32
# How many times longer a warp takes whose lanes end their ``while`` loops at different steps.
_WAITS = 1.5
# Cycles of a group, whose arrays are in shared memory or the L1 cache. Assumed are 30 to 40
# cycles, of which loops have four in flight, and six shuffles of 25 cycles for a reduction.
_GROUP_ACCESS, _GROUP_WARP_ACCESS, _REDUCTION, _BARRIER = 10.0, 1.0, 200.0, 30.0
# CTAs that an SM has at a time, shared memory that each takes besides its own (CUDA Programming
# Guide), and threads that their registers allow.
_CTAS, _RESERVED, _RESIDENT_THREADS = 32, 1024, 1024
# The share of the bandwidth that kernels of lanes reach, which load and store single elements.
_SHARE_OF_BANDWIDTH = 0.45
_LAUNCH = 3.0
# XLA's kernel, and the end of a step of a ``while`` loop, which the host decides.
_XLA_KERNEL, _XLA_CONDITION = 2.4, 14.0


@dataclass(frozen=True)
class LaneWork:
    """What a function does: by each thread of one kernel, and by XLA for all lanes.

    Numbers count the steps of loops. A ``while`` loop has a nominal number.
    """

    instructions: float = 0  # of a thread, on values in registers
    accesses: float = 0  # of a thread, to arrays in memory inside the function
    reductions: float = 0  # of values of all threads of a group
    barriers: float = 0  # of a group
    bytes: float = 0  # of operands and results of all lanes
    xla_kernels: float = 0
    xla_conditions: float = 0  # of ``while`` loops, each step of which has one
    xla_bytes: float = 0  # that XLA's kernels read and write

    def __add__(self, other: LaneWork) -> LaneWork:
        return LaneWork(*(x + y for x, y in zip(self._numbers, other._numbers, strict=True)))

    def __rmul__(self, steps: int) -> LaneWork:
        return LaneWork(*(steps * x for x in self._numbers))

    @property
    def _numbers(self) -> tuple[float, ...]:
        return dataclasses.astuple(self)

    def kernel_us(self, lanes: int, gpu: Gpu, threads: int = 1, shared_bytes: int = 0) -> float:
        """Return the time of a kernel in which so many threads evaluate a lane."""
        if threads > 1:
            return self._group_us(lanes, gpu, threads, shared_bytes)
        if shared_bytes:
            # A warp has copies of its lanes' rows.
            return self._group_us(math.ceil(lanes / _WARP), gpu, _WARP, shared_bytes)
        waits = _WAITS if self.xla_conditions else 1.0
        of_thread = self.instructions * _INSTRUCTION + self.accesses * _ACCESS
        issued = self.instructions * _ISSUE / _SCHEDULERS + self.accesses * _WARP_ACCESS
        of_sm = math.ceil(lanes / _WARP / gpu.sm_count) * issued
        bandwidth = gpu.rates.memory_bandwidth * _SHARE_OF_BANDWIDTH
        cycles = max(waits * of_thread, waits * of_sm, self.bytes / bandwidth)
        return _LAUNCH + cycles / gpu.rates.cycles_per_microsecond

    def _group_us(self, lanes: int, gpu: Gpu, threads: int, shared_bytes: int) -> float:
        ctas = math.ceil(lanes / gpu.sm_count)
        by_memory = gpu.shared_memory_bytes // (shared_bytes + _RESERVED)
        waves = math.ceil(ctas / max(1, min(_CTAS, _RESIDENT_THREADS // threads, by_memory)))
        of_thread = (
            self.instructions * _INSTRUCTION
            + self.accesses * _GROUP_ACCESS
            + self.reductions * _REDUCTION
            + self.barriers * _BARRIER
        )
        warps = ctas * threads // _WARP
        issued = self.instructions * _ISSUE / _SCHEDULERS + self.accesses * _GROUP_WARP_ACCESS
        of_sm = warps * issued
        bandwidth = gpu.rates.memory_bandwidth * _SHARE_OF_BANDWIDTH
        cycles = max(waves * of_thread, of_sm, self.bytes / bandwidth)
        return _LAUNCH + cycles / gpu.rates.cycles_per_microsecond

    def xla_us(self, gpu: Gpu) -> float:
        launches = self.xla_kernels * _XLA_KERNEL + self.xla_conditions * _XLA_CONDITION
        memory = self.xla_bytes / gpu.rates.memory_bandwidth / gpu.rates.cycles_per_microsecond
        return max(launches, memory)
