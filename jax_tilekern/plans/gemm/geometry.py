"""A batched matrix product over strided operands: sizes and strides, independent of JAX."""

from __future__ import annotations

import math
from dataclasses import dataclass


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


MAX_BATCH_DIMS = 4
