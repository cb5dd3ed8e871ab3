"""A sort of short rows in the registers of warps (``selection/sort_rows_of_warps.cuh``)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import WARP, Gpu, power_of_two
from jax_tilekern.plans.launch import Buffer, Launch, Scalars

_THREADS = 128
# The most elements of a lane, by their bytes.
_ITEMS = {1: 8, 2: 8, 4: 8, 8: 1}
# Fitted to times on an H200: an SM's cycles of a warp that reads and writes rows, and of a step of
# a sort for an element of each lane, by the words of its key; and those where a warp waits for
# itself.
WARP_CYCLES, _STEP_CYCLES, _STEP_LATENCY = 30, 1.1, 20


@dataclass(frozen=True)
class WarpSort:
    """A sort of rows, of which a warp has one or several."""

    rows: int
    columns: int
    dtype: np.dtype[Any]

    @property
    def fits(self) -> bool:
        """Whether a warp holds a row."""
        return self.columns <= WARP * _ITEMS[self.dtype.itemsize]

    @property
    def lanes(self) -> int:
        """Lanes of a row."""
        return min(WARP, power_of_two(self.columns))

    @property
    def items(self) -> int:
        """Elements of a lane."""
        return power_of_two(math.ceil(self.columns / WARP))

    @property
    def warps(self) -> int:
        return math.ceil(self.rows * self.lanes / WARP)

    @property
    def cycles(self) -> float:
        """An SM's cycles of a warp."""
        return WARP_CYCLES + _STEP_CYCLES * self._words

    @property
    def latency(self) -> float:
        """Cycles of a warp that is alone."""
        return _STEP_LATENCY * self._words

    @property
    def _words(self) -> int:
        """Words of the keys that a lane compares."""
        log = (self.lanes * self.items).bit_length() - 1
        words = math.ceil((self.dtype.itemsize + 2) / 4)
        return log * (log + 1) // 2 * self.items * words

    @property
    def way(self) -> str:
        """What a plan's reason says."""
        rows = WARP // self.lanes
        return f"{rows} rows to a warp" if rows > 1 else "a warp to a row"

    def launch(
        self, gpu: Gpu, buffers: tuple[Buffer, ...], *, largest: int = 0, backwards: int = 0,
        values: bool = True, indices: bool = True,
    ) -> Launch:  # fmt: skip
        """Return the launch that sorts rows, or with ``largest`` finds so many elements."""
        flags = (str(x).lower() for x in (largest > 0, values, indices))
        arguments = ", ".join((CXX_TYPES[self.dtype], str(self.lanes), str(self.items), *flags))
        kernel = Kernel(
            "selection/sort_rows_of_warps.cuh", f"tilekern::sort_rows_of_warps<{arguments}>"
        )
        sizes = (self.rows, self.columns, largest or self.columns, backwards)
        return Launch(
            entry=compile_kernels(kernel, arch=gpu.arch).entry(kernel.name),
            grid=(math.ceil(self.warps * WARP / _THREADS), 1, 1),
            block=(_THREADS, 1, 1),
            parameters=(*buffers, *(Scalars.pack("I", x) for x in sizes)),
        )
