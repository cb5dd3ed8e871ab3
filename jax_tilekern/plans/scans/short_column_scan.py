"""Scans along a dimension with columns after it, of sequences that a thread has."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.gpu import VECTOR_BYTES, Gpu
from jax_tilekern.plans.launch import MAX_INT32, Launch, LaunchPlan, NoKernel, Scalars
from jax_tilekern.plans.scans.problem import Scan
from jax_tilekern.plans.scans.scan_text import ScanText

_FILE = "scans/short_column_scan.cuh"
_THREADS = 128
# Bytes that a thread holds in registers, and with vectors of more than a word.
_REGISTER_BYTES, _WIDE_BYTES = 160, 96
_WORD_BYTES = 4
# What memory moves at least; and steps of whose sectors half are read again, by times of an H200.
SECTOR_BYTES, _CACHED_STEPS = 32, 32


@dataclass(frozen=True)
class ShortColumnScan:
    """Scans of columns, each of which a thread has (``scans/short_column_scan.cuh``)."""

    scan: Scan
    tiles = 1  # of a sequence

    @property
    def vector(self) -> int:
        """Adjacent sequences of a thread."""
        widest = max(x.dtype.itemsize for x in self.scan.inputs)
        sizes = [x for x in (16, 8, 4, 2, 1) if x * widest <= VECTOR_BYTES]
        whole = (x for x in sizes if self.scan.columns % x == 0)
        most = {x: _WIDE_BYTES if x * widest > _WORD_BYTES else _REGISTER_BYTES for x in sizes}
        return next((x for x in whole if self._held_bytes(x) <= most[x]), 1)

    @property
    def used(self) -> float:
        """The share of the bytes of memory sectors that accesses use, where columns are few.

        The more steps there are, the fewer of these sectors a cache has for the next step.
        """
        share = self.scan.columns * max(x.dtype.itemsize for x in self.scan.inputs) / SECTOR_BYTES
        return 1.0 if share >= 1 else share / (1 + self.scan.length / _CACHED_STEPS)

    @property
    def fits(self) -> bool:
        """Whether registers hold sequences."""
        return self._held_bytes(self.vector) <= _REGISTER_BYTES

    def _held_bytes(self, vector: int) -> int:
        """Return the bytes of what a thread loads, and of values of each sequence."""
        loaded = self.scan.length * sum(x.dtype.itemsize for x in self.scan.inputs)
        return vector * (loaded + 4 * self.scan.value_bytes)

    def plan(self, gpu: Gpu) -> LaunchPlan | NoKernel:
        s = self.scan
        threads = s.outer * s.columns // self.vector
        if threads > MAX_INT32:
            return NoKernel(f"{s.outer} x {s.columns} sequences")
        text = ScanText(s, self.vector, along=False)
        kernel = text.kernel(_FILE, "scan_short_columns", s.length)
        sizes = (Scalars.pack("I", x) for x in (threads, s.columns // self.vector))
        launch = Launch(
            entry=compile_kernels(kernel, arch=gpu.arch).entry(kernel.name),
            grid=(math.ceil(threads / _THREADS), 1, 1),
            block=(_THREADS, 1, 1),
            parameters=(*sizes, *text.buffers),
        )
        return LaunchPlan(
            name=s.name,
            gpu=gpu,
            launches=(launch,),
            alignments=text.alignments,
            reason=f"{self.vector} columns to a thread",
        )
