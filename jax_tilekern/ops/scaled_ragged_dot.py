"""``scaled_ragged_dot``: grouped GEMMs of 8-bit floats that have a scale for each block.

The primitive contracts the last dimensions of its operands. Its scales of ``lhs`` have those of
adjacent rows adjacent, as :func:`quantize` writes them: ``(ceil(K / 128), M)``. Those of ``rhs``
have, with ``columns_first``: ``(..., ceil(K / 128), N)``, padded to a multiple of 4.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.ops.contraction import contract, in_float32, masked_product
from jax_tilekern.ops.groups import checked_offset, group_bounds, local_bounds, used
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.planned_kernel import planned_kernel
from jax_tilekern.ops.scaled_layout import scales_in_memory, with_columns_first
from jax_tilekern.ops.scaled_matmul import sharding_rule
from jax_tilekern.ops.scaled_operands import (
    blocks_of,
    check_scales,
    check_types,
    dequantized,
    refuse_tangent,
)
from jax_tilekern.ops.segments.explicit import by_automatic_axes, spec_of
from jax_tilekern.partitioning.local_program import Shard
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.plans.contraction import Contraction, Dimension, merged, row_major_strides
from jax_tilekern.plans.gemm.arithmetic import TYPES
from jax_tilekern.plans.gemm.geometry import MatmulGeometry
from jax_tilekern.plans.gemm.problem import Product, Scales
from jax_tilekern.plans.gemm.select import plan_matmul
from jax_tilekern.plans.grouped_gemm.problem import GroupedGeometry
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    Outcome,
    Planner,
    Rewrite,
    define,
)

_ROW, _K, _GROUP, _COLUMN = range(4)
# Rows times the transpose of a matrix for each group.
_ROWS_BY_MATRICES = Contraction(
    (_ROW, _K), (_GROUP, _COLUMN, _K), (_ROW, _COLUMN), (_GROUP,), _ROW, _GROUP
)


@jitted("preferred_element_type")
def scaled_ragged_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    lhs_scales: ArrayLike,
    rhs_scales: ArrayLike,
    preferred_element_type: DTypeLike = np.float32,
    *,
    group_offset: ArrayLike | None = None,
) -> Array:
    """Multiply consecutive groups of rows by a matrix each, all of 8-bit floats with scales.

    It is :func:`ragged_dot` of what the scales make of both operands, computed as
    :func:`scaled_matmul` computes a product. Groups have any sizes, and no row is padded for.
    Scales are differentiable, and a tangent of an operand is refused.

    Parameters
    ----------
    lhs
        Rows, shape ``(M, K)``, of float8_e4m3fn or float8_e5m2.
    rhs
        A matrix for each group, shape ``(groups, N, K)``, of either type: its last dimension is
        contracted, as that of :func:`scaled_matmul` is.
    group_sizes
        Integers of shape ``(groups,)``, as in :func:`ragged_dot`. Rows of no group are zeros in the
        result.
    lhs_scales
        float32 of shape ``(M, ceil(K / 128))``, scales of blocks of 1x128. Either size may be 1.
    rhs_scales
        float32 of shape ``(groups, R, ceil(K / 128))``, where ``R`` is ``N``, ``ceil(N / 128)`` or
        1. The last size may be 1.
    preferred_element_type
        Type of the result, to which it is rounded once.
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
    >>> of_w = jnp.array([[[1.0, 1.0]], [[1.0, 3.0]]])
    >>> jtk.scaled_ragged_dot(x, w, jnp.array([1, 2]), jnp.ones((4, 2)), of_w)
    Array([[256., 256., 256.],
           [512., 512., 512.],
           [512., 512., 512.],
           [  0.,   0.,   0.]], dtype=float32)
    """
    lhs, rhs, lhs_scales, rhs_scales = map(jnp.asarray, (lhs, rhs, lhs_scales, rhs_scales))
    sizes = jnp.asarray(group_sizes)
    out_dtype = np.dtype(jax.dtypes.canonicalize_dtype(preferred_element_type))
    _check(lhs, rhs, sizes, lhs_scales, rhs_scales, out_dtype)
    offset = checked_offset("scaled_ragged_dot", group_offset)
    if offset is None and sizes.shape != rhs.shape[:1]:
        raise ValueError(
            "scaled_ragged_dot has a matrix for each group: "
            f"group_sizes {sizes.shape}, rhs {rhs.shape}"
        )

    def product(operands: tuple[Any, ...]) -> Array:
        lhs, rhs, lhs_scales, rhs_scales, sizes, offset = operands
        bounds = group_bounds(sizes, lhs.shape[0], offset, rhs.shape[0])
        return scaled_rows_by_matrices(lhs, rhs, lhs_scales.T, rhs_scales, bounds, out_dtype)

    operands = (lhs, rhs, lhs_scales, rhs_scales, sizes, offset)
    result: Array = by_automatic_axes(product, operands, lambda: _split(lhs, rhs))
    return result


def _split(lhs: Array, rhs: Array) -> tuple[Any, Any]:
    """Return how explicit axes split the result: as the rows, and as the columns if they can."""
    rows, columns = spec_of(lhs)[0], spec_of(rhs)[1]
    axes = [{x} if isinstance(x, str) else set(x or ()) for x in (rows, columns)]
    return rows, columns if axes[0].isdisjoint(axes[1]) else None


def scaled_rows_by_matrices(
    lhs: Array,
    rhs: Array,
    lhs_scales: Array,
    rhs_scales: Array,
    bounds: Array,
    out_dtype: np.dtype[Any],
) -> Array:
    """Multiply groups of rows, given their bounds, with scales of adjacent rows adjacent."""
    own = out_dtype if out_dtype in TYPES["fp8"].results else np.dtype(np.float32)
    result: Array = _bind(
        lhs, rhs, lhs_scales, rhs_scales, bounds,
        contraction=_ROWS_BY_MATRICES, out_dtype=own, columns_first=False,
    )  # fmt: skip
    return result.astype(out_dtype)


def _check(
    lhs: Array, rhs: Array, sizes: Array, lhs_scales: Array, rhs_scales: Array, out: np.dtype
) -> None:
    if (lhs.ndim, rhs.ndim, sizes.ndim) != (2, 3, 1):
        raise ValueError(
            "scaled_ragged_dot takes lhs (M, K), rhs (groups, N, K) and group_sizes (groups,), not "
            f"{lhs.shape}, {rhs.shape} and {sizes.shape}"
        )
    if not jnp.issubdtype(sizes.dtype, np.integer):
        raise TypeError(f"group_sizes of scaled_ragged_dot are integers, not {sizes.dtype}")
    check_types("scaled_ragged_dot", lhs, rhs, out)
    rows, columns = lhs.shape[0], rhs.shape[1]
    check_scales("scaled_ragged_dot", "lhs", lhs, lhs_scales, (rows, 1))
    check_scales("scaled_ragged_dot", "rhs", rhs, rhs_scales, (columns, blocks_of(columns), 1))


# Meaning.


def _by(
    multiply: Callable[..., Array],
    *operands: Array,
    contraction: Contraction,
    out_dtype: np.dtype[Any],
    columns_first: bool,
) -> Array:
    """Contract the operands in float32."""
    lhs, rhs, lhs_scales, rhs_scales, bounds = operands
    if columns_first:
        rhs_scales = jnp.swapaxes(rhs_scales, -1, -2)[..., : rhs.shape[-2], :]
    return multiply(
        dequantized(lhs, jnp.swapaxes(lhs_scales, -1, -2)),
        dequantized(rhs, rhs_scales),
        bounds,
        contraction=contraction,
        precision=(lax.Precision.HIGHEST, lax.Precision.HIGHEST),
        out_dtype=np.dtype(np.float32),
    ).astype(out_dtype)


_reference = functools.partial(_by, masked_product)
_by_contraction = functools.partial(_by, contract)


# Rules.


def _refuse_tangent(operand: int, **_: Any) -> None:
    refuse_tangent("scaled_ragged_dot", operand)


def _cotangent(operand: int, cotangent: Array, *operands: Any, **params: Any) -> Array:
    lhs, rhs, *others, bounds = operands
    factors = used(lhs, rhs, bounds, contraction=params["contraction"])

    def linear(scales: Array) -> Array:
        read = [*factors, *others]
        read[operand] = scales
        return _by_contraction(*read, bounds, **params)

    (result,) = jax.linear_transpose(linear, operands[operand])(cotangent)
    return result  # type: ignore[no-any-return]


def _batch(
    axis_data: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    contraction: Contraction,
    **params: Any,
) -> tuple[Array, int]:
    """Put the mapped axis first. An operand and its scales have it together."""
    lhs, rhs = (dims[i] is not None or dims[i + 2] is not None for i in (0, 1))
    mapped = (lhs, rhs, lhs, rhs, dims[4] is not None)

    def moved(x: Array, dim: int | None, is_mapped: bool) -> Array:
        if not is_mapped:
            return x
        if dim is None:
            return jnp.broadcast_to(x, (axis_data.size, *x.shape))
        return jnp.moveaxis(x, dim, 0)

    labels = contraction.mapped(*(0 if mapped[i] else None for i in (0, 1, 4)))
    return _bind(*map(moved, operands, dims, mapped), contraction=labels, **params), 0


def _sharding_rule(
    lhs: Any,
    rhs: Any,
    lhs_scales: Any,
    rhs_scales: Any,
    bounds: Any,
    *,
    contraction: Contraction,
    **_: Any,
) -> ShardingRule:
    c = contraction
    *leading, blocks, rows = lhs_scales.shape
    by_row = jax.ShapeDtypeStruct((*leading, rows, blocks), lhs_scales.dtype)
    rule = sharding_rule(lhs, rhs, by_row, rhs_scales, contraction=c)
    *first, of_rows, of_blocks = rule.operands[2]
    # A device has the bounds of its own rows and groups.
    prefix = c.bounds[:-1]
    return dataclasses.replace(
        rule,
        operands=(
            *rule.operands[:2],
            (*first, of_blocks, of_rows),
            rule.operands[3],
            (*prefix, None),
        ),
        sizes={**rule.sizes, **dict(zip(prefix, bounds.shape, strict=False))},
        # Each row is multiplied for one group only.
        flops=2 * math.prod(lhs.shape) * rhs.shape[-2],
        names=c.names,
    )


def _localised(shard: Shard, *operands: Array, contraction: Contraction, **_: Any) -> list[Array]:
    *others, bounds = operands
    return [*others, local_bounds(shard, bounds, contraction)]


# Lowering.


def _refusal(*_: Any, **__: Any) -> Fallback | None:
    return None


def _dequantised(why: str, params: dict[str, Any]) -> Rewrite:
    # The reference has all rows for each group.
    function = functools.partial(_by_contraction, **params)
    return Rewrite(f"the operands are dequantised, and multiplied in float32: {why}", function)


def _cpu(_operands: Any, _avals: Any, **params: Any) -> Rewrite:
    return _dequantised("kernels are for Hopper GPUs", params)


def _cuda(operands: Sequence[Operand], _: Any, **params: Any) -> Outcome:
    product = _stated(*(x.aval for x in operands), **params)
    assert product.scales is not None
    of_rows, of_columns = product.scales
    if (
        of_rows.row_stride
        and of_columns.row_stride
        and of_columns.block_rows == 1
        and not of_columns.fit_bulk_copies(product.geometry.n)
        and not params["columns_first"]
    ):
        return Rewrite(
            "scales of rhs copied first: those of columns are adjacent, and a multiple of 4",
            functools.partial(_with_columns_first, **params),
        )
    lhs, rhs, *scales, bounds = (x.value for x in operands)
    found = planned_kernel((lhs, rhs, bounds, *scales), plan_matmul, product)
    return _dequantised(found.reason, params) if isinstance(found, Fallback) else found


def _with_columns_first(
    lhs: Array, rhs: Array, lhs_scales: Array, rhs_scales: Array, bounds: Array, **params: Any
) -> Array:
    columns = with_columns_first(rhs_scales, rhs.shape[-2])
    result: Array = _bind(
        lhs, rhs, lhs_scales, columns, bounds, **{**params, "columns_first": True}
    )
    return result


def _stated(
    *operands: Any, contraction: Contraction, out_dtype: np.dtype[Any], columns_first: bool
) -> Product:
    """Return the grouped GEMM of operands of these types."""
    c = contraction
    lhs, rhs, lhs_scales, rhs_scales, bounds = operands
    sizes = dict(
        zip(
            (*c.lhs, *c.rhs, *c.bounds[:-1]),
            (*lhs.shape, *rhs.shape, *bounds.shape[:-1]),
            strict=True,
        )
    )
    strides = [
        row_major_strides(labels, dict(zip(labels, shape, strict=True)))
        for labels, shape in (
            (c.lhs, lhs.shape),
            (c.rhs, rhs.shape),
            (c.out, [sizes[label] for label in c.out]),
            (c.bounds, bounds.shape),
            # Their last two dimensions may be in another order.
            (c.lhs, lhs_scales.shape),
            (c.rhs, rhs_scales.shape),
        )
    ]

    def dimension(label: int) -> Dimension:
        of = [x.get(label, 0) for x in strides]
        return Dimension(sizes[label], of[0], of[1], of[2], of[3], (of[4], of[5]))

    batch = merged(map(dimension, c.out[:-2]))
    dims = [*batch, dimension(c.group)] if c.group is not None else batch
    m, n, k = (sizes[label] for label in (*c.out[-2:], c.lhs[-1]))
    geometry = MatmulGeometry(
        tuple(x.size for x in dims), m, n, k,
        lhs_strides=(*(x.lhs for x in dims), k, 1),
        rhs_strides=(*(x.rhs for x in dims), 1, k),
        out_strides=(*(x.out for x in dims), n, 1),
    )  # fmt: skip
    of_lhs, of_rhs = (
        dataclasses.replace(found, batch_strides=tuple(x.extra[i] for x in dims))
        for i, found in enumerate(
            (
                _scales(lhs, lhs_scales, columns_first=True),
                _scales(rhs, rhs_scales, columns_first=columns_first),
            )
        )
    )
    return Product(
        GroupedGeometry.of(geometry, "m", tuple(x.bounds for x in batch)),
        lhs.dtype, rhs.dtype, out_dtype, "fp8", scales=(of_lhs, of_rhs),
    )  # fmt: skip


def _scales(operand: Any, scales: Any, *, columns_first: bool) -> Scales:
    rows, adjacent = operand.shape[-2], scales.shape[-1]
    if columns_first:
        return scales_in_memory(rows, scales.shape[:-3:-1], (1, adjacent))
    return scales_in_memory(rows, scales.shape[-2:], (adjacent, 1))


_bind = define(
    Operation(
        name="tilekern_scaled_ragged_dot",
        reference=_reference,
        refuse_tangent=_refuse_tangent,
        transposes={i: functools.partial(_cotangent, i) for i in (2, 3)},
        batch=_batch,
        sharding_rule=_sharding_rule,
        localised=_localised,
        planners={"cpu": Planner(_refusal, _cpu), "cuda": Planner(_refusal, _cuda)},
        describe=lambda contraction, **_: f"scaled_ragged_dot {contraction}",
        in_float32=in_float32,
    )
)
