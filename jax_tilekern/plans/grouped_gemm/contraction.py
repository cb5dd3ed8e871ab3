"""From labelled dimensions to the strided grouped GEMM that a kernel computes.

A *ragged* contraction is an ``einsum`` of two operands and a mask that says which positions along
the *ragged* label each *group* has. ``lhs`` has the ragged label. Where ``out`` has it too, the
group is a label of ``rhs``, and every row is multiplied by its own group's matrix; where ``rhs``
has it too, the group is a label of ``out``, which has a product for every group's rows. The
cotangents of either are ragged contractions again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jax_tilekern.plans.gemm.contraction import (
    Dimension,
    Labels,
    choose_rows,
    dimension,
    letters,
    merged,
    row_major_strides,
    strided_product,
)
from jax_tilekern.plans.grouped_gemm.problem import MAX_GROUP_BATCH_DIMS, GroupedGeometry


@dataclass(frozen=True)
class RaggedContraction:
    """Labels of each dimension of the operands and of the output, in memory order.

    Attributes
    ----------
    lhs, rhs, out
        Labels of the dimensions. A label of one operand alone is the output's too.
    bounds
        Labels of the groups' bounds, the group last: ``bounds[..., g]`` and ``bounds[..., g + 1]``
        are where group ``g`` begins and ends.
    ragged
        The dimension whose positions belong to groups, a label of ``lhs``, and of ``out`` or
        ``rhs``.
    group
        The groups, a label of ``rhs`` or ``out``, whichever lacks the ragged one.
    """

    lhs: Labels
    rhs: Labels
    bounds: Labels
    out: Labels
    ragged: int
    group: int

    @property
    def ragged_dimension(self) -> Literal["m", "k"]:
        """The product's dimension that is ragged."""
        return "m" if self.ragged in self.out else "k"

    @property
    def rows(self) -> Labels:
        """Labels of ``lhs`` and the output alone, in the output's order; not the ragged one."""
        elsewhere = (*self.rhs, *self.bounds, self.ragged)
        return tuple(x for x in self.out if x in self.lhs and x not in elsewhere)

    @property
    def columns(self) -> Labels:
        """Labels of ``rhs`` and the output alone, in the output's order."""
        return tuple(x for x in self.out if x in self.rhs and x not in (*self.lhs, *self.bounds))

    @property
    def batch(self) -> Labels:
        """The output's other labels, in its order: of both operands, or of the bounds."""
        others = (*self.rows, *self.columns, self.ragged, self.group)
        return tuple(x for x in self.out if x not in others)

    @property
    def contracted(self) -> Labels:
        """Labels of the two operands alone, in ``lhs``'s order; not the ragged one."""
        return tuple(x for x in self.lhs if x in self.rhs and x not in (*self.out, self.ragged))

    def swapped(self) -> RaggedContraction:
        """Return the same product with swapped operands, where both have the ragged label."""
        return RaggedContraction(self.rhs, self.lhs, self.bounds, self.out, self.ragged, self.group)

    def mergeable(self) -> RaggedContraction:
        """Return the same product, dimensions reordered so that every class merges into one.

        The bounds have every batch label. An operand that already lies in such an order, in either
        major order, keeps it.
        """
        rows, columns, ragged, group = self.rows, self.columns, (self.ragged,), (self.group,)
        lhs_batch = tuple(x for x in self.batch if x in self.lhs)
        rhs_batch = tuple(x for x in self.batch if x in self.rhs)
        both = tuple(x for x in lhs_batch if x in rhs_batch)
        lhs_only = tuple(x for x in lhs_batch if x not in both)
        rhs_only = tuple(x for x in rhs_batch if x not in both)
        neither = tuple(x for x in self.batch if x not in (*lhs_batch, *rhs_batch))

        def arrange(labels: Labels, batch: Labels, outer: Labels, inner: Labels) -> Labels:
            order, other = batch + outer + inner, batch + inner + outer
            return labels if labels in (order, other) else order

        if self.ragged_dimension == "m":
            # Rows beside the ragged ones are a batch that shares its groups.
            lhs_only += rows
            batch = both + lhs_only + rhs_only + neither
            lhs = arrange(self.lhs, both + lhs_only, ragged, self.contracted)
            rhs = arrange(self.rhs, both + rhs_only + group, self.contracted, columns)
            out = batch + ragged + columns
        else:
            batch = both + lhs_only + rhs_only + neither
            lhs = arrange(self.lhs, both + lhs_only, ragged, rows)
            rhs = arrange(self.rhs, both + rhs_only, ragged, columns)
            out = arrange(self.out, batch + group, rows, columns)
        return RaggedContraction(lhs, rhs, batch + group, out, self.ragged, self.group)

    @property
    def names(self) -> dict[int, str]:
        """A letter for each label."""
        rows, contracted = self.rows, self.contracted
        if self.ragged_dimension == "m":
            rows = (self.ragged, *rows)
        else:
            contracted = (self.ragged, *contracted)
        return letters(self.batch, rows, self.columns, contracted) | {self.group: "g"}

    def __str__(self) -> str:
        """Return the ``einsum`` subscripts, for example ``mk,gkn->mn, ragged m``."""
        names = self.names
        lhs, rhs, out = ("".join(names[x] for x in xs) for xs in (self.lhs, self.rhs, self.out))
        return f"{lhs},{rhs}->{out}, ragged {names[self.ragged]}"


class OrientedRagged(NamedTuple):
    """A geometry, and whether the contraction's operands must be swapped to get it."""

    geometry: GroupedGeometry
    swapped: bool
    # Batch strides, that of the group, and the strides of m and n of each further array.
    further_strides: tuple[tuple[int, ...], ...] = ()


def ragged_geometry(
    contraction: RaggedContraction,
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    bounds_shape: Sequence[int],
    further: Sequence[Labels] = (),
) -> OrientedRagged | str:
    """Collapse a ragged contraction of row-major arrays into one strided grouped GEMM.

    Parameters
    ----------
    contraction
        Labels of the dimensions.
    lhs_shape, rhs_shape, bounds_shape
        Sizes. That of the bounds has one more than there are groups; there is at least one, and
        the other sizes are at least 1.
    further
        Labels of the dimensions of further arrays that an epilogue reads and writes; they lack
        labels that they are broadcast over.

    Returns
    -------
    OrientedRagged | str
        The geometry, or in words what stands in the way.
    """
    sizes = dict(zip(contraction.bounds, bounds_shape, strict=True))
    bounds_strides = row_major_strides(contraction.bounds, sizes)
    # The bounds of groups are adjacent along the group, which is no dimension of the product.
    bounds_strides[contraction.group] = 0
    sizes[contraction.group] -= 1
    sizes |= dict(zip(contraction.lhs, lhs_shape, strict=True))
    sizes |= dict(zip(contraction.rhs, rhs_shape, strict=True))
    strides = (
        *(
            row_major_strides(labels, sizes)
            for labels in (contraction.lhs, contraction.rhs, contraction.out)
        ),
        bounds_strides,
    )

    further_strides = [row_major_strides(labels, sizes) for labels in further]

    def one(label: int) -> Dimension:
        return dimension(label, sizes, strides, further_strides)

    batch, rows, columns, contracted = (
        merged([one(x) for x in labels])
        for labels in (
            contraction.batch,
            contraction.rows,
            contraction.columns,
            contraction.contracted,
        )
    )
    ragged = one(contraction.ragged)
    if contraction.ragged_dimension == "m":
        if len(contracted) > 1:
            return "the contracted dimensions lie in different orders in the two operands"
        batch += rows
        m: Dimension | None = ragged
        k = contracted[0] if contracted else None
    else:
        if contracted:
            return "other dimensions are contracted along with the ragged one"
        if any(dim.out == 1 for dim in rows):
            oriented = ragged_geometry(
                contraction.swapped(), rhs_shape, lhs_shape, bounds_shape, further
            )
            return (
                oriented._replace(swapped=True)
                if isinstance(oriented, OrientedRagged)
                else oriented
            )
        m, k = choose_rows(rows, ragged), ragged
        batch += [dim for dim in rows if dim is not m]
    n = next((dim for dim in columns if dim.out == 1), None)
    if n is None and (columns or (rows and contraction.ragged_dimension == "k")):
        return "the output's innermost dimension is the group's, a batch's or the ragged one"
    batch += [dim for dim in columns if dim is not n]
    if len(batch) > MAX_GROUP_BATCH_DIMS:
        return (
            f"{len(batch)} separate batch dimensions beside the groups "
            f"(at most {MAX_GROUP_BATCH_DIMS})"
        )
    batch.sort(key=lambda dim: -dim.out)
    batches = [*batch, one(contraction.group)]
    product = strided_product(batches, m, n, k)
    further_of_dims = [dim.further if dim else (0,) * len(further) for dim in (*batches, m, n)]
    return OrientedRagged(
        GroupedGeometry(product, contraction.ragged_dimension, tuple(dim.bounds for dim in batch)),
        swapped=False,
        further_strides=tuple(zip(*further_of_dims, strict=True)),
    )
