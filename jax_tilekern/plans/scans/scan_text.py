"""The functor of a scan, the struct ``Scan`` that ``look_back.cuh`` describes, as CUDA C++."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_tilekern.compilation.compiler import Kernel, Source
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import VECTOR_BYTES
from jax_tilekern.plans.launch import Buffer
from jax_tilekern.plans.scans.problem import Scan


@dataclass(frozen=True)
class ScanText:
    """The text of a scan whose vectors lie along sequences or across them."""

    scan: Scan
    vector: int  # adjacent elements
    along: bool

    @property
    def fields(self) -> tuple[str, ...]:
        """Types of the functor's fields: operands, then results."""
        s = self.scan
        initial = (f"const {s.inputs[-1].cxx}*",) if s.initial else ()
        results = (f"{s.inputs[i].cxx}*" for i in s.outputs)
        return (*(f"const {x.cxx}*" for x in s.inputs), *initial, *results)

    @property
    def alignments(self) -> tuple[int, ...]:
        """The alignment of each buffer in bytes."""
        s = self.scan
        sizes = [x.dtype.itemsize for x in s.inputs]
        initial = (sizes[-1],) if s.initial else ()
        accesses = [math.gcd(size * self.vector, VECTOR_BYTES) for size in sizes]
        whole = [
            size if x.is_before and self.along else access
            for x, size, access in zip(s.inputs, sizes, accesses, strict=True)
        ]
        return (*whole, *initial, *(accesses[i] for i in s.outputs))

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return tuple(map(Buffer, range(len(self.fields))))

    def kernel(self, file: str, template: str, *arguments: int | str) -> Kernel:
        """Return a kernel that is a template of the functor."""
        values = ", ".join(("tilekern::GeneratedScan", *map(str, arguments), *self.fields))
        text = f'#include "{file}"\n{self._text()}'
        source = Source(text, f"{file.removesuffix('.cuh')}_of_function.cu")
        return Kernel(source, f"tilekern::{template}<{values}>")

    def _text(self) -> str:
        s, vector = self.scan, self.vector
        members, loads, values, pointers, results = [], [], [], [], []
        prefetches = []
        for i, x in enumerate(s.inputs):
            size = vector * x.dtype.itemsize
            pointers.append(f"const {x.cxx}* p{i};")
            members.append(f"Bits<{size}> e{i};")
            # Complex numbers are loaded as whole ones.
            whole = CXX_TYPES[x.dtype]
            array = f"p{i}" if x.parts == 1 else f"reinterpret_cast<const {whole}*>(p{i})"
            if not x.is_before:
                loads.append(f"load_elements<{size}>({array} + at, count)")
            else:
                loads.append(f"load_before<{size}>({array}, at, count, place)")
            prefetches.append(f"prefetch_line_to_l2({array} + at);")
            for part in range(x.parts):
                place = "i" if x.parts == 1 else f"2 * i + {part}"
                values.append(_number(x.cxx, x.computed, f"vector.e{i}", place))
        if s.initial:
            pointers.append(f"const {s.inputs[-1].cxx}* q;")
        for number, i in enumerate(s.outputs):
            x = s.inputs[i]
            first = sum(y.parts for y in s.inputs[:i])
            pointers.append(f"{x.cxx}* r{number};")
            stored = ", ".join(
                f"rounded<{x.cxx}>(values[i].v{first + part})" for part in range(x.parts)
            )
            results.append(
                _STORE.format(
                    kind=x.cxx, parts=x.parts, bytes=vector * x.dtype.itemsize, vector=vector,
                    values=stored, pointer=f"r{number}",
                )
            )  # fmt: skip
        numbers = s.numbers
        # Numbers of fewer bytes are held in words.
        fields = " ".join(f"{_held(kind)} v{i};" for i, kind in enumerate(numbers))
        operands = " ".join(
            f"const {kind} x{i + len(numbers) * later} = static_cast<{kind}>({value}.v{i});"
            for later, value in enumerate(("earlier", "later"))
            for i, kind in enumerate(numbers)
        )
        initial = ""
        if s.initial:
            x, parts = s.inputs[-1], iter(range(s.inputs[-1].parts))
            convert = "to_float" if x.computed == "float" else x.computed
            given = (
                f"{convert}(q[{x.parts} * sequence + {next(parts)}])" if text is None else text
                for text in s.initial
            )
            initial = f"Value initial(int64 sequence) const {{ return {{{', '.join(given)}}}; }}"
        return _TEMPLATE.format(
            fields=fields,
            members=" ".join(members),
            vector=vector,
            reverse=str(s.reverse).lower(),
            has_initial=str(bool(s.initial)).lower(),
            pointers="\n  ".join(pointers),
            loads=",\n            ".join(loads),
            prefetches="\n    ".join(prefetches),
            values=",\n            ".join(values),
            operands=operands,
            statements="\n    ".join(s.combination.statements),
            combined=", ".join(
                f"static_cast<{_held(kind)}>({x})"
                for kind, x in zip(numbers, s.combination.results, strict=True)
            ),
            initial=initial,
            results="\n".join(results),
        )


def _held(kind: str) -> str:
    """Return the type of 32 or 64 bits that holds a number."""
    return kind if kind in _WHOLE_WORDS else "int" if kind in _SIGNED else "unsigned int"


_WHOLE_WORDS = ("float", "double", "int", "unsigned int", "long long", "unsigned long long")
_SIGNED = ("signed char", "short")


def _number(stored: str, computed: str, bits: str, place: str) -> str:
    return f"static_cast<{_held(computed)}>(element<{stored}, {computed}>({bits}, {place}))"


_STORE = """\
    {{
      alignas(WordOf<{bytes}>) {kind} elements[{parts} * {vector}];
#pragma unroll
      for (int i = 0; i < {vector}; ++i) {{
        const {kind} parts[] = {{{values}}};
        for (int j = 0; j < {parts}; ++j) elements[{parts} * i + j] = parts[j];
      }}
      store_elements<{bytes}, {parts}>({pointer} + {parts} * at, elements, count);
    }}"""

_TEMPLATE = """\
namespace tilekern {{

struct GeneratedScan {{
  struct Value {{ {fields} }};
  struct Vector {{ {members} }};
  static constexpr int kVector = {vector};
  static constexpr bool kReverse = {reverse}, kInitial = {has_initial};

  {pointers}

  template <class Place>
  Vector load(int64 at, int count, const Place& place) const {{
    return {{{loads}}};
  }}
  void prefetch(int64 at) const {{
    {prefetches}
  }}
  static Value value(const Vector& vector, int i) {{
    return {{{values}}};
  }}
  static Value combine(const Value& earlier, const Value& later) {{
    {operands}
    {statements}
    return {{{combined}}};
  }}
  {initial}
  void store(int64 at, int count, const Value (&values)[kVector]) const {{
{results}
  }}
}};

}}  // namespace tilekern
"""
