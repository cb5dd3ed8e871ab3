"""Scans along the innermost dimension (``scans/row_scan.cuh``)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.gpu import VECTOR_BYTES, WARP, Gpu, power_of_two
from jax_tilekern.plans.launch import MAX_INT32, Buffer, Launch, LaunchPlan, NoKernel, Scalars
from jax_tilekern.plans.scans.look_back import LookBack
from jax_tilekern.plans.scans.problem import Scan
from jax_tilekern.plans.scans.scan_text import ScanText

_FILE = "scans/row_scan.cuh"
_THREADS, _WARPS = 256, 8
# Bytes that a thread loads of each array, and of all arrays together.
_ARRAY_BYTES, _LOADED_BYTES = 64, 128


@dataclass(frozen=True)
class RowScan:
    """Scans of rows."""

    scan: Scan
    group: int = _THREADS  # tiles of a group, at most a tile for each thread

    @property
    def vector(self) -> int:
        """Adjacent elements of a load, which lie in one row."""
        widest = max(x.dtype.itemsize for x in self.scan.inputs)
        whole = max(1, VECTOR_BYTES // widest)
        if self.scan.outer == 1 and not self.scan.reverse:
            # Only the last vector is not whole.
            return whole
        return math.gcd(whole, self.scan.length)

    @property
    def vectors(self) -> int:
        """Vectors of a row."""
        return math.ceil(self.scan.length / self.vector)

    @property
    def thread_vectors(self) -> int:
        """Vectors of a thread."""
        sizes = [self.vector * x.dtype.itemsize for x in self.scan.inputs]
        # Each vector has a value of what precedes it.
        most = min(
            _ARRAY_BYTES // max(sizes),
            _LOADED_BYTES // sum(sizes),
            _LOADED_BYTES // self.scan.value_bytes,
        )
        most = 1 << max(1, most).bit_length() - 1
        # Groups wait for each other, so rows of several groups have fewer and larger tiles of one
        # array, if registers hold no more than that.
        words = sizes == [VECTOR_BYTES] and self.scan.value_bytes == VECTOR_BYTES // self.vector
        if words and self.vectors > self.group * _WARPS * WARP * most:
            most *= 2
        return min(most, power_of_two(math.ceil(self.vectors / WARP)))

    @property
    def warps(self) -> int:
        """Warps of a row, or of a tile of one."""
        return min(_WARPS, power_of_two(math.ceil(self.vectors / (WARP * self.thread_vectors))))

    @property
    def tiles(self) -> int:
        """Tiles of a row."""
        return math.ceil(self.vectors / (self.warps * WARP * self.thread_vectors))

    @property
    def groups(self) -> int:
        """Groups of tiles of a row."""
        return math.ceil(self.tiles / self.group)

    @property
    def ctas_of_sm(self) -> int:
        """CTAs that an SM has at the same time, as the kernel's launch bounds say."""
        return 3 if self.scan.value_bytes <= 16 else 1

    @property
    def ctas(self) -> int:
        return math.ceil(self.scan.outer / (_WARPS // self.warps)) * self.tiles

    def plan(self, gpu: Gpu) -> LaunchPlan | NoKernel:
        s = self.scan
        if self.ctas > MAX_INT32 or self.vectors > MAX_INT32:
            return NoKernel(f"{s.outer} rows of {s.length} elements")
        text = ScanText(s, self.vector, along=True)
        looks_back = self.tiles > 1
        kernel = text.kernel(
            _FILE, "scan_rows", self.warps, self.thread_vectors, str(looks_back).lower()
        )
        look_back = LookBack(s, s.outer * self.tiles, s.outer * self.groups)
        compiled = compile_kernels(kernel, *look_back.kernels(looks_back), arch=gpu.arch)
        # Without publications there is no workspace, and the kernel does not read the parameter.
        slots = Buffer(len(text.fields) if looks_back else 0)
        shape = Scalars.pack(
            "q6I", s.length, s.outer, self.vectors, self.tiles, self.groups, self.group,
            self.ctas_of_sm * gpu.sm_count,
        )  # fmt: skip
        launch = Launch(
            entry=compiled.entry(kernel.name),
            grid=(self.ctas, 1, 1),
            block=(_THREADS, 1, 1),
            parameters=(slots, shape, *text.buffers),
        )
        return LaunchPlan(
            name=s.name,
            gpu=gpu,
            launches=look_back.launches(compiled, launch, slots, gpu) if looks_back else (launch,),
            alignments=text.alignments,
            workspace_bytes=(look_back.bytes,) if looks_back else (),
            reason=f"{self.warps} warps to a row, vectors of {self.vector}, {self.tiles} tiles of "
            f"a row, {self.ctas} CTAs",
        )
