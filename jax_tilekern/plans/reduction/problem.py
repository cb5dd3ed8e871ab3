"""The problem of a launch of ``reduction/reduction.cuh``: sums, or products with a vector."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from jax_tilekern.compilation.compiler import Compiled, Kernel
from jax_tilekern.plans.cxx import CXX_TYPES, Dtype, cxx_config
from jax_tilekern.plans.gemm.geometry import MAX_BATCH_DIMS, distinct_matrices
from jax_tilekern.plans.gpu import VECTOR_BYTES, WARP, power_of_two
from jax_tilekern.plans.launch import Buffer, Launch, Scalars

THREADS = 256
# Bytes that loads of all threads, one each, have at least.
_LOADED_BYTES = 2**20
_MAX_LINES = 16


class SummedDims(NamedTuple):
    """Dimensions of a row-major array that is summed over some of them."""

    sizes: tuple[int, ...]  # all above 1
    reduced: tuple[bool, ...]  # whether each is summed over; neighbours differ

    @classmethod
    def of(cls, shape: Sequence[int], axes: Collection[int]) -> SummedDims:
        """Merge neighbours that are both summed over or both kept, and drop sizes of 1."""
        dims = [axis for axis, size in enumerate(shape) if size != 1]
        runs = [(is_reduced, [*run]) for is_reduced, run in groupby(dims, lambda x: x in axes)]
        sizes = (math.prod(shape[axis] for axis in run) for _, run in runs)
        return cls(tuple(sizes), tuple(is_reduced for is_reduced, _ in runs))


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
    dtype: Dtype  # of lhs and rhs
    sum_dtype: Dtype  # of the accumulators: float32, float64, or uint32 and uint64, which wrap
    out_dtype: Dtype
    chunks: int = 1  # CTAs that share k; with several, out has the partial sums of each

    @property
    def results(self) -> int:
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
        """Elements of a load: up to 16 bytes that divide rows or columns and all steps."""
        *batch, output, k = self.lhs_strides
        if self.columns:
            steps = [k if self.k > 1 else 0, self.outputs if output == 1 else 1]
        else:
            steps = [output if self.outputs > 1 else 0, self.k, *(self.rhs_strides or ())[:-1]]
        return math.gcd(VECTOR_BYTES // self.dtype.itemsize, *batch, *steps)

    @property
    def slots(self) -> int:
        """Outputs, or vectors of outputs, that have threads of their own."""
        return self.results // (self.vector if self.columns else 1)

    @property
    def lanes(self) -> int:
        """Threads side by side along the dimension of loads."""
        load_bytes = self.vector * self.dtype.itemsize
        unroll = 4 if load_bytes > 4 else 8
        wanted = _LOADED_BYTES // max(4, load_bytes)
        # More threads share k, as long as their loads are in flight together, if slots are few.
        loads = self.k if self.columns else self.k // self.vector
        sharing = power_of_two(math.ceil(min(loads / unroll, wanted / self.slots)))
        if self.columns:
            return min(THREADS // min(sharing, _MAX_LINES), power_of_two(self.slots))
        # Long rows take a warp.
        return min(THREADS, max(sharing, min(WARP, power_of_two(math.ceil(loads / 8)))))

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
        config = cxx_config(
            "ReductionConfig",
            vector_bytes=self.vector * self.dtype.itemsize,
            columns=self.columns,
            products=self.rhs_strides is not None,
        )
        types = ", ".join(CXX_TYPES[t] for t in (self.dtype, self.sum_dtype, self.out_dtype))
        return Kernel("reduction/reduction.cuh", f"tilekern::reduce<{types}, {config}>")

    def partial(self, chunks: int) -> tuple[Reduction, Reduction]:
        """Return the reduction to dense partial sums of chunks of ``k``, and that of these."""
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
