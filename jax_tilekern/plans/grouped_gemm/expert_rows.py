"""Plans of rows of pairs of a token and an expert (``grouped_gemm/expert_rows.cuh``)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from jax_tilekern.compilation.compiler import Kernel, compile_kernels
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import Gpu, power_of_two
from jax_tilekern.plans.launch import Buffer, Launch, LaunchPlan, NoKernel, Scalars

_FILE = "grouped_gemm/expert_rows.cuh"
_THREADS, _WARP = 256, 32
# Bytes.
WIDEST_LOAD = 16
_SUMS = {
    np.dtype(ml_dtypes.bfloat16): np.float32,
    np.dtype(np.float16): np.float32,
    np.dtype(np.float32): np.float32,
    np.dtype(np.float64): np.float64,
}
MAX_ARRAYS = 2


@dataclass(frozen=True)
class ExpertRows:
    """Rows of tokens, and of pairs.

    Attributes
    ----------
    tokens, chosen
        Number of tokens, and of the pairs of each.
    rows
        Number of rows of pairs.
    columns
        Elements of a row.
    dtype
        Their type.
    """

    tokens: int
    chosen: int
    rows: int
    columns: int
    dtype: np.dtype[Any]

    @property
    def vector_bytes(self) -> int:
        """Bytes that a thread loads at once."""
        return math.gcd(WIDEST_LOAD, self.columns * self.dtype.itemsize)

    @property
    def vectors(self) -> int:
        """Loads of a row."""
        return self.columns * self.dtype.itemsize // self.vector_bytes

    @property
    def lanes(self) -> int:
        """Threads side by side on a row."""
        return min(_WARP, power_of_two(self.vectors))

    def shape(self) -> Scalars:
        """Return the sizes as the kernels take them."""
        return Scalars.pack("q3I", self.vectors, self.tokens, self.chosen, self.rows)


def plan_spread(rows: ExpertRows, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan the copies of each token's row; the operands are the rows and the places."""
    kernel = Kernel(_FILE, f"tilekern::spread_rows<{rows.vector_bytes}, {rows.lanes}>")
    return _plan("spread", rows, kernel, (0, 1, 2), gpu)


def plan_combine(rows: ExpertRows, arrays: int, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan the sums of each token's rows; the operands are one or two arrays, and the places."""
    if rows.dtype not in _SUMS or arrays > MAX_ARRAYS:
        return NoKernel(f"no kernel sums {arrays} arrays of {rows.dtype}")
    types = ", ".join(CXX_TYPES[np.dtype(x)] for x in (rows.dtype, _SUMS[rows.dtype]))
    kernel = Kernel(
        _FILE, f"tilekern::combine_rows<{types}, {rows.vector_bytes}, {rows.lanes}, {arrays}>"
    )
    return _plan("combine", rows, kernel, (0, arrays - 1, arrays, arrays + 1), gpu)


def _plan(
    name: str, rows: ExpertRows, kernel: Kernel, buffers: tuple[int, ...], gpu: Gpu
) -> LaunchPlan | NoKernel:
    if max(rows.rows, rows.tokens * rows.chosen) > 2**31 - 1:
        return NoKernel(f"{rows.rows} rows of {rows.tokens} tokens of {rows.chosen} experts")
    compiled = compile_kernels(kernel, arch=gpu.arch)
    ctas = math.ceil(rows.tokens * rows.lanes / _THREADS)
    # Few tokens do not fill the GPU, so several CTAs have slices of the same rows.
    slices = max(1, min(math.ceil(rows.vectors / rows.lanes), gpu.sm_count // max(ctas, 1)))
    launch = Launch(
        entry=compiled.entry(kernel.name),
        grid=(ctas, slices, 1),
        block=(_THREADS, 1, 1),
        parameters=(*map(Buffer, buffers), rows.shape()),
    )
    # The places come before the result.
    count = buffers[-1] + 1
    vector = rows.vector_bytes
    return LaunchPlan(
        name=f"{name} rows of {rows.dtype}",
        gpu=gpu,
        launches=(launch,),
        alignments=tuple(4 if i == count - 2 else vector for i in range(count)),
        reason=f"{rows.chosen} rows of {rows.columns} for each of {rows.tokens} tokens",
    )
