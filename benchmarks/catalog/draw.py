"""Random choices of one call."""

from __future__ import annotations

import math
import string
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.catalog.bounds import (
    COMPLEX,
    F8E4,
    F32,
    F64,
    FLOATS,
    FP8,
    NARROW,
    is_float,
    supported,
)
from benchmarks.catalog.call import Operand

OTHERS = tuple(np.dtype(t) for t in ("int8", "uint8", "int16", "int32", "bool"))
# Multiply-adds of one call, which NumPy computes without a BLAS.
MOST_TERMS = 1 << 22
# The fewest and most elements of an array that is moved, at a scale above 1 and over the scale.
_FEWEST_MOVED, _MOST_MOVED = 64, 6000


class Draw:
    """Random choices of one call.

    Parameters
    ----------
    rng
        NumPy's generator.
    only
        Without it, calls have any sizes and types. With a type, they are small, without options,
        of that type where the operation takes it, and of sizes that two devices divide.
    scale
        Factor of the largest sizes, and of the most elements or multiply-adds. Sizes of a scale
        above 1 have any order of magnitude, most of them that of the root of the largest or more.
    """

    def __init__(
        self, rng: np.random.Generator, only: np.dtype[Any] | None = None, scale: int = 1
    ) -> None:
        self.rng, self.only, self.scale = rng, only, scale

    @property
    def for_tests(self):
        """Whether types and modes of indices are drawn, on which no time depends."""
        return self.only is not None or self.scale == 1

    def chance(self, probability):
        """Return true with a probability."""
        return self.rng.random() < probability

    def one(self, *values):
        """Return one of the values."""
        return values[int(self.rng.integers(len(values)))]

    def type(self, *values):
        """Return one of the types, or the only one."""
        if self.only is None:
            return self.one(*values)
        return self.only if self.only in values else values[0]

    def size(self, most=300):
        """Return a size, small ones more often."""
        if self.only is not None:
            return self.one(2, 4, 6, 8) * self.scale
        if self.scale > 1:
            largest = math.log(most * self.scale)
            size = math.exp(self.rng.uniform(self.one(0, *[largest / 2] * 4), largest))
            return self.one(round(size), max(1, round(size / 64) * 64))
        low, high = self.one((1, 1), (2, 9), (2, 9), (10, 70), (10, 70), (70, 300))
        size = int(self.rng.integers(low, high + 1))
        return 0 if self.chance(0.02) else min(size, most)

    def sizes(self, labels, most_terms=MOST_TERMS):
        """Return a size for each label, of a limited product."""
        found = {label: self.size() for label in sorted(labels)}
        if found and self.only is None and self.chance(0.2):
            found[self.one(*found)] *= self.one(3, 10, 30)
        while math.prod(found.values()) > most_terms * self.scale:
            largest = max(found, key=lambda label: found[label])
            found[largest] = max(1, found[largest] // 2)
        return found

    def moved_sizes(self, labels, most_terms=1 << 16):
        """Return a size for each label of an array that is sorted, scanned or filtered.

        At a scale above 1 the number of elements has any order of magnitude from 64 times the scale
        on, and sizes divide its logarithm at random.
        """
        if self.only is not None or self.scale == 1:
            return self.sizes(labels, most_terms)
        fewest, most = (math.log2(count * self.scale) for count in (_FEWEST_MOVED, _MOST_MOVED))
        log = self.rng.uniform(fewest, most)
        cuts = np.sort(self.rng.uniform(0, log, len(labels) - 1))
        sizes = 2 ** np.diff(cuts, prepend=0, append=log)
        return {
            label: self.one(round(size), round(size / 64) * 64 or round(size))
            for label, size in zip(labels, sizes.tolist(), strict=True)
        }

    def matrix_size(self, most):
        """Return rows or columns of a matrix, whatever the scale."""
        if self.only is not None or self.scale == 1:
            return max(1, self.size(most))
        return round(math.exp(self.rng.uniform(0, math.log(most))))

    def batch(self, elements, *shapes):
        """Return one of the shapes of a batch of matrices of so many elements.

        At a scale above 1 a batch has one dimension, and any order of magnitude up to the scale:
        libraries take seconds for more, as they decompose many matrices one by one.
        """
        if self.only is not None or self.scale == 1:
            return self.one(*shapes)
        most = min(self.scale, _MOST_MOVED * self.scale // elements)
        return (round(math.exp(self.rng.uniform(0, math.log(most)))),)

    def labels(self, ranks=(0, 1, 1, 2), but=""):
        """Return distinct labels."""
        free = [label for label in string.ascii_lowercase if label not in but]
        return "".join(free[: self.one(*ranks)])

    def shuffled(self, labels):
        """Return the labels in any order."""
        return "".join(self.rng.permutation(list(labels)).tolist())

    def dtype(self):
        """Return any type."""
        if self.only is not None:
            return self.only
        group = self.rng.choice(4, p=(0.7, 0.05, 0.1, 0.15))
        dtype = self.one(*(FLOATS, FP8, COMPLEX, OTHERS)[group])
        return dtype if supported(dtype) else F32

    def types(self, count=2):
        """Return types of operands, mostly the same."""
        first = self.dtype()
        if self.only is not None:
            return [first] * count
        return [first, *(self.dtype() if self.chance(0.15) else first for _ in range(count - 1))]

    def operand(self, shape, dtype):
        """Return an operand that is stored in any order."""
        rank = len(shape)
        order = self.rng.permutation(rank).tolist() if self.chance(0.4) else range(rank)
        return Operand(tuple(shape), dtype, tuple(order))

    def given(self, values):
        """Return an operand of these values, such as indices."""
        return Operand(values.shape, values.dtype, tuple(range(values.ndim)), values)

    def operands(self, subscripts, sizes, types=None, broadcast=""):
        """Return operands of an einsum, of which some dimensions of some labels are 1."""
        inputs = subscripts.split("->")[0].split(",")
        types = types or self.types(len(inputs))
        narrowed = {
            label: int(self.rng.integers(len(inputs))) for label in broadcast if self.chance(0.4)
        }
        return tuple(
            self.operand([1 if narrowed.get(x) == i else sizes[x] for x in labels], dtype)
            for i, (labels, dtype) in enumerate(zip(inputs, types, strict=True))
        )

    def options(self, operands, *, element_type=True):
        """Return keywords of a product: precision and type of the result."""
        options: dict[str, Any] = {}
        if self.only is not None:
            return options
        if self.chance(0.3):
            options["precision"] = self.one("highest", "high", "default", "float32")
        kinds = {("f" if is_float(x.dtype) else x.dtype.kind) for x in operands}
        if element_type and self.chance(0.3) and kinds <= {"f"}:
            wider = (F64,) if any(x.dtype == F64 for x in operands) else ()
            options["preferred_element_type"] = self.one(F32, *NARROW, *wider)
        elif element_type and self.chance(0.5) and kinds <= {"i"}:
            options["preferred_element_type"] = self.one(F32, *map(np.dtype, ("int32", "int16")))
        return options

    def value(self, operand, special):
        """Return normal numbers, or integers that floats of 8 bits of significand hold."""
        shape, dtype = operand.shape, operand.dtype
        if operand.values is not None:
            return operand.values
        if dtype.kind in "iu":
            low, high = max(np.iinfo(dtype).min, -128), min(np.iinfo(dtype).max, 127)
            return self.rng.integers(low, high, shape, dtype=np.int64, endpoint=True).astype(dtype)
        if dtype.kind == "b":
            return self.rng.integers(0, 2, shape).astype(bool)
        x = self.rng.standard_normal(shape)
        if dtype.kind == "c":
            return (x + 1j * self.rng.standard_normal(shape)).astype(dtype)
        if special and x.size:
            values = (np.nan,) if dtype == F8E4 else (np.nan, np.inf, -np.inf, 0.0)
            for _ in range(int(self.rng.integers(1, 4))):
                x[tuple(self.rng.integers(0, size) for size in shape)] = self.one(*values)
        return x.astype(dtype)

    def ordered(self, operand):
        """Return numbers of which many are equal, some special, and some the largest."""
        dtype, x = operand.dtype, self.value(operand, special=False)
        if operand.values is not None or dtype.kind not in "iufV":
            return x
        limits = np.iinfo(dtype) if dtype.kind in "iu" else ml_dtypes.finfo(dtype)
        values: list[Any] = [limits.min, limits.max, 0]
        if dtype.kind not in "iu":
            x = np.round(2 * x.astype(np.float64)).astype(dtype)
            values += [np.nan, -np.nan, np.inf, -np.inf, -0.0]
        for value in values:
            x[self.rng.random(x.shape) < 0.06] = value
        return x


def text_of(options):
    """Return keywords in words."""
    return ", ".join(f"{key}={getattr(x, 'name', x)}" for key, x in options.items())
