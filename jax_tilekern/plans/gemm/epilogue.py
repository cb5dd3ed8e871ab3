"""The epilogue of a product: a function of each accumulator, in the kernel that computes it.

What the function computes is text, which ``jax_tilekern/epilogue/cuda_text.py`` writes. Here it
becomes a functor that satisfies the contract of ``ffi/cuda/epilogue.cuh``, the template argument of
a kernel, and the kernel's further parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from jax_tilekern.compilation.compiler import Kernel, Source
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gemm.geometry import MAX_BATCH_DIMS
from jax_tilekern.plans.launch import Buffer, Parameter, Scalars, TensorMap

_FUNCTOR = "GeneratedEpilogue"
# Addresses and strides of a tensor map are multiples of this.
TMA_BYTES = 16


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
            return TMA_BYTES
        return min(16, (8 if self.has_aligned_rows else 2) * self.dtype.itemsize)

    @property
    def fits_tma(self) -> bool:
        """Whether TMA can load tiles of it, in which adjacent columns are contiguous."""
        *outer, row, column = self.strides
        itemsize = self.dtype.itemsize
        aligned = all(stride * itemsize % TMA_BYTES == 0 for stride in (*outer, row))
        return itemsize <= 4 and column == 1 and aligned


Reduction = Literal["sum", "max", "logsumexp"]


class _ReductionClass(NamedTuple):
    name: str
    # Size of the partial result of a tile's row.
    partial_bytes: int
    # As the kernel of a row's logarithm of the sum of exponentials takes them (docs/tuning-log.md).
    instructions: int


_CLASSES: dict[Reduction, _ReductionClass] = {
    "sum": _ReductionClass("tilekern::SumOfRow", 4, 1),
    "max": _ReductionClass("tilekern::MaxOfRow", 4, 1),
    "logsumexp": _ReductionClass("tilekern::LogSumExpOfRow", 8, 40),
}


@dataclass(frozen=True)
class RowReduction:
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

    kind: Reduction
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
    """

    statements: tuple[str, ...]
    results: tuple[str, ...]
    operands: tuple[EpilogueArray, ...]
    outputs: tuple[EpilogueArray, ...]
    batch: tuple[int, ...]
    instructions: int
    ragged: Literal["rows", "columns"] | None = None
    reductions: tuple[RowReduction, ...] = ()

    @property
    def stores(self) -> bool:
        """Whether the kernel stores an element for each accumulator."""
        return bool(self.results)

    @property
    def has_matrices(self) -> bool:
        """Whether it reads or writes arrays that have rows and columns."""
        return any(all(array.strides[-2:]) for array in self._arrays)

    def swapped(self) -> Epilogue:
        """Return the epilogue of the transposed product."""

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

    def fits_orientation(self, *, swapped: bool) -> bool:
        """Whether reductions, if there are any, are along the rows of the kernel's matrices."""
        along = -2 if swapped else -1
        return all(x.strides[along] == 0 for x in self.reductions)

    def kernel(
        self,
        plain: Kernel,
        *,
        columns: int,
        within_rows: bool,
        within_columns: bool,
        tile_columns: int,
        staging: Staging | None = None,
    ) -> Kernel:
        """Return a kernel with this epilogue.

        Parameters
        ----------
        plain
            The kernel with the identity.
        columns
            The columns of the output.
        within_rows, within_columns
            Whether no tile reaches beyond the rows, and beyond the columns, of the output.
        tile_columns
            The columns of a tile.
        staging
            Operands that come through stages of the mainloop, if there are any.
        """
        assert isinstance(plain.source, str)
        within_rows &= self.ragged != "rows"
        within_columns &= self.ragged != "columns"
        functor = self._functor(within_rows, within_columns, columns, tile_columns, staging)
        text = f'#include "{plain.source}"\n{functor}'
        types = ", ".join((_FUNCTOR, *self._parameter_types(staging)))
        name = f"{plain.name.removesuffix('>')}, {types}>"
        file = plain.source.removesuffix(".cuh") + "_with_epilogue.cu"
        return Kernel(Source(text, file), name, plain.options)

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
        if not self._arrays:
            return tuple(partials)
        missing = MAX_BATCH_DIMS - len(self.batch)
        rows, columns = ([x.strides[i] for x in self._arrays] for i in (-2, -1))
        batch = [stride for x in self._arrays for stride in (*(0,) * missing, *x.strides[:-2])]
        strides = Scalars.pack(
            f"{len(self._arrays) * (2 + MAX_BATCH_DIMS)}q{MAX_BATCH_DIMS}i",
            *rows, *columns, *batch, *(1,) * missing, *self.batch,
        )  # fmt: skip
        first, maps = out_buffer - len(self.operands), staging.maps if staging else {}
        operands = (maps.get(i, Buffer(first + i)) for i in range(len(self.operands)))
        outputs = (Buffer(out_buffer + 1 + i) for i in range(len(self.outputs)))
        return (*operands, *outputs, strides, *partials)

    @property
    def _arrays(self) -> tuple[EpilogueArray, ...]:
        return (*self.operands, *self.outputs)

    def _parameter_types(self, staging: Staging | None) -> list[str]:
        maps = staging.maps if staging else {}
        types = [
            "tilekern::TensorMap" if i in maps else f"const {CXX_TYPES[x.dtype]}*"
            for i, x in enumerate(self.operands)
        ]
        types += [f"{CXX_TYPES[x.dtype]}*" for x in self.outputs]
        types += [f"tilekern::ElementStrides<{len(types)}>"] if types else []
        return types + [f"{x.cxx_class}::Partial*" for x in self.reductions]

    def _functor(
        self,
        within_rows: bool,
        within_columns: bool,
        columns: int,
        tile_columns: int,
        staging: Staging | None,
    ) -> str:
        names = [f"p{i}" for i, _ in enumerate(self._arrays, 1)]
        names += ["strides"] if names else []
        names += [f"q{i}" for i, _ in enumerate(self.reductions)]
        types = zip(self._parameter_types(staging), names, strict=True)
        # A tensor map is read where the kernel's parameter lies.
        members = [
            f"const {kind}& {name};" if kind == "tilekern::TensorMap" else f"{kind} {name};"
            for kind, name in types
        ]
        before = [
            _coordinate("row", "rows", 1, within_rows),
            _coordinate("column", "columns", "kRun", within_columns),
        ]
        each = ["const Accumulator x0 = accumulators[first + i];"]
        after = []
        blocks = _Blocks([], [], [], [])
        in_order = any(
            all(array.strides[-2:]) and not (staging and i in staging.maps)
            for i, array in enumerate(self._arrays)
        )
        # A block is 16 accumulators of a lane: see `kBlockOf`.
        in_blocks = within_columns and tile_columns % 32 == 0 and not self.reductions
        numbered = list(enumerate(self._arrays))
        staged = _StagedText(staging, self.operands, len(self.batch))
        for i, array in numbered[: len(self.operands)]:
            if i in staged.tiles:
                blocks.read_staged(i, array, staged.tiles[i])
                each.append(
                    f"const {array.computed} x{i + 1} = computed(e{i + 1}[first - block + i]);"
                )
                continue
            if in_blocks and array.has_aligned_rows:
                blocks.read(i, array)
                each.append(
                    f"const {array.computed} x{i + 1} = computed(e{i + 1}[first - block + i]);"
                )
                continue
            count = "kRun" if array.strides[-1] else "1"
            before.append(
                f"const auto r{i + 1} = read_run<{count}, {_contiguous(array, count)}>"
                f"(p{i + 1}{_offset(array, i)}, {_stride(array, i)});"
            )
            index = "i" if array.strides[-1] else "0"
            each.append(f"const {array.computed} x{i + 1} = r{i + 1}[{index}];")
        each += self.statements
        inside = " && ".join(
            f"at.{name}(first) < at.{name}s()"
            for name, within in (("row", within_rows), ("column", within_columns))
            if not within
        )
        results = [*map(self._result, self.results)]
        for (i, array), result in zip(numbered[len(self.operands) :], results[1:], strict=True):
            kind = CXX_TYPES[array.dtype]
            if in_blocks and array.has_aligned_rows:
                blocks.write(i, array)
                each.append(f"e{i + 1}[first - block + i] = stored<{kind}>({result});")
                continue
            before.append(f"ElementRun<{kind}, kRun> r{i + 1};")
            each.append(f"r{i + 1}.elements[i] = stored<{kind}>({result});")
            write = (
                f"write_run<kRun, {_contiguous(array, 'kRun')}>"
                f"(p{i + 1}{_offset(array, i)}, {_stride(array, i)}, r{i + 1});"
            )
            after.append(f"if ({inside}) {write}" if inside else write)
        if self.stores:
            each.append(f"accumulators[first + i] = static_cast<Accumulator>({results[0]});")
        prefetched = [
            f"prefetch_rows<kRows, kColumns>(p{i + 1}{_batch_offset(array, i, '0')}, "
            f"strides.row[{i}], at);"
            for i, array in numbered[: len(self.operands)]
            if array.strides[-1] == 1 and array.strides[-2] != 0 and i not in staged.tiles
        ]
        reductions = [*enumerate(self.reductions)]
        for i, x in reductions:
            inside = "true" if within_columns else "at.column(first + i) < at.columns()"
            each.append(
                f"t{i}[first + i - block] = {inside} ? {x.value} : {x.cxx_class}::kNeutral;"
            )
        template = _REDUCING_TEMPLATE if reductions else _TEMPLATE
        return template.format(
            name=_FUNCTOR,
            block="kBlockOf<Coordinates, kRun>" if blocks.begin else "kCount",
            staged_columns=staging.columns if staging else 0,
            staged=staged.functions(),
            first_block="\n    ".join(blocks.first),
            begin_block="\n      ".join(blocks.begin),
            next_block="\n      ".join(blocks.next),
            end_block="\n      ".join(blocks.end),
            stores=str(self.stores).lower(),
            prefetches=str(bool(prefetched)).lower(),
            prefetch="\n    ".join(prefetched),
            rows="\n    ".join(
                f"{x.cxx_class} s{i}[Coordinates::kRowSlots];" for i, x in reductions
            ),
            values="\n      ".join(f"float t{i}[kBlock];" for i, _ in reductions),
            add="\n      ".join(f"add_values<Coordinates>(s{i}, t{i});" for i, _ in reductions),
            tile_columns=tile_columns,
            store="\n    ".join(f"store_partials(q{i}, tile, s{i}, at);" for i, _ in reductions),
            members="\n  ".join(members),
            # A run of an odd number of columns would reach beyond the last one.
            longest_run=2 if columns % 2 == 0 and self.ragged != "columns" else 1,
            before="\n      ".join(before),
            each="\n        ".join(each),
            after="\n      ".join([*after, *([_KEEP_ORDER] if in_order else [])]),
        )

    def _result(self, expression: str) -> str:
        """Return a result's expression, which is zero in rows of no group."""
        return f"(at.in_group() ? {expression} : 0)" if self.ragged else expression


class _Blocks(NamedTuple):
    """Statements for arrays that are read and written in blocks of accumulators.

    Attributes
    ----------
    first
        Before the first block.
    begin, next, end
        In each block: before it, reads of the next one, and after it.
    """

    first: list[str]
    begin: list[str]
    next: list[str]
    end: list[str]

    def read(self, i: int, array: EpilogueArray) -> None:
        self._declare(i, array)
        self.first.append(f"n{i + 1}.read({self._place(i, array, '0')});")
        self.begin.append(f"n{i + 1}.to_accumulators(e{i + 1});")
        read = f"n{i + 1}.read({self._place(i, array, 'block + kBlock')});"
        self.next.append(f"if (block + kBlock < kCount) {read}")

    def read_staged(self, i: int, array: EpilogueArray, tile: str) -> None:
        self.begin.append(f"{CXX_TYPES[array.dtype]} e{i + 1}[kBlock];")
        self.begin.append(f"at.template read<{tile}>(e{i + 1}, block);")

    def write(self, i: int, array: EpilogueArray) -> None:
        self._declare(i, array)
        self.end.append(f"n{i + 1}.from_accumulators(e{i + 1});")
        self.end.append(f"n{i + 1}.write({self._place(i, array, 'block')});")

    def _declare(self, i: int, array: EpilogueArray) -> None:
        kind = CXX_TYPES[array.dtype]
        self.first.append(f"ElementBlock<{kind}, Coordinates, kBlock> n{i + 1};")
        self.begin.append(f"{kind} e{i + 1}[kBlock];")

    def _place(self, i: int, array: EpilogueArray, accumulator: str) -> str:
        matrix = f"p{i + 1}{_batch_offset(array, i, accumulator)}"
        return f"{matrix}, strides.row[{i}], at, {accumulator}"


class _StagedText:
    """The functions of an epilogue that load its operands to stages of the mainloop.

    Attributes
    ----------
    tiles
        The class of each operand's elements in a stage, and where they lie there.
    """

    def __init__(
        self, staging: Staging | None, operands: Sequence[EpilogueArray], batch_dims: int
    ) -> None:
        self.tiles: dict[int, str] = {}
        self._bytes = ["0"]
        self._loads: list[str] = []
        self._prefetches: list[str] = []
        if staging is None:
            return
        # Rows are behind matrices, whose swizzle takes more alignment.
        for i in sorted(staging.maps, key=lambda i: (operands[i].strides[-2] == 0, i)):
            self._add(i, operands[i], staging, batch_dims)

    def _add(self, i: int, array: EpilogueArray, staging: Staging, batch_dims: int) -> None:
        *batch, row, _ = array.strides
        kind = CXX_TYPES[array.dtype]
        rows = f"{staging.rows}, " if row else ""
        tile = f"tilekern::Staged{'Tile' if row else 'Row'}<{kind}, {rows}{staging.columns}>"
        offset = " + ".join(self._bytes)
        self._bytes.append(f"{tile}::kBytes")
        # The coordinate stays 0 in dimensions over which the operand is broadcast.
        places = ["0"] * 3
        for dim, stride in enumerate(batch, 3 - batch_dims):
            places[dim] = f"work.out_batch[{dim}]" if stride else "0"
        at = ", ".join(("work.n + column", "work.m" if row else "0", *reversed(places)))
        self._loads.append(f"{tile}::load(to + ({offset}), p{i + 1}, {{{{{at}}}}}, full);")
        self._prefetches.append(f"{tile}::prefetch(p{i + 1}, {{{{{at}}}}});")
        self.tiles[i] = f"{tile}, {offset}"

    def functions(self) -> str:
        """Return the text of the functions."""
        if not self.tiles:
            return ""
        return _STAGED_TEMPLATE.format(
            bytes=" + ".join(self._bytes),
            loads="\n    ".join(self._loads),
            prefetches="\n    ".join(self._prefetches),
        )


# ptxas hoists loads of a whole tile's operands, and spills what they load. It moves none over this.
_KEEP_ORDER = "if (Coordinates::kConverged && (first + kRun) % 16 == 0) __syncwarp();"

_STAGED_TEMPLATE = """
  static constexpr int staged_bytes() {{ return {bytes}; }}
  template <class WorkTile>
  void load(tilekern::uint32 to, const WorkTile& work, int column, tilekern::uint32 full) const {{
    {loads}
  }}
  template <class WorkTile>
  void prefetch(const WorkTile& work, int column) const {{
    {prefetches}
  }}
"""

_TEMPLATE = """#include "gemm/epilogue_arrays.cuh"
#include "scalar_functions.cuh"

struct {name} {{
  static constexpr bool kStores = {stores};
  static constexpr bool kPrefetches = {prefetches};
  static constexpr int kStagedColumns = {staged_columns};
  {members}

  template <typename Accumulator, int kCount, class Coordinates>
  void operator()(Accumulator (&accumulators)[kCount], const Coordinates& at) const {{
    using namespace tilekern;
    constexpr int kRun = min_of(Coordinates::kAdjacentColumns, {longest_run});
    constexpr int kBlock = {block};
    static_assert(kCount % kBlock == 0);
    {first_block}
#pragma unroll
    for (int block = 0; block < kCount; block += kBlock) {{
      {begin_block}
      {next_block}
#pragma unroll
      for (int first = block; first < block + kBlock; first += kRun) {{
        {before}
#pragma unroll
        for (int i = 0; i < kRun; ++i) {{
          {each}
        }}
        {after}
      }}
      {end_block}
    }}
  }}
{staged}
  template <int kRows, int kColumns, class Coordinates>
  void prefetch(const Coordinates& at) const {{
    using namespace tilekern;
    {prefetch}
  }}
}};
"""

_REDUCING_TEMPLATE = """#include "gemm/epilogue_arrays.cuh"
#include "gemm/row_reductions.cuh"
#include "scalar_functions.cuh"

struct {name} {{
  static constexpr bool kStores = {stores};
  static constexpr bool kPrefetches = {prefetches};
  static constexpr int kStagedColumns = {staged_columns};
  {members}

  template <typename Accumulator, int kCount, class Coordinates>
  void operator()(Accumulator (&accumulators)[kCount], const Coordinates& at) const {{
    using namespace tilekern;
    constexpr int kRun = min_of(Coordinates::kAdjacentColumns, {longest_run});
    constexpr int kBlock = min_of(kReducedValues, kCount);
    {rows}
#pragma unroll
    for (int block = 0; block < kCount; block += kBlock) {{
      {values}
#pragma unroll
      for (int first = block; first < block + kBlock; first += kRun) {{
        {before}
#pragma unroll
        for (int i = 0; i < kRun; ++i) {{
          {each}
        }}
        {after}
      }}
      {add}
    }}
    const int tiles = (at.columns() + {tile_columns} - 1) / {tile_columns};
    const int64 tile = int64(at.batch(0)) * tiles + at.tile_column() / {tile_columns};
    {store}
  }}

  template <int kRows, int kColumns, class Coordinates>
  void prefetch(const Coordinates& at) const {{
    using namespace tilekern;
    {prefetch}
  }}
}};
"""


def _coordinate(name: str, extent: str, count: int | str, within: bool) -> str:
    index = f"at.{name}(first)"
    clamped = f"min_of({index}, at.{extent}() - {count})"
    return f"const int {name} = {index if within else clamped};"


def _contiguous(array: EpilogueArray, count: str) -> str:
    """Return whether runs of a multiple of 2 elements are adjacent and aligned, in C++."""
    *outer, column = array.strides
    aligned = column == 1 and all(stride % 2 == 0 for stride in outer)
    return "true" if aligned else f"{count} == 1"


def _stride(array: EpilogueArray, number: int) -> str:
    column = array.strides[-1]
    return f"{column}" if column in (0, 1) else f"strides.column[{number}]"


def _offset(array: EpilogueArray, number: int) -> str:
    """Return the text of an element's offset, in terms of ``row`` and ``column``."""
    terms = []
    for name, stride in zip(("row", "column"), array.strides[-2:], strict=True):
        if stride == 1:
            terms.append(name)
        elif stride:
            terms.append(f"{name} * strides.{name}[{number}]")
    return _batch_offset(array, number, "first") + "".join(f" + {term}" for term in terms)


def _batch_offset(array: EpilogueArray, number: int, accumulator: str) -> str:
    """Return the text of the offset of the matrix of an accumulator."""
    if not any(array.strides[:-2]):
        return ""
    return f" + strides.batch_offset({number}, at.batch({accumulator}))"
