"""Scans of short rows, of which a warp has several (``scans/short_row_scan.cuh``)."""

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
# Bytes of a vector's values, and of the vectors of a thread; and elements of a vector, of which a
# word has bits.
_VALUE_BYTES, _LOADED_BYTES, _MOST_ELEMENTS = 80, 128, 32
_WORD_BYTES = 4
# Accesses to a vector, of which each leaves parts of memory sectors to the others.
_MOST_ACCESSES = 3
_MOST_VECTORS = 4
# Warps for each SM, without which a thread has fewer vectors.
_WARPS_OF_SM = 32


@dataclass(frozen=True)
class ShortRowScan:
    """Scans of rows, whose columns, if there are any, are parts of the rows."""

    scan: Scan
    sm_count: int
    tiles = 1  # of a row

    @property
    def vector(self) -> int:
        """Elements that a thread has side by side, whole steps of all columns, or 0."""
        sizes = [x.dtype.itemsize for x in self.scan.inputs]
        most = min(_MOST_ELEMENTS, max(_VALUE_BYTES // self.scan.value_bytes, self.scan.columns))
        # Accesses are of so many elements, or of fewer bytes.
        for access in (x for x in (16, 8, 4, 2, 1) if x * max(sizes) <= VECTOR_BYTES):
            vector = math.lcm(access, self.scan.columns)
            has_words = all(vector * x % _WORD_BYTES == 0 for x in sizes)
            is_small = vector <= min(most, _MOST_ACCESSES * access)
            if is_small and (has_words or vector == access):
                return vector
        return 0

    @property
    def length(self) -> int:
        """Elements of a row."""
        return self.scan.length * self.scan.columns

    @property
    def group(self) -> int:
        """The fewest vectors that are whole rows."""
        return self.length // math.gcd(self.length, self.vector)

    @property
    def thread_vectors(self) -> int:
        """Vectors of a thread, or 0 where a warp has no whole rows."""
        if self.vector == 0:
            return 0
        loaded = self.vector * sum(x.dtype.itemsize for x in self.scan.inputs)
        most = max(1, min(_MOST_VECTORS, _LOADED_BYTES // loaded))
        fitting = [x for x in (4, 2, 1) if x <= most and self.group <= WARP * x]
        vectors = self.scan.outer * self.length / self.vector
        many = (x for x in fitting if vectors >= x * WARP * _WARPS_OF_SM * self.sm_count)
        return next(many, min(fitting, default=0))

    def _vectors(self, of_thread: int) -> int:
        """Return the vectors of a warp."""
        return WARP * of_thread // self.group * self.group

    @property
    def warp_rows(self) -> int:
        """Rows of a warp."""
        return self._vectors(self.thread_vectors) * self.vector // self.length

    @property
    def warps(self) -> int:
        return math.ceil(self.scan.outer / self.warp_rows)

    def plan(self, gpu: Gpu) -> LaunchPlan | NoKernel:
        s = self.scan
        if s.outer > MAX_INT32:
            return NoKernel(f"{s.outer} rows of {s.length} elements")
        text = ScanText(s, self.vector, along=True)
        span = min(WARP, power_of_two(math.ceil(self.length / self.vector)))
        kernel = text.kernel(_FILE, "scan_short_rows", self.thread_vectors, span, s.columns)
        starts = sum(1 << i for i in range(self.vector) if i % self.length < s.columns)
        vectors = self._vectors(self.thread_vectors)
        shape = Scalars.pack("5I", self.length, s.outer, self.warp_rows, vectors, starts)
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
