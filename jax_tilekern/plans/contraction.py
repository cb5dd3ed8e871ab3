"""From labelled dimensions to the strided matrix product that a kernel computes.

Any ``lax.dot_general``, any gradient of one and any ``vmap`` of either is a contraction of two
operands whose dimensions carry labels, as in ``einsum``. A label is a *batch* dimension (in both
operands and the output), a *row* (``lhs`` and output), a *column* (``rhs`` and output) or
*contracted* (both operands only). :func:`matmul_geometry` collapses the labels into one batched
matrix product over strides, with no operand moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jax_tilekern.plans.geometry import MAX_BATCH_DIMS, MatmulGeometry

Labels = tuple[int, ...]


@dataclass(frozen=True)
class Contraction:
    """Labels of each dimension of the operands and of the output, in memory order."""

    lhs: Labels
    rhs: Labels
    out: Labels

    @classmethod
    def of_dot_general(
        cls,
        lhs_ndim: int,
        rhs_ndim: int,
        dimension_numbers: tuple[tuple[Sequence[int], Sequence[int]], ...],
    ) -> Contraction:
        """Labels of ``lax.dot_general``: output dimensions are batch, then lhs's, then rhs's."""
        (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = dimension_numbers
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
    def batch(self) -> Labels:
        """Labels of both operands and the output, in the output's order."""
        return tuple(x for x in self.out if x in self.lhs and x in self.rhs)

    @property
    def rows(self) -> Labels:
        """Labels of ``lhs`` and the output alone, in the output's order."""
        return tuple(x for x in self.out if x not in self.rhs)

    @property
    def columns(self) -> Labels:
        """Labels of ``rhs`` and the output alone, in the output's order."""
        return tuple(x for x in self.out if x not in self.lhs)

    @property
    def contracted(self) -> Labels:
        """Labels of the two operands alone, in ``lhs``'s order."""
        return tuple(x for x in self.lhs if x not in self.out)

    @property
    def dimension_numbers(self) -> tuple[tuple[Labels, Labels], tuple[Labels, Labels]]:
        """Dimension numbers of the ``lax.dot_general`` whose output is batch, rows, columns."""

        def positions(labels: Labels) -> tuple[Labels, Labels]:
            return (tuple(map(self.lhs.index, labels)), tuple(map(self.rhs.index, labels)))

        return positions(self.contracted), positions(self.batch)

    @property
    def dot_general_out(self) -> Labels:
        """Labels of what ``lax.dot_general`` with these dimension numbers returns."""
        rows = tuple(x for x in self.lhs if x in self.rows)
        columns = tuple(x for x in self.rhs if x in self.columns)
        return self.batch + rows + columns

    def swapped(self) -> Contraction:
        """Return the same product with the operands exchanged."""
        return Contraction(self.rhs, self.lhs, self.out)

    def mergeable(self) -> Contraction:
        """Return the same product, dimensions reordered so that every class merges into one.

        An operand that already lies in such an order, in either major order, keeps it.
        """
        batch, rows, columns, contracted = self.batch, self.rows, self.columns, self.contracted

        def arrange(labels: Labels, outer: Labels, inner: Labels) -> Labels:
            order, other = batch + outer + inner, batch + inner + outer
            return labels if labels in (order, other) else order

        return Contraction(
            arrange(self.lhs, rows, contracted),
            arrange(self.rhs, contracted, columns),
            arrange(self.out, rows, columns),
        )

    def __str__(self) -> str:
        """Return the ``einsum`` subscripts, for example ``bmk,bkn->bmn``."""
        names: dict[int, str] = {}
        for labels, letters in (
            (self.batch, "bcdefgh"),
            (self.rows, "mpqrst"),
            (self.columns, "nuvwxyz"),
            (self.contracted, "kijlao"),
        ):
            for i, label in enumerate(labels):
                names[label] = letters[i] if i < len(letters) else f"<{label}>"
        lhs, rhs, out = ("".join(names[x] for x in xs) for xs in (self.lhs, self.rhs, self.out))
        return f"{lhs},{rhs}->{out}"


class Oriented(NamedTuple):
    """A geometry, and whether the contraction's operands must be exchanged to get it."""

    geometry: MatmulGeometry
    swapped: bool


class _Group(NamedTuple):
    """Dimensions merged into one: its size and its stride in each array that holds it."""

    size: int
    lhs: int
    rhs: int
    out: int


def matmul_geometry(
    contraction: Contraction, lhs_shape: Sequence[int], rhs_shape: Sequence[int]
) -> Oriented | str:
    """Collapse a contraction of row-major arrays into one strided matrix product.

    The output's unit stride must lie along the product's columns, so the operands are exchanged
    when it lies along the rows.

    Parameters
    ----------
    contraction
        Labels of the dimensions.
    lhs_shape, rhs_shape
        Sizes, all at least 1.

    Returns
    -------
    Oriented | str
        The geometry, or in words what stands in the way, in which case the product of
        :meth:`Contraction.mergeable` always has one.
    """
    sizes = dict(zip(contraction.lhs, lhs_shape, strict=True))
    sizes |= dict(zip(contraction.rhs, rhs_shape, strict=True))
    lhs, rhs, out = (
        _row_major_strides(labels, sizes)
        for labels in (contraction.lhs, contraction.rhs, contraction.out)
    )

    def merged(labels: Labels) -> list[_Group]:
        groups: list[_Group] = []
        for x in labels:
            if sizes[x] == 1:
                continue
            inner = _Group(sizes[x], lhs.get(x, 0), rhs.get(x, 0), out.get(x, 0))
            if groups and all(
                outer == stride * inner.size
                for outer, stride in zip(groups[-1][1:], inner[1:], strict=True)
            ):
                inner = inner._replace(size=groups.pop().size * inner.size)
            groups.append(inner)
        return groups

    batch, rows, columns, contracted = map(
        merged,
        (contraction.batch, contraction.rows, contraction.columns, contraction.contracted),
    )
    if len(contracted) > 1:
        return "the contracted dimensions lie in different orders in the two operands"
    contiguous = [group for group in (*rows, *columns) if group.out == 1]
    if (rows or columns) and not contiguous:
        return "a batch dimension is the output's innermost"
    if any(group in rows for group in contiguous):
        oriented = matmul_geometry(contraction.swapped(), rhs_shape, lhs_shape)
        return oriented._replace(swapped=True) if isinstance(oriented, Oriented) else oriented

    k = contracted[0] if contracted else None
    m = max(rows, key=lambda g: (g.lhs == 1 and (k is None or k.lhs != 1), g.size), default=None)
    n = contiguous[0] if contiguous else max(columns, key=lambda g: g.size, default=None)
    batch = sorted((g for g in (*batch, *rows, *columns) if g not in (m, n)), key=lambda g: -g.out)
    if len(batch) > MAX_BATCH_DIMS:
        return f"{len(batch)} separate batch dimensions (at most {MAX_BATCH_DIMS})"
    lhs_m, lhs_k = _matrix_strides(m, k, "lhs")
    rhs_k, rhs_n = _matrix_strides(k, n, "rhs")
    out_m, out_n = _matrix_strides(m, n, "out")
    return Oriented(
        MatmulGeometry(
            batch=tuple(g.size for g in batch),
            m=m.size if m else 1,
            n=n.size if n else 1,
            k=k.size if k else 1,
            lhs_strides=(*(g.lhs for g in batch), lhs_m, lhs_k),
            rhs_strides=(*(g.rhs for g in batch), rhs_k, rhs_n),
            out_strides=(*(g.out for g in batch), out_m, out_n),
        ),
        swapped=False,
    )


def _row_major_strides(labels: Labels, sizes: Mapping[int, int]) -> dict[int, int]:
    strides, stride = {}, 1
    for label in reversed(labels):
        strides[label] = stride
        stride *= sizes[label]
    return strides


def _matrix_strides(outer: _Group | None, inner: _Group | None, array: str) -> tuple[int, int]:
    """Strides of a matrix in one array, where a missing dimension has size 1.

    Its stride is free, and is 1 unless the other dimension's is, so that a kernel finds a major
    order wherever there is one.
    """
    if outer and inner:
        return getattr(outer, array), getattr(inner, array)
    present = outer or inner
    if not present:
        return 1, 1
    stride: int = getattr(present, array)
    free = 1 if stride != 1 else present.size
    return (stride, free) if outer else (free, stride)
