"""Values of a lane: scalars, arrays in memory, and views of them, as C++ expressions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.epilogue.cuda_text import computed_type
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gemm.arithmetic import BF16, F16

# An index along a dimension: a number, or a C++ expression of type int.
Index = int | str
Shape = tuple[int, ...]

_MAX_INT = 2**31 - 1


def plus(x: Index, y: Index) -> Index:
    if isinstance(x, int) and isinstance(y, int):
        return x + y
    if 0 in (x, y):
        return y if x == 0 else x
    return f"({x} + {y})"


def times(x: Index, factor: int) -> Index:
    if isinstance(x, int):
        return x * factor
    if factor in (0, 1):
        return x if factor else 0
    return f"{x} * {factor}"


def row_major(shape: Sequence[int]) -> Shape:
    """Return the strides of a row-major array."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def position(indices: Sequence[Index], strides: Sequence[int]) -> Index:
    """Return the distance of an element from the first one."""
    found: Index = 0
    for index, stride in zip(indices, strides, strict=True):
        found = plus(found, times(index, stride))
    return found


def indices_of(flat: Index, shape: Sequence[int]) -> tuple[Index, ...]:
    """Return the indices of the element at a position of a row-major array."""
    found: list[Index] = []
    for i, (size, stride) in enumerate(zip(shape, row_major(shape), strict=True)):
        if size == 1:
            found.append(0)
        elif isinstance(flat, int):
            found.append(flat // stride % size)
        else:
            quotient = flat if stride == 1 else f"{flat} / {stride}"
            outermost = all(x == 1 for x in shape[:i])
            found.append(quotient if outermost else f"({quotient}) % {size}")
    return tuple(found)


@dataclass(frozen=True, eq=False)
class Buffer:
    """Memory of an array, which a lane may write."""

    name: str  # a C++ pointer or array
    dtype: np.dtype[Any]
    # Sizes, and distances between neighbours in elements of the pointer.
    shape: Shape
    strides: Shape
    # Whether elements in memory have their own type, not the type that they are computed in.
    stored: bool = False
    wide: bool = False  # whether positions may exceed an int
    shared: bool = False  # whether all threads that evaluate a lane have the same memory

    def _place(self, indices: Sequence[Index]) -> str:
        if not self.wide:
            return f"{self.name}[{position(indices, self.strides)}]"
        terms = [
            f"{index} * {stride}ll"
            for index, stride in zip(indices, self.strides, strict=True)
            if index != 0 and stride != 0
        ]
        return f"{self.name}[{' + '.join(terms) or 0}]"

    def load(self, indices: Sequence[Index]) -> str:
        place = self._place(indices)
        return f"to_float({place})" if self._is_converted else place

    def store(self, indices: Sequence[Index], value: str) -> str:
        if self._is_converted:
            value = f"from_float<{CXX_TYPES[self.dtype]}>({value})"
        return f"{self._place(indices)} = {value};"

    @property
    def _is_converted(self) -> bool:
        return self.stored and self.dtype in (F16, BF16)

    @property
    def can_be_copied(self) -> bool:
        """Whether ``cp.async`` copies elements from here to shared memory."""
        return self.stored and not self._is_converted and self.dtype.itemsize in (4, 8)

    @property
    def step(self) -> int | None:
        """Distance between neighbours in row-major order, if it is the same for all."""
        sizes = [(n, stride) for n, stride in zip(self.shape, self.strides, strict=True) if n != 1]
        step = sizes[-1][1] if sizes else 1
        expected = [step * stride for stride in row_major([n for n, _ in sizes])]
        return step if [stride for _, stride in sizes] == expected else None

    def flattened(self) -> Buffer | None:
        """Return it as an array of one dimension, if it is one."""
        if self.step is None:
            return None
        return dataclasses.replace(self, shape=(math.prod(self.shape),), strides=(self.step,))


@dataclass(frozen=True, eq=False)
class Value:
    """How to read an element of a value, which costs little more than a load."""

    dtype: np.dtype[Any]
    shape: Shape
    at: Callable[[Sequence[Index]], str]  # at(indices) is the C++ expression of an element
    # flat(position) is the same for a position in row-major order, if that is as simple.
    flat: Callable[[Index], str] | None = None
    buffers: frozenset[Buffer] = frozenset()  # the memory that it reads
    whole: Buffer | None = None  # the buffer whose elements it has, all and in order

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def first(self) -> str:
        return self.at((0,) * len(self.shape))

    @property
    def cxx(self) -> str:
        """The C++ type that it is computed in."""
        return computed_type(self.dtype)

    def at_position(self, flat: Index) -> str:
        return self.flat(flat) if self.flat else self.at(indices_of(flat, self.shape))

    def view(self, shape: Shape, indices: Callable[[Sequence[Index]], Sequence[Index]]) -> Value:
        """Return a value whose element ``i`` is this one's element ``indices(i)``."""
        return Value(self.dtype, shape, lambda i: self.at(indices(i)), None, self.buffers)


def everywhere(dtype: np.dtype[Any], shape: Shape, expression: str) -> Value:
    """Return a value whose elements are one expression."""
    return Value(dtype, shape, lambda _: expression, lambda _: expression)


def in_memory(buffer: Buffer) -> Value:
    """Return the value of an array in memory."""
    flat = buffer.flattened()
    return Value(
        buffer.dtype,
        buffer.shape,
        buffer.load,
        None if flat is None else lambda i: flat.load((i,)),
        frozenset({buffer}),
        buffer,
    )


def is_wide(shape: Sequence[int]) -> bool:
    """Whether positions in an array may exceed an ``int``."""
    return math.prod(shape) > _MAX_INT
