"""A matrix product to plan for: its sizes, strides, types and arithmetic, and what it costs."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from jax_tilekern.plans.cxx import Dtype
from jax_tilekern.plans.gemm.arithmetic import ElementTypes
from jax_tilekern.plans.gemm.epilogue import Epilogue
from jax_tilekern.plans.gemm.geometry import MatmulGeometry, distinct_matrices
from jax_tilekern.plans.gpu import Gpu, overlapped_cycles
from jax_tilekern.plans.grouped_gemm.problem import GroupedGeometry
from jax_tilekern.plans.launch import NoKernel

# The share of the memory bandwidth that a pass which copies reaches (H100).
_COPY_EFFICIENCY = 0.8
# Kernels count rows, columns and k in 32 bits, and round up to whole tiles.
_MAX_SIZE = 2**31 - 1024
# Scales that are copied in units of 16 bytes.
SCALES_OF_COPY = 4
# Bounds of groups are integers of 32 bits.
_BOUNDS_BYTES = 4


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
class Product:
    """A matrix product, or a product for each group of rows.

    ``lhs`` has a unit stride along ``m`` or ``k``, or that dimension has size 1; ``rhs`` along
    ``k`` or ``n`` likewise. A plan's buffers are ``lhs``, ``rhs``, the bounds of the groups, the
    second ``rhs``, the scales of ``lhs`` and of ``rhs``, the operands of the epilogue, the results
    and the workspaces, as far as there are any.

    Attributes
    ----------
    geometry
        Sizes and strides; those of a grouped GEMM are a ``GroupedGeometry``.
    lhs_dtype, rhs_dtype, out_dtype
        Element types.
    arithmetic
        What it is computed in, for example ``"tf32"``; see ``plans/gemm/arithmetic.py``.
    epilogue
        What is done to the accumulators; ``None`` for nothing.
    pair
        Whether there are two products of one ``lhs``, whose accumulators the epilogue combines.
        The second ``rhs`` has the type and the strides of the first.
    scales
        Where the scales of ``lhs`` and of ``rhs`` lie, if they have any.
    symmetric
        Whether the result is symmetric, and so is what the epilogue makes of it.
    """

    geometry: MatmulGeometry
    lhs_dtype: Dtype
    rhs_dtype: Dtype
    out_dtype: Dtype
    arithmetic: str
    epilogue: Epilogue | None = None
    pair: bool = False
    scales: tuple[Scales, Scales] | None = None
    symmetric: bool = False

    @property
    def is_grouped(self) -> bool:
        """Whether there is a product for each group of rows."""
        return isinstance(self.geometry, GroupedGeometry)

    @property
    def groups(self) -> GroupedGeometry:
        """The geometry of a grouped GEMM."""
        assert isinstance(self.geometry, GroupedGeometry)
        return self.geometry

    @property
    def dtypes(self) -> tuple[Dtype, Dtype, Dtype]:
        """Element types of ``lhs``, ``rhs`` and the output."""
        return self.lhs_dtype, self.rhs_dtype, self.out_dtype

    def plain(self, geometry: MatmulGeometry) -> Product:
        """Return a product of the same types with nothing else, of these sizes and strides."""
        return Product(geometry, *self.dtypes, self.arithmetic)

    @property
    def epilogue_bytes(self) -> int:
        """Bytes that the epilogue reads and writes beside the output."""
        if self.epilogue is None:
            return 0
        sizes = (*self.geometry.batch, self.geometry.m, self.geometry.n)
        return sum(
            distinct_matrices(sizes, array.strides) * array.dtype.itemsize
            for array in (*self.epilogue.operands, *self.epilogue.outputs)
        ) + (math.prod(sizes) if self.epilogue.quantized else 0)

    def with_epilogue(self, epilogue: Epilogue | None) -> Product:
        """Return the same product with another epilogue, or without one."""
        return dataclasses.replace(self, epilogue=epilogue)

    @property
    def second_rhs(self) -> int:
        """The buffer of the second ``rhs`` of a pair."""
        return 2 + self.is_grouped

    @property
    def first_scales(self) -> int:
        """The buffer of the scales of ``lhs``, which those of ``rhs`` follow."""
        return self.second_rhs + self.pair

    @property
    def out_buffer(self) -> int:
        """The buffer of the first result, which follows all operands."""
        own = self.first_scales + (2 if self.scales else 0)
        return own + (len(self.epilogue.operands) if self.epilogue else 0)

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

    def alignments(self, lhs: int, rhs: int, out: int) -> tuple[int, ...]:
        """Return the alignment of every buffer, in bytes, given those of three."""
        operands = [lhs, rhs]
        if self.is_grouped:
            operands.append(_BOUNDS_BYTES)
        if self.pair:
            operands.append(rhs)
        if self.scales:
            operands += [4 * SCALES_OF_COPY] * 2
        if self.epilogue is None:
            return *operands, out
        more = (x.alignment for x in self.epilogue.operands)
        outputs = (out, *(x.alignment for x in self.epilogue.outputs))
        reductions = (x.dtype.itemsize for x in self.epilogue.reductions)
        rows = (
            (x.alignment for x in self.epilogue.quantized.arrays) if self.epilogue.quantized else ()
        )
        return *operands, *more, *(outputs if self.epilogue.stores else ()), *reductions, *rows

    @property
    def rhs_bytes(self) -> int:
        """Bytes of ``rhs``, of the groups that may have rows alone if it has groups."""
        g = self.geometry
        matrices = distinct_matrices(g.batch, g.rhs_strides)
        total = g.k * g.n * matrices * self.rhs_dtype.itemsize
        if isinstance(g, GroupedGeometry) and g.ragged == "m":
            return total * g.used_groups // g.groups
        return total

    def memory_cycles(self, gpu: Gpu) -> float:
        """Return the time to read each operand once and to write the output."""
        return self._memory_bytes / gpu.rates.memory_bandwidth

    @functools.cached_property
    def _memory_bytes(self) -> int:
        g = self.geometry
        lhs = g.m * g.k * distinct_matrices(g.batch, g.lhs_strides) * self.lhs_dtype.itemsize
        out = g.m * g.n * distinct_matrices(g.batch, g.out_strides) * self.out_dtype.itemsize
        if self.epilogue is not None and not self.epilogue.stores:
            out = 0
        return lhs + (1 + self.pair) * self.rhs_bytes + out + self.epilogue_bytes

    def cycles(self, busy: float, gpu: Gpu) -> float:
        """Estimate a launch whose busiest SM would take ``busy`` cycles if memory were no limit."""
        return gpu.rates.launch_cycles + overlapped_cycles(busy, self.memory_cycles(gpu))

    def refusal(self, types: ElementTypes) -> NoKernel | None:
        """Return why a family of kernels for these types does not take it, or ``None``."""
        lhs, rhs, out = self.dtypes
        if not {lhs, rhs} <= set(types.operands) or out not in types.results:
            return NoKernel(f"no {self.arithmetic} kernel for {lhs} x {rhs} -> {out}")
        if max(self.geometry.m, self.geometry.n, self.geometry.k) > _MAX_SIZE:
            return NoKernel("a dimension has more than 2**31 - 1024 elements")
        return None


def copy_cycles(bytes_: int, gpu: Gpu) -> float:
    """Estimate a further launch that reads and writes so many bytes each."""
    rates = gpu.rates
    return rates.next_launch_cycles + 2 * bytes_ / (_COPY_EFFICIENCY * rates.memory_bandwidth)
