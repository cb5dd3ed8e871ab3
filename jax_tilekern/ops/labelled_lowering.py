"""Shared code for lowering the primitives over labelled dimensions.

Which arithmetic computes a product, and where a kernel reads its operands: the MLIR value of an
operand tells what transposes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_tilekern.interop import compat
from jax_tilekern.plans.gemm.arithmetic import Converted, precision_name
from jax_tilekern.plans.gemm.contraction import Labels
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.primitives.operation import Fallback, Rewrite


class Platform(NamedTuple):
    """The capabilities of a platform's product kernels.

    Attributes
    ----------
    arithmetic
        ``arithmetic(lhs, rhs, out, precision)`` chooses from the types.
    needs_unit_stride
        Whether each matrix must have a unit stride in memory.
    """

    arithmetic: Callable[..., str | Converted | None]
    needs_unit_stride: bool

    def obstacle(self, geometry: MatmulGeometry) -> str | None:
        """Return in words why no kernel supports a geometry, if none does."""
        return geometry.without_unit_stride if self.needs_unit_stride else None


def chosen_arithmetic(
    platform: Platform, lhs: Any, rhs: Any, out_dtype: np.dtype[Any], precision: Any
) -> str | Converted | Fallback:
    """Return the arithmetic of a product of two abstract values, or why there is no kernel."""
    name = precision_name(precision)
    arithmetic = platform.arithmetic(lhs.dtype, rhs.dtype, out_dtype, name)
    if arithmetic is None:
        types = f"{lhs.dtype} x {rhs.dtype} -> {out_dtype}"
        return Fallback(f"no kernel for {types} at precision {name}")
    return arithmetic


class LabelledOperand(NamedTuple):
    """An operand of a call that is being lowered, with the labels of its dimensions."""

    value: Any
    aval: Any
    labels: Labels

    @property
    def source(self) -> LabelledOperand:
        """The array that one or more transposes make this operand of, or the operand itself."""
        found = compat.transposed_from(self.value)
        if found is None:
            return self
        value, permutation = found
        inverse = [permutation.index(i) for i in range(len(permutation))]
        shape = tuple(self.aval.shape[i] for i in inverse)
        labels = tuple(self.labels[i] for i in inverse)
        return LabelledOperand(value, jax.core.ShapedArray(shape, self.aval.dtype), labels).source


def ways_to_read(
    lhs: LabelledOperand, rhs: LabelledOperand
) -> Iterator[tuple[LabelledOperand, LabelledOperand]]:
    """Yield the operands that a kernel may read: before their transposes, and as they are."""
    yield lhs.source, rhs.source
    yield lhs, rhs


def cast_first(arithmetic: Converted, function: Callable[..., Any]) -> Rewrite:
    """Return the rewrite to a product of other types, which ``function`` computes."""
    return Rewrite(
        f"computed as {arithmetic.operands} -> {arithmetic.result}: {arithmetic.reason}", function
    )


def cpu_attributes(geometry: MatmulGeometry) -> dict[str, tuple[int, ...]]:
    """Return the attributes of a geometry for the CPU's handlers."""
    return {
        "sizes": (*geometry.batch, geometry.m, geometry.n, geometry.k),
        "lhs_strides": geometry.lhs_strides,
        "rhs_strides": geometry.rhs_strides,
        "out_strides": geometry.out_strides,
    }
