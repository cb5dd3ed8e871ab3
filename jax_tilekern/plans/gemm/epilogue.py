"""The epilogue of a product: a function of each accumulator, in the kernel that computes it.

What the function computes is text, which ``jax_tilekern/epilogue/cuda_text.py`` writes. Here it
becomes the kernel's further parameters. ``epilogue_text.py`` makes a functor of it, and
the kernel that has this functor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gemm.geometry import MAX_BATCH_DIMS
from jax_tilekern.plans.launch import TMA_STRIDE_BYTES, Buffer, Parameter, Scalars, TensorMap

# Instructions of a thread that an SM issues in a cycle: its schedulers have one or two warps each,
# which wait for half of the time (H100, H200).
_LANES = 64
# Cycles of an SM for an element of a matrix: its load is waited for, it comes through the ring of
# stages, or it is stored.
_READ, _STAGED, _WRITTEN = 0.9, 0.1, 0.5


@dataclass(frozen=True)
class EpilogueArray:
    """An array of which each accumulator has an element: an operand, or a further result.

    Attributes
    ----------
    dtype
        Element type in memory.
    computed
        The C++ type of its elements in the function, which for 16-bit floats is another.
    strides
        Batch strides, then those of ``m`` and ``n``, in elements; 0 where it is broadcast.
    """

    dtype: np.dtype[Any]
    computed: str
    strides: tuple[int, ...]

    @property
    def has_aligned_rows(self) -> bool:
        """Whether 8 adjacent elements of a row can be read at once, see ``ElementBlock``."""
        *outer, row, column = self.strides
        small = self.dtype.itemsize <= 2
        return small and column == 1 and row != 0 and all(x % 8 == 0 for x in (*outer, row))

    @property
    def alignment(self) -> int:
        """Bytes that its address is a multiple of: those of the elements that are read at once."""
        if self.fits_tma:
            return TMA_STRIDE_BYTES
        return min(16, (8 if self.has_aligned_rows else 2) * self.dtype.itemsize)

    @property
    def fits_tma(self) -> bool:
        """Whether TMA can load tiles of it, in which adjacent columns are contiguous."""
        *outer, row, column = self.strides
        itemsize = self.dtype.itemsize
        aligned = all(stride * itemsize % TMA_STRIDE_BYTES == 0 for stride in (*outer, row))
        return itemsize <= 4 and column == 1 and aligned


RowReductionKind = Literal["sum", "max", "logsumexp"]


class _ReductionClass(NamedTuple):
    name: str
    # Size of the partial result of a tile's row.
    partial_bytes: int
    # Instructions for each element. Those of logsumexp are fitted (docs/tuning-log.md).
    instructions: int


_CLASSES: dict[RowReductionKind, _ReductionClass] = {
    "sum": _ReductionClass("tilekern::SumOfRow", 4, 1),
    "max": _ReductionClass("tilekern::MaxOfRow", 4, 1),
    "logsumexp": _ReductionClass("tilekern::LogSumExpOfRow", 8, 40),
}


@dataclass(frozen=True)
class RowReductionText:
    """A result that is reduced over rows, in float32; see ``ffi/cuda/gemm/row_reductions.cuh``.

    Attributes
    ----------
    kind
        How the values of a row are reduced.
    value
        The C++ expression of one value.
    dtype
        Type of the result.
    strides
        Batch strides, then those of ``m`` and ``n``, in elements. That of the dimension along which
        rows are reduced is 0.
    """

    kind: RowReductionKind
    value: str
    dtype: np.dtype[Any]
    strides: tuple[int, ...]

    @property
    def cxx_class(self) -> str:
        """The class that reduces."""
        return _CLASSES[self.kind].name

    @property
    def partial_bytes(self) -> int:
        """Size of the partial result of a tile's row."""
        return _CLASSES[self.kind].partial_bytes

    @property
    def instructions(self) -> int:
        """An estimate of the instructions for each accumulator."""
        return _CLASSES[self.kind].instructions


@dataclass(frozen=True)
class RowQuantization:
    """A result of rows that are quantised in blocks of 1x128; see ``row_quantize``.

    Attributes
    ----------
    dtype
        Type of the 8-bit floats.
    power_of_two
        Whether scales are powers of two.
    scales
        Whether the result is the scales, and not the values.
    """

    dtype: np.dtype[Any]
    power_of_two: bool
    scales: bool


@dataclass(frozen=True)
class QuantizedText:
    """Results that are quantised rows; see ``ffi/cuda/gemm/row_quantization.cuh``.

    Attributes
    ----------
    value
        The C++ expression of one value.
    power_of_two
        Whether scales are powers of two.
    values, scales
        The two results. ``n`` of the scales counts blocks.
    """

    value: str
    power_of_two: bool
    values: EpilogueArray
    scales: EpilogueArray

    @property
    def arrays(self) -> tuple[EpilogueArray, EpilogueArray]:
        """Both results."""
        return self.values, self.scales


# Columns of a block of quantised rows, of which a tile has whole ones.
QUANTIZED_COLUMNS = 128
# Instructions for each accumulator, an estimate: the maximum, the rounding, and shuffles.
QUANTIZING_INSTRUCTIONS = 8


@dataclass(frozen=True)
class Staging:
    """Operands that come through stages of the mainloop, see ``gemm/sm90/staged_operands.cuh``.

    Attributes
    ----------
    maps
        The tensor map of each of these operands, by its number.
    rows
        Rows of the output tile.
    columns
        Columns of the output tile that a stage has.
    """

    maps: Mapping[int, TensorMap]
    rows: int
    columns: int


@dataclass(frozen=True)
class Epilogue:
    """A function of an accumulator and of elements of further arrays.

    Attributes
    ----------
    statements
        C++ statements over ``x0``, the accumulator, and ``x1``, ``x2``, ..., the operands.
    results
        The expression of each result that has an element for each accumulator. The first one is
        stored by the kernel.
    operands
        The arrays that it reads, whose buffers follow the product's operands.
    outputs
        The arrays of the other results, whose buffers follow the product's output.
    batch
        Sizes of the product's batch dimensions.
    instructions
        An estimate of the instructions for each accumulator.
    ragged
        Which dimension of the matrices has the rows of groups, in a grouped GEMM whose output has
        them: tiles end where groups do, and rows of no group stay zeros in every result. There
        the last of ``batch`` is the group.
    reductions
        Results that are reduced over rows. Their buffers follow those of ``results``.
    products
        The number of products whose accumulators it is a function of: 1, or 2 of one ``lhs``. Then
        ``x1`` is the second accumulator, and the operands follow.
    quantized
        Quantised rows, whose buffers follow those of ``reductions``. There are none of the two
        together.
    rounded
        The factors' type, if accumulators are rounded to it before anything else.
    """

    statements: tuple[str, ...]
    results: tuple[str, ...]
    operands: tuple[EpilogueArray, ...]
    outputs: tuple[EpilogueArray, ...]
    batch: tuple[int, ...]
    instructions: int
    ragged: Literal["rows", "columns"] | None = None
    reductions: tuple[RowReductionText, ...] = ()
    products: int = 1
    quantized: QuantizedText | None = None
    rounded: np.dtype[Any] | None = None

    @property
    def cycles(self) -> float:
        """Cycles of an SM for each accumulator, without accesses of memory."""
        return self.instructions / _LANES

    def cycles_of_arrays(self, *, staged: bool) -> float:
        """Cycles of an SM for the elements of matrices, whose loads are waited for or staged."""
        read = sum(array.strides[-2] != 0 != array.strides[-1] for array in self.operands)
        return read * (_STAGED if staged else _READ) + len(self.outputs) * _WRITTEN

    @property
    def stores(self) -> bool:
        """Whether the kernel stores an element for each accumulator."""
        return bool(self.results)

    @property
    def has_matrices(self) -> bool:
        """Whether it reads or writes arrays that have rows and columns."""
        return any(all(array.strides[-2:]) for array in self.arrays)

    def swapped(self) -> Epilogue:
        """Return the epilogue of the transposed product."""
        assert self.quantized is None

        def transposed(arrays: tuple[EpilogueArray, ...]) -> tuple[EpilogueArray, ...]:
            return tuple(
                dataclasses.replace(x, strides=(*x.strides[:-2], *x.strides[:-3:-1]))
                for x in arrays
            )

        ragged: dict[str | None, Literal["rows", "columns"]] = {
            "rows": "columns",
            "columns": "rows",
        }
        return dataclasses.replace(
            self,
            operands=transposed(self.operands),
            outputs=transposed(self.outputs),
            ragged=ragged.get(self.ragged),
            reductions=tuple(
                dataclasses.replace(x, strides=(*x.strides[:-2], *x.strides[:-3:-1]))
                for x in self.reductions
            ),
        )

    @property
    def has_row_results(self) -> bool:
        """Whether there are results of whole rows, or blocks of them."""
        return bool(self.reductions or self.quantized)

    def fits_orientation(self, *, swapped: bool) -> bool:
        """Whether results of rows, if there are any, are those of the kernel's matrices."""
        along = -2 if swapped else -1
        whole = all(x.strides[along] == 0 for x in self.reductions)
        return whole and not (swapped and self.quantized)

    def parameters(
        self, out_buffer: int, partials: Sequence[Buffer] = (), staging: Staging | None = None
    ) -> tuple[Parameter, ...]:
        """Return the parameters that follow a kernel's own.

        Parameters
        ----------
        out_buffer
            The buffer of the first result.
        partials
            Workspaces of the partial results of the reductions.
        staging
            Operands that come through stages of the mainloop, if there are any.
        """
        if not self.arrays:
            return tuple(partials)
        missing = MAX_BATCH_DIMS - len(self.batch)
        rows, columns = ([x.strides[i] for x in self.arrays] for i in (-2, -1))
        batch = [stride for x in self.arrays for stride in (*(0,) * missing, *x.strides[:-2])]
        strides = Scalars.pack(
            f"{len(self.arrays) * (2 + MAX_BATCH_DIMS)}q{MAX_BATCH_DIMS}i",
            *rows, *columns, *batch, *(1,) * missing, *self.batch,
        )  # fmt: skip
        first, maps = out_buffer - len(self.operands), staging.maps if staging else {}
        operands = (maps.get(i, Buffer(first + i)) for i in range(len(self.operands)))
        outputs = (Buffer(out_buffer + 1 + i) for i in range(len(self.outputs)))
        behind = out_buffer + len(self.results) + len(self.reductions)
        quantized = (Buffer(behind + i) for i in range(2 if self.quantized else 0))
        return (*operands, *outputs, *quantized, strides, *partials)

    @property
    def arrays(self) -> tuple[EpilogueArray, ...]:
        """Arrays that have strides: operands, other results of elements, and quantised rows."""
        quantized = self.quantized.arrays if self.quantized else ()
        return (*self.operands, *self.outputs, *quantized)

    def parameter_types(self, staging: Staging | None) -> list[str]:
        """Return the C++ types of the parameters that follow a kernel's own."""
        maps = staging.maps if staging else {}
        types = [
            "tilekern::TensorMap" if i in maps else f"const {CXX_TYPES[x.dtype]}*"
            for i, x in enumerate(self.operands)
        ]
        types += [f"{CXX_TYPES[x.dtype]}*" for x in self.arrays[len(types) :]]
        types += [f"tilekern::ElementStrides<{len(types)}>"] if types else []
        return types + [f"{x.cxx_class}::Partial*" for x in self.reductions]
