"""The primitive behind every matrix product: a contraction over labelled dimensions.

It is closed under differentiation and batching. The cotangent of an operand is a contraction of
the other operand with the output's cotangent, written straight into the operand's own dimension
order; ``vmap`` adds one label to whatever carries the mapped axis. Neither moves any data.

With groups it is a grouped GEMM. The bounds of the groups are its third operand.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jax_tilekern.interop import compat
from jax_tilekern.ops.complex_products import planners
from jax_tilekern.ops.contraction_lowering import source
from jax_tilekern.ops.groups import local_bounds, masked
from jax_tilekern.ops.labelled_operands import common_type, product_by_lax
from jax_tilekern.partitioning.local_program import Shard
from jax_tilekern.partitioning.rule import ShardingRule, sizes_of
from jax_tilekern.plans.contraction import Contraction
from jax_tilekern.primitives.operation import Operation, define


def contract(
    lhs: Array,
    rhs: Array,
    *bounds: Array,
    contraction: Contraction,
    precision: Any,
    out_dtype: np.dtype[Any],
    out_sharding: NamedSharding | None = None,
) -> Array:
    """Contract two arrays, group by group if there are groups.

    Parameters
    ----------
    lhs, rhs
        Operands; where their types differ, both are cast to a common one first.
    *bounds
        Those of the groups, if there are any: one array of ``int32``, in order along its last
        dimension and between 0 and the number of rows.
    contraction
        Labels of their dimensions and of the result's. A label of the bounds need not be the
        result's.
    precision
        Canonical, as :func:`jax_tilekern.interop.compat.canonicalize_precision` returns it.
    out_dtype
        Type of the result.
    out_sharding
        Sharding of the result on a mesh with explicit axes, where groups require it; by default
        what follows from the operands'.
    """
    lhs, rhs = common_type(lhs, rhs, out_dtype, precision)
    summed = contraction.summed_bounds
    if summed:
        # Groups differ along these dimensions, so each index is a product of its own.
        narrow = jnp.issubdtype(out_dtype, jnp.floating) and np.dtype(out_dtype).itemsize < 4
        sums = np.dtype(np.float32 if narrow else out_dtype)
        products = contract(
            lhs,
            rhs,
            *bounds,
            contraction=dataclasses.replace(contraction, out=(*summed, *contraction.out)),
            precision=precision,
            out_dtype=sums,
            out_sharding=compat.with_leading_dims(out_sharding, len(summed)),
        )
        return products.sum(range(len(summed)), dtype=sums).astype(out_dtype)
    result: Array = _bind(
        lhs,
        rhs,
        *bounds,
        contraction=contraction,
        precision=precision,
        out_dtype=np.dtype(out_dtype),
        out_sharding=out_sharding,
    )
    return result


# Meaning.


def _reference(
    lhs: Array, rhs: Array, *bounds: Array, out_sharding: NamedSharding | None, **params: Any
) -> Array:
    if not bounds:
        return product_by_lax(lhs, rhs, **params, out_sharding=out_sharding)
    product = compat.with_automatic_axes(functools.partial(masked_product, **params), out_sharding)
    result: Array = product(lhs, rhs, *bounds)
    return result


def masked_product(
    lhs: Array, rhs: Array, *bounds: Array, contraction: Contraction, **params: Any
) -> Array:
    """Contract two arrays in terms of ``jax.lax``; rows of other groups count as zeros."""
    if bounds:
        lhs, rhs, contraction = masked(lhs, rhs, *bounds, contraction=contraction)
    return product_by_lax(lhs, rhs, contraction, **params)


# Differentiation and batching, which Strassen's algorithm has in common.


def _cotangent(
    operand: int,
    contract: Callable[..., Array],
    cotangent: Array,
    lhs: Any,
    rhs: Any,
    *bounds: Array,
    contraction: Contraction,
    out_dtype: np.dtype[Any],
    out_sharding: NamedSharding | None,
    **params: Any,
) -> Array:
    """Return the cotangent of ``lhs`` or ``rhs``, with its own labels, type and sharding."""
    c = contraction
    like, labels = ((lhs, c.lhs), (rhs, c.rhs))[operand]
    factors = [(lhs, c.lhs), (rhs, c.rhs)]
    factors[operand] = (cotangent, c.out)
    if operand == 0 and c.ragged_dimension == "k":
        # The operand with the ragged label comes first.
        factors.reverse()
    (left, left_labels), (right, right_labels) = factors
    return contract(
        left,
        right,
        *bounds,
        contraction=dataclasses.replace(c, lhs=left_labels, rhs=right_labels, out=labels),
        out_dtype=like.dtype,
        out_sharding=compat.cotangent_sharding(like),
        **params,
    )


def transposes(
    contract: Callable[..., Array],
) -> dict[int | tuple[int, ...], Callable[..., Any]]:
    """Return the transpose rules of both operands, which ``contract`` computes."""
    return {i: functools.partial(_cotangent, i, contract) for i in (0, 1)}


def batched(
    contract: Callable[..., Array],
    axis_data: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    contraction: Contraction,
    out_sharding: NamedSharding | None,
    **params: Any,
) -> tuple[Array, int]:
    """Label the mapped axis in place; an operand without it is unchanged."""
    factors, labels = mapped(contraction, operands, dims)
    out_sharding = compat.sharding_under_vmap(axis_data, out_sharding, 0)
    return contract(*factors, contraction=labels, out_sharding=out_sharding, **params), 0


def mapped(
    contraction: Contraction, operands: Sequence[Array], dims: Sequence[int | None]
) -> tuple[list[Array], Contraction]:
    """Return the operands of a contraction and their labels under ``vmap``."""
    operands, dims = list(operands), list(dims)
    for i in range(2, len(dims)):
        if (dim := dims[i]) is not None:
            # A few numbers, of which those of the groups stay adjacent.
            operands[i], dims[i] = jnp.moveaxis(operands[i], dim, 0), 0
    return operands, contraction.mapped(*dims)


# Partitioning: the labels state which dimensions may be split among devices.


def sharding_rule(
    lhs: Any, rhs: Any, *bounds: Any, contraction: Contraction, **_: Any
) -> ShardingRule:
    """Return the rule of a contraction, whose labels are those of the product."""
    c = contraction
    # A device has the bounds of its own rows and groups.
    prefixes = [(*c.bounds[:-1], None) for _ in bounds]
    sizes = sizes_of(
        *((prefix, x.shape) for prefix, x in zip(prefixes, bounds, strict=True)),
        (c.lhs, lhs.shape),
        (c.rhs, rhs.shape),
    )
    # Each row is multiplied for one group only.
    flops = 2 * math.prod(size for label, size in sizes.items() if label != c.group)
    if c.group is not None:
        sizes[c.group] = bounds[0].shape[-1] - 1
    # A matrix for each group is the largest of the three arrays where groups have few rows.
    gatherable = frozenset(label for label in c.lhs if label == c.ragged) - set(c.out)
    return ShardingRule(
        (c.lhs, c.rhs, *prefixes), (c.out,), sizes, flops=flops, names=c.names,
        gatherable=gatherable,
    )  # fmt: skip


def _localised(
    shard: Shard, lhs: Array, rhs: Array, *bounds: Array, contraction: Contraction, **_: Any
) -> list[Array]:
    return [lhs, rhs, *(local_bounds(shard, x, contraction) for x in bounds)]


def in_float32(**params: Any) -> dict[str, Any]:
    """Return the parameters of the same call with a float32 result."""
    return {**params, "out_dtype": np.dtype(np.float32)}


# Checkpoint policies.


def as_dot_general(
    contraction: Contraction, precision: Any, out_dtype: np.dtype[Any], **_: Any
) -> tuple[compat.Primitive, dict[str, Any]] | None:
    """Return the primitive of JAX's, and its parameters, as which policies see a contraction.

    There is none for one with groups.
    """
    if contraction.group is not None:
        return None
    return compat.dot_general_p, {
        "dimension_numbers": contraction.dimension_numbers,
        "precision": precision,
        "preferred_element_type": out_dtype,
        "out_sharding": None,
    }


_bind = define(
    Operation(
        name="tilekern_contract",
        reference=_reference,
        any_size=lambda contraction, **_: contraction.group is None,
        transposes=transposes(contract),
        batch=functools.partial(batched, contract),
        sharding_rule=sharding_rule,
        planners=planners(contract),
        describe=lambda contraction, **_: str(contraction),
        localised=_localised,
        source=source,
        in_float32=in_float32,
        stands_for=as_dot_general,
    )
)
