"""Kernels with an epilogue, whose functor satisfies the contract of ``ffi/cuda/epilogue.cuh``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax_tilekern.compilation.compiler import Kernel, Source
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gemm.epilogue import Epilogue, EpilogueArray, QuantizedText, Staging


def kernel_with_epilogue(
    plain: Kernel,
    epilogue: Epilogue,
    *,
    columns: int,
    within_rows: bool,
    within_columns: bool,
    tile_columns: int,
    staging: Staging | None = None,
) -> Kernel:
    """Return a kernel with an epilogue.

    Parameters
    ----------
    plain
        The kernel with the identity.
    epilogue
        The epilogue, with the rows and columns of the kernel's matrices.
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
    functor = functor_text(
        epilogue,
        within_rows=within_rows and epilogue.ragged != "rows",
        within_columns=within_columns and epilogue.ragged != "columns",
        columns=columns,
        tile_columns=tile_columns,
        staging=staging,
    )
    text = f'#include "{plain.source}"\n{functor}'
    types = ", ".join((FUNCTOR, *epilogue.parameter_types(staging)))
    name = f"{plain.name.removesuffix('>')}, {types}>"
    file = plain.source.removesuffix(".cuh") + "_with_epilogue.cu"
    return Kernel(Source(text, file), name, plain.options)


FUNCTOR = "GeneratedEpilogue"


def functor_text(
    epilogue: Epilogue,
    *,
    within_rows: bool,
    within_columns: bool,
    columns: int,
    tile_columns: int,
    staging: Staging | None,
) -> str:
    """Return the text of an epilogue's functor, given what the kernel with it is given."""
    names = [f"p{i}" for i, _ in enumerate(epilogue.arrays, 1)]
    names += ["strides"] if names else []
    names += [f"q{i}" for i, _ in enumerate(epilogue.reductions)]
    types = zip(epilogue.parameter_types(staging), names, strict=True)
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
    if epilogue.products == 2:
        each.append("const Accumulator x1 = second[first + i];")
    after = []
    blocks = _Blocks([], [], [], [])
    in_order = any(
        all(array.strides[-2:]) and not (staging and i in staging.maps)
        for i, array in enumerate(epilogue.arrays)
    )
    # A block is 16 accumulators of a lane: see `kBlockOf`.
    in_blocks = within_columns and tile_columns % 32 == 0 and not epilogue.has_row_results
    numbered = list(enumerate(epilogue.arrays))
    staged = _StagedText(staging, epilogue.operands, len(epilogue.batch))
    for i, array in numbered[: len(epilogue.operands)]:
        name = f"x{i + epilogue.products}"
        if i in staged.tiles:
            blocks.read_staged(i, array, staged.tiles[i])
            each.append(f"const {array.computed} {name} = computed(e{i + 1}[first - block + i]);")
            continue
        if in_blocks and array.has_aligned_rows:
            blocks.read(i, array)
            each.append(f"const {array.computed} {name} = computed(e{i + 1}[first - block + i]);")
            continue
        count = "kRun" if array.strides[-1] else "1"
        before.append(
            f"const auto r{i + 1} = read_run<{count}, {_contiguous(array, count)}>"
            f"(p{i + 1}{_offset(array, i)}, {_stride(array, i)});"
        )
        index = "i" if array.strides[-1] else "0"
        each.append(f"const {array.computed} {name} = r{i + 1}[{index}];")
    each += epilogue.statements
    inside = " && ".join(
        f"at.{name}(first) < at.{name}s()"
        for name, within in (("row", within_rows), ("column", within_columns))
        if not within
    )
    results = [_result(epilogue, x) for x in epilogue.results]
    outputs = numbered[len(epilogue.operands) :][: len(epilogue.outputs)]
    for (i, array), result in zip(outputs, results[1:], strict=True):
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
    if epilogue.stores:
        each.append(f"accumulators[first + i] = static_cast<Accumulator>({results[0]});")
    prefetched = [
        f"prefetch_rows<kRows, kColumns>(p{i + 1}{_batch_offset(array, i, '0')}, "
        f"strides.row[{i}], at);"
        for i, array in numbered[: len(epilogue.operands)]
        if array.strides[-1] == 1 and array.strides[-2] != 0 and i not in staged.tiles
    ]
    rows = _RowsText.of(epilogue, within_columns, tile_columns, len(numbered))
    each += rows.each
    template = _ROWS_TEMPLATE if rows.each else _TEMPLATE
    return template.format(
        name=FUNCTOR,
        include=rows.include,
        block=rows.block or ("kBlockOf<Coordinates, kRun>" if blocks.begin else "kCount"),
        staged_columns=staging.columns if staging else 0,
        staged=staged.functions(),
        first_block="\n    ".join(blocks.first),
        begin_block="\n      ".join(blocks.begin),
        next_block="\n      ".join(blocks.next),
        end_block="\n      ".join(blocks.end),
        stores=str(epilogue.stores).lower(),
        prefetches=str(bool(prefetched)).lower(),
        prefetch="\n    ".join(prefetched),
        rows="\n    ".join(rows.before),
        values="\n      ".join(f"float t{i}[kBlock];" for i, _ in enumerate(rows.each)),
        add="\n      ".join(rows.per_block),
        store="\n    ".join(rows.after),
        second=_SECOND if epilogue.products == 2 else "",
        members="\n  ".join(members),
        # A run of an odd number of columns would reach beyond the last one.
        longest_run=2 if columns % 2 == 0 and epilogue.ragged != "columns" else 1,
        before="\n      ".join(before),
        each="\n        ".join(each),
        after="\n      ".join([*after, *([_KEEP_ORDER] if in_order else [])]),
    )


def _result(epilogue: Epilogue, expression: str) -> str:
    """Return a result's expression, which is zero in rows of no group."""
    return f"(at.in_group() ? {expression} : 0)" if epilogue.ragged else expression


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


class _RowsText(NamedTuple):
    """Statements of results of rows.

    Attributes
    ----------
    include
        Their header.
    block
        Values that are taken in at a time.
    each
        For each accumulator: its value, if it is one of the matrix.
    before, per_block, after
        Before the accumulators, for each block of values, and behind.
    """

    include: str = ""
    block: str = ""
    each: Sequence[str] = ()
    before: Sequence[str] = ()
    per_block: Sequence[str] = ()
    after: Sequence[str] = ()

    @classmethod
    def of(
        cls, epilogue: Epilogue, within_columns: bool, tile_columns: int, arrays: int
    ) -> _RowsText:
        """Write the text of an epilogue's results of rows, which has so many arrays."""
        inside = "true" if within_columns else "at.column(first + i) < at.columns()"

        def value(number: int, text: str, neutral: str) -> str:
            return f"t{number}[first + i - block] = {inside} ? {text} : {neutral};"

        if epilogue.quantized:
            return cls._for_quantized(epilogue.quantized, value, arrays)
        if not epilogue.reductions:
            return cls()
        reductions = [*enumerate(epilogue.reductions)]
        tiles = f"(at.columns() + {tile_columns} - 1) / {tile_columns}"
        tile = f"at.tile_column() / {tile_columns}"
        return cls(
            '#include "gemm/row_reductions.cuh"\n',
            "min_of(kReducedValues, kCount)",
            [value(i, x.value, f"{x.cxx_class}::kNeutral") for i, x in reductions],
            [f"{x.cxx_class} s{i}[Coordinates::kRowSlots];" for i, x in reductions],
            [f"add_values<Coordinates>(s{i}, t{i});" for i, _ in reductions],
            [
                f"const int64 tile = int64(at.batch(0)) * ({tiles}) + {tile};",
                *(f"store_partials(q{i}, tile, s{i}, at);" for i, _ in reductions),
            ],
        )

    @classmethod
    def _for_quantized(
        cls, quantized: QuantizedText, value: Callable[..., str], arrays: int
    ) -> _RowsText:
        first = arrays - 2
        matrices = (
            f"p{i + 1}{_batch_offset(array, i, '0')}, strides.row[{i}]"
            for i, array in enumerate(quantized.arrays, first)
        )
        flags = (quantized.power_of_two, quantized.values.has_aligned_rows)
        text = ", ".join(str(flag).lower() for flag in flags)
        places = f"{', '.join(matrices)}, strides.column[{arrays - 1}]"
        call = f"quantize_rows<{text}>(t0, {places}, at, block);"
        return cls(
            '#include "gemm/row_quantization.cuh"\n',
            "kQuantizedValues",
            [value(0, quantized.value, "0.0f")],
            per_block=[call],
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

_SECOND = "const Accumulator (&second)[kCount], "

_ARRAYS = '#include "gemm/epilogue_arrays.cuh"\n{include}'
_HEAD = """#include "scalar_functions.cuh"

struct {name} {{
  static constexpr bool kStores = {stores};
  static constexpr bool kPrefetches = {prefetches};
  static constexpr int kStagedColumns = {staged_columns};
  {members}

  template <typename Accumulator, int kCount, class Coordinates>
  void operator()(Accumulator (&accumulators)[kCount], {second}const Coordinates& at) const {{
    using namespace tilekern;
    constexpr int kRun = min_of(Coordinates::kAdjacentColumns, {longest_run});
"""

_TAIL = """  template <int kRows, int kColumns, class Coordinates>
  void prefetch(const Coordinates& at) const {{
    using namespace tilekern;
    {prefetch}
  }}
}};
"""

_BODY = """    constexpr int kBlock = {block};
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
"""

_ROWS_BODY = """    constexpr int kBlock = {block};
    static_assert(kCount % kBlock == 0);
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
    {store}
  }}

"""

_TEMPLATE = _ARRAYS + _HEAD + _BODY + _TAIL
_ROWS_TEMPLATE = _ARRAYS + _HEAD + _ROWS_BODY + _TAIL


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
