"""The text of a kernel that evaluates a jaxpr once for each lane."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jax_tilekern.epilogue.cuda_text import computed_type
from jax_tilekern.epilogue.understood import Untranslatable
from jax_tilekern.ops.kernel.group_work import LONGEST_ALIKE, group_work

# Their rules are registered when they are imported.
from jax_tilekern.ops.kernel.translation import (  # noqa: F401
    bits,
    calls,
    control_flow,
    eigenvalues,
    indexing,
    linear_algebra,
    reductions,
    sorts,
    special,
    tridiagonal,
)
from jax_tilekern.ops.kernel.translation.complex_numbers import part_type
from jax_tilekern.ops.kernel.translation.groups import VECTOR, GroupWriter, has_rows
from jax_tilekern.ops.kernel.translation.rows import shared_rows
from jax_tilekern.ops.kernel.translation.values import Buffer, Shape, in_memory, is_wide, row_major
from jax_tilekern.ops.kernel.translation.writer import LaneWriter, TooLong
from jax_tilekern.ops.kernel.work import work_of
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.lane_cost import LaneWork
from jax_tilekern.plans.lanes import GROUPS, LANES_WITH_ROWS, LaneKernel

# Arrays of up to so many elements are in registers, if the text does not become too long. The
# threads of a group share out the loops over longer ones.
_UNROLLED = (64, 16, 4, 0)
_UNROLLED_IN_GROUPS = (LONGEST_ALIKE, 4, 0)

# For each dimension of lanes, outermost first, the dimension of an array that it is.
Axes = tuple[int | None, ...]


class Layout(NamedTuple):
    """How an array holds the operands or results of all lanes."""

    dtype: np.dtype[Any]
    shape: Shape  # of the whole array
    axes: Axes  # for each dimension of lanes, the dimension of the array
    # Whether the elements of a lane are neighbours in memory; else the array is row-major.
    lanes_first: bool = False

    @property
    def order(self) -> tuple[int, ...]:
        """Dimensions of the array in memory, from the outermost to the innermost one."""
        if not self.lanes_first:
            return tuple(range(len(self.shape)))
        return (*(d for d in self.axes if d is not None), *self.own_dims)

    @property
    def own_dims(self) -> tuple[int, ...]:
        """Dimensions of one lane's array."""
        return tuple(d for d in range(len(self.shape)) if d not in self.axes)

    @property
    def real_dtype(self) -> np.dtype[Any]:
        """The type of the numbers in memory, of which a complex element is two."""
        return part_type(self.dtype)

    @property
    def parts(self) -> int:
        return self.dtype.itemsize // self.real_dtype.itemsize

    def _strides(self) -> Shape:
        strides = row_major([self.shape[d] for d in self.order])
        by_dim = dict(zip(self.order, strides, strict=True))
        return tuple(self.parts * by_dim[d] for d in range(len(self.shape)))

    def lane_strides(self) -> Shape:
        """Return the numbers between neighbours in each dimension of lanes."""
        strides = self._strides()
        return tuple(0 if d is None else strides[d] for d in self.axes)

    @property
    def row(self) -> int | None:
        """Elements of a lane, if they are real and lanes lie one behind the other."""
        in_order = self.parts == 1 and (*self.axes, *self.own_dims) == tuple(range(len(self.shape)))
        return math.prod(self.shape[d] for d in self.own_dims) if in_order else None

    def buffers(self, name: str) -> list[Buffer]:
        """Return one lane's array, or those of its parts, where ``name`` points to its start."""
        strides = self._strides()
        return [
            Buffer(
                f"({name} + {part})" if part else name,
                self.real_dtype,
                tuple(self.shape[d] for d in self.own_dims),
                tuple(strides[d] for d in self.own_dims),
                stored=True,
                wide=is_wide((*self.shape, self.parts)),
                shared=True,
            )
            for part in range(self.parts)
        ]


@dataclass(frozen=True)
class _Lanes:
    sizes: Shape

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    def index_statements(self) -> list[str]:
        """Return statements that declare the index of a lane in each dimension of lanes."""
        statements = []
        for k, (size, stride) in enumerate(zip(self.sizes, row_major(self.sizes), strict=True)):
            index = "lane" if stride == 1 else f"lane / {stride}ll"
            within = f" % {size}ll" if k else ""
            statements.append(f"const long long l{k} = {index}{within};")
        return statements


def lane_kernel(
    name: str,
    closed: Any,
    operands: Sequence[Layout],
    results: Sequence[Layout],
    *,
    group: bool = False,
) -> LaneKernel:
    """Write the kernel of one lane's jaxpr; raise ``Untranslatable`` if it has none.

    In the kernel of a ``group``, its threads evaluate a lane together. They read its elements side
    by side, so these are neighbours in memory.
    """
    if group:
        operands, results = ([x._replace(lanes_first=True) for x in y] for y in (operands, results))
    # A result has every dimension of lanes.
    lanes = _Lanes(tuple(results[0].shape[axis] for axis in results[0].axes if axis is not None))
    for unrolled in _UNROLLED_IN_GROUPS if group else _UNROLLED:
        writer = (GroupWriter if group else LaneWriter)(unrolled, lanes.count)
        try:
            return _written(name, closed, operands, results, lanes, writer)
        except TooLong:
            continue
    raise Untranslatable(f"the kernel of {name} would have more statements than its limit")


def _written(
    name: str,
    closed: Any,
    operands: Sequence[Layout],
    results: Sequence[Layout],
    lanes: _Lanes,
    writer: LaneWriter,
) -> LaneKernel:
    in_groups = isinstance(writer, GroupWriter)
    mapped = [set(x.axes) != {None} for x in operands for _ in range(x.parts)]
    work = work_of(closed, lanes.count, mapped)
    parameters, pointers, alignments = [], [], []
    named = [(f"x{i}", x) for i, x in enumerate(operands)]
    named += [(f"y{i}", x) for i, x in enumerate(results)]
    rows = {} if in_groups else shared_rows(((x, y.dtype, y.row) for x, y in named), work)
    for array, layout in named:
        const = "const " if array.startswith("x") else ""
        kind = f"{const}{CXX_TYPES[layout.real_dtype]}*"
        parameters.append(f"{kind} __restrict__ {array}")
        offset = "".join(
            f" + l{k} * {stride}ll" for k, stride in enumerate(layout.lane_strides()) if stride
        )
        if f"p{array}" not in rows:
            pointers.append(f"{kind} const p{array} = {array}{offset};")
        alignments.append(layout.dtype.itemsize)
    parameters.append("unsigned char* workspace")
    for layout in operands:
        computed_type(layout.real_dtype)
    # An operand of one element is a named scalar.
    inputs = []
    for i, layout in enumerate(operands):
        for buffer in layout.buffers(f"px{i}"):
            if isinstance(writer, GroupWriter) and has_rows(buffer, layout.lane_strides()):
                inputs.append(writer.row_value(buffer))
            elif buffer.name in rows:
                # The lane's own copy, which updates may change.
                inputs.append(in_memory(writer.owned(dataclasses.replace(buffer, wide=False))))
            else:
                inputs.append(writer.evaluated(in_memory(buffer)))
    are_rows = [x.row is not None for x in results for _ in range(x.parts)]
    places = [buffer for i, x in enumerate(results) for buffer in x.buffers(f"py{i}")]
    found = writer.jaxpr(closed, inputs, places)
    if isinstance(writer, GroupWriter):
        for buffer in writer.loaded_by_rows:
            alignments[int(buffer.name.removeprefix("px"))] = VECTOR
    stores = []
    for is_row, place, value in zip(are_rows, places, found, strict=True):
        computed_type(value.dtype)
        # A result that lies otherwise, or the part of a complex one, is stored element by element.
        row = rows.get(value.whole.name) if is_row and value.whole else None
        if row is None:
            if value.whole is not place:
                writer.filled(value, place)
            row = rows.get(place.name)
        if row is not None:
            stores.append((row, place.name.removeprefix("p")))
    loads = [row for name, row in rows.items() if name.startswith("px")]
    in_shared = {row.start: row for row in (*loads, *(row for row, _ in stores))}
    function = f"{'groups' if in_groups else 'lanes'}_{re.sub(r'[^A-Za-z0-9_]', '_', name)}"
    template = _GROUP_TEMPLATE if in_groups else _TEMPLATE_WITH_ROWS if in_shared else _TEMPLATE
    text = template.format(
        function=function,
        headers="".join(f'#include "{x}"\n' for x in sorted(writer.headers)),
        parameters=", ".join(parameters),
        count=lanes.count,
        of_cta=LANES_WITH_ROWS,
        rows=_indented(x for row in in_shared.values() for x in row.pointers()),
        loads=_indented(row.load() for row in loads),
        body=_indented((*lanes.index_statements(), *pointers, *writer.body())),
        stores=_indented(row.store_to(array) for row, array in stores),
    )
    by_threads: tuple[tuple[int, LaneWork], ...] = ((1, work),)
    shared_bytes = LANES_WITH_ROWS * max((row.end for row in in_shared.values()), default=0)
    if isinstance(writer, GroupWriter):
        shared_bytes = writer.shared_bytes
        by_threads = tuple(
            (n, dataclasses.replace(group_work(closed, n), bytes=work.bytes)) for n in GROUPS
        )
    return LaneKernel(
        function=function,
        text=text,
        lanes=lanes.count,
        alignments=tuple(alignments),
        orders=tuple(layout.order for _, layout in named) if in_groups else (),
        workspace_bytes=writer.workspace_bytes,
        work=by_threads,
        shared_bytes=shared_bytes,
    )


def _indented(lines: Iterable[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)


_TEMPLATE = """\
#include "lanes.cuh"

namespace tilekern {{

template <int kThreads>
__global__ void __launch_bounds__(kThreads) {function}({parameters}) {{
  const long long lane = blockIdx.x * static_cast<long long>(kThreads) + threadIdx.x;
  if (lane >= {count}ll) return;
{body}
}}

}}  // namespace tilekern
"""
_TEMPLATE_WITH_ROWS = """\
#include "lane_rows.cuh"
#include "lanes.cuh"

namespace tilekern {{

template <int kThreads>
__global__ void __launch_bounds__(kThreads) {function}({parameters}) {{
  extern __shared__ __align__(16) unsigned char shared[];
  const long long first_lane = blockIdx.x * {of_cta}ll;
  const long long lane = first_lane + threadIdx.x;
  const int lanes_of_cta = min_of<long long>({of_cta}, {count}ll - first_lane);
{rows}
{loads}
  lax::wait_for_rows();
  if (threadIdx.x < lanes_of_cta) {{
{body}
  }}
  __syncthreads();
{stores}
}}

}}  // namespace tilekern
"""
_GROUP_TEMPLATE = """\
#include "lane_groups.cuh"
{headers}
namespace tilekern {{

template <int kThreads>
__global__ void __launch_bounds__(kThreads) {function}({parameters}) {{
  extern __shared__ __align__(16) unsigned char shared[];
  const long long lane = blockIdx.x;
  const int rank = threadIdx.x % kThreads;  // The compiler knows its range.
{body}
}}

}}  // namespace tilekern
"""
