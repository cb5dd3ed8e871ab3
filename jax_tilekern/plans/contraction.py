"""Contractions of labelled dimensions, and the strided matrix products that kernels compute.

Any ``lax.dot_general``, any gradient of one and any ``vmap`` of either is a contraction of two
operands whose dimensions carry labels, as in ``einsum``. A label is a *batch* dimension (in both
operands and the output), a *row* (``lhs`` and output), a *column* (``rhs`` and output) or
*contracted* (both operands only).

A *ragged* contraction has a mask besides, which says which positions along the *ragged* label each
*group* has. ``lhs`` has the ragged label. Where ``out`` has it too, the group is a label of
``rhs``, and every row is multiplied by its own group's matrix; where ``rhs`` has it too, the group
is a label of ``out``, which has a product for every group's rows. The cotangents of either are
ragged contractions again.

:func:`matmul_geometry` collapses the labels into one batched matrix product over strides, with no
operand moved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jax_tilekern.plans.gemm.geometry import MAX_BATCH_DIMS, MatmulGeometry
from jax_tilekern.plans.grouped_gemm.problem import MAX_GROUP_BATCH_DIMS, GroupedGeometry

Labels = tuple[int, ...]


# The dimension numbers of ``lax.dot_general``.
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def explicit_dimension_numbers(numbers: DimensionNumbers | None, lhs_ndim: int) -> DimensionNumbers:
    """Return dimension numbers; ``None`` stands for those of ``lax.dot``."""
    return (((lhs_ndim - 1,), (0,)), ((), ())) if numbers is None else numbers


@dataclass(frozen=True)
class Contraction:
    """Labels of each dimension of the operands and of the output, in memory order."""

    # Labels of the dimensions. The output has every label of one operand alone.
    lhs: Labels
    rhs: Labels
    out: Labels
    # Labels of the groups' bounds, the group last, or none without groups: ``bounds[..., g]`` and
    # ``bounds[..., g + 1]`` are where group ``g`` begins and ends.
    bounds: Labels = ()
    # The dimension whose positions belong to groups, a label of ``lhs``, and of ``out`` or ``rhs``.
    ragged: int | None = None
    # The groups, a label of ``rhs`` or ``out``, whichever lacks the ragged one.
    group: int | None = None

    @classmethod
    def from_dot_general(
        cls,
        lhs_ndim: int,
        rhs_ndim: int,
        dimension_numbers: DimensionNumbers | None,
    ) -> Contraction:
        """Labels of ``lax.dot_general``: output dimensions are batch, then lhs's, then rhs's."""
        numbers = explicit_dimension_numbers(dimension_numbers, lhs_ndim)
        (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = numbers
        lhs = tuple(range(lhs_ndim))
        rhs = list(range(lhs_ndim, lhs_ndim + rhs_ndim))
        for i, j in (
            *zip(lhs_batch, rhs_batch, strict=True),
            *zip(lhs_contracting, rhs_contracting, strict=True),
        ):
            rhs[j] = lhs[i]
        batch = tuple(lhs[i] for i in lhs_batch)
        shared = set(lhs) & set(rhs)
        rows = tuple(label for label in lhs if label not in shared)
        columns = tuple(label for label in rhs if label not in shared)
        return cls(lhs, tuple(rhs), batch + rows + columns)

    @property
    def operands(self) -> tuple[Labels, ...]:
        """Labels of ``lhs``, of ``rhs``, and of the bounds if there are groups."""
        return (self.lhs, self.rhs, *([self.bounds] if self.bounds else []))

    @property
    def ragged_dimension(self) -> Literal["m", "k"] | None:
        """The product's dimension that is ragged, if one is."""
        if self.ragged is None:
            return None
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

    @property
    def summed_bounds(self) -> Labels:
        """Labels along which groups differ, and over whose indices products are summed."""
        contracted = self.contracted if self.ragged_dimension == "k" else ()
        return tuple(x for x in self.bounds if x not in (*self.out, *contracted, self.group))

    @property
    def dimension_numbers(self) -> tuple[tuple[Labels, Labels], tuple[Labels, Labels]]:
        """Dimension numbers of the ``lax.dot_general`` whose output is batch, rows, columns."""

        def positions(labels: Labels) -> tuple[Labels, Labels]:
            return (tuple(map(self.lhs.index, labels)), tuple(map(self.rhs.index, labels)))

        return positions(self.contracted), positions(self.batch)

    @property
    def dot_general_out(self) -> Labels:
        """Labels of the result of ``lax.dot_general`` with these dimension numbers."""
        rows = tuple(x for x in self.lhs if x in self.rows)
        columns = tuple(x for x in self.rhs if x in self.columns)
        return self.batch + rows + columns

    @property
    def names(self) -> dict[int, str]:
        """A letter for each label."""
        ragged = _present(self.ragged)
        rows, contracted = self.rows, self.contracted
        if self.ragged_dimension == "m":
            rows = ragged + rows
        else:
            contracted = ragged + contracted
        groups = dict.fromkeys(_present(self.group), "g")
        return _letters(self.batch, rows, self.columns, contracted) | groups

    def swapped(self) -> Contraction:
        """Return the same product with swapped operands, both or neither of them ragged."""
        return dataclasses.replace(self, lhs=self.rhs, rhs=self.lhs)

    def mapped(self, *dims: int | None) -> Contraction:
        """Return the same product under ``vmap``, with a new label that comes first in the output.

        ``dims`` has the place of the mapped dimension in each operand, or ``None``.
        """
        new = 1 + max(*self.lhs, *self.rhs, *self.out, -1, -1)
        lhs, rhs, *bounds = map(labelled, self.operands, [new] * len(dims), dims)
        return dataclasses.replace(
            self, lhs=lhs, rhs=rhs, out=(new, *self.out), bounds=bounds[0] if bounds else ()
        )

    def mergeable(self) -> Contraction:
        """Return the same product, dimensions reordered so that every class merges into one.

        The bounds have every batch label. An operand that already lies in such an order, in either
        major order, keeps it.
        """
        rows, columns, contracted = self.rows, self.columns, self.contracted
        ragged, group = _present(self.ragged), _present(self.group)
        lhs_batch = tuple(x for x in self.batch if x in self.lhs)
        rhs_batch = tuple(x for x in self.batch if x in self.rhs)
        both = tuple(x for x in lhs_batch if x in rhs_batch)
        lhs_only = tuple(x for x in lhs_batch if x not in both)
        rhs_only = tuple(x for x in rhs_batch if x not in both)
        neither = tuple(x for x in self.batch if x not in (*lhs_batch, *rhs_batch))
        if self.ragged_dimension == "m":
            # Rows beside the ragged ones are a batch that shares its groups.
            lhs_only += rows
        batch = both + lhs_only + rhs_only + neither

        def arrange(labels: Labels, batch: Labels, outer: Labels, inner: Labels) -> Labels:
            order, other = batch + outer + inner, batch + inner + outer
            return labels if labels in (order, other) else order

        if self.ragged_dimension == "m":
            lhs = arrange(self.lhs, both + lhs_only, ragged, contracted)
            rhs = arrange(self.rhs, both + rhs_only + group, contracted, columns)
            out = batch + ragged + columns
        elif self.ragged_dimension == "k":
            lhs = arrange(self.lhs, both + lhs_only, ragged, rows)
            rhs = arrange(self.rhs, both + rhs_only, ragged, columns)
            out = arrange(self.out, batch + group, rows, columns)
        else:
            lhs = arrange(self.lhs, batch, rows, contracted)
            rhs = arrange(self.rhs, batch, contracted, columns)
            out = arrange(self.out, batch, rows, columns)
        bounds = batch + group if group else ()
        return dataclasses.replace(self, lhs=lhs, rhs=rhs, out=out, bounds=bounds)

    def __str__(self) -> str:
        """Return the ``einsum`` subscripts, for example ``bmk,bkn->bmn``."""
        names = self.names
        lhs, rhs, out = ("".join(names[x] for x in xs) for xs in (self.lhs, self.rhs, self.out))
        ragged = f", ragged {names[self.ragged]}" if self.ragged is not None else ""
        return f"{lhs},{rhs}->{out}{ragged}"


def labelled(labels: Labels, mapped: int, dim: int | None) -> Labels:
    """Label the axis that ``vmap`` maps over, if an operand has it."""
    return labels if dim is None else (*labels[:dim], mapped, *labels[dim:])


def _present(label: int | None) -> Labels:
    return () if label is None else (label,)


def _letters(batch: Labels, rows: Labels, columns: Labels, contracted: Labels) -> dict[int, str]:
    """Return a letter for each label, by its kind."""
    names: dict[int, str] = {}
    for labels, choice in (
        (batch, "bcdefh"),
        (rows, "mpqrst"),
        (columns, "nuvwxyz"),
        (contracted, "kijlao"),
    ):
        for i, label in enumerate(labels):
            names[label] = choice[i] if i < len(choice) else f"<{label}>"
    return names


class Oriented(NamedTuple):
    """A geometry, and whether the contraction's operands must be swapped to get it."""

    geometry: MatmulGeometry
    swapped: bool
    # For each extra array: batch strides, that of the group if there is one, and those of m and n.
    extra_strides: tuple[tuple[int, ...], ...] = ()


class Dimension(NamedTuple):
    """Labels merged into one dimension: its size, and its stride in each array or 0."""

    size: int
    lhs: int
    rhs: int
    out: int
    bounds: int
    extra: tuple[int, ...]  # of the arrays of an epilogue, or of scales

    @property
    def strides(self) -> tuple[int, ...]:
        return (*self[1:5], *self.extra)


def matmul_geometry(
    contraction: Contraction, *shapes: Sequence[int], extra: Sequence[Labels] = ()
) -> Oriented | str:
    """Collapse a contraction of row-major arrays into one strided product, or grouped GEMM.

    The output's unit stride must lie along the product's columns, so A and B are swapped if it lies
    along the rows. All sizes are at least 1, and the bounds have one more than there are groups.
    ``extra`` labels the dimensions of arrays that an epilogue reads and writes, without those
    that they are broadcast over. The result is the geometry, or in words what stands in the way;
    without groups the product of :meth:`Contraction.mergeable` has a geometry.
    """
    c = contraction
    sizes: dict[int, int] = {}
    for labels, shape in zip(c.operands, shapes, strict=True):
        sizes |= zip(labels, shape, strict=True)
    bounds_strides = row_major_strides(c.bounds, sizes)
    if c.group is not None:
        # The bounds of groups are adjacent along the group, which is no dimension of the product.
        bounds_strides[c.group] = 0
        sizes[c.group] -= 1
    strides = [row_major_strides(labels, sizes) for labels in (c.lhs, c.rhs, c.out)]
    extra_strides = [row_major_strides(labels, sizes) for labels in extra]

    def dimension(label: int) -> Dimension:
        lhs, rhs, out, bounds = (x.get(label, 0) for x in (*strides, bounds_strides))
        more = tuple(x.get(label, 0) for x in extra_strides)
        return Dimension(sizes[label], lhs, rhs, out, bounds, more)

    batch, rows, columns, contracted = (
        merged(map(dimension, labels)) for labels in (c.batch, c.rows, c.columns, c.contracted)
    )
    ragged = None if c.ragged is None else dimension(c.ragged)
    if c.ragged_dimension == "k" and contracted:
        return "other dimensions are contracted along with the ragged one"
    if len(contracted) > 1:
        return "the contracted dimensions lie in different orders in the two operands"
    if c.ragged_dimension != "m" and any(dim.out == 1 for dim in rows):
        left, right, *others = shapes
        oriented = matmul_geometry(c.swapped(), right, left, *others, extra=extra)
        return oriented._replace(swapped=True) if isinstance(oriented, Oriented) else oriented

    k = ragged if c.ragged_dimension == "k" else next(iter(contracted), None)
    m = ragged if c.ragged_dimension == "m" else choose_rows(rows, k)
    n = next((dim for dim in columns if dim.out == 1), None)
    if n is None and (columns or (rows and c.ragged_dimension != "m")):
        if ragged is None:
            return "a batch dimension is the output's innermost"
        return "the output's innermost dimension is the group's, a batch's or the ragged one"
    batch = sorted(
        (dim for dim in (*batch, *rows, *columns) if dim not in (m, n)), key=lambda dim: -dim.out
    )
    beside, most = (
        ("", MAX_BATCH_DIMS) if c.group is None else (" beside the groups", MAX_GROUP_BATCH_DIMS)
    )
    if len(batch) > most:
        return f"{len(batch)} separate batch dimensions{beside} (at most {most})"
    groups = [dimension(label) for label in _present(c.group)]
    product = strided_product([*batch, *groups], m, n, k)
    dim_extras = [dim.extra if dim else (0,) * len(extra) for dim in (*batch, *groups, m, n)]
    return Oriented(
        product
        if c.ragged_dimension is None
        else GroupedGeometry.of(product, c.ragged_dimension, tuple(dim.bounds for dim in batch)),
        swapped=False,
        extra_strides=tuple(zip(*dim_extras, strict=True)),
    )


def row_major_strides(labels: Labels, sizes: Mapping[int, int]) -> dict[int, int]:
    strides, stride = {}, 1
    for label in reversed(labels):
        strides[label] = stride
        stride *= sizes[label]
    return strides


def merged(dims: Iterable[Dimension]) -> list[Dimension]:
    """Merge neighbours that are contiguous in every array; sizes of 1 are dropped."""
    result: list[Dimension] = []
    for inner in dims:
        if inner.size == 1:
            continue
        if result and all(
            outer == stride * inner.size
            for outer, stride in zip(result[-1].strides, inner.strides, strict=True)
        ):
            inner = inner._replace(size=result.pop().size * inner.size)
        result.append(inner)
    return result


def choose_rows(rows: Sequence[Dimension], k: Dimension | None) -> Dimension | None:
    """Choose which of several dimensions are a product's rows: a unit stride, if ``k`` has none."""
    return max(
        rows, key=lambda dim: (dim.lhs == 1 and (k is None or k.lhs != 1), dim.size), default=None
    )


def strided_product(
    batch: Sequence[Dimension], m: Dimension | None, n: Dimension | None, k: Dimension | None
) -> MatmulGeometry:
    """Return the product over these dimensions, where ``None`` has size 1; ``n`` is contiguous."""
    lhs_m, lhs_k = _matrix_strides(m, k, "lhs")
    rhs_k, rhs_n = _matrix_strides(k, n, "rhs")
    out_m, _ = _matrix_strides(m, n, "out")
    return MatmulGeometry(
        batch=tuple(dim.size for dim in batch),
        m=m.size if m else 1,
        n=n.size if n else 1,
        k=k.size if k else 1,
        lhs_strides=(*(dim.lhs for dim in batch), lhs_m, lhs_k),
        rhs_strides=(*(dim.rhs for dim in batch), rhs_k, rhs_n),
        out_strides=(*(dim.out for dim in batch), out_m, 1),
    )


def _matrix_strides(
    outer: Dimension | None, inner: Dimension | None, array: str
) -> tuple[int, int]:
    """Return the strides of a matrix in one array, where a missing dimension has size 1.

    The stride of a missing dimension is free. It is 1 unless the other dimension's is, so that a
    kernel finds a major order wherever there is one.
    """
    if outer and inner:
        return getattr(outer, array), getattr(inner, array)
    present = outer or inner
    if not present:
        return 1, 1
    stride: int = getattr(present, array)
    free = 1 if stride != 1 else present.size
    return (stride, free) if outer else (free, stride)
