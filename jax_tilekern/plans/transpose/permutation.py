"""A permutation of an array's dimensions, reduced to what it does to memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_ITEM_BYTES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Permutation:
    """A permutation of the dimensions of a row-major array."""

    sizes: tuple[int, ...]  # of the source
    order: tuple[int, ...]  # the result's dimension ``i`` is the source's ``order[i]``
    itemsize: int  # in bytes

    @classmethod
    def reduced(cls, shape: Sequence[int], axes: Sequence[int], itemsize: int) -> Permutation:
        """Return the permutation of the fewest dimensions that moves memory the same way.

        Dimensions of size 1 are dropped, and those that stay adjacent are merged. A permutation
        that leaves memory as it is has at most one dimension. No size is 0.
        """
        runs: list[list[int]] = []
        for axis in (axis for axis in axes if shape[axis] > 1):
            between = shape[runs[-1][-1] + 1 : axis] if runs and runs[-1][-1] < axis else None
            if between is not None and math.prod(between) == 1:
                runs[-1].append(axis)
            else:
                runs.append([axis])
        starts = sorted(run[0] for run in runs)
        order = tuple(starts.index(run[0]) for run in runs)
        sizes = [0] * len(runs)
        for dim, run in zip(order, runs, strict=True):
            sizes[dim] = math.prod(shape[axis] for axis in run)
        return cls(tuple(sizes), order, itemsize)

    @property
    def widened(self) -> Permutation:
        """The same, with an innermost dimension that stays merged into the element, if it fits."""
        if not self.keeps_innermost or self.row_bytes not in _ITEM_BYTES:
            return self
        return Permutation(self.sizes[:-1], self.order[:-1], self.row_bytes)

    @property
    def keeps_innermost(self) -> bool:
        """Whether the source's innermost dimension is the result's."""
        return bool(self.order) and self.order[-1] == len(self.order) - 1

    @property
    def row_bytes(self) -> int:
        """Bytes of the source's innermost dimension."""
        return self.sizes[-1] * self.itemsize

    @property
    def size_bytes(self) -> int:
        return math.prod(self.sizes) * self.itemsize

    @property
    def source_strides(self) -> tuple[int, ...]:
        """Bytes between items along each of the source's dimensions, in the source."""
        return tuple(
            math.prod(self.sizes[dim + 1 :]) * self.itemsize for dim in range(len(self.sizes))
        )

    @property
    def result_strides(self) -> tuple[int, ...]:
        """Bytes between items along each of the source's dimensions, in the result."""
        strides = [0] * len(self.sizes)
        step = self.itemsize
        for dim in reversed(self.order):
            strides[dim] = step
            step *= self.sizes[dim]
        return tuple(strides)
