"""Contractions that share an operand or a result: two of one ``lhs``, and the sum of two.

Each is the other's transpose. On a Hopper GPU one kernel may compute the sum of two grouped GEMMs:
the k-tiles of the second follow those of the first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from jax_tilekern.epilogue.scalar_function import trace_scalars
from jax_tilekern.interop.originals import lax
from jax_tilekern.ops.contraction import contract, mapped, masked_product, transposes
from jax_tilekern.ops.contraction_lowering import CUDA, LoweredProduct, cuda_kernel, state_problem
from jax_tilekern.ops.fused_contraction import contract_with_scalar_function
from jax_tilekern.ops.fused_lowering import planners
from jax_tilekern.plans.contraction import Contraction
from jax_tilekern.plans.gemm.arithmetic import accumulator_dtype
from jax_tilekern.plans.grouped_gemm.problem import GroupedProduct, GroupedSum
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    PlannedKernel,
    define,
)


def contract_each(
    lhs: Array,
    first: Array,
    second: Array,
    *bounds: Array,
    contraction: Contraction,
    precision: Any,
    out_dtype: np.dtype[Any],
) -> list[Array]:
    """Contract an array with each of two of one shape.

    The cotangent of ``lhs`` is one :func:`contract_sum`. All arrays have one type; the parameters
    are those of :func:`~jax_tilekern.ops.contraction.contract`.
    """
    results: list[Array] = _bind_each(
        lhs, first, second, *bounds,
        contraction=contraction, precision=precision, out_dtype=np.dtype(out_dtype),
    )  # fmt: skip
    return results


def contract_sum(
    lhs: Array,
    rhs: Array,
    second_lhs: Array,
    second_rhs: Array,
    *bounds: Array,
    contraction: Contraction,
    precision: Any,
    out_dtype: np.dtype[Any],
) -> Array:
    """Add two contractions of operands of one shape.

    All arrays have one type; the parameters are those of
    :func:`~jax_tilekern.ops.contraction.contract`.
    """
    result: Array = _bind_sum(
        lhs, rhs, second_lhs, second_rhs, *bounds,
        contraction=contraction, precision=precision, out_dtype=np.dtype(out_dtype),
    )  # fmt: skip
    return result


# Meaning.


def _each(lhs: Array, first: Array, second: Array, *bounds: Array, **params: Any) -> list[Array]:
    return [contract(lhs, rhs, *bounds, **params) for rhs in (first, second)]


def _reference_of_each(
    lhs: Array, first: Array, second: Array, *bounds: Array, **params: Any
) -> list[Array]:
    return [masked_product(lhs, rhs, *bounds, **params) for rhs in (first, second)]


def _reference_of_sum(
    lhs: Array,
    rhs: Array,
    second_lhs: Array,
    second_rhs: Array,
    *bounds: Array,
    out_dtype: np.dtype[Any],
    **params: Any,
) -> Array:
    wide = accumulator_dtype(lhs.dtype, out_dtype)
    terms = (
        masked_product(*factors, *bounds, out_dtype=wide, **params)
        for factors in ((lhs, rhs), (second_lhs, second_rhs))
    )
    return functools.reduce(lax.add, terms).astype(out_dtype)


def _second_onto_first(
    lhs: Array,
    rhs: Array,
    second_lhs: Array,
    second_rhs: Array,
    *bounds: Array,
    contraction: Contraction,
    precision: Any,
    out_dtype: np.dtype[Any],
) -> Array:
    """Compute one product, and add it to the other one in that one's epilogue."""
    first = contract(
        lhs, rhs, *bounds, contraction=contraction, precision=precision, out_dtype=out_dtype
    )

    def added(x: Any, first: Any) -> Any:
        return x + first.astype(x.dtype)

    wide = accumulator_dtype(lhs.dtype, out_dtype)
    (result,) = contract_with_scalar_function(
        second_lhs,
        second_rhs,
        *bounds,
        contraction=contraction,
        precision=precision,
        product=out_dtype,
        function=trace_scalars(added, wide, out_dtype, [out_dtype]).function,
        operands=[(first, contraction.out)],
        in_place=((0, 0),),
    )
    return result


# Differentiation.


def _cotangent_of_lhs(
    cotangents: Sequence[Array],
    lhs: Any,
    first: Array,
    second: Array,
    *bounds: Array,
    contraction: Contraction,
    precision: Any,
    **_: Any,
) -> Array:
    c = contraction
    one, two = cotangents
    return contract_sum(
        one, first, two, second, *bounds,
        contraction=dataclasses.replace(c, lhs=c.out, out=c.lhs),
        precision=precision, out_dtype=lhs.dtype,
    )  # fmt: skip


_of_lhs, _of_rhs = (transposes(contract)[i] for i in (0, 1))


def _cotangents_of_each(
    cotangents: Sequence[Array], lhs: Array, first: Any, second: Any, *bounds: Array, **params: Any
) -> list[Array]:
    return [
        _of_rhs(cotangent, lhs, rhs, *bounds, out_sharding=None, **params)
        for cotangent, rhs in zip(cotangents, (first, second), strict=True)
    ]


def _cotangents_of_factors(
    transpose: Callable[..., Array],
    cotangent: Array,
    lhs: Any,
    rhs: Any,
    two: Any,
    second: Any,
    *bounds: Array,
    **params: Any,
) -> list[Array]:
    """Apply the rule of one factor of a product to both products."""
    return [
        transpose(cotangent, *factors, *bounds, out_sharding=None, **params)
        for factors in ((lhs, rhs), (two, second))
    ]


# Batching.


def _batch_of_each(
    axis_data: Any, operands: Sequence[Array], dims: Sequence[int | None], **params: Any
) -> tuple[list[Array], list[int]]:
    lhs, first, second, *bounds = operands
    along, one, two, *others = dims
    if one == two:
        factors, labels = mapped(
            params.pop("contraction"), [lhs, first, *bounds], [along, one, *others]
        )
        results = contract_each(*factors[:2], second, *factors[2:], contraction=labels, **params)
    else:
        function = functools.partial(_each, **params)
        results = jax.vmap(function, in_axes=tuple(dims), axis_size=axis_data.size)(*operands)
    return results, [0, 0]


def _batch_of_sum(
    axis_data: Any, operands: Sequence[Array], dims: Sequence[int | None], **params: Any
) -> tuple[Array, int]:
    if tuple(dims[:2]) == tuple(dims[2:4]):
        factors, labels = mapped(
            params.pop("contraction"), [*operands[:2], *operands[4:]], [*dims[:2], *dims[4:]]
        )
        pairs = (*factors[:2], *operands[2:4], *factors[2:])
        return contract_sum(*pairs, contraction=labels, **params), 0
    function = functools.partial(_second_onto_first, **params)
    result = jax.vmap(function, in_axes=tuple(dims), axis_size=axis_data.size)(*operands)
    return result, 0


# Lowering.


def _no_kernel(*_: Any, **__: Any) -> str:
    return "a kernel has one result"


def _kernel_of_sum(operands: Sequence[Operand], **params: Any) -> PlannedKernel | str:
    lhs, rhs, second_lhs, second_rhs, *bounds = operands
    one, two = (
        state_problem(contract, CUDA, [*factors, *bounds], **params)
        for factors in ((lhs, rhs), (second_lhs, second_rhs))
    )
    if not isinstance(one, LoweredProduct):
        return one.reason
    if not isinstance(two, LoweredProduct) or two.product != one.product:
        return "the operands of the two products lie differently in memory"
    product = one.product
    if not isinstance(product, GroupedProduct) or product.geometry.ragged != "m":
        return "one kernel adds grouped GEMMs of ragged rows alone"
    both = GroupedSum(product.geometry, *product.dtypes, product.arithmetic)
    planned = cuda_kernel(both, (*one.operands, *two.operands[:2]))
    return planned.reason if isinstance(planned, Fallback) else planned


def _operation(name: str, **rules: Any) -> Any:
    def describe(*, contraction: Contraction, **_: Any) -> str:
        return f"{name} {contraction}"

    # XLA partitions each of the two contractions.
    return define(
        Operation(name=f"tilekern_contract_{name}", sharding_rule=None, describe=describe, **rules)
    )


_HOW = "a kernel for each"
_bind_each = _operation(
    "each",
    reference=_reference_of_each,
    several_results=True,
    transposes={0: _cotangent_of_lhs, (1, 2): _cotangents_of_each},
    batch=_batch_of_each,
    composed=_each,
    planners=planners(_no_kernel, _each, _HOW, on_cpu="XLA adds them"),
)


_bind_sum = _operation(
    "sum",
    reference=_reference_of_sum,
    transposes={
        (0, 2): functools.partial(_cotangents_of_factors, _of_lhs),
        (1, 3): functools.partial(_cotangents_of_factors, _of_rhs),
    },
    batch=_batch_of_sum,
    composed=_second_onto_first,
    planners=planners(_kernel_of_sum, _second_onto_first, _HOW, on_cpu="one kernel is for Hopper"),
)
