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

from jax_tilekern.plans.gemm.geometry import MAX_BATCH_DIMS, MatmulGeometry

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

    @property
    def names(self) -> dict[int, str]:
        """A letter for each label."""
        return letters(self.batch, self.rows, self.columns, self.contracted)

    def swapped(self) -> Contraction:
        """Return the same product with swapped operands."""
        return Contraction(self.rhs, self.lhs, self.out)

    def mapped(self, lhs_dim: int | None, rhs_dim: int | None) -> Contraction:
        """Return the same product under ``vmap``, with a new label that comes first in the output.

        An operand has the mapped dimension at the given place, or lacks it.
        """
        new = 1 + max(*self.lhs, *self.rhs, -1, -1)
        return Contraction(
            labelled(self.lhs, new, lhs_dim), labelled(self.rhs, new, rhs_dim), (new, *self.out)
        )

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
        names = self.names
        lhs, rhs, out = ("".join(names[x] for x in xs) for xs in (self.lhs, self.rhs, self.out))
        return f"{lhs},{rhs}->{out}"


def labelled(labels: Labels, mapped: int, dim: int | None) -> Labels:
    """Label the axis that ``vmap`` maps over, if an operand has it."""
    return labels if dim is None else (*labels[:dim], mapped, *labels[dim:])


def letters(batch: Labels, rows: Labels, columns: Labels, contracted: Labels) -> dict[int, str]:
    """Return a letter for each label, by what the label is."""
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
    # Batch strides and the strides of m and n of each further array.
    further_strides: tuple[tuple[int, ...], ...] = ()


class Dimension(NamedTuple):
    """Labels merged into one dimension: its size, and its stride in each array or 0."""

    size: int
    lhs: int
    rhs: int
    out: int
    # The fourth array, of a grouped GEMM.
    bounds: int = 0
    # Arrays of an epilogue.
    further: tuple[int, ...] = ()

    @property
    def strides(self) -> tuple[int, ...]:
        """The stride in every array."""
        return (*self[1:5], *self.further)


def matmul_geometry(
    contraction: Contraction,
    lhs_shape: Sequence[int],
    rhs_shape: Sequence[int],
    further: Sequence[Labels] = (),
) -> Oriented | str:
    """Collapse a contraction of row-major arrays into one strided matrix product.

    The output's unit stride must lie along the product's columns, so A and B are swapped if
    it lies along the rows.

    Parameters
    ----------
    contraction
        Labels of the dimensions.
    lhs_shape, rhs_shape
        Sizes, all at least 1.
    further
        Labels of the dimensions of further arrays that an epilogue reads and writes; they lack
        labels that they are broadcast over.

    Returns
    -------
    Oriented | str
        The geometry, or in words what stands in the way, in which case the product of
        :meth:`Contraction.mergeable` always has one.
    """
    sizes = dict(zip(contraction.lhs, lhs_shape, strict=True))
    sizes |= dict(zip(contraction.rhs, rhs_shape, strict=True))
    strides = tuple(
        row_major_strides(labels, sizes)
        for labels in (contraction.lhs, contraction.rhs, contraction.out)
    )
    further_strides = [row_major_strides(labels, sizes) for labels in further]
    batch, rows, columns, contracted = (
        merged([dimension(x, sizes, strides, further_strides) for x in labels])
        for labels in (
            contraction.batch,
            contraction.rows,
            contraction.columns,
            contraction.contracted,
        )
    )
    if len(contracted) > 1:
        return "the contracted dimensions lie in different orders in the two operands"
    contiguous = [dim for dim in (*rows, *columns) if dim.out == 1]
    if (rows or columns) and not contiguous:
        return "a batch dimension is the output's innermost"
    if any(dim in rows for dim in contiguous):
        oriented = matmul_geometry(contraction.swapped(), rhs_shape, lhs_shape, further)
        return oriented._replace(swapped=True) if isinstance(oriented, Oriented) else oriented

    k = contracted[0] if contracted else None
    m = choose_rows(rows, k)
    n = contiguous[0] if contiguous else max(columns, key=lambda dim: dim.size, default=None)
    batch = sorted(
        (dim for dim in (*batch, *rows, *columns) if dim not in (m, n)), key=lambda dim: -dim.out
    )
    if len(batch) > MAX_BATCH_DIMS:
        return f"{len(batch)} separate batch dimensions (at most {MAX_BATCH_DIMS})"
    further_of_dims = [dim.further if dim else (0,) * len(further) for dim in (*batch, m, n)]
    return Oriented(
        strided_product(batch, m, n, k),
        swapped=False,
        further_strides=tuple(zip(*further_of_dims, strict=True)),
    )


def row_major_strides(labels: Labels, sizes: Mapping[int, int]) -> dict[int, int]:
    """Return the stride of each label's dimension in a row-major array."""
    strides, stride = {}, 1
    for label in reversed(labels):
        strides[label] = stride
        stride *= sizes[label]
    return strides


def dimension(
    label: int,
    sizes: Mapping[int, int],
    strides: Sequence[Mapping[int, int]],
    further: Sequence[Mapping[int, int]] = (),
) -> Dimension:
    """Return one label's dimension, from the strides in each array."""
    own = [array.get(label, 0) for array in strides]
    lhs, rhs, out, bounds = (*own, 0) if len(own) == 3 else own
    more = tuple(array.get(label, 0) for array in further)
    return Dimension(sizes[label], lhs, rhs, out, bounds, more)


def merged(dims: Sequence[Dimension]) -> list[Dimension]:
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
    """Return the product over these dimensions, where ``None`` has size 1.

    The output is contiguous along ``n``.
    """
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
