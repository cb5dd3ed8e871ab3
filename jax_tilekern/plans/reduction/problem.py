"""The reductions of ``row_sums.cuh`` and ``column_sums.cuh``, and their cost model.

Sums, dot products and products of a matrix and a vector are all a :class:`Reduction`; a
:class:`Pass` is one launch for it.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jax_tilekern.compilation.compiler import Compiled, Kernel
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gemm.geometry import MAX_BATCH_DIMS, distinct_matrices
from jax_tilekern.plans.gpu import VECTOR_BYTES, Gpu, overlapped_cycles
from jax_tilekern.plans.launch import Buffer, Launch, Scalars


class SummedDims(NamedTuple):
    """Dimensions of a row-major array that is summed over some of them.

    Attributes
    ----------
    sizes
        All above 1.
    reduced
        Whether each is summed over; neighbours differ.
    """

    sizes: tuple[int, ...]
    reduced: tuple[bool, ...]

    @classmethod
    def of(cls, shape: Sequence[int], axes: Collection[int]) -> SummedDims:
        """Merge neighbours that are both summed over or both kept, and drop sizes of 1."""
        sizes: list[int] = []
        reduced: list[bool] = []
        for axis, size in enumerate(shape):
            if size == 1:
                continue
            if reduced and reduced[-1] == (axis in axes):
                sizes[-1] *= size
            else:
                sizes.append(size)
                reduced.append(axis in axes)
        return cls(tuple(sizes), tuple(reduced))


_Dtype = np.dtype[Any]

THREADS = 256
MAX_INDICES = 2**31 - 1
# CTAs per SM that splits aim at: few leave few partial sums, and many balance the load.
_CTAS_PER_SM = (2, 4, 16)
# The minimum loads per thread of a split, and the minimum bytes that are worth a further launch.
_MIN_LOADS = 2
_MIN_SPLIT_BYTES = 1 << 16
# CTAs of fewer bytes run closer to each other in memory, which is 1 to 3 % faster (H100).
_NEAR_BYTES = 1 << 16
_FAR = 1.03
_MAX_SPLITS = 1 << 16
# The share of memory's time that the last CTAs add, which run while others have ended, if all CTAs
# run at a time.
_UNEVEN = 0.02
# The overhead of each contiguous run of bytes, in bytes.
_RUN_BYTES = 8


@dataclass(frozen=True)
class Reduction:
    """``out[b, i]`` is the sum over ``k`` of ``lhs[b, i, k]``, or of ``lhs[b, i, k] * rhs[b, k]``.

    All strides are in elements, and all sizes at least 1.

    Attributes
    ----------
    batch
        Sizes of the batch dimensions, outermost first; at most ``MAX_BATCH_DIMS``.
    outputs
        Sums per batch index: the rows or columns that are added up.
    k
        Elements of each sum.
    lhs_strides
        Batch strides, then those of the outputs and of ``k``.
    rhs_strides
        Batch strides, then that of ``k``; ``None`` where there is no ``rhs``.
    out_strides
        Batch strides, then that of the outputs.
    dtype
        Type of ``lhs`` and ``rhs``.
    sum_dtype
        Type that sums are made in: float32, float64, uint32 or uint64. Unsigned, they wrap.
    out_dtype
        Type of the result.
    """

    batch: tuple[int, ...]
    outputs: int
    k: int
    lhs_strides: tuple[int, ...]
    rhs_strides: tuple[int, ...] | None
    out_strides: tuple[int, ...]
    dtype: _Dtype
    sum_dtype: _Dtype
    out_dtype: _Dtype

    @property
    def bytes(self) -> int:
        """Bytes of the operands that have to be read."""
        bytes_ = distinct_matrices(self.batch, self.lhs_strides) * self.outputs * self.k
        if self.rhs_strides is not None:
            bytes_ += distinct_matrices(self.batch, self.rhs_strides) * self.k
        return bytes_ * self.dtype.itemsize

    @property
    def types(self) -> str:
        """The kernels' first template arguments."""
        return ", ".join(CXX_TYPES[t] for t in (self.dtype, self.sum_dtype, self.out_dtype))

    def partial(self, splits: int, *, side_by_side: bool) -> tuple[Reduction, Reduction]:
        """Return the reduction to partial sums, and that of the partial sums.

        Strides between the partial sums of one element are the last of the latter's ``lhs``.

        Parameters
        ----------
        splits
            Parts of ``k``.
        side_by_side
            Whether the partial sums of an element, rather than the elements, are neighbours.
        """
        line, partial = (splits, 1) if side_by_side else (1, self.outputs)
        batch = _dense((*self.batch, self.outputs))[:-1]
        strides = (*(splits * stride for stride in batch), line)
        first = dataclasses.replace(self, out_strides=strides, out_dtype=self.sum_dtype)
        second = dataclasses.replace(
            self,
            k=splits,
            lhs_strides=(*strides, partial),
            rhs_strides=None,
            dtype=self.sum_dtype,
        )
        return first, second

    def pack_batch(self) -> tuple[int, ...]:
        """Return the values of ``ReductionBatch``."""
        missing = MAX_BATCH_DIMS - len(self.batch)
        rhs = self.rhs_strides or (0,) * (len(self.batch) + 1)
        strides = (self.lhs_strides[:-2], rhs[:-1], self.out_strides[:-1])
        return (
            *(s for of_array in strides for s in ((0,) * missing + of_array)),
            *(1,) * missing,
            *self.batch,
        )


BATCH_LAYOUT = f"{3 * MAX_BATCH_DIMS}q{MAX_BATCH_DIMS}I"


@dataclass(frozen=True)
class Pass(ABC):
    """One launch, not compiled yet.

    Attributes
    ----------
    reduction
        What is added up. With several splits, ``out`` is the partial sums.
    vector_bytes
        Bytes of a load.
    lanes
        Threads of a row.
    splits
        CTAs that share ``k``.
    split_stride
        Elements between the partial sums of one output.
    """

    reduction: Reduction
    vector_bytes: int
    lanes: int
    splits: int = 1
    split_stride: int = 0

    @property
    @abstractmethod
    def key(self) -> str:
        """A short name for the kernel and how it is used."""

    @property
    @abstractmethod
    def kernel(self) -> Kernel:
        """What the compiler is asked for."""

    @property
    @abstractmethod
    def k_step(self) -> int:
        """Elements of ``k`` that the threads of a row take with a load each."""

    @property
    @abstractmethod
    def _whole_blocks(self) -> int:
        """CTAs if ``k`` is not split."""

    @property
    @abstractmethod
    def resident_ctas(self) -> int:
        """CTAs that an SM holds."""

    @property
    @abstractmethod
    def _busy(self) -> float:
        """Share of a CTA's threads that have work."""

    @property
    @abstractmethod
    def _loads(self) -> float:
        """Loads that a thread has in flight."""

    @property
    @abstractmethod
    def _row_bytes(self) -> int:
        """Contiguous bytes that neighbouring threads read."""

    @abstractmethod
    def _shape(self) -> Scalars:
        """Return the kernel's last parameter."""

    @property
    def vector(self) -> int:
        """Elements of a load."""
        return self.vector_bytes // self.reduction.dtype.itemsize

    @property
    def blocks(self) -> int:
        """CTAs of the grid."""
        return self._whole_blocks * self.splits

    @property
    def split_k(self) -> int:
        """Elements of ``k`` in a split, whole loads of all threads of a row."""
        return math.ceil(math.ceil(self.reduction.k / self.k_step) / self.splits) * self.k_step

    def cycles(self, gpu: Gpu) -> float:
        """Estimate what the launch takes once it has begun."""
        rates = gpu.rates
        busiest = math.ceil(self.blocks / gpu.sm_count)
        resident = min(busiest, self.resident_ctas)
        rounds = math.ceil(busiest / resident)
        # A CTA receives what it has in flight once per latency, within its share of the SM's rate.
        rate = THREADS * self._busy * self._loads * self.vector_bytes / rates.load_latency
        rate = min(rate, rates.sm_load_bandwidth / resident)
        busy = rounds * (rates.cta_cycles + self.reduction.bytes / self.blocks / rate)
        # Memory is more efficient for longer contiguous runs.
        whole = self._row_bytes / (self._row_bytes + _RUN_BYTES)
        memory = self.reduction.bytes / (whole * rates.memory_bandwidth) * (1 + _UNEVEN / rounds)
        if self.reduction.bytes > 2 * _NEAR_BYTES * self.blocks:
            memory *= _FAR
        return overlapped_cycles(busy, memory)

    def split_counts(self, gpu: Gpu) -> list[int]:
        """Return the numbers of splits to consider."""
        if self.reduction.bytes < _MIN_SPLIT_BYTES:
            return [1]
        most = self.reduction.k // (self.k_step * _MIN_LOADS)
        counts = {1}
        totals = [blocks * gpu.sm_count for blocks in _CTAS_PER_SM]
        for blocks in (*totals, min(self.reduction.bytes // _NEAR_BYTES, _MAX_SPLITS)):
            wanted = min(most, blocks // self._whole_blocks)
            # Splits are whole steps, and each has at least one.
            if wanted > 1:
                steps = math.ceil(self.reduction.k / self.k_step)
                counts.add(math.ceil(steps / math.ceil(steps / wanted)))
        return sorted(counts)

    def launch(self, compiled: Compiled, *buffers: Buffer) -> Launch:
        """Return the launch, given what ``kernel`` was compiled to, and the buffers."""
        return Launch(
            entry=compiled.entry(self.kernel.name),
            grid=(self.blocks, 1, 1),
            block=(THREADS, 1, 1),
            parameters=(*buffers, self._shape()),
        )

    def _kernel(self, family: str, config: str) -> Kernel:
        kind = "sums" if self.reduction.rhs_strides is None else "products"
        name = f"tilekern::{family}_{kind}<{self.reduction.types}, {config}>"
        return Kernel(f"reduction/{family}_sums.cuh", name)


def load_bytes(steps: list[int], dtype: _Dtype) -> int:
    """Return the widest load that divides steps in elements."""
    return math.gcd(VECTOR_BYTES, *(step * dtype.itemsize for step in steps))


def _dense(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of row-major dimensions."""
    return tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
