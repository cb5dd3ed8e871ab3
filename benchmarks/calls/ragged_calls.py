"""Grouped GEMMs and layers of them, by the functions of any side."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array, lax

from benchmarks.calls.ragged_row import LAYER_GRADIENTS, RaggedRow
from jax_tilekern.tuning.random_operands import Operands

FORWARD, ROW_GRADIENT, WEIGHT_GRADIENT = (
    lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=((lhs, rhs), ((), ())),
        lhs_ragged_dimensions=(0,),
        rhs_group_dimensions=groups,
    )
    for lhs, rhs, groups in (((1,), (1,), (0,)), ((1,), (2,), (0,)), ((0,), (0,), ()))
)
_PRODUCTS = {"mn": FORWARD, "mk": ROW_GRADIENT, "gkn": WEIGHT_GRADIENT}


@dataclass(frozen=True)
class Grouped:
    """A side that has grouped GEMMs, with the arguments of JAX's."""

    ragged_dot_general: Callable[..., Array]


def ragged(row: RaggedRow, side: Any) -> Callable[..., Any]:
    """Return the function of the operands that computes a row by a side's ``ragged_dot_general``.

    A layer is gated, ``(silu(x @ w1) * (x @ w3)) @ w2`` with weights by group. Its gradients are
    those of half the sum of the squares of its result.
    """
    types: dict[str, Any] = {"precision": row.precision} if row.precision else {}
    if row.result:
        types["preferred_element_type"] = row.result_type

    if not row.is_layer:
        numbers = _PRODUCTS[row.out]
        return lambda lhs, rhs, sizes: side.ragged_dot_general(lhs, rhs, sizes, numbers, **types)

    def layer(x: Array, w1: Array, w3: Array, w2: Array, sizes: Array) -> Array:
        def product(x: Array, w: Array) -> Array:
            return side.ragged_dot_general(x, w, sizes, FORWARD, **types)  # type: ignore[no-any-return]

        return product(jax.nn.silu(product(x, w1)) * product(x, w3), w2)

    def gradients(x: Array, w1: Array, w3: Array, w2: Array, sizes: Array) -> Any:
        y, pullback = jax.vjp(functools.partial(layer, sizes=sizes), x, w1, w3, w2)
        return pullback(y)

    return gradients if row.dimensions == LAYER_GRADIENTS else layer


def one_product(
    lhs: Array, rhs: Array, _: Array, numbers: lax.RaggedDotDimensionNumbers, **types: Any
) -> Array:
    """Return one product of the same operations, all rows by one group's weights."""
    (lhs_contracted, rhs_contracted), batch = numbers.dot_dimension_numbers
    grouped = len(numbers.rhs_group_dimensions)
    contracted = lhs_contracted, [axis - grouped for axis in rhs_contracted]
    return lax.dot_general(lhs, rhs, (contracted, batch), **types)


def dense_operands(operands: Operands) -> Operands:
    """Return what the dense product takes in place of a grouped one's operands."""
    *arrays, sizes = operands
    return (*(x[0] if x.ndim == 3 else x for x in arrays), sizes)


DENSE = Grouped(one_product)


@functools.cache
def _tokamax(implementation: str | None) -> Grouped:
    """Return tokamax's functions by one of its implementations, or by its own choice."""
    # Where it is installed; nothing here needs it.
    tokamax: Any = importlib.import_module("tokamax")

    def product(*arguments: Any, **types: Any) -> Array:
        return tokamax.ragged_dot_general(*arguments, **types, implementation=implementation)  # type: ignore[no-any-return]

    return Grouped(product)


def tokamax() -> Grouped:
    """Return tokamax's functions by its own choice of an implementation."""
    return _tokamax(None)


def tokamax_triton() -> Grouped:
    """Return tokamax's functions by its Triton kernels."""
    return _tokamax("triton")
