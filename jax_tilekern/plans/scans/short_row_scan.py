"""Scans along the innermost dimension, several rows to a warp (``scans/short_row_scan.cuh``)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.gpu import VECTOR_BYTES, WARP, Gpu, power_of_two
from jax_tilekern.plans.launch import MAX_INT32, Launch, LaunchPlan, NoKernel, Scalars
from jax_tilekern.plans.scans.problem import Scan
from jax_tilekern.plans.scans.scan_text import ScanText

_FILE = "scans/short_row_scan.cuh"
_THREADS = 128
# Bytes of a vector's values, and of the vectors of a thread.
_VALUE_BYTES, _LOADED_BYTES = 64, 128
_MOST_VECTORS = 4
# Warps for each SM, without which a thread has fewer vectors.
_WARPS_OF_SM = 32


@dataclass(frozen=True)
class ShortRowScan:
    """Scans of rows of which a warp has one or several."""

    scan: Scan
    sm_count: int
    tiles = 1  # of a row

    @property
    def vector(self) -> int:
        """Adjacent elements of a load, which lie in any rows."""
        widest = max(x.dtype.itemsize for x in self.scan.inputs)
        most = min(VECTOR_BYTES // widest, _VALUE_BYTES // self.scan.value_bytes)
        return 1 << max(1, most).bit_length() - 1

    @property
    def group(self) -> int:
        """The fewest vectors that are whole rows."""
        return self.scan.length // math.gcd(self.scan.length, self.vector)

    @property
    def thread_vectors(self) -> int:
        """Vectors of a thread, or 0 where a warp has no whole rows."""
        loaded = self.vector * sum(x.dtype.itemsize for x in self.scan.inputs)
        most = max(1, min(_MOST_VECTORS, _LOADED_BYTES // loaded))
        fitting = [x for x in (4, 2, 1) if x <= most and self.group <= WARP * x]
        vectors = self.scan.outer * self.scan.length / self.vector
        many = (x for x in fitting if vectors >= x * WARP * _WARPS_OF_SM * self.sm_count)
        return next(many, min(fitting, default=0))

    def _vectors(self, of_thread: int) -> int:
        """Return the vectors of a warp."""
        return WARP * of_thread // self.group * self.group

    @property
    def warp_rows(self) -> int:
        """Rows of a warp."""
        return self._vectors(self.thread_vectors) * self.vector // self.scan.length

    @property
    def warps(self) -> int:
        return math.ceil(self.scan.outer / self.warp_rows)

    def plan(self, gpu: Gpu) -> LaunchPlan | NoKernel:
        s = self.scan
        if s.outer > MAX_INT32:
            return NoKernel(f"{s.outer} rows of {s.length} elements")
        text = ScanText(s, self.vector, along=True)
        span = min(WARP, power_of_two(math.ceil(s.length / self.vector)))
        kernel = text.kernel(_FILE, "scan_short_rows", self.thread_vectors, span)
        shape = Scalars.pack(
            "5I", s.length, s.outer, self.warp_rows, self._vectors(self.thread_vectors),
            sum(1 << i for i in range(0, self.vector, s.length)),
        )  # fmt: skip
        launch = Launch(
            entry=compile_kernels(kernel, arch=gpu.arch).entry(kernel.name),
            grid=(math.ceil(self.warps * WARP / _THREADS), 1, 1),
            block=(_THREADS, 1, 1),
            parameters=(shape, *text.buffers),
        )
        return LaunchPlan(
            name=s.name,
            gpu=gpu,
            launches=(launch,),
            alignments=text.alignments,
            reason=f"{self.warp_rows} rows to a warp, {self.thread_vectors} vectors of "
            f"{self.vector} to a thread",
        )
