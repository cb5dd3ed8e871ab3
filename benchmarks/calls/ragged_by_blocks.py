"""What results are compared with: products of blocks of rows, one after the other.

A block is of one group. They need hardly any memory, and no group's size at trace time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.calls.ragged_calls import ROW_GRADIENT, WEIGHT_GRADIENT, Grouped, one_product

# Rows that are taken at once.
_BLOCK = 128


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
        return one_product(block, weights, sizes, numbers, **types)

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
        new = one_product(rows, _block(padded_rhs, start), sizes, numbers, **arguments)
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
