"""Plans for the kernels that add up rows and columns (``row_sums.cuh``, ``column_sums.cuh``).

Sums, dot products and products of a matrix and a vector are all a :class:`Reduction`. A pass takes
it in one launch, or leaves partial sums in a workspace that a further, smaller reduction adds up;
so every sum is made in the same order every time, without atomic operations.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.compiler import Compiled, Kernel, compile_kernels
from jax_tilekern.plans.cxx import CXX_TYPES, cxx_config
from jax_tilekern.plans.geometry import MAX_BATCH_DIMS
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import Buffer, Launch, Scalars
from jax_tilekern.plans.product import (
    FURTHER_LAUNCH_CYCLES,
    LAUNCH_CYCLES,
    MEMORY_BANDWIDTH,
)

_Dtype = np.dtype[Any]

_THREADS = 256
_WIDEST_LOAD = 16
_MOST_BLOCKS = 2**31 - 1
_MOST_INDICES = 2**31 - 1
# Blocks for each multiprocessor that splits aim at: few, which leaves few partial sums, and many,
# whose ends even out.
_BLOCKS_PER_MULTIPROCESSOR = (2, 4, 16)
# Loads of a thread that a split has at least, and bytes that are not worth a further launch.
_FEWEST_LOADS = 2
_FEWEST_SPLIT_BYTES = 1 << 16
# Blocks that take less run closer to each other in memory, which has been seen to give 3 % more.
_NEAR_BYTES = 1 << 16
_FAR = 1.03
_MOST_SPLITS = 1 << 16
# What is left of the candidates.
_MOST_CANDIDATES = 8
# Cycles of a load, and of a block besides its loads; bytes that a multiprocessor takes in a cycle.
# What the last blocks cost that run while others have ended, for one round of blocks.
_LATENCY_CYCLES = 1500
_BLOCK_CYCLES = 2500
_MULTIPROCESSOR_BANDWIDTH = 48
_UNEVEN = 0.02
# What a piece of neighbouring bytes costs besides its own.
_PIECE_BYTES = 8


@dataclass(frozen=True)
class Reduction:
    """``out[b, i]`` is the sum over ``k`` of ``lhs[b, i, k]``, or of ``lhs[b, i, k] * rhs[b, k]``.

    All strides are in elements, and all sizes at least 1.

    Attributes
    ----------
    batch
        Sizes of the batch dimensions, outermost first; at most ``MAX_BATCH_DIMS``.
    lines
        Sums of each batch index.
    k
        Elements of each sum.
    lhs_strides
        Batch strides, then those of the lines and of ``k``.
    rhs_strides
        Batch strides, then that of ``k``; ``None`` where there is no ``rhs``.
    out_strides
        Batch strides, then that of the lines.
    dtype
        Type of ``lhs`` and ``rhs``.
    sum_dtype
        Type that sums are made in: float32, float64, uint32 or uint64. Unsigned, they wrap.
    out_dtype
        Type of the result.
    outer
        How many of the batch dimensions, the last ones, are summed over too. Their strides of
        ``out`` have no meaning, and are 0.
    """

    batch: tuple[int, ...]
    lines: int
    k: int
    lhs_strides: tuple[int, ...]
    rhs_strides: tuple[int, ...] | None
    out_strides: tuple[int, ...]
    dtype: _Dtype
    sum_dtype: _Dtype
    out_dtype: _Dtype
    outer: int = 0

    @property
    def bytes(self) -> int:
        """What has to be read of the operands."""
        bytes_ = _distinct(self.batch, self.lhs_strides) * self.lines * self.k
        if self.rhs_strides is not None:
            bytes_ += _distinct(self.batch, self.rhs_strides) * self.k
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
            Parts that ``k`` is taken in.
        side_by_side
            Whether the partial sums of an element, rather than the elements, are neighbours.
        """
        kept = len(self.batch) - self.outer
        partials = splits * math.prod(self.batch[kept:])
        line, partial = (partials, 1) if side_by_side else (1, self.lines)
        strides = (
            *(partials * s for s in _dense((*self.batch[:kept], self.lines))[:-1]),
            *(partial * s for s in _dense((*self.batch[kept:], splits))[:-1]),
            line,
        )
        first = dataclasses.replace(self, out_strides=strides, out_dtype=self.sum_dtype, outer=0)
        second = dataclasses.replace(
            self,
            batch=self.batch[:kept],
            k=partials,
            lhs_strides=(*strides[:kept], line, partial),
            rhs_strides=None,
            out_strides=(*self.out_strides[:kept], self.out_strides[-1]),
            dtype=self.sum_dtype,
            outer=0,
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


_BATCH_LAYOUT = f"{3 * MAX_BATCH_DIMS}q{MAX_BATCH_DIMS}I"


@dataclass(frozen=True)
class Pass(ABC):
    """One launch, not compiled yet.

    Attributes
    ----------
    reduction
        What is added up; in several splits, ``out`` is the partial sums.
    vector_bytes
        Bytes of a load.
    lanes
        Threads side by side on a row.
    splits
        Blocks that share ``k``.
    split_stride
        Between the partial sums of one element.
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
        """Blocks if ``k`` is not split."""

    @property
    @abstractmethod
    def resident_blocks(self) -> int:
        """Blocks that a multiprocessor holds."""

    @property
    @abstractmethod
    def _busy(self) -> float:
        """Share of a block's threads that have something to do."""

    @property
    @abstractmethod
    def _loads(self) -> float:
        """Loads that a thread has on their way at once."""

    @property
    @abstractmethod
    def _row_bytes(self) -> int:
        """Bytes that neighbouring threads read in one piece."""

    @abstractmethod
    def _shape(self) -> Scalars:
        """Return the kernel's last parameter."""

    @property
    def vector(self) -> int:
        """Elements of a load."""
        return self.vector_bytes // self.reduction.dtype.itemsize

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return self._whole_blocks * self.splits

    @property
    def split_k(self) -> int:
        """Elements of ``k`` in a split, whole loads of all threads of a row."""
        return math.ceil(math.ceil(self.reduction.k / self.k_step) / self.splits) * self.k_step

    def cycles(self, gpu: Gpu) -> float:
        """Estimate what the launch takes once it has begun."""
        busiest = math.ceil(self.blocks / gpu.multiprocessors)
        resident = min(busiest, self.resident_blocks)
        rounds = math.ceil(busiest / resident)
        # What a block has on its way in the time of a load, unless too many share the way.
        rate = _THREADS * self._busy * self._loads * self.vector_bytes / _LATENCY_CYCLES
        rate = min(rate, _MULTIPROCESSOR_BANDWIDTH / resident)
        busy = rounds * (_BLOCK_CYCLES + self.reduction.bytes / self.blocks / rate)
        # The longer the pieces, the better for memory.
        whole = self._row_bytes / (self._row_bytes + _PIECE_BYTES)
        memory = self.reduction.bytes / (whole * MEMORY_BANDWIDTH) * (1 + _UNEVEN / rounds)
        if self.reduction.bytes > 2 * _NEAR_BYTES * self.blocks:
            memory *= _FAR
        return max(busy, memory) + 0.15 * min(busy, memory)

    def split_counts(self, gpu: Gpu) -> list[int]:
        """Return the numbers of splits that are worth a thought."""
        if self.reduction.bytes < _FEWEST_SPLIT_BYTES:
            return [1]
        most = self.reduction.k // (self.k_step * _FEWEST_LOADS)
        counts = {1}
        totals = [blocks * gpu.multiprocessors for blocks in _BLOCKS_PER_MULTIPROCESSOR]
        for blocks in (*totals, min(self.reduction.bytes // _NEAR_BYTES, _MOST_SPLITS)):
            wanted = min(most, blocks // self._whole_blocks)
            # Splits are whole steps; leave out those that would have none.
            if wanted > 1:
                steps = math.ceil(self.reduction.k / self.k_step)
                counts.add(math.ceil(steps / math.ceil(steps / wanted)))
        return sorted(counts)

    def launch(self, compiled: Compiled, *buffers: Buffer) -> Launch:
        """Return the launch, given what ``kernel`` was compiled to, and the buffers."""
        return Launch(
            entry=compiled.entry(self.kernel.name),
            grid=(self.blocks, 1, 1),
            block=(_THREADS, 1, 1),
            parameters=(*buffers, self._shape()),
        )

    def _kernel(self, family: str, config: str) -> Kernel:
        kind = "sums" if self.reduction.rhs_strides is None else "products"
        name = f"tilekern::{family}_{kind}<{self.reduction.types}, {config}>"
        return Kernel(f"{family}_sums.cuh", name)


@dataclass(frozen=True)
class RowPass(Pass):
    """Adds up rows, whose ``k`` has unit stride.

    Attributes
    ----------
    rows
        Rows that a thread takes together.
    """

    rows: int = 1

    @property
    def key(self) -> str:
        """Rows of a thread, and lanes."""
        return f"rows {self.rows}x{self.lanes}"

    @property
    def kernel(self) -> Kernel:
        """What the compiler is asked for."""
        fields = {"vector_bytes": self.vector_bytes, "rows": self.rows, "unroll": self._unroll}
        return self._kernel("row", cxx_config("RowConfig", **fields))

    @property
    def k_step(self) -> int:
        """Elements of ``k`` that the lanes take with a load each."""
        return self.vector * self.lanes

    @property
    def _unroll(self) -> int:
        # 8 loads at a time, of which a vector for one row takes half.
        alone = self.rows == 1 and self.reduction.rhs_strides is not None
        return 4 if alone else 8 // self.rows

    @property
    def _whole_blocks(self) -> int:
        return math.ceil(self._groups / (_THREADS // self.lanes))

    @property
    def resident_blocks(self) -> int:
        """Blocks that a multiprocessor holds, as ``RowConfig`` says."""
        return 4 if self.rows == 1 else 2

    @property
    def _busy(self) -> float:
        threads = self.blocks * _THREADS * self.rows
        lines = math.prod(self.reduction.batch) * self.reduction.lines
        vectors = max(1.0, self.split_k / self.vector)
        return min(1.0, vectors / self.lanes) * lines * self.splits * self.lanes / threads

    @property
    def _loads(self) -> float:
        each = max(1.0, min(self._unroll, self.split_k / self.k_step))
        return each * (self.rows + 1 / self.rows if self.reduction.rhs_strides else self.rows)

    @property
    def _row_bytes(self) -> int:
        dense = self.reduction.lhs_strides[-2] == self.reduction.k
        short = self.split_k <= self.k_step * self._unroll
        return self.vector_bytes * (_THREADS if dense and short else self.lanes)

    @property
    def _row_groups(self) -> int:
        return math.ceil(self.reduction.lines / self.rows)

    @property
    def _groups(self) -> int:
        return math.prod(self.reduction.batch) * self._row_groups

    def _shape(self) -> Scalars:
        reduction = self.reduction
        return Scalars.pack(
            f"{_BATCH_LAYOUT}5q5I",
            *reduction.pack_batch(),
            reduction.lhs_strides[-2],
            reduction.out_strides[-1],
            self.split_stride,
            reduction.k,
            self.split_k,
            reduction.lines,
            self._row_groups,
            self._groups,
            self.splits,
            self.lanes.bit_length() - 1,
        )


@dataclass(frozen=True)
class ColumnPass(Pass):
    """Adds up columns, which have unit stride."""

    @property
    def key(self) -> str:
        """Lanes."""
        return f"columns {self.lanes}"

    @property
    def kernel(self) -> Kernel:
        """What the compiler is asked for."""
        fields = {"vector_bytes": self.vector_bytes, "unroll": self._unroll}
        return self._kernel("column", cxx_config("ColumnConfig", **fields))

    @property
    def _unroll(self) -> int:
        # Registers: a double takes two, and a vector comes on top.
        wide = self.reduction.sum_dtype.itemsize == 8 and self.reduction.rhs_strides is not None
        return 4 if wide else 8

    @property
    def k_step(self) -> int:
        """Rows of a block."""
        return _THREADS // self.lanes

    @property
    def _whole_blocks(self) -> int:
        return math.prod(self.reduction.batch) * self._tiles

    @property
    def resident_blocks(self) -> int:
        """Blocks that a multiprocessor holds, as ``ColumnConfig`` says."""
        return 3 if self.vector_bytes == _WIDEST_LOAD else 4

    @property
    def _busy(self) -> float:
        rows = min(1.0, self.split_k / self.k_step)
        return rows * self._vectors / (self._tiles * self.lanes)

    @property
    def _loads(self) -> float:
        return max(1.0, min(self._unroll, self.split_k / self.k_step))

    @property
    def _row_bytes(self) -> int:
        return self.vector_bytes * (_THREADS if self._tiles == 1 else self.lanes)

    @property
    def _vectors(self) -> int:
        return self.reduction.lines // self.vector

    @property
    def _tiles(self) -> int:
        return math.ceil(self._vectors / self.lanes)

    def _shape(self) -> Scalars:
        reduction = self.reduction
        return Scalars.pack(
            f"{_BATCH_LAYOUT}6q4I",
            *reduction.pack_batch(),
            reduction.lhs_strides[-1],
            reduction.rhs_strides[-1] if reduction.rhs_strides else 0,
            reduction.out_strides[-1],
            self.split_stride,
            reduction.k,
            self.split_k,
            self._vectors,
            self._tiles,
            self.splits,
            self.lanes.bit_length() - 1,
        )


@dataclass(frozen=True)
class Passes:
    """Launches that make a reduction, each but the first from what the one before has left.

    Attributes
    ----------
    passes
        In order.
    cycles
        The estimated cost.
    """

    passes: tuple[Pass, ...]
    cycles: float

    @property
    def key(self) -> str:
        """Short, and unique among those of a reduction."""
        first = self.passes[0]
        return first.key + (f" in {first.splits} splits" if first.splits > 1 else "")

    @property
    def reason(self) -> str:
        """What is done, in words for ``explain``."""
        first = self.passes[0]
        text = f"{first.key}, {first.vector_bytes}-byte loads, {first.blocks} blocks"
        return text + (f", {len(self.passes)} launches" if len(self.passes) > 1 else "")

    @property
    def workspace_bytes(self) -> tuple[int, ...]:
        """Sizes of the partial sums that each pass leaves to the next."""
        return tuple(later.reduction.bytes for later in self.passes[1:])

    @property
    def operand_alignment(self) -> int:
        """Bytes that the operands' addresses are to be multiples of."""
        first = self.passes[0]
        return max(first.vector_bytes, first.reduction.dtype.itemsize)

    def compile(self, gpu: Gpu) -> Compiled:
        """Compile the kernels.

        Raises
        ------
        NvrtcNotFound
            If there is no NVRTC to compile the kernels with.
        """
        return compile_kernels(*dict.fromkeys(p.kernel for p in self.passes), arch=gpu.arch)

    def launches(
        self, compiled: Compiled, operands: tuple[Buffer, ...], out: Buffer
    ) -> tuple[Launch, ...]:
        """Return the launches. Workspaces follow ``out``, the last of the buffers."""
        between = [Buffer(out.index + 1 + i) for i in range(len(self.passes) - 1)]
        sources = [operands, *((buffer,) for buffer in between)]
        return tuple(
            step.launch(compiled, *source, target)
            for step, source, target in zip(self.passes, sources, [*between, out], strict=True)
        )


def reduction_passes(reduction: Reduction, gpu: Gpu) -> list[Passes]:
    """Return the ways to make a reduction, best first by the cost model; none if there is none.

    Either ``k`` or the lines must have unit stride, and ``rhs`` too where ``k`` has it.
    """
    found: list[Passes] = []
    for whole in (*_row_passes(reduction), *_column_passes(reduction)):
        for splits in whole.split_counts(gpu):
            passes = _split(whole, splits, gpu)
            if passes is not None:
                found.append(passes)
    return sorted(found, key=lambda passes: passes.cycles)[:_MOST_CANDIDATES]


def _split(whole: Pass, splits: int, gpu: Gpu) -> Passes | None:
    if whole.blocks * splits > _MOST_BLOCKS:
        return None
    reduction = whole.reduction
    if splits == 1 and not reduction.outer:
        return Passes((whole,), LAUNCH_CYCLES + whole.cycles(gpu))
    rows = isinstance(whole, RowPass)
    first, second = reduction.partial(splits, side_by_side=rows)
    step = dataclasses.replace(
        whole, reduction=first, splits=splits, split_stride=second.lhs_strides[-1]
    )
    rest = reduction_passes(second, gpu)
    if not rest:
        return None
    return Passes(
        (step, *rest[0].passes), step.cycles(gpu) + FURTHER_LAUNCH_CYCLES + rest[0].cycles
    )


def _row_passes(reduction: Reduction) -> Iterator[RowPass]:
    *lhs_batch, line, k = reduction.lhs_strides
    *rhs_batch, rhs_k = reduction.rhs_strides or (1,)
    if reduction.k > 1 and not k == rhs_k == 1:
        return
    if math.prod(reduction.batch) * reduction.lines > _MOST_INDICES:
        return
    steps = [*lhs_batch, *rhs_batch, line if reduction.lines > 1 else 0]
    vector_bytes = _load_bytes(steps, reduction.dtype)
    vectors = max(1, reduction.k * reduction.dtype.itemsize // vector_bytes)
    enough = 1 << (vectors - 1).bit_length()
    for lanes in sorted({min(lanes, enough) for lanes in (8, 32, _THREADS)}):
        for rows in (1, 4):
            groups = math.prod(reduction.batch) * reduction.lines // rows
            # Rather more threads on a row than threads without one.
            idle = lanes < min(enough, _THREADS) and groups * lanes < _THREADS
            # A row that takes a whole block has loads enough on its way, unless they are narrow.
            alone = lanes == _THREADS and vector_bytes == _WIDEST_LOAD
            if rows <= (1 if alone else reduction.lines) and not idle:
                yield RowPass(reduction, vector_bytes, lanes, rows=rows)


def _column_passes(reduction: Reduction) -> Iterator[ColumnPass]:
    *lhs_batch, line, k = reduction.lhs_strides
    if reduction.lines == 1 or line != 1:
        return
    if math.prod(reduction.batch) > _MOST_INDICES or reduction.k > _MOST_INDICES:
        return
    vector_bytes = _load_bytes([*lhs_batch, reduction.lines, k], reduction.dtype)
    vectors = reduction.lines * reduction.dtype.itemsize // vector_bytes
    if vectors > _MOST_INDICES:
        return
    enough = 1 << (vectors - 1).bit_length()
    for lanes in sorted({min(lanes, enough) for lanes in (2, 8, 16, 32, 128)}):
        yield ColumnPass(reduction, vector_bytes, lanes)


def _load_bytes(steps: list[int], dtype: _Dtype) -> int:
    """Return the widest load that divides steps in elements."""
    return math.gcd(_WIDEST_LOAD, *(step * dtype.itemsize for step in steps))


def _dense(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of row-major dimensions."""
    return tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))


def _distinct(batch: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Matrices of an operand, each counted once however often it is broadcast."""
    return math.prod(size for size, stride in zip(batch, strides, strict=False) if stride)
