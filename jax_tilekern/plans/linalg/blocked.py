"""The extent of blocks for large matrices, or why XLA's own functions are faster.

XLA calls cuSOLVER and cuBLAS. They take a time per column, because columns depend on each other,
and do the rest of the arithmetic far below the rate of products. In blocks, nearly all of it is
products. The rates here are round numbers for an H100.
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
# Seconds per column.
_COLUMN_SECONDS = {"inverse": 0.4e-6, "triangular_solve": 0.2e-6}
# Operations per second of cuBLAS's systems with a triangle.
_LIBRARY_RATE = {_F32: 20e12, _F64: 30e12}
# Measured over estimated time of the small products along a triangle: 4096 rows took 9.7 ms and not
# 1.9, and 8192 rows 26 ms and not 8.4.
_CHAIN = 4
# Operations per second of large products.
_PRODUCT_RATE = {_F32: 190e12, _F64: 50e12}
# Seconds of the smallest products. Products in float32 split their operands first.
_PRODUCT_SECONDS = {_F32: 15e-6, _F64: 8e-6}
_BYTES_PER_SECOND = 3e12
# How often a matrix is read or written besides the products.
_PASSES = 6


@dataclass(frozen=True)
class LargeMatrices:
    """An operation on large square matrices."""

    operation: str  # "inverse", by LU factors that XLA computes, or "triangular_solve"
    count: int  # number of matrices
    size: int  # rows and columns of each
    columns: int  # right-hand sides of each, for "triangular_solve"
    dtype: np.dtype[Any]

    def library_seconds(self) -> float:
        n = self.size
        operations = {
            "inverse": 2 * n**3,
            "triangular_solve": n**2 * self.columns,
        }[self.operation]
        columns = n * _COLUMN_SECONDS[self.operation]
        # Systems of a batch are solved together, and factors computed one after the other.
        in_turn = self.count if self.operation == "inverse" else 1
        return in_turn * columns + self.count * operations / _LIBRARY_RATE[self.dtype]

    def blocked_seconds(self, block: int) -> float:
        n, panels = self.size, math.ceil(self.size / block)
        # Each panel of a system with a triangle takes a product off the diagonal and three on it.
        system = 2 * math.log2(block / 64) + 4 * panels
        products, operations = {
            "inverse": (2 * system, 5 * n**3 / 3 + 5 * n**2 * block),
            "triangular_solve": (system, (n + 5 * block) * n * self.columns),
        }[self.operation]
        each = (
            operations / _PRODUCT_RATE[self.dtype]
            + _PASSES * n**2 * self.dtype.itemsize / _BYTES_PER_SECOND
        )
        return _CHAIN * (products * _PRODUCT_SECONDS[self.dtype] + self.count * each)


def plan_blocks(matrices: LargeMatrices, gpu: Gpu) -> int | NoKernel:
    """Return the extent of blocks, or why XLA's own function computes the call."""
    if gpu.compute_capability != _COMPUTE_CAPABILITY:
        return NoKernel(f"large matrices are computed in blocks on sm_90a, and this is {gpu.arch}")
    blocks = [block for block in _BLOCKS if block < matrices.size <= _MAX_PANELS * block]
    if not blocks:
        largest = _MAX_PANELS * _BLOCKS[-1]
        return NoKernel(f"blocks are for more than {_BLOCKS[0]} rows, up to {largest}")
    library = matrices.library_seconds()
    block = min(blocks, key=matrices.blocked_seconds)
    seconds = matrices.blocked_seconds(block)
    if library < _MIN_GAIN * seconds:
        return NoKernel(f"XLA's own function takes about {library:.1e} s, blocks {seconds:.1e} s")
    return block
