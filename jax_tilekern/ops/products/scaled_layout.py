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


def strided_product(
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
    m, n, k = (sizes[x] for x in (c.lhs[-2], c.rhs[-2], c.lhs[-1]))
    rows = [x.get(c.out[-2], 0) for x in others]
    left, right = scales
    while c.group is None and batch and _are_rows(batch[-1], m, n, k, left, rows):
        m *= batch.pop().size
    bound_strides = tuple(x.bounds for x in batch)
    if c.group is not None:
        batch.append(dimension(c.group))
    geometry = MatmulGeometry(
        tuple(x.size for x in batch), m, n, k,
        lhs_strides=(*(x.lhs for x in batch), k, 1),
        rhs_strides=(*(x.rhs for x in batch), 1, k),
        out_strides=(*(x.out for x in batch), n, 1),
    )  # fmt: skip
    if c.group is not None:
        geometry = GroupedGeometry.of(geometry, "m", bound_strides)
    left, right = (
        dataclasses.replace(x, batch_strides=tuple(dim.extra[i] for dim in batch))
        for i, x in enumerate((left, right))
    )
    strides = tuple(
        (*(dim.extra[2 + i] for dim in batch), *(x.get(y, 0) for y in c.out[-2:]))
        for i, x in enumerate(others)
    )
    return geometry, (left, right), strides


def _are_rows(dim: Dimension, m: int, n: int, k: int, scales: Scales, extra: Sequence[int]) -> bool:
    """Whether a batch dimension continues the rows of ``lhs``, which has it alone.

    ``extra`` has the strides of the rows of extra arrays.
    """
    blocks, rest = divmod(m, scales.block_rows)
    strides = (dim.extra[0], *dim.extra[2:])
    wanted = (blocks * scales.row_stride, *(m * x for x in extra))
    continues = scales.row_stride and strides == wanted
    return (dim.lhs, dim.rhs, dim.out) == (m * k, 0, m * n) and bool(continues) and not rest
