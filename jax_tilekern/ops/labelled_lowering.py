"""What lowering the primitives over labelled dimensions has in common.

Which arithmetic computes a product, and where a kernel reads its operands. A planner gets MLIR
values, so it can see where they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_tilekern.plans.gemm.arithmetic import Converted, precision_name
from jax_tilekern.plans.gemm.contraction import Labels
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.primitives import compat
from jax_tilekern.primitives.operation import Fallback, Kernel


class Platform(NamedTuple):
    """What a platform's kernels do.

    ``arithmetic(lhs, rhs, out, precision)`` chooses from the types; ``obstacle(geometry)`` says
    what keeps kernels from a geometry, if anything does; ``kernel(ctx, *operands, geometry,
    arithmetic)`` plans the rest.
    """

    arithmetic: Callable[..., str | Converted | None]
    obstacle: Callable[[MatmulGeometry], str | None]
    kernel: Callable[..., Kernel | Fallback]


def unplannable(avals: Sequence[Any]) -> Fallback | None:
    """Return what about the operands' sizes allows no plan, if anything does."""
    sizes = [size for aval in avals for size in aval.shape]
    if not all(isinstance(size, int) for size in sizes):
        return Fallback("a plan needs every size, and this shape is symbolic")
    return Fallback("an empty product has nothing to compute") if 0 in sizes else None


def chosen_arithmetic(
    platform: Platform, lhs: Any, rhs: Any, out_dtype: np.dtype[Any], precision: Any
) -> str | Converted | Fallback:
    """Return what a product of two abstract values is computed in, or why there is no kernel."""
    name = precision_name(precision)
    arithmetic = platform.arithmetic(lhs.dtype, rhs.dtype, out_dtype, name)
    if arithmetic is None:
        types = f"{lhs.dtype} x {rhs.dtype} -> {out_dtype}"
        return Fallback(f"no kernel for {types} at precision {name}")
    return arithmetic


class Operand(NamedTuple):
    """An MLIR value to read, with the labels of its dimensions where it lies."""

    value: Any
    labels: Labels
    aval: Any


def where_it_lies(operand: Operand) -> Operand:
    """Look through the transpose that makes an operand, if one does."""
    source = compat.transposed_from(operand.value)
    if source is None:
        return operand
    value, permutation = source
    inverse = [permutation.index(i) for i in range(len(permutation))]
    shape = tuple(operand.aval.shape[i] for i in inverse)
    labels = tuple(operand.labels[i] for i in inverse)
    return Operand(value, labels, jax.core.ShapedArray(shape, operand.aval.dtype))


class Readable(NamedTuple):
    """Operands that a kernel can read where they lie, and the geometry that they make."""

    lhs: Operand
    rhs: Operand
    geometry: Any


def readable(
    lhs: Operand, rhs: Operand, collapsed: Callable[[Operand, Operand], Any]
) -> Readable | str:
    """Look for operands that a kernel can read: before what transposes them, or as they are.

    Parameters
    ----------
    lhs, rhs
        As they are.
    collapsed
        Returns the geometry that two operands make, with ``swapped``, or in words what stands in
        the way.

    Returns
    -------
    Readable | str
        The operands, exchanged if the geometry is, or what stands in the way of the given ones.
    """
    obstacle = ""
    for left, right in ((where_it_lies(lhs), where_it_lies(rhs)), (lhs, rhs)):
        oriented = collapsed(left, right)
        if isinstance(oriented, str):
            obstacle = oriented
            continue
        if oriented.swapped:
            left, right = right, left
        return Readable(left, right, oriented.geometry)
    return obstacle


def cpu_attributes(geometry: MatmulGeometry) -> dict[str, tuple[int, ...]]:
    """Return what the CPU's handlers are told of a geometry."""
    return {
        "sizes": (*geometry.batch, geometry.m, geometry.n, geometry.k),
        "lhs_strides": geometry.lhs_strides,
        "rhs_strides": geometry.rhs_strides,
        "out_strides": geometry.out_strides,
    }
