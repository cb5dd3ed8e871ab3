"""The map of a segment kernel, which computes the values of an edge; see ``segments.cuh``."""

from __future__ import annotations

from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Kernel, Source
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.launch import Buffer, Parameter, Scalars
from jax_tilekern.plans.segments.problem import SegmentReduction


@dataclass(frozen=True)
class SegmentMap:
    """The map of a reduction."""

    reduction: SegmentReduction
    vector: int  # adjacent columns of a lane

    @property
    def name(self) -> str:
        if self.reduction.text is not None:
            return "tilekern::GeneratedMap"
        (x,) = self.reduction.operands
        size = self.vector * x.dtype.itemsize
        return f"tilekern::RowValues<{CXX_TYPES[x.dtype]}, {self.reduction.cxx_value}, {size}>"

    @property
    def fields(self) -> tuple[str, ...]:
        operands, indices = self.reduction.operands, self.reduction.indices
        if self.reduction.text is None:
            return (f"const {CXX_TYPES[operands[0].dtype]}*", "long long")
        pointers = (*(f"const {CXX_TYPES[x.dtype]}*" for x in operands), *("const int*",) * indices)
        return (*pointers, f"tilekern::MapSizes<{len(operands)}>")

    @property
    def alignments(self) -> tuple[int, ...]:
        """The alignment in bytes of the operands and of the index arrays."""
        loads = (
            x.dtype.itemsize * (1 if x.broadcast else self.vector) for x in self.reduction.operands
        )
        return (*loads, *(4,) * self.reduction.indices)

    def parameters(self) -> tuple[Parameter, ...]:
        """Return the fields, where the operands and index arrays are the call's first buffers."""
        operands = self.reduction.operands
        strides = [1 if x.broadcast else self.reduction.columns for x in operands]
        count = len(operands) + self.reduction.indices
        if self.reduction.text is None:
            return (Buffer(0), Scalars.pack("q", *strides))
        sizes = Scalars.pack(f"{2 * len(operands)}q", *strides, *(x.rows for x in operands))
        return (*map(Buffer, range(count)), sizes)

    def kernel(self, file: str, template: str, *arguments: str) -> Kernel:
        """Return a kernel whose template arguments ``{map}`` are the class of this map."""
        values = ", ".join((*arguments, *self.fields)).replace("{map}", self.name)
        name = f"tilekern::{template}<{values}>"
        if self.reduction.text is None:
            return Kernel(file, name)
        text = f'#include "{file}"\n{self._text()}'
        return Kernel(Source(text, f"{file.removesuffix('.cuh')}_of_map.cu"), name)

    def _text(self) -> str:
        text = self.reduction.text
        assert text is not None
        pointers, members, loads, rows, values = [], [], [], [], []
        for i in range(self.reduction.indices):
            rows.append(f"q{i}[edge]")
        for i, (x, computed) in enumerate(zip(self.reduction.operands, text.computed, strict=True)):
            kind = CXX_TYPES[x.dtype]
            count = 1 if x.broadcast else self.vector
            column = "0" if x.broadcast else "column"
            size = count * x.dtype.itemsize
            if x.index is None:
                loads.append(
                    f"load_reused<{size}>(p{i} + place.edge * sizes.strides[{i}] + {column})"
                )
            else:
                place = f"place.gathered[{x.index}], sizes.strides[{i}], sizes.rows[{i}], {column}"
                loads.append(f"load_gathered<{size}>(p{i}, {place})")
            pointers.append(f"const {kind}* p{i};")
            members.append(f"Bits<{size}> e{i};")
            values.append(
                f"const {computed} x{i} = element<{kind}, {computed}>(row.e{i}, "
                f"{'0' if x.broadcast else 'i'});"
            )
        pointers += [f"const int* q{i};" for i in range(self.reduction.indices)]
        return _TEMPLATE.format(
            value=self.reduction.cxx_value,
            vector=self.vector,
            operands=len(self.reduction.operands),
            members="\n    ".join(members),
            pointers="\n  ".join(pointers),
            numbers=max(1, len(rows)),
            rows=", ".join(rows),
            loads=",\n            ".join(loads),
            values="\n      ".join((*values, *text.statements)),
            result=text.result,
        )


_TEMPLATE = """\
namespace tilekern {{

struct GeneratedMap {{
  using Value = {value};
  static constexpr int kVector = {vector};
  struct Row {{
    {members}
  }};

  {pointers}
  MapSizes<{operands}> sizes;

  struct Place {{
    uint32 edge;
    int32 gathered[{numbers}];
  }};

  Place place(uint32 edge) const {{ return {{edge, {{{rows}}}}}; }}
  Row load(const Place& place, int64 column) const {{
    return {{{loads}}};
  }}
  void values(const Row& row, Value (&values)[kVector]) const {{
#pragma unroll
    for (int i = 0; i < kVector; ++i) {{
      {values}
      values[i] = static_cast<Value>({result});
    }}
  }}
}};

}}  // namespace tilekern
"""
