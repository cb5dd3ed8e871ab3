"""A matrix product to plan for: its sizes, strides, types and arithmetic, and what it costs."""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np

from jax_tilekern.plans.gemm.arithmetic import ElementTypes
from jax_tilekern.plans.gemm.epilogue import Epilogue
from jax_tilekern.plans.gemm.geometry import MatmulGeometry, distinct_matrices
from jax_tilekern.plans.gpu import Gpu, overlapped_cycles
from jax_tilekern.plans.launch import NoKernel

_Dtype = np.dtype[Any]
_Geometry = TypeVar("_Geometry")

# The share of the memory bandwidth that a pass which copies reaches (H100).
_COPY_EFFICIENCY = 0.8
# Kernels count rows, columns and k in 32 bits, and round up to whole tiles.
_MAX_SIZE = 2**31 - 1024
# Scales that are copied in units of 16 bytes.
SCALES_OF_COPY = 4


@dataclass(frozen=True)
class TypedProduct(ABC, Generic[_Geometry]):
    """What dense products and grouped GEMMs share: element types, and the cost of memory.

    Attributes
    ----------
    geometry
        Sizes and strides.
    lhs_dtype, rhs_dtype, out_dtype
        Element types.
    arithmetic
        What it is computed in, for example ``"tf32"``; see ``plans/gemm/arithmetic.py``.
    epilogue
        What is done to the accumulators; ``None`` for nothing.
    """

    # The buffers before those of the epilogue's operands.
    _OPERANDS: ClassVar[int] = 2

    geometry: _Geometry
    lhs_dtype: _Dtype
    rhs_dtype: _Dtype
    out_dtype: _Dtype
    arithmetic: str
    epilogue: Epilogue | None = None

    @property
    @abstractmethod
    def strided(self) -> MatmulGeometry:
        """Sizes and strides of the three arrays."""

    @property
    def dtypes(self) -> tuple[_Dtype, _Dtype, _Dtype]:
        """Element types of ``lhs``, ``rhs`` and the output."""
        return self.lhs_dtype, self.rhs_dtype, self.out_dtype

    @property
    def epilogue_bytes(self) -> int:
        """Bytes that the epilogue reads and writes beside the output."""
        if self.epilogue is None:
            return 0
        sizes = (*self.strided.batch, self.strided.m, self.strided.n)
        return sum(
            distinct_matrices(sizes, array.strides) * array.dtype.itemsize
            for array in (*self.epilogue.operands, *self.epilogue.outputs)
        ) + (math.prod(sizes) if self.epilogue.quantized else 0)

    def with_epilogue(self, epilogue: Epilogue | None) -> Self:
        """Return the same product with another epilogue, or without one."""
        return dataclasses.replace(self, epilogue=epilogue)

    @property
    def out_buffer(self) -> int:
        """The buffer of the first result, which follows all operands."""
        return self._OPERANDS + (len(self.epilogue.operands) if self.epilogue else 0)

    @property
    def first_workspace(self) -> int:
        """The first buffer behind the results."""
        if self.epilogue is None:
            return self.out_buffer + 1
        quantized = 2 if self.epilogue.quantized else 0
        return self.first_reduction + len(self.epilogue.reductions) + quantized

    @property
    def first_reduction(self) -> int:
        """The buffer of the first of the epilogue's reductions, which follow its elements."""
        elements = len(self.epilogue.results) if self.epilogue else 1
        return self.out_buffer + elements

    def alignments(self, *own: int) -> tuple[int, ...]:
        """Return the alignment of every buffer, in bytes, given those of the product's own.

        The output is the last of these.
        """
        if self.epilogue is None:
            return own
        *operands, out = own
        more = (x.alignment for x in self.epilogue.operands)
        outputs = (out, *(x.alignment for x in self.epilogue.outputs))
        reductions = (x.dtype.itemsize for x in self.epilogue.reductions)
        rows = (
            (x.alignment for x in self.epilogue.quantized.arrays) if self.epilogue.quantized else ()
        )
        return *operands, *more, *(outputs if self.epilogue.stores else ()), *reductions, *rows

    @property
    def rhs_bytes(self) -> int:
        """Bytes of ``rhs``."""
        g = self.strided
        return g.k * g.n * distinct_matrices(g.batch, g.rhs_strides) * self.rhs_dtype.itemsize

    def memory_cycles(self, gpu: Gpu) -> float:
        """Return the time to read each operand once and to write the output."""
        return self._memory_bytes / gpu.rates.memory_bandwidth

    @functools.cached_property
    def _memory_bytes(self) -> int:
        g = self.strided
        lhs = g.m * g.k * distinct_matrices(g.batch, g.lhs_strides) * self.lhs_dtype.itemsize
        out = g.m * g.n * distinct_matrices(g.batch, g.out_strides) * self.out_dtype.itemsize
        if self.epilogue is not None and not self.epilogue.stores:
            out = 0
        return lhs + self.rhs_bytes + out + self.epilogue_bytes

    def cycles(self, busy: float, gpu: Gpu) -> float:
        """Estimate a launch whose busiest SM would take ``busy`` cycles if memory were no limit."""
        return gpu.rates.launch_cycles + overlapped_cycles(busy, self.memory_cycles(gpu))

    def refusal(self, types: ElementTypes) -> NoKernel | None:
        """Return why a family of kernels for these types does not take it, or ``None``."""
        lhs, rhs, out = self.dtypes
        if not {lhs, rhs} <= set(types.operands) or out not in types.results:
            return NoKernel(f"no {self.arithmetic} kernel for {lhs} x {rhs} -> {out}")
        if max(self.strided.m, self.strided.n, self.strided.k) > _MAX_SIZE:
            return NoKernel("a dimension has more than 2**31 - 1024 elements")
        return None


@dataclass(frozen=True)
class Product(TypedProduct[MatmulGeometry]):
    """A matrix product.

    ``lhs`` has a unit stride along ``m`` or ``k``, or that dimension has size 1; ``rhs`` along
    ``k`` or ``n`` likewise.
    """

    @property
    def strided(self) -> MatmulGeometry:
        """Sizes and strides of the three arrays."""
        return self.geometry


class OfPair(TypedProduct[_Geometry]):
    """Two products of one ``lhs``, whose accumulators the epilogue combines.

    The second ``rhs`` has the type and the strides of the first. Its buffer follows those of the
    first product's operands.
    """

    def alignments(self, *own: int) -> tuple[int, ...]:
        """Return the alignment of every buffer, in bytes."""
        *operands, out = own
        return super().alignments(*operands, operands[1], out)

    def memory_cycles(self, gpu: Gpu) -> float:
        """Return the time to read each operand once and to write the output."""
        return super().memory_cycles(gpu) + self.rhs_bytes / gpu.rates.memory_bandwidth


@dataclass(frozen=True)
class PairProduct(OfPair[MatmulGeometry], Product):
    """Two products of one ``lhs``."""

    _OPERANDS: ClassVar[int] = 3


@dataclass(frozen=True)
class SymmetricProduct(Product):
    """A product whose result is symmetric, and so is what its epilogue makes of it."""


@dataclass(frozen=True)
class Scales:
    """Where the scales of an operand lie, one of float32 for each block.

    Attributes
    ----------
    block_rows
        Rows of a block (of M or N), 1 or 128.
    batch_strides
        A stride for each batch dimension, in elements.
    row_stride, k_stride
        Strides of blocks of rows, and of k-tiles of 128; 0 where a scale is that of all.
    padded
        Whether adjacent rows continue to a multiple of 4.
    """

    block_rows: int
    batch_strides: tuple[int, ...]
    row_stride: int
    k_stride: int
    padded: bool = False

    def fit_bulk_copies(self, rows: int) -> bool:
        """Whether scales of so many rows, a scale each, are copied in units of 16 bytes."""
        strides = (*self.batch_strides, self.k_stride, 0 if self.padded else rows)
        return (self.block_rows, self.row_stride) == (1, 1) and not any(
            x % SCALES_OF_COPY for x in strides
        )


@dataclass(frozen=True)
class OfScaled(TypedProduct[_Geometry]):
    """A product of operands with scales, whose buffers follow those of a product without.

    Attributes
    ----------
    lhs_scales, rhs_scales
        Where they lie.
    """

    lhs_scales: Scales = field(kw_only=True)
    rhs_scales: Scales = field(kw_only=True)

    @property
    def scales(self) -> tuple[tuple[int, Scales], tuple[int, Scales]]:
        """The buffer of each operand's scales, and where they lie in it."""
        return (self._OPERANDS - 2, self.lhs_scales), (self._OPERANDS - 1, self.rhs_scales)

    def alignments(self, *own: int) -> tuple[int, ...]:
        """Return the alignment of every buffer, in bytes."""
        *operands, out = own
        return super().alignments(*operands, 4 * SCALES_OF_COPY, 4 * SCALES_OF_COPY, out)


@dataclass(frozen=True)
class ScaledProduct(OfScaled[MatmulGeometry], Product):
    """A product of operands with scales."""

    _OPERANDS: ClassVar[int] = 4


def copy_cycles(bytes_: int, gpu: Gpu) -> float:
    """Estimate a further launch that reads and writes so many bytes each."""
    rates = gpu.rates
    return rates.further_launch_cycles + 2 * bytes_ / (_COPY_EFFICIENCY * rates.memory_bandwidth)
