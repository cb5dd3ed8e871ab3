"""Scans along a dimension with adjacent columns after it (``scans/column_scan.cuh``)."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import compile_kernels
from jax_tilekern.plans.gpu import WARP, Gpu, power_of_two
from jax_tilekern.plans.launch import MAX_INT32, Buffer, Launch, LaunchPlan, NoKernel, Scalars
from jax_tilekern.plans.occupancy import occupancy
from jax_tilekern.plans.scans.look_back import LookBack
from jax_tilekern.plans.scans.problem import Scan
from jax_tilekern.plans.scans.scan_text import ScanText

_FILE = "scans/column_scan.cuh"
# Threads of a CTA that computes many tiles, and of one that computes a single one.
_THREADS_OF_MANY, _THREADS = 256, 512
_CTAS_OF_SM = 2
# ``kColumnGroup`` of the kernel.
_GROUP = 32
# Bytes of a load, so that a warp reads whole lines of a row; and those that a thread holds in
# registers, of which it has 64 where an SM has two CTAs.
_VECTOR_BYTES, _REGISTER_BYTES = 4, 160
_MOST_STEPS = 16
# Fewer lanes read less than a memory sector at a time, and have long lists of rows to combine.
_LEAST_LANES = 8
_MAX_SHARED_BYTES = 48 << 10


@dataclass(frozen=True)
class ColumnScan:
    """Scans of columns."""

    scan: Scan
    sm_count: int

    @property
    def repeats(self) -> bool:
        """Whether a CTA computes tile after tile.

        A tile then waits for the CTA that has its ticket, which does not matter where all CTAs are
        at work on the same steps of different sequences.
        """
        return self.scan.outer * self.blocks >= _CTAS_OF_SM * self.sm_count

    @property
    def vector(self) -> int:
        """Adjacent sequences of a thread."""
        widest = max(x.dtype.itemsize for x in self.scan.inputs)
        return math.gcd(max(1, _VECTOR_BYTES // widest), self.scan.columns)

    @property
    def lanes(self) -> int:
        """Threads side by side."""
        wanted = power_of_two(math.ceil(self.scan.columns / self.vector))
        return max(_LEAST_LANES, min(WARP, wanted))

    @property
    def used(self) -> float:
        """The share of the lanes that have columns, where these are few."""
        return min(1.0, self.scan.columns / (self.lanes * self.vector))

    @property
    def steps(self) -> int:
        """Elements of a sequence that a thread has."""
        # What is loaded, and values of each sequence, are in registers.
        loaded = self.vector * sum(x.dtype.itemsize for x in self.scan.inputs)
        values = 4 * self.vector * self.scan.value_bytes
        steps = _MOST_STEPS
        while steps > 1 and steps * loaded + values > _REGISTER_BYTES:
            steps //= 2
        return min(steps, power_of_two(self.scan.length))

    @property
    def rows(self) -> int:
        """Threads one after the other along a sequence."""
        threads = _THREADS_OF_MANY if self.repeats else _THREADS
        most = threads // self.lanes
        # A warp is whole.
        least = WARP // self.lanes
        return max(least, min(most, power_of_two(math.ceil(self.scan.length / self.steps))))

    @property
    def tiles(self) -> int:
        """Tiles of a sequence."""
        return math.ceil(self.scan.length / (self.rows * self.steps))

    @property
    def blocks(self) -> int:
        """Blocks of columns."""
        return math.ceil(self.scan.columns / (self.lanes * self.vector))

    @property
    def tiles_of_all(self) -> int:
        return self.scan.outer * self.tiles * self.blocks

    @property
    def shared_bytes(self) -> int:
        parts = max(self.rows, _GROUP) + 1
        return parts * self.lanes * self.vector * self.scan.value_bytes

    def plan(self, gpu: Gpu) -> LaunchPlan | NoKernel:
        s = self.scan
        if self.tiles_of_all > MAX_INT32 or s.length > MAX_INT32:
            return NoKernel(f"{s.outer} x {s.length} x {s.columns} elements")
        if self.shared_bytes > _MAX_SHARED_BYTES:
            return NoKernel(f"values of {s.value_bytes} bytes")
        text = ScanText(s, self.vector, along=False)
        looks_back = self.tiles > 1
        kernel = text.kernel(
            _FILE,
            "scan_columns",
            self.lanes,
            self.rows,
            self.steps,
            *(str(x).lower() for x in (looks_back, self.repeats)),
        )
        sequences = s.outer * s.columns
        groups = math.ceil(self.tiles / _GROUP)
        look_back = LookBack(s, sequences * self.tiles, sequences * groups)
        compiled = compile_kernels(kernel, *look_back.kernels(looks_back), arch=gpu.arch)
        # Without publications there is no workspace, and the kernel does not read the parameter.
        slots = Buffer(len(text.fields) if looks_back else 0)
        shape = Scalars.pack("q4I", s.columns, s.length, s.outer, self.tiles, self.blocks)
        launch = Launch(
            entry=compiled.entry(kernel.name),
            grid=(self.tiles_of_all, 1, 1),
            block=(self.lanes * self.rows, 1, 1),
            parameters=(slots, shape, *text.buffers),
        )
        ctas = self.tiles_of_all
        if self.repeats:
            found = occupancy(launch, gpu)
            ctas = min(ctas, self.sm_count * (found.blocks if found else _CTAS_OF_SM))
            launch = dataclasses.replace(launch, grid=(ctas, 1, 1))
        return LaunchPlan(
            name=s.name,
            gpu=gpu,
            launches=look_back.launches(compiled, launch, slots, gpu) if looks_back else (launch,),
            alignments=text.alignments,
            workspace_bytes=(look_back.bytes,) if looks_back else (),
            reason=f"tiles of {self.rows * self.steps} steps by {self.lanes * self.vector} "
            f"columns, {self.tiles} of a sequence, {ctas} CTAs",
        )
