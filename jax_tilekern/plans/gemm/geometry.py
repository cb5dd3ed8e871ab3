"""A batched matrix product over strided operands: sizes and strides, independent of JAX."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_BATCH_DIMS = 4


@dataclass(frozen=True)
class MatmulGeometry:
    """A batched matrix product over strided operands.

    ``out[b, m, n] = sum_k lhs[b, m, k] * rhs[b, k, n]`` for every index ``b`` of the batch
    dimensions. All strides are in elements. A batch stride of 0 broadcasts an operand over that
    batch dimension. Every size is at least 1, and the output's stride of ``n`` is 1.

    Attributes
    ----------
    batch
        Sizes of the batch dimensions, outermost first; at most ``MAX_BATCH_DIMS``.
    m, n, k
        Rows of the output, columns of the output, and the contracted size.
    lhs_strides
        Batch strides, then the strides of ``m`` and ``k``.
    rhs_strides
        Batch strides, then the strides of ``k`` and ``n``.
    out_strides
        Batch strides, then the strides of ``m`` and ``n``.
    """

    batch: tuple[int, ...]
    m: int
    n: int
    k: int
    lhs_strides: tuple[int, ...]
    rhs_strides: tuple[int, ...]
    out_strides: tuple[int, ...]

    @property
    def lhs_k_major(self) -> bool:
        """Whether ``lhs`` is contiguous along ``k``."""
        return self.lhs_strides[-1] == 1

    @property
    def is_of_transpose(self) -> bool:
        """Whether ``rhs`` is the transpose of ``lhs``, if both have the same address."""
        *batch, m, k = self.lhs_strides
        return self.m == self.n and self.rhs_strides == (*batch, k, m)

    @property
    def without_unit_stride(self) -> str | None:
        """Why kernels that need a unit stride in each matrix do not take it, or ``None``."""
        for name, strides in (("lhs", self.lhs_strides), ("rhs", self.rhs_strides)):
            if 1 not in strides[-2:]:
                return f"a batch dimension is the innermost of {name}"
        return None


def distinct_matrices(batch: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the number of matrices in memory, each counted once however often it is broadcast.

    ``strides`` are those of the batch dimensions; further ones may follow.
    """
    return math.prod(size for size, stride in zip(batch, strides, strict=False) if stride)


@dataclass(frozen=True)
class StridedOperand:
    """An operand as the passes see it: rows of ``k`` for each m of ``lhs`` or n of ``rhs``.

    Attributes
    ----------
    batch
        Sizes of the batch dimensions, outermost first.
    mn, k
        Sizes of the matrices: the extent of M or N, and that of ``k``.
    batch_strides
        A stride for each batch dimension; 0 broadcasts.
    mn_stride, k_stride
        Strides of the matrices. One of them is 1, or its dimension has size 1.
    """

    batch: tuple[int, ...]
    mn: int
    k: int
    batch_strides: tuple[int, ...]
    mn_stride: int
    k_stride: int

    def __post_init__(self) -> None:
        unit_k = self.k_stride == 1 or self.k == 1
        if not unit_k and self.mn_stride != 1 and self.mn > 1:
            raise ValueError(f"{self} has a unit stride along neither M or N nor k")

    @classmethod
    def lhs(cls, geometry: MatmulGeometry) -> StridedOperand:
        """Return ``lhs``."""
        *batch, m, k = geometry.lhs_strides
        return cls(geometry.batch, geometry.m, geometry.k, tuple(batch), m, k)

    @classmethod
    def rhs(cls, geometry: MatmulGeometry) -> StridedOperand:
        """Return ``rhs``."""
        *batch, k, n = geometry.rhs_strides
        return cls(geometry.batch, geometry.n, geometry.k, tuple(batch), n, k)

    @property
    def k_major(self) -> bool:
        """Whether the unit stride is along ``k``."""
        return self.k_stride == 1 if self.k > 1 else self.mn_stride != 1 and self.mn > 1

    @property
    def copied_batch(self) -> tuple[tuple[int, int], ...]:
        """Sizes and strides of the batch dimensions that are not broadcast, which a pass copies."""
        dims = zip(self.batch, self.batch_strides, strict=True)
        return tuple((size, stride) for size, stride in dims if _is_copied(size, stride))

    @property
    def copied_rows(self) -> int:
        """Number of rows of k that a pass writes, of all matrices."""
        return self.matrices * self.mn

    @property
    def matrices(self) -> int:
        """Number of matrices that a pass writes."""
        return math.prod(size for size, _ in self.copied_batch)

    def dense_batch_strides(self, matrix: int) -> tuple[int, ...]:
        """Return the batch strides of a pass's result, whose matrices are ``matrix`` apart."""
        strides: list[int] = []
        for size, stride in reversed([*zip(self.batch, self.batch_strides, strict=True)]):
            strides.insert(0, matrix if _is_copied(size, stride) else 0)
            matrix *= size if _is_copied(size, stride) else 1
        return tuple(strides)


def _is_copied(size: int, stride: int) -> bool:
    return size > 1 and stride != 0
