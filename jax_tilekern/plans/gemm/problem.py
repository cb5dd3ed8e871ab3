"""A matrix product to plan for, and the ways to compute it that planners offer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan

_Dtype = np.dtype[Any]

# Measured on an H100. Planners count in cycles of a clock that it keeps on long products, and
# memory brings it so many bytes a cycle.
_CYCLES_PER_MICROSECOND = 1700
MEMORY_BANDWIDTH = 1760
# A launch with its first loads, and a further one.
LAUNCH_CYCLES = 4500
FURTHER_LAUNCH_CYCLES = 4000


@dataclass(frozen=True)
class Product:
    """A matrix product.

    Attributes
    ----------
    geometry
        Sizes and strides. ``lhs`` has a unit stride along ``m`` or ``k``, or that dimension has
        size 1; ``rhs`` along ``k`` or ``n`` likewise.
    lhs_dtype, rhs_dtype, out_dtype
        Element types.
    arithmetic
        What it is computed in, for example ``"tf32"``; see ``plans/gemm/arithmetic.py``.
    """

    geometry: MatmulGeometry
    lhs_dtype: _Dtype
    rhs_dtype: _Dtype
    out_dtype: _Dtype
    arithmetic: str

    @property
    def memory_cycles(self) -> float:
        """What it takes to read each operand once and to write the output."""
        return memory_cycles(self.geometry, self.lhs_dtype, self.rhs_dtype, self.out_dtype)

    def cycles(self, busy: float) -> float:
        """Estimate a launch whose busiest multiprocessor takes so long without memory's limit."""
        return launch_cycles(busy, self.memory_cycles)


def memory_cycles(
    geometry: MatmulGeometry, lhs_dtype: _Dtype, rhs_dtype: _Dtype, out_dtype: _Dtype
) -> float:
    """Return what it takes to read each operand once and to write the output."""
    m, n, k, batch = geometry.m, geometry.n, geometry.k, geometry.batch
    lhs = m * k * _distinct(batch, geometry.lhs_strides) * lhs_dtype.itemsize
    rhs = k * n * _distinct(batch, geometry.rhs_strides) * rhs_dtype.itemsize
    out = m * n * _distinct(batch, geometry.out_strides) * out_dtype.itemsize
    return (lhs + rhs + out) / MEMORY_BANDWIDTH


def launch_cycles(busy: float, memory: float) -> float:
    """Estimate a launch from what multiprocessors take without memory's limit, and memory alone."""
    # Neither hides all of the other.
    return LAUNCH_CYCLES + max(busy, memory) + 0.15 * min(busy, memory)


def copy_cycles(bytes_: int) -> float:
    """Return what a pass takes that reads and writes so many bytes each."""
    return FURTHER_LAUNCH_CYCLES + 2 * bytes_ / (0.8 * MEMORY_BANDWIDTH)


def _distinct(batch: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Matrices of an operand, each counted once however often it is broadcast."""
    return math.prod(size for size, stride in zip(batch, strides, strict=False) if stride)


class Candidate(ABC):
    """One way to compute a product, not compiled yet.

    Attributes
    ----------
    cycles
        The cost model's estimate.
    """

    cycles: float

    @property
    @abstractmethod
    def key(self) -> str:
        """A short name, unique among the product's candidates and stable between versions."""

    @abstractmethod
    def plan(self, gpu: Gpu) -> LaunchPlan:
        """Compile it.

        Raises
        ------
        NvrtcNotFound
            If there is no NVRTC to compile the kernel with.
        """

    @property
    def microseconds(self) -> float:
        """The estimated time."""
        return self.cycles / _CYCLES_PER_MICROSECOND
