"""What a sum over axes is of a row-major array."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


class SummedDims(NamedTuple):
    """Dimensions of a row-major array that is summed over some of them.

    Attributes
    ----------
    sizes
        All above 1.
    reduced
        Whether each is summed over; neighbours differ.
    """

    sizes: tuple[int, ...]
    reduced: tuple[bool, ...]

    @classmethod
    def of(cls, shape: Sequence[int], axes: Collection[int]) -> SummedDims:
        """Merge neighbours that are both summed over or both kept, and drop sizes of 1."""
        sizes: list[int] = []
        reduced: list[bool] = []
        for axis, size in enumerate(shape):
            if size == 1:
                continue
            if reduced and reduced[-1] == (axis in axes):
                sizes[-1] *= size
            else:
                sizes.append(size)
                reduced.append(axis in axes)
        return cls(tuple(sizes), tuple(reduced))
