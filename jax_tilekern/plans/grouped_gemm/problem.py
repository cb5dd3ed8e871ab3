"""Groups of rows: a product for each, whose sizes the device knows."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.launch import Scalars

# Batch dimensions besides the groups.
MAX_GROUP_BATCH_DIMS = 3


@dataclass(frozen=True)
class GroupedGeometry(MatmulGeometry):
    """A batched matrix product whose last batch dimension is a group with some of the rows.

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
    ragged
        Which dimension is ragged: it has the rows of all groups.
    bounds_strides
        Strides of the bounds along the other batch dimensions; bounds of a batch are adjacent.
    """

    ragged: Literal["m", "k"]
    bounds_strides: tuple[int, ...]

    @classmethod
    def of(
        cls, product: MatmulGeometry, ragged: Literal["m", "k"], bounds_strides: tuple[int, ...]
    ) -> GroupedGeometry:
        """Return a product whose last batch dimension is the group."""
        sizes = {x.name: getattr(product, x.name) for x in dataclasses.fields(MatmulGeometry)}
        return cls(**sizes, ragged=ragged, bounds_strides=bounds_strides)

    @property
    def outer_batch(self) -> tuple[int, ...]:
        """Sizes of the batch dimensions without the group."""
        return self.batch[:-1]

    @property
    def groups(self) -> int:
        """The number of groups."""
        return self.batch[-1]

    @property
    def rows(self) -> int:
        """Size of the ragged dimension."""
        return self.m if self.ragged == "m" else self.k

    @property
    def spans(self) -> int:
        """Ranges of rows: each group's, and each batch's before the first and after the last."""
        return math.prod(self.outer_batch) * (self.groups + 2)

    @property
    def used_groups(self) -> int:
        """The number of groups that may have rows."""
        return max(1, min(self.groups, self.rows))

    @property
    def average_rows(self) -> float:
        """Average number of rows of a group, if every row belongs to one."""
        return self.rows / self.groups


def max_tiles(geometry: GroupedGeometry, block_rows: int) -> int:
    """Return how many tiles of rows there are at most, whatever the bounds.

    Each span has at most one partial tile.
    """
    full = math.prod(geometry.outer_batch) * (geometry.rows // block_rows)
    return full + min(geometry.spans, math.prod(geometry.outer_batch) * geometry.rows)


def pack_groups(geometry: GroupedGeometry) -> Scalars:
    """Return the kernels' ``GroupShape``, field by field as in ``grouped_gemm/groups.cuh``."""
    missing = MAX_GROUP_BATCH_DIMS - len(geometry.outer_batch)
    return Scalars.pack(
        f"{MAX_GROUP_BATCH_DIMS}q{MAX_GROUP_BATCH_DIMS + 3}i",
        *(0,) * missing,
        *geometry.bounds_strides,
        *(1,) * missing,
        *geometry.outer_batch,
        math.prod(geometry.outer_batch),
        geometry.groups,
        geometry.rows,
    )
