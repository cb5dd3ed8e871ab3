"""What tiles of a scan publish (``scans/look_back.cuh``): the workspace, and its zeros."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Compiled, Kernel
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, Scalars, overlapping
from jax_tilekern.plans.scans.problem import Scan

CLEAR = Kernel("scans/look_back.cuh", "tilekern::clear_published")
_THREADS = 256
_SLOT_BYTES, _WORD_BYTES = 8, 4


@dataclass(frozen=True)
class LookBack:
    """The publications of a scan."""

    scan: Scan
    aggregates: int  # one for each tile of a sequence
    groups: int

    @property
    def slots(self) -> int:
        """A counter of tickets, and the words of the values."""
        return 1 + (self.aggregates + self.groups) * (self.scan.value_bytes // _WORD_BYTES)

    @property
    def bytes(self) -> int:
        return self.slots * _SLOT_BYTES

    @staticmethod
    def kernels(looks_back: bool) -> tuple[Kernel, ...]:
        return (CLEAR,) if looks_back else ()

    def launches(
        self, compiled: Compiled, scan: Launch, slots: Buffer, gpu: Gpu
    ) -> tuple[Launch, ...]:
        """Return the launch that zeros the slots, and the scan."""
        return overlapping(gpu, clear_launch(compiled, slots, self.slots, gpu), scan)


def clear_launch(compiled: Compiled, slots: Buffer, count: int, gpu: Gpu) -> Launch:
    """Return the launch that zeros words of 64 bits."""
    ctas = min(math.ceil(count / _THREADS), 4 * gpu.sm_count)
    return Launch(
        entry=compiled.entry(CLEAR.name),
        grid=(ctas, 1, 1),
        block=(_THREADS, 1, 1),
        parameters=(slots, Scalars.int64(count)),
    )
