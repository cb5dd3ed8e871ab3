"""Products of arrays in page-locked host memory inside ``jit``, in loops over blocks.

The blocks of the same rows of the result are collected on the device, because XLA copies to part of
a row in host memory at a twentieth of the speed of whole rows. While XLA multiplies blocks, it
copies the next ones to the device, and the rows before to the host.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.interop.custom_rules import custom_vjp
from jax_tilekern.ops.products.matmul import dot_general
from jax_tilekern.out_of_core.blocks import WholeProduct, choose_plan

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
_Axes = tuple[int, int]  # the contracted dimension of each operand


def matmul(a: Any, b: Any, problem: WholeProduct, limit: int | None, precision: Any) -> Array:
    """Return the product, in host memory, of matrices of which either may be there."""
    if limit is None:
        raise ValueError("inside jit a call needs a memory_limit: pass the bytes that it may use")
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, Array):
            raise TypeError(
                f"{name} is {type(operand).__name__}, which inside jit would become a constant of "
                "the program: pass a JAX array"
            )
    a, b = jnp.asarray(a, problem.lhs), jnp.asarray(b, problem.rhs)
    result: Array = _contract(a, b, (problem, limit, precision), (1, 0))
    return result


@functools.partial(custom_vjp, nondiff_argnums=(2, 3))
def _contract(a: Array, b: Array, settings: tuple[WholeProduct, int, Any], axes: _Axes) -> Array:
    """Contract a dimension of each; the problem has the types of the sums and of the result."""
    problem, limit, precision = settings
    m, n, k = a.shape[1 - axes[0]], b.shape[1 - axes[1]], a.shape[axes[0]]
    result: Array = jax.device_put(jnp.zeros((m, n), problem.out), _HOST)
    if 0 in (m, n, k):
        return result
    types = np.dtype(a.dtype), np.dtype(b.dtype), problem.out, problem.sums
    plan = choose_plan(WholeProduct(m, n, k, *types), limit, inside_jit=True)
    rows, columns, _ = plan.grid
    # With x64 enabled, numbers and loops' indices are int64.
    zero = jnp.int32(0)

    def start(index: Any, extent: int, size: int) -> Any:
        # The last block begins early enough to be whole, and computes some elements again.
        return jnp.minimum(jnp.int32(index) * extent, size - extent)

    def block(x: Array, index: Any, extent: int, axis: int) -> Array:
        place = start(index, extent, x.shape[axis])
        part = lax.dynamic_slice_in_dim(x, place, extent, axis)
        return jax.device_put(part, _DEVICE)  # type: ignore[no-any-return]

    block_of_a = functools.partial(block, a, extent=plan.rows, axis=1 - axes[0])
    block_of_b = functools.partial(block, b, extent=plan.columns, axis=1 - axes[1])

    def written(result: Array, strip: Array, i: Any) -> Array:
        place = start(i, plan.rows, m), zero
        return lax.dynamic_update_slice(result, jax.device_put(strip, _HOST), place)

    def row(i: Any, x: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        y, before, result = carry

        def column(j: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            y, strip = carry
            next_y = block_of_b(jnp.where(j + 1 < columns, j + 1, 0))
            numbers = ((axes[:1], axes[1:]), ((), ()))
            product = dot_general(x, y, numbers, precision, problem.sums).astype(problem.out)
            place = zero, start(j, plan.columns, n)
            return next_y, lax.dynamic_update_slice(strip, product, place)

        # Before there is a strip, zeros are copied, and replaced later.
        result = written(result, before, jnp.maximum(i - 1, 0))
        return *lax.fori_loop(0, columns, column, (y, jnp.zeros_like(before))), result

    def row_before_last(i: Any, carry: tuple[Array, Any]) -> tuple[Array, Any]:
        x, others = carry
        return block_of_a(i + 1), row(i, x, others)

    first = block_of_a(0), (block_of_b(0), jnp.zeros((plan.rows, n), problem.out), result)
    # No block of `a` is copied beside the last row, since none comes after it.
    _, strip, result = row(rows - 1, *lax.fori_loop(0, rows - 1, row_before_last, first))
    return written(result, strip, rows - 1)


def _forward(a: Array, b: Array, *settings: Any) -> tuple[Array, tuple[Array, Array]]:
    return _contract(a, b, *settings), (a, b)


def _backward(settings: Any, axes: _Axes, operands: Any, g: Array) -> tuple[Array, Array]:
    (a, b), (i, j), (problem, *others) = operands, axes, settings

    def cotangent(x: Array, y: Array, like: Array, axes: _Axes) -> Array:
        found = _contract(x, y, (problem._replace(out=like.dtype), *others), axes)
        moved: Array = jax.device_put(found, jax.typeof(like).memory_space)
        return moved

    return (
        cotangent(g, b, a, (1, 1 - j)) if i == 1 else cotangent(b, g, a, (1 - j, 1)),
        cotangent(a, g, b, (1 - i, 0)) if j == 0 else cotangent(g, a, b, (0, 1 - i)),
    )


_contract.defvjp(_forward, _backward)
