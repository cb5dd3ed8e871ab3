"""What a scan computes, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_tilekern.plans.cxx import CXX_TYPES


@dataclass(frozen=True)
class ScanInput:
    """An array of the elements of sequences."""

    dtype: np.dtype[Any]
    computed: str  # the C++ type of a number that is combined; complex numbers are two
    # Whether an element belongs to the one after it in the order of the scan. The first one of a
    # sequence then has zero.
    is_before: bool = False

    @property
    def parts(self) -> int:
        """Numbers of an element."""
        return 2 if self.dtype.kind == "c" else 1

    @property
    def stored(self) -> np.dtype[Any]:
        """The type of a number in memory."""
        return np.dtype(f"f{self.dtype.itemsize // 2}") if self.parts == 2 else self.dtype

    @property
    def cxx(self) -> str:
        """The C++ type of a number in memory."""
        return CXX_TYPES[self.stored]


@dataclass(frozen=True)
class Combination:
    """An associative function of two values in C++.

    Its operands are ``x0``, ``x1``, ...: the numbers of the earlier value, then those of the later
    one.
    """

    statements: tuple[str, ...]
    results: tuple[str, ...]
    instructions: int


@dataclass(frozen=True)
class Scan:
    """Scans of sequences along the middle one of three dimensions."""

    name: str
    outer: int
    length: int
    columns: int  # adjacent sequences
    reverse: bool
    inputs: tuple[ScanInput, ...]
    outputs: tuple[int, ...]  # the inputs whose combinations are results
    combination: Combination
    # The numbers of a value before the first element, of which ``None`` is one of the next operand,
    # as wide as the last input. Empty without it.
    initial: tuple[str | None, ...] = ()
    in_levels: bool = False  # whether XLA combines pairs, then pairs of these, and so on

    @property
    def numbers(self) -> tuple[str, ...]:
        """The C++ types of the numbers of a value."""
        return tuple(x.computed for x in self.inputs for _ in range(x.parts))

    @property
    def value_bytes(self) -> int:
        """Size of a value."""
        return sum(8 if x in _EIGHT_BYTES else 4 for x in self.numbers)

    @property
    def bytes(self) -> int:
        """Bytes that are read and written."""
        moved = sum(x.dtype.itemsize for x in self.inputs)
        moved += sum(self.inputs[i].dtype.itemsize for i in self.outputs)
        return self.outer * self.length * self.columns * moved


_EIGHT_BYTES = ("double", "long long", "unsigned long long")
