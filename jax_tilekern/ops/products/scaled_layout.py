"""Where the scales of 8-bit operands lie, and the strided product that a kernel computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from jax_tilekern.interop import compat
from jax_tilekern.plans.contraction import (
    Contraction,
    Dimension,
    Labels,
    merged,
    row_major_strides,
    strided_product,
)
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import SCALES_OF_COPY, Scales
from jax_tilekern.plans.grouped_gemm.problem import GroupedGeometry
from jax_tilekern.plans.quantize import BLOCK
from jax_tilekern.primitives.operation import Operand


class Stored(NamedTuple):
    """Where scales lie, with a count and a stride for each dimension of their operand."""

    value: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def stored_scales(scales: Operand, columns_first: bool) -> Stored:
    """Return where scales lie, before a transpose that produces them."""
    shape = scales.aval.shape
    dims = range(len(shape))
    found = None if columns_first else compat.transposed_from(scales.value)
    value, permutation = found or (scales.value, [*dims])
    source = row_major_strides(
        tuple(permutation.index(i) for i in dims), dict(zip(dims, shape, strict=True))
    )
    order = (*dims[:-2], dims[-1], dims[-2]) if columns_first else (*dims,)
    return Stored(value, tuple(shape[i] for i in order), tuple(source[i] for i in order))


def scales_in_memory(rows: int, counts: Sequence[int], strides: Sequence[int]) -> Scales:
    """Return the strides of an operand's scales, without those of batch dimensions.

    ``counts`` and ``strides`` are those of blocks of the operand's rows, and of blocks of ``k``.
    """
    (row_blocks, k_blocks), (row, k) = counts, strides
    return Scales(
        block_rows=BLOCK if 1 < row_blocks < rows else 1,
        batch_strides=(),
        row_stride=0 if row_blocks == 1 else row,
        k_stride=0 if k_blocks == 1 else k,
        padded=row_blocks > rows,
    )


def with_columns_first(scales: Array, columns: int) -> Array:
    """Return scales of so many columns as bulk copies take them: adjacent, and a multiple of 4."""
    padding = [(0, 0)] * (scales.ndim - 1) + [(0, -columns % SCALES_OF_COPY)]
    return jnp.pad(jnp.swapaxes(scales, -1, -2), padding)


def scaled_geometry(
    contraction: Contraction,
    shapes: Sequence[Sequence[int]],
    scales: Sequence[Scales],
    scale_strides: Sequence[Sequence[int]],
    extra: Sequence[Labels],
) -> tuple[MatmulGeometry, tuple[Scales, Scales], tuple[tuple[int, ...], ...]]:
    """Return the strided product, where the scales lie, and the strides of extra arrays."""
    c = contraction
    lhs_scales, rhs_scales = (
        dict(zip(labels, strides, strict=True))
        for labels, strides in zip((c.lhs, c.rhs), scale_strides, strict=True)
    )
    sizes: dict[int, int] = {}
    for labels, shape in zip(c.operands, shapes, strict=True):
        sizes |= zip(labels, shape, strict=True)
    bounds = row_major_strides(c.bounds, sizes)
    if c.group is not None:
        # Bounds are one more than groups.
        sizes[c.group] -= 1
    lhs, rhs, out, *others = (
        row_major_strides(labels, sizes) for labels in (c.lhs, c.rhs, c.out, *extra)
    )

    def dimension(x: int) -> Dimension:
        strides = tuple(y.get(x, 0) for y in (lhs_scales, rhs_scales, *others))
        out_stride, bound_strides = out.get(x, 0), bounds.get(x, 0)
        return Dimension(sizes[x], lhs.get(x, 0), rhs.get(x, 0), out_stride, bound_strides, strides)

    batch = merged(map(dimension, c.out[:-2]))
    m, n, k = map(dimension, (c.lhs[-2], c.rhs[-2], c.lhs[-1]))
    left, right = scales
    while c.group is None and batch and _continues(batch[-1], m, left):
        m = m._replace(size=m.size * batch.pop().size)
    bound_strides = tuple(x.bounds for x in batch)
    if c.group is not None:
        batch.append(dimension(c.group))
    geometry = strided_product(batch, m, n, k)
    if c.group is not None:
        geometry = GroupedGeometry.of(geometry, "m", bound_strides)
    left, right = (
        dataclasses.replace(x, batch_strides=tuple(dim.extra[i] for dim in batch))
        for i, x in enumerate((left, right))
    )
    _, _, *extra_strides = zip(*(dim.extra for dim in (*batch, m, n)), strict=True)
    return geometry, (left, right), tuple(extra_strides)


def _continues(dim: Dimension, rows: Dimension, scales: Scales) -> bool:
    """Whether a batch dimension continues the rows of ``lhs``, which has it alone."""
    blocks, rest = divmod(rows.size, scales.block_rows)
    strides = (rows.lhs, rows.rhs, rows.out, *rows.extra[2:])
    wanted = (blocks * scales.row_stride, *(rows.size * x for x in strides))
    own = (dim.extra[0], dim.lhs, dim.rhs, dim.out, *dim.extra[2:])
    return own == wanted and scales.row_stride > 0 and not rest
