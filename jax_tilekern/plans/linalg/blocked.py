"""The extent of blocks for large matrices, or why XLA's own functions are faster.

XLA calls cuSOLVER and cuBLAS. They take a time per column of a factorisation, because columns
depend on each other, and do the rest of the arithmetic far below the rate of products. In blocks,
cuSOLVER factors panels, and the rest is products. The rates here are round numbers for an H100.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import NoKernel

_BLOCKS = (256, 512, 1024, 2048)
# More panels make a program that takes long to compile.
_MAX_PANELS = 32
_COMPUTE_CAPABILITY = (9, 0)
# The model is rough, so blocks are chosen only if it promises this much.
_MIN_GAIN = 1.2

_F32, _F64 = np.dtype(np.float32), np.dtype(np.float64)
# Seconds per column of a factorisation or of a triangle, and of one in a tall panel. Measured: with
# its LU decomposition in panels the inverse of 4096 rows took 20.7 ms and XLA's 17.5, and that of
# 8192 rows 62 and 65.
_COLUMN_SECONDS = {"lu": 1.5e-6, "inverse": 0.4e-6, "triangular_solve": 0.2e-6}
_PANEL_COLUMN_SECONDS = {"lu": 1e-6}
# Operations per second of cuSOLVER's factorisations and of cuBLAS's systems with a triangle.
_LIBRARY_RATE = {_F32: 20e12, _F64: 30e12}
# Measured over estimated time of the small products along a triangle: 4096 rows took 9.7 ms and not
# 1.9, and 8192 rows 26 ms and not 8.4.
_CHAIN = 4
# Operations per second of large products.
_PRODUCT_RATE = {_F32: 190e12, _F64: 50e12}
# Seconds of the smallest products. Those in float32 split their operands first.
_PRODUCT_SECONDS = {_F32: 15e-6, _F64: 8e-6}
_BYTES_PER_SECOND = 3e12
# How often a matrix is read or written besides the products.
_PASSES = 6


@dataclass(frozen=True)
class LargeMatrices:
    """An operation on large square matrices.

    Attributes
    ----------
    operation
        ``"lu"``, ``"inverse"`` or ``"triangular_solve"``; an inverse is that of the
        factors of ``"lu"``.
    count
        How many matrices there are.
    size
        Rows and columns of each.
    columns
        Right-hand sides of each; read for ``"triangular_solve"`` alone.
    dtype
        Their element type.
    """

    operation: str
    count: int
    size: int
    columns: int
    dtype: np.dtype[Any]

    def library_seconds(self) -> float:
        """Return the time of XLA's own function."""
        n = self.size
        operations = {
            "lu": 2 * n**3 / 3,
            "inverse": 2 * n**3,
            "triangular_solve": n**2 * self.columns,
        }[self.operation]
        columns = n * _COLUMN_SECONDS[self.operation]
        return self.count * (columns + operations / _LIBRARY_RATE[self.dtype])

    def blocked_seconds(self, block: int) -> float:
        """Return the time in blocks of an extent."""
        n, panels = self.size, math.ceil(self.size / block)
        levels = math.ceil(math.log2(panels))
        inversion = 2 * math.log2(block / 64)
        # Each panel of a system with a triangle takes a product off the diagonal and three on it.
        system = inversion + 4 * panels
        lu = levels * (inversion + 2 * panels)
        products, operations, panel_operations = {
            "lu": (lu, 2 * n**3 / 3 + 2 * levels * n**2 * block, n**2 * block),
            "inverse": (2 * system, 5 * n**3 / 3 + 5 * n**2 * block, 0),
            "triangular_solve": (system, (n + 5 * block) * n * self.columns, 0),
        }[self.operation]
        columns = n * _PANEL_COLUMN_SECONDS.get(self.operation, 0)
        each = (
            columns
            + panel_operations / _LIBRARY_RATE[self.dtype]
            + operations / _PRODUCT_RATE[self.dtype]
            + _PASSES * n**2 * self.dtype.itemsize / _BYTES_PER_SECOND
        )
        return _CHAIN * (products * _PRODUCT_SECONDS[self.dtype] + self.count * each)


def plan_blocks(matrices: LargeMatrices, gpu: Gpu) -> int | NoKernel:
    """Return the extent of blocks, or why XLA's own function computes the call."""
    if gpu.compute_capability != _COMPUTE_CAPABILITY:
        return NoKernel(f"large matrices are computed in blocks on sm_90a, and this is {gpu.arch}")
    blocks = [block for block in _BLOCKS if block < matrices.size <= _MAX_PANELS * block]
    if not blocks:
        return NoKernel(f"blocks are for more than {_BLOCKS[0]} rows, up to {_largest()}")
    library = matrices.library_seconds()
    block = min(blocks, key=matrices.blocked_seconds)
    seconds = matrices.blocked_seconds(block)
    if library < _MIN_GAIN * seconds:
        return NoKernel(f"XLA's own function takes about {library:.1e} s, blocks {seconds:.1e} s")
    return block


def _largest() -> int:
    return _MAX_PANELS * _BLOCKS[-1]
