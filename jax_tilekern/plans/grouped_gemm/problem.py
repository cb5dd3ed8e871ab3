"""A ragged matrix product to plan for: one for each group of rows, whose sizes the device knows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import launch_cycles, memory_cycles
from jax_tilekern.plans.launch import Scalars

# Batch dimensions besides the groups.
MAX_GROUP_BATCH_DIMS = 3


@dataclass(frozen=True)
class RaggedGeometry:
    """A batched matrix product whose last batch dimension is a group that has some of the rows.

    "Rows" are positions along the ragged dimension. Group ``g`` of batch ``b`` has rows
    ``bounds[b, g]`` to ``bounds[b, g + 1]``, an array of ``int32`` on the device whose entries are
    in order along ``g`` and lie in ``[0, rows]``.

    - With ``ragged == "m"``, ``out[b, r] = lhs[b, r] @ rhs[b, g]`` for each row ``r`` of group
      ``g``, and rows of no group are zeros. Neither ``lhs`` nor ``out`` has the group: its stride
      is 0 in both.
    - With ``ragged == "k"``, ``out[b, g]`` is the sum over the rows ``r`` of group ``g`` of the
      outer products of ``lhs[b, :, r]`` and ``rhs[b, r]``, zeros for a group without rows. Neither
      operand has the group: its stride is 0 in both.

    Attributes
    ----------
    product
        Sizes and strides; the last batch dimension is the group, and ``m`` or ``k`` has the rows
        of all groups.
    ragged
        Which dimension is ragged.
    bounds_strides
        Of the bounds along the batch dimensions but for the group, along which they are adjacent.
    """

    product: MatmulGeometry
    ragged: Literal["m", "k"]
    bounds_strides: tuple[int, ...]

    @property
    def batch(self) -> tuple[int, ...]:
        """Sizes of the batch dimensions but for the group."""
        return self.product.batch[:-1]

    @property
    def groups(self) -> int:
        """The number of groups."""
        return self.product.batch[-1]

    @property
    def rows(self) -> int:
        """Size of the ragged dimension."""
        return self.product.m if self.ragged == "m" else self.product.k

    @property
    def spans(self) -> int:
        """Ranges of rows: of each group, and in each batch before the first and after the last."""
        return math.prod(self.batch) * (self.groups + 2)

    @property
    def average_rows(self) -> float:
        """Rows of a group, if they have all rows between them."""
        return self.rows / self.groups


@dataclass(frozen=True)
class RaggedProduct:
    """A ragged matrix product.

    Attributes
    ----------
    geometry
        Sizes and strides.
    lhs_dtype, rhs_dtype, out_dtype
        Element types.
    arithmetic
        What it is computed in, for example ``"tf32"``; see ``plans/gemm/arithmetic.py``.
    """

    geometry: RaggedGeometry
    lhs_dtype: np.dtype[Any]
    rhs_dtype: np.dtype[Any]
    out_dtype: np.dtype[Any]
    arithmetic: str

    def cycles(self, busy: float) -> float:
        """Estimate a launch whose busiest multiprocessor takes so long without memory's limit."""
        dtypes = (self.lhs_dtype, self.rhs_dtype, self.out_dtype)
        return launch_cycles(busy, memory_cycles(self.geometry.product, *dtypes))


def most_tiles(geometry: RaggedGeometry, block_rows: int) -> int:
    """Return how many tiles of rows there are at most, whatever the bounds.

    Each span has one that is not full, if it has any.
    """
    full = math.prod(geometry.batch) * (geometry.rows // block_rows)
    return full + min(geometry.spans, math.prod(geometry.batch) * geometry.rows)


def pack_groups(geometry: RaggedGeometry) -> Scalars:
    """Return the kernels' ``GroupShape``, field by field as in ``grouped_gemm/groups.cuh``."""
    missing = MAX_GROUP_BATCH_DIMS - len(geometry.batch)
    return Scalars.pack(
        f"{MAX_GROUP_BATCH_DIMS}q{MAX_GROUP_BATCH_DIMS + 3}i",
        *(0,) * missing,
        *geometry.bounds_strides,
        *(1,) * missing,
        *geometry.batch,
        math.prod(geometry.batch),
        geometry.groups,
        geometry.rows,
    )
