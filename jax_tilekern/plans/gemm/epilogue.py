"""The epilogue of a product: a function of each accumulator, in the kernel that computes it.

What the function computes is text, which ``jax_tilekern/epilogue/cuda_text.py`` writes. Here it
becomes a functor that satisfies the contract of ``ffi/cuda/epilogue.cuh``, the template argument of
a kernel, and the kernel's further parameters.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jax_tilekern.compilation.compiler import Kernel, Source
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gemm.geometry import MAX_BATCH_DIMS
from jax_tilekern.plans.launch import Buffer, Parameter, Scalars

_FUNCTOR = "GeneratedEpilogue"


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
    def alignment(self) -> int:
        """Bytes that its address is a multiple of: two elements are read or written at once."""
        return min(16, 2 * self.dtype.itemsize)


@dataclass(frozen=True)
class Epilogue:
    """A function of an accumulator and of elements of further arrays.

    Attributes
    ----------
    statements
        C++ statements over ``x0``, the accumulator, and ``x1``, ``x2``, ..., the operands.
    results
        The expression of each result. The first one is stored by the kernel.
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
    """

    statements: tuple[str, ...]
    results: tuple[str, ...]
    operands: tuple[EpilogueArray, ...]
    outputs: tuple[EpilogueArray, ...]
    batch: tuple[int, ...]
    instructions: int
    ragged: Literal["rows", "columns"] | None = None

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
        )

    def kernel(
        self, plain: Kernel, *, columns: int, within_rows: bool, within_columns: bool
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
        """
        assert isinstance(plain.source, str)
        within_rows &= self.ragged != "rows"
        within_columns &= self.ragged != "columns"
        text = f'#include "{plain.source}"\n{self._functor(within_rows, within_columns, columns)}'
        types = ", ".join((_FUNCTOR, *self._parameter_types))
        name = f"{plain.name.removesuffix('>')}, {types}>"
        file = plain.source.removesuffix(".cuh") + "_with_epilogue.cu"
        return Kernel(Source(text, file), name, plain.options)

    def parameters(self, out_buffer: int) -> tuple[Parameter, ...]:
        """Return the parameters that follow a kernel's own, given the buffer of the output."""
        if not self._arrays:
            return ()
        missing = MAX_BATCH_DIMS - len(self.batch)
        rows, columns = ([x.strides[i] for x in self._arrays] for i in (-2, -1))
        batch = [stride for x in self._arrays for stride in (*(0,) * missing, *x.strides[:-2])]
        strides = Scalars.pack(
            f"{len(self._arrays) * (2 + MAX_BATCH_DIMS)}q{MAX_BATCH_DIMS}i",
            *rows, *columns, *batch, *(1,) * missing, *self.batch,
        )  # fmt: skip
        first = out_buffer - len(self.operands)
        operands = (Buffer(first + i) for i in range(len(self.operands)))
        outputs = (Buffer(out_buffer + 1 + i) for i in range(len(self.outputs)))
        return (*operands, *outputs, strides)

    @property
    def _arrays(self) -> tuple[EpilogueArray, ...]:
        return (*self.operands, *self.outputs)

    @property
    def _parameter_types(self) -> list[str]:
        types = [f"const {CXX_TYPES[x.dtype]}*" for x in self.operands]
        types += [f"{CXX_TYPES[x.dtype]}*" for x in self.outputs]
        return [*types, f"tilekern::ElementStrides<{len(types)}>"] if types else []

    def _functor(self, within_rows: bool, within_columns: bool, columns: int) -> str:
        names = [f"p{i}" for i, _ in enumerate(self._arrays, 1)]
        names += ["strides"] if names else []
        types = zip(self._parameter_types, names, strict=True)
        members = [f"{kind} {name};" for kind, name in types]
        before = [
            _coordinate("row", "rows", 1, within_rows),
            _coordinate("column", "columns", "kRun", within_columns),
        ]
        each = ["const Accumulator x0 = accumulators[first + i];"]
        after = []
        numbered = list(enumerate(self._arrays))
        for i, array in numbered[: len(self.operands)]:
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
        first_result, *results = map(self._result, self.results)
        for (i, array), result in zip(numbered[len(self.operands) :], results, strict=True):
            kind = CXX_TYPES[array.dtype]
            before.append(f"ElementRun<{kind}, kRun> r{i + 1};")
            each.append(f"r{i + 1}.elements[i] = stored<{kind}>({result});")
            write = (
                f"write_run<kRun, {_contiguous(array, 'kRun')}>"
                f"(p{i + 1}{_offset(array, i)}, {_stride(array, i)}, r{i + 1});"
            )
            after.append(f"if ({inside}) {write}" if inside else write)
        each.append(f"accumulators[first + i] = static_cast<Accumulator>({first_result});")
        return _TEMPLATE.format(
            name=_FUNCTOR,
            members="\n  ".join(members),
            # A run of an odd number of columns would reach beyond the last one.
            longest_run=2 if columns % 2 == 0 and self.ragged != "columns" else 1,
            before="\n      ".join(before),
            each="\n        ".join(each),
            after="\n      ".join([*after, *([_KEEP_ORDER] if self.has_matrices else [])]),
        )

    def _result(self, expression: str) -> str:
        """Return a result's expression, which is zero in rows of no group."""
        return f"(at.in_group() ? {expression} : 0)" if self.ragged else expression


# ptxas hoists loads of a whole tile's operands, and spills what they load. It moves none over this.
_KEEP_ORDER = "if (Coordinates::kConverged && (first + kRun) % 16 == 0) __syncwarp();"

_TEMPLATE = """#include "gemm/epilogue_arrays.cuh"
#include "scalar_functions.cuh"

struct {name} {{
  {members}

  template <typename Accumulator, int kCount, class Coordinates>
  void operator()(Accumulator (&accumulators)[kCount], const Coordinates& at) const {{
    using namespace tilekern;
    constexpr int kRun = min_of(Coordinates::kAdjacentColumns, {longest_run});
#pragma unroll
    for (int first = 0; first < kCount; first += kRun) {{
      {before}
#pragma unroll
      for (int i = 0; i < kRun; ++i) {{
        {each}
      }}
      {after}
    }}
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
    *batch, row, column = array.strides
    terms = []
    if any(batch):
        terms.append(f"strides.batch_offset({number}, at.batch(first))")
    for name, stride in (("row", row), ("column", column)):
        if stride == 1:
            terms.append(name)
        elif stride:
            terms.append(f"{name} * strides.{name}[{number}]")
    return "".join(f" + {term}" for term in terms)
