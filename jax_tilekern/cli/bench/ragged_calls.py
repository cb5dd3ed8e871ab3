"""Grouped products and layers of them, by the functions of any side."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_tilekern.cli.bench.ragged_row import LAYER_GRADIENTS, RaggedRow
from jax_tilekern.random_operands import Operands

FORWARD, ROW_GRADIENT, WEIGHT_GRADIENT = (
    lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=((lhs, rhs), ((), ())),
        lhs_ragged_dimensions=(0,),
        rhs_group_dimensions=groups,
    )
    for lhs, rhs, groups in (((1,), (1,), (0,)), ((1,), (2,), (0,)), ((0,), (0,), ()))
)
_PRODUCTS = {"mn": FORWARD, "mk": ROW_GRADIENT, "gkn": WEIGHT_GRADIENT}

# Rows that the products by blocks take at once.
_BLOCK = 128


@dataclass(frozen=True)
class Grouped:
    """A side that has grouped products, with the arguments of JAX's."""

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


def _dense(
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


DENSE = Grouped(_dense)


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


# What results are compared with: products of blocks of rows that are of one group each, one after
# the other. They need hardly any memory, and no group's size at trace time.


def _blocks(rows: int, sizes: Array) -> tuple[Array, Array, Array]:
    """Return each block's group, first row and end; blocks beyond the last have no rows."""
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    blocks = (sizes + _BLOCK - 1) // _BLOCK
    block_ends = jnp.cumsum(blocks, dtype=jnp.int32)
    numbers = jnp.arange(-(-rows // _BLOCK) + sizes.size, dtype=jnp.int32)
    group = jnp.searchsorted(block_ends, numbers, side="right").astype(jnp.int32)
    group = jnp.minimum(group, sizes.size - 1)
    within = numbers - (block_ends - blocks)[group]
    start = jnp.minimum((ends - sizes)[group] + within * _BLOCK, rows)
    return group, start, ends[group]


def _by_blocks(
    lhs: Array, rhs: Array, sizes: Array, numbers: lax.RaggedDotDimensionNumbers, **types: Any
) -> Array:
    """Return ``ragged_dot_general`` by blocks of rows, which has gradients where rows have."""

    @jax.custom_vjp
    def product(lhs: Array, rhs: Array) -> Array:
        compute = _sum_by_blocks if numbers == WEIGHT_GRADIENT else _rows_by_blocks
        return compute(lhs, rhs, sizes, numbers, types)

    def backward(saved: tuple[Array, Array], ct: Array) -> tuple[Array, Array]:
        lhs, rhs = saved
        by_rows = _rows_by_blocks(ct, rhs, sizes, ROW_GRADIENT, types)
        return by_rows, _sum_by_blocks(lhs, ct, sizes, WEIGHT_GRADIENT, types)

    product.defvjp(lambda lhs, rhs: (product(lhs, rhs), (lhs, rhs)), backward)
    return product(lhs, rhs)


def _rows_by_blocks(
    lhs: Array, rhs: Array, sizes: Array, numbers: lax.RaggedDotDimensionNumbers, types: Any
) -> Array:
    rows, padded = lhs.shape[0], _padded(lhs)

    def product(block: Array, weights: Array) -> Array:
        return _dense(block, weights, sizes, numbers, **types)

    def step(out: Array, place: tuple[Array, Array, Array]) -> tuple[Array, None]:
        group, start, end = place
        new = product(_block(padded, start), _of_group(rhs, group))
        kept = jnp.where(_inside(start, end), new, _block(out, start))
        return lax.dynamic_update_slice_in_dim(out, kept, start, 0), None

    struct = jax.eval_shape(product, padded, rhs[0])
    out, _ = lax.scan(step, jnp.zeros(struct.shape, struct.dtype), _blocks(rows, sizes))
    return out[:rows]


def _sum_by_blocks(
    lhs: Array, rhs: Array, sizes: Array, numbers: lax.RaggedDotDimensionNumbers, types: Any
) -> Array:
    result = types.get("preferred_element_type", jnp.result_type(lhs, rhs))
    # The sums of several blocks are rounded once.
    integers = jnp.issubdtype(result, jnp.integer)
    total = result if integers else jnp.promote_types(result, jnp.float32)
    padded_lhs, padded_rhs = _padded(lhs), _padded(rhs)

    def step(out: Array, place: tuple[Array, Array, Array]) -> tuple[Array, None]:
        group, start, end = place
        block = _block(padded_lhs, start)
        rows = jnp.where(_inside(start, end), block, jnp.zeros_like(block))
        arguments = types | {"preferred_element_type": total}
        new = _dense(rows, _block(padded_rhs, start), sizes, numbers, **arguments)
        # In place: results may be large.
        return lax.dynamic_update_index_in_dim(out, _of_group(out, group) + new, group, 0), None

    zeros = jnp.zeros((sizes.size, lhs.shape[1], rhs.shape[1]), total)
    out, _ = lax.scan(step, zeros, _blocks(lhs.shape[0], sizes))
    return out.astype(result)


def _padded(x: Array) -> Array:
    """Return rows with those of one more block, so that no block is cut off."""
    return jnp.pad(x, ((0, _BLOCK), (0, 0)))


def _block(x: Array, start: Array) -> Array:
    return lax.dynamic_slice_in_dim(x, start, _BLOCK)


def _of_group(x: Array, group: Array) -> Array:
    return lax.dynamic_index_in_dim(x, group, keepdims=False)  # type: ignore[no-any-return]


def _inside(start: Array, end: Array) -> Array:
    """Say which rows of a block are of its group."""
    return (start + jnp.arange(_BLOCK, dtype=jnp.int32) < end)[:, None]


BY_BLOCKS = Grouped(_by_blocks)
