"""``scaled_ragged_dot``: grouped GEMMs that have a scale for each block."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.epilogue.scalar_function import Role
from jax_tilekern.interop import compat
from jax_tilekern.ops.explicit import by_automatic_axes, spec_of
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.products.groups import checked_offset, group_bounds
from jax_tilekern.ops.products.scaled_call import ROWS_BY_MATRICES, scaled_call
from jax_tilekern.ops.products.scaled_operands import (
    blocks_of,
    check_scales,
    check_types,
    check_weights,
    refuse_zeros,
)
from jax_tilekern.ops.products.scaled_product import SCALED
from jax_tilekern.ops.products.weight_product import weights_call


@jitted("preferred_element_type")
def scaled_ragged_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    lhs_scales: ArrayLike | None,
    rhs_scales: ArrayLike,
    preferred_element_type: DTypeLike = np.float32,
    *,
    rhs_zeros: ArrayLike | None = None,
    group_offset: ArrayLike | None = None,
) -> Array:
    """Multiply consecutive groups of rows by a matrix each, of 8-bit floats or quantised weights.

    It is :func:`ragged_dot` of what the scales make of both operands, computed as
    :func:`scaled_matmul` computes a product. Groups have any sizes, and no row is padded for.
    Derivatives are those of :func:`scaled_matmul`.

    Parameters
    ----------
    lhs
        Rows, shape ``(M, K)``, of float8_e4m3fn or float8_e5m2; of bfloat16, float16 or float32 if
        ``lhs_scales`` is ``None``.
    rhs
        A matrix for each group, shape ``(groups, N, K)``, of either 8-bit type; weights may be int4
        or int8, too. Its last dimension is contracted, as that of :func:`scaled_matmul` is.
    group_sizes
        Integers of shape ``(groups,)``, as in :func:`ragged_dot`. Rows of no group are zeros in the
        result.
    lhs_scales
        float32 of shape ``(M, ceil(K / 128))``, scales of blocks of 1x128. Either size may be 1.
        ``None`` for the product by weights.
    rhs_scales
        float32 of shape ``(groups, R, ceil(K / 128))``, where ``R`` is ``N``, ``ceil(N / 128)`` or
        1. The last size may be 1. Those of weights may be for each 32 or 64 of ``K``, and of
        bfloat16 or float16.
    preferred_element_type
        Type of the result, to which it is rounded once.
    rhs_zeros
        Zero points of weights, as in :func:`scaled_matmul`.
    group_offset
        The first group that ``rhs`` has, as in :func:`ragged_dot`.

    Returns
    -------
    Array
        Shape ``(M, N)``. On a mesh with explicit axes it is split as the rows of ``lhs`` and the
        columns of ``rhs`` are.

    Raises
    ------
    TypeError
        If a type is another one, or an operand has a tangent.
    ValueError
        If shapes do not match. The message has the shapes of scales that are possible.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> x = jnp.ones((4, 256), jnp.float8_e4m3fn)
    >>> w = jnp.ones((2, 3, 256), jnp.float8_e4m3fn)
    >>> w_scales = jnp.array([[[1.0, 1.0]], [[1.0, 3.0]]])
    >>> jtk.scaled_ragged_dot(x, w, jnp.array([1, 2]), jnp.ones((4, 2)), w_scales)
    Array([[256., 256., 256.],
           [512., 512., 512.],
           [512., 512., 512.],
           [  0.,   0.,   0.]], dtype=float32)
    """
    optional = compat.given(lhs_scales=lhs_scales, rhs_zeros=rhs_zeros)
    compat.check_arraylike("scaled_ragged_dot", lhs, rhs, rhs_scales=rhs_scales, **optional)
    lhs, rhs, rhs_scales = map(jnp.asarray, (lhs, rhs, rhs_scales))
    lhs_scales = None if lhs_scales is None else jnp.asarray(lhs_scales)
    zeros = None if rhs_zeros is None else jnp.asarray(rhs_zeros)
    sizes = jnp.asarray(group_sizes)
    out_dtype = np.dtype(jax.dtypes.canonicalize_dtype(preferred_element_type))
    _check(lhs, rhs, sizes, lhs_scales, rhs_scales, zeros, out_dtype)
    offset = checked_offset("scaled_ragged_dot", group_offset)
    if offset is None and sizes.shape != rhs.shape[:1]:
        raise ValueError(
            "scaled_ragged_dot has a matrix for each group: "
            f"group_sizes {sizes.shape}, rhs {rhs.shape}"
        )

    def product(operands: tuple[Any, ...]) -> Array:
        lhs, rhs, lhs_scales, rhs_scales, zeros, sizes, offset = operands
        bounds = group_bounds(sizes, lhs.shape[0], offset, rhs.shape[0])
        call: dict[str, Any] = {
            "out_dtype": out_dtype,
            "shape": (lhs.shape[0], rhs.shape[1]),
            "role": Role("scaled_ragged_dot"),
        }
        if lhs_scales is None:
            weights = rhs, rhs_scales, zeros
            product = weights_call(lhs, weights, [bounds], contraction=ROWS_BY_MATRICES, **call)
        else:
            factors = lhs, rhs, lhs_scales.T, rhs_scales
            layout = {"contraction": ROWS_BY_MATRICES, "rows_last": (True, False)}
            product = scaled_call(SCALED, factors, [bounds], layout=layout, **call)
        return product  # type: ignore[no-any-return]

    operands = (lhs, rhs, lhs_scales, rhs_scales, zeros, sizes, offset)
    result: Array = by_automatic_axes(product, operands, lambda: _split(lhs, rhs))
    return result


def _split(lhs: Array, rhs: Array) -> tuple[Any, Any]:
    """Return how explicit axes split the result: as the rows, and as the columns if they can."""
    rows, columns = spec_of(lhs)[0], spec_of(rhs)[1]
    axes = [{x} if isinstance(x, str) else set(x or ()) for x in (rows, columns)]
    return rows, columns if axes[0].isdisjoint(axes[1]) else None


def _check(
    lhs: Array,
    rhs: Array,
    sizes: Array,
    lhs_scales: Array | None,
    rhs_scales: Array,
    rhs_zeros: Array | None,
    out: np.dtype[Any],
) -> None:
    if (lhs.ndim, rhs.ndim, sizes.ndim) != (2, 3, 1):
        raise ValueError(
            "scaled_ragged_dot takes lhs (M, K), rhs (groups, N, K) and group_sizes (groups,), not "
            f"{lhs.shape}, {rhs.shape} and {sizes.shape}"
        )
    if not jnp.issubdtype(sizes.dtype, np.integer):
        raise TypeError(f"group_sizes of scaled_ragged_dot are integers, not {sizes.dtype}")
    if lhs_scales is None:
        check_weights("scaled_ragged_dot", lhs, rhs, rhs_scales, rhs_zeros, out)
        return
    refuse_zeros("scaled_ragged_dot", rhs_zeros)
    check_types("scaled_ragged_dot", lhs, rhs, out)
    rows, columns = lhs.shape[0], rhs.shape[1]
    check_scales("scaled_ragged_dot", "lhs", lhs, lhs_scales, (rows, 1))
    check_scales("scaled_ragged_dot", "rhs", rhs, rhs_scales, (columns, blocks_of(columns), 1))
