"""The problem of a launch of ``reduction/reduction.cuh``: sums, or products with a vector."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jax_tilekern.compilation.compiler import Compiled, Kernel
from jax_tilekern.plans.cxx import CXX_TYPES, cxx_config
from jax_tilekern.plans.gemm.geometry import MAX_BATCH_DIMS, distinct_matrices
from jax_tilekern.plans.gpu import VECTOR_BYTES, WARP
from jax_tilekern.plans.launch import Buffer, Launch, Scalars

_Dtype = np.dtype[Any]
THREADS = 256
# Bytes that loads of all threads, one each, have at least, and the most threads that this takes.
_LOADED_BYTES, _MANY_THREADS = 2**20, 2**18
_MAX_LINES = 16


class SummedDims(NamedTuple):
    """Dimensions of a row-major array that is summed over some of them."""

    sizes: tuple[int, ...]  # all above 1
    reduced: tuple[bool, ...]  # whether each is summed over; neighbours differ

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


@dataclass(frozen=True)
class Reduction:
    """``out[b, i]`` is the sum over ``k`` of ``lhs[b, i, k]``, or of ``lhs[b, i, k] * rhs[b, k]``.

    All strides are in elements, and all sizes at least 1.
    """

    batch: tuple[int, ...]  # outermost first, at most ``MAX_BATCH_DIMS``
    outputs: int  # sums per batch index
    k: int
    lhs_strides: tuple[int, ...]  # of the batch, the outputs and k
    rhs_strides: tuple[int, ...] | None  # of the batch and k; None where there is no rhs
    out_strides: tuple[int, ...]  # of the batch and the outputs
    dtype: _Dtype  # of lhs and rhs
    sum_dtype: _Dtype  # of the accumulators: float32, float64, or uint32 and uint64, which wrap
    out_dtype: _Dtype
    chunks: int = 1  # CTAs that share k; with several, out has the partial sums of each

    @property
    def results(self) -> int:
        """Number of sums."""
        return math.prod(self.batch) * self.outputs

    @property
    def bytes(self) -> int:
        """Bytes of the operands that have to be read."""
        elements = distinct_matrices(self.batch, self.lhs_strides) * self.outputs * self.k
        if self.rhs_strides is not None:
            elements += distinct_matrices(self.batch, self.rhs_strides) * self.k
        return elements * self.dtype.itemsize

    @property
    def columns(self) -> bool:
        """Whether loads are along the outputs; otherwise they are along ``k``."""
        rhs_k = self.rhs_strides[-1] if self.rhs_strides else 1
        return self.k == 1 or not self.lhs_strides[-1] == rhs_k == 1

    @property
    def vector(self) -> int:
        """Elements of a load of ``lhs``: 16 bytes of a row, or what divides steps of columns."""
        *batch, output, k = self.lhs_strides
        most = VECTOR_BYTES // self.dtype.itemsize
        if not self.columns:
            return most
        steps = [*batch, k if self.k > 1 else 0, self.outputs if output == 1 else 1]
        return math.gcd(most, *steps)

    @property
    def factor(self) -> int:
        """Elements of a load of ``rhs``: a vector if rows of both are as far from alignment."""
        if self.columns or self.rhs_strides is None:
            return 1
        *lhs_batch, output, _ = self.lhs_strides
        steps = [x - y for x, y in zip(lhs_batch, self.rhs_strides[:-1], strict=True)]
        steps += [output] if self.outputs > 1 else []
        return 1 if any(step % self.vector for step in steps) else self.vector

    @property
    def slots(self) -> int:
        """Outputs, or vectors of outputs, that have threads of their own."""
        return self.results // (self.vector if self.columns else 1)

    @property
    def lanes(self) -> int:
        """Threads side by side along the dimension of loads."""
        load_bytes = self.vector * self.dtype.itemsize
        unroll = 4 if load_bytes > 4 else 8
        wanted = min(_MANY_THREADS, _LOADED_BYTES // load_bytes)
        # More threads share k, as long as their loads are in flight together, if slots are few.
        loads = self.k if self.columns else math.ceil(self.k / self.vector)
        sharing = min(
            _power_of_two(math.ceil(loads / unroll)), _power_of_two(math.ceil(wanted / self.slots))
        )
        if self.columns:
            return min(THREADS // min(sharing, _MAX_LINES), _power_of_two(self.slots))
        # A lane has one of the elements before and after whole vectors. Long rows take a warp.
        ends = _power_of_two(min(self.k, 2 * self.vector))
        warp = min(WARP, _power_of_two(math.ceil(loads / 8)))
        return min(THREADS, max(sharing, ends, warp))

    @property
    def k_step(self) -> int:
        """Elements of ``k`` that the threads of a slot take with a load each."""
        return THREADS // self.lanes if self.columns else self.lanes * self.vector

    @property
    def chunk_k(self) -> int:
        """Elements of ``k`` in a chunk, whole loads of all threads of a slot."""
        return math.ceil(math.ceil(self.k / self.k_step) / self.chunks) * self.k_step

    @property
    def ctas(self) -> int:
        """CTAs of the grid."""
        slots_per_cta = self.lanes if self.columns else THREADS // self.lanes
        return math.ceil(self.slots / slots_per_cta) * self.chunks

    @property
    def kernel(self) -> Kernel:
        """The kernel to compile."""
        config = cxx_config(
            "ReductionConfig",
            vector_bytes=self.vector * self.dtype.itemsize,
            factor_bytes=self.factor * self.dtype.itemsize,
            columns=self.columns,
            products=self.rhs_strides is not None,
        )
        types = ", ".join(CXX_TYPES[t] for t in (self.dtype, self.sum_dtype, self.out_dtype))
        return Kernel("reduction/reduction.cuh", f"tilekern::reduce<{types}, {config}>")

    def partial(self, chunks: int) -> tuple[Reduction, Reduction]:
        """Return the reduction to partial sums of chunks of ``k``, and that of the partial sums.

        The partial sums of a chunk are dense, and follow those of the chunk before.
        """
        sizes = (*self.batch, self.outputs)
        dense = tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))
        first = dataclasses.replace(
            self, out_strides=dense, out_dtype=self.sum_dtype, chunks=chunks
        )
        second = dataclasses.replace(
            self,
            k=chunks,
            lhs_strides=(*dense, self.results),
            rhs_strides=None,
            dtype=self.sum_dtype,
        )
        return first, second

    def launch(self, compiled: Compiled, *buffers: Buffer) -> Launch:
        """Return the launch, given what ``kernel`` was compiled to, and the buffers."""
        missing = MAX_BATCH_DIMS - len(self.batch)
        rhs_strides = self.rhs_strides or (0,) * (len(self.batch) + 1)
        batches = self.lhs_strides[:-2], rhs_strides[:-1], self.out_strides[:-1]
        shape = Scalars.pack(
            f"{3 * MAX_BATCH_DIMS + 6}q{MAX_BATCH_DIMS + 5}I",
            *(stride for batch in batches for stride in ((0,) * missing + batch)),
            *self.lhs_strides[-2:],
            rhs_strides[-1],
            self.out_strides[-1],
            self.results,
            self.k,
            *(1,) * missing,
            *self.batch,
            self.slots // math.prod(self.batch),
            self.slots,
            self.chunks,
            self.chunk_k,
            self.lanes.bit_length() - 1,
        )
        return Launch(
            entry=compiled.entry(self.kernel.name),
            grid=(self.ctas, 1, 1),
            block=(THREADS, 1, 1),
            parameters=(*buffers, shape),
        )


def _power_of_two(size: int) -> int:
    return int(1 << (size - 1).bit_length())
