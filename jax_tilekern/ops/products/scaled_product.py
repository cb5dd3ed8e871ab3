"""The primitive of products of 8-bit floats that have a scale for each block.

It contracts the last dimensions of ``lhs`` and ``rhs``, whose scales follow them. The shape of an
array of scales states the blocks: scales of rows, of blocks of 128 rows and of all rows differ in
their strides alone, so one kernel takes them all. With ``rows_last`` an array has those of adjacent
rows adjacent, ``(..., ceil(K / 128), rows)``, and those of ``rhs`` are padded to a multiple of 4.

With groups it is a grouped GEMM, and the bounds of the groups follow. With a function it has an
epilogue, whose operands come last.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad
from jax_tilekern.ops.products.contraction import (
    contract,
    masked_product,
    sharding_rule,
)
from jax_tilekern.ops.products.contraction_lowering import LoweredProduct, cuda_kernel
from jax_tilekern.ops.products.fused_lowering import fused_kernel
from jax_tilekern.ops.products.groups import used
from jax_tilekern.ops.products.scaled_call import ScaledCall, define_scaled
from jax_tilekern.ops.products.scaled_layout import (
    scaled_geometry,
    scales_in_memory,
    stored_scales,
    with_columns_first,
)
from jax_tilekern.ops.products.scaled_operands import dequantized, refuse_tangent
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.plans.contraction import Labels
from jax_tilekern.plans.gemm.problem import Product, Scales
from jax_tilekern.plans.gemm.select import copies_rows_first
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.plans.quantize import BLOCK
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Outcome,
    Params,
    Planner,
    Rewrite,
    no_refusal,
)

_F32: np.dtype[Any] = np.dtype(np.float32)


@dataclass(frozen=True, kw_only=True)
class _Call(ScaledCall):
    """The parameters of a call."""

    rows_last: tuple[bool, bool] = (False, False)
    accumulator: np.dtype[Any] = _F32

    factors = 4
    linear_in = ((2,), (3,))
    together = ((0, 2), (1, 3))

    def multiply(self, *factors: Array, **others: Any) -> Array:
        own = {"contraction": self.contraction, "rows_last": self.rows_last, "out_dtype": _F32}
        (result,) = _bind(*factors, **own | others)
        return result


# Meaning.


def _by(
    multiply: Callable[..., Array],
    *operands: Array,
    transposed: Sequence[bool] = (False, False),
    **params: Any,
) -> list[Array]:
    """Contract the operands in float32.

    What is made by a transpose is dequantised where it lies before it.
    """
    call = _Call(**params)

    def factor(i: int) -> Array:
        x, scales = operands[i], operands[2 + i]
        if call.rows_last[i]:
            scales = jnp.swapaxes(scales[..., : x.shape[-2]], -1, -2)
        if transposed[i]:
            return dequantized(x.mT, scales.mT).mT
        return dequantized(x, scales)

    result = multiply(
        factor(0),
        factor(1),
        *operands[4 : call.first_read],
        contraction=call.contraction,
        precision=(lax.Precision.HIGHEST, lax.Precision.HIGHEST),
        out_dtype=_F32,
    )
    if call.function is None:
        return [result.astype(call.out_dtype)]
    return call.elementwise()(result, *operands[4:])


def _contract_stored(lhs: Array, rhs: Array, *others: Array, **params: Any) -> Array:
    call = params["contraction"]
    if all(lhs.shape[call.lhs.index(label)] == 1 for label in call.contracted):
        # On CPUs XLA would dequantise both factors for each element of an outer product.
        lhs, rhs = lax.optimization_barrier((lhs, rhs))
    return contract(lhs, rhs, *others, **params)


_reference = functools.partial(_by, masked_product)
_by_contraction = functools.partial(_by, contract)


# Rules.


def _refuse_tangent(operand: int, **params: Any) -> None:
    refuse_tangent(_Call(**params).name, operand)


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Any], **params: Any
) -> tuple[list[Array], list[Any]]:
    """Differentiate a call with an epilogue."""
    call = _Call(**params)
    for operand, tangent in enumerate(tangents[:2]):
        if type(tangent) is not ad.Zero:
            refuse_tangent(call.name, operand)
    return call.jvp(functools.partial(_bind, **params), primals, tangents)


def _cotangent(operand: int, cotangents: Sequence[Array], *operands: Any, **params: Any) -> Array:
    read, by = [*operands], _reference
    if len(operands) > 4:
        # The reference has all rows for each group.
        lhs, rhs, *_, bounds = operands
        read[:2] = used(lhs, rhs, bounds, contraction=params["contraction"])
        by = _by_contraction

    def linear(scales: Array) -> list[Array]:
        return by(*read[:operand], scales, *read[operand + 1 :], **params)

    (result,) = jax.linear_transpose(linear, operands[operand])(list(cotangents))
    return result  # type: ignore[no-any-return]


def _sharding_rule(
    lhs: Any, rhs: Any, lhs_scales: Any, rhs_scales: Any, *others: Any, **params: Any
) -> ShardingRule:
    """Let devices share whole blocks, along dimensions that consist of those."""
    call = _Call(**params)
    c = call.contraction
    rule = sharding_rule(lhs, rhs, *others[: call.is_grouped], contraction=c)
    blocked: set[int] = set()
    scale_dims = []
    for labels, x, scales, last in zip(
        (c.lhs, c.rhs), (lhs, rhs), (lhs_scales, rhs_scales), call.rows_last, strict=True
    ):
        *leading, rows, blocks = scales.shape
        if last:
            rows, blocks = min(blocks, x.shape[-2]), rows
        counts = (*leading, rows, blocks)
        blocked |= {
            label
            for label, size, count in zip(labels, x.shape, counts, strict=True)
            if count not in (1, size)
        }
        *outer, row, block = (
            label if count > 1 else None for label, count in zip(labels, counts, strict=True)
        )
        scale_dims.append((*outer, block, row) if last else (*outer, row, block))
    factors, bounds = rule.operands[:2], rule.operands[2:]
    rule = dataclasses.replace(rule, operands=(*factors, *scale_dims, *bounds))
    rule = rule.in_blocks(blocked, BLOCK)
    return call.with_epilogue(rule)


# Lowering.


def _dequantised(
    why: str, params: Params, by: Callable[..., list[Array]] = _by_contraction
) -> Rewrite:
    text = "the operands are dequantised, and multiplied in float32"
    return Rewrite(f"{text}: {why}" if why else text, functools.partial(by, **params))


def _cpu(operands: Sequence[Operand], _: Any, **params: Any) -> Rewrite:
    why = "kernels are for Hopper GPUs" if _Call(**params).is_grouped else ""
    transposed = tuple(_is_transposed(x) for x in operands[:2])
    stored = functools.partial(_by, _contract_stored)
    return _dequantised(why, {**params, "transposed": transposed}, stored)


def _is_transposed(x: Operand) -> bool:
    """Return whether a transpose of the last two dimensions makes an operand."""
    *leading, row, column = range(x.aval.ndim)
    found = compat.transposed_from(x.value)
    return found is not None and [*found[1]] == [*leading, column, row]


def _cuda(operands: Sequence[Operand], _: Any, **params: Any) -> Outcome:
    call, n = _Call(**params), _Call(**params).first_read
    factors, bounds = operands[:2], operands[4:n]
    stored = [*map(stored_scales, operands[2:4], call.rows_last)]
    scales = [
        scales_in_memory(x.aval.shape[-2], own.shape[-2:], own.strides[-2:])
        for x, own in zip(factors, stored, strict=True)
    ]
    read = (*(x.value for x in (*factors, *bounds)), *(x.value for x in stored))

    def state(_: Any, out_dtype: np.dtype[Any], extra: Sequence[Labels] = ()) -> LoweredProduct:
        shapes = [x.aval.shape for x in (*factors, *bounds)]
        geometry, placed, strides = scaled_geometry(
            call.contraction, shapes, scales, [x.strides for x in stored], extra
        )
        left, right = (x.aval.dtype for x in factors)
        stated = Product(geometry, left, right, out_dtype, "fp8", scales=placed)
        return LoweredProduct(stated, read, strides)

    product = state(None, call.out_dtype).product
    assert product.scales is not None

    def are_unfit(found: Scales, x: Operand) -> bool:
        adjacent = found.block_rows != 1 or found.fit_bulk_copies(x.aval.shape[-2])
        return found.row_stride > 0 and not adjacent

    if call.is_grouped:
        # Rows of groups have scales of rows, unless there is one for all.
        row_scales, column_scales = product.scales
        unfit = row_scales.row_stride > 0 and are_unfit(column_scales, factors[1])
    else:
        unfit = all(map(are_unfit, scales, factors))
    if unfit and not call.rows_last[1]:
        return Rewrite(
            "scales of rhs copied first: those of columns are adjacent, and a multiple of 4",
            functools.partial(_with_columns_first, **params),
        )
    if not call.is_grouped and copies_rows_first(product, current_gpu()):
        return Rewrite(
            "scales of lhs copied first: those of rows are adjacent",
            functools.partial(_with_rows_first, **params),
        )
    if call.function is None:
        kernel = cuda_kernel(product, read)
        if call.is_grouped and isinstance(kernel, Fallback):
            return _dequantised(kernel.reason, params)
        return kernel
    found = fused_kernel(
        operands[:n],
        None,
        operands[n:],
        contraction=call.contraction,
        operand_labels=call.operand_labels,
        function=call.function,
        accumulator=_F32,
        state=state,
    )
    if not isinstance(found, str):
        return found
    text = f"the epilogue runs in XLA, after the product: {found}"
    return Rewrite(text, functools.partial(SCALED.unfused, **params))


def _with_rows_first(
    lhs: Array, rhs: Array, lhs_scales: Array, *operands: Array, **params: Any
) -> list[Array]:
    # The kernel reads them where they lie before the second transpose.
    rows = jnp.swapaxes(jnp.swapaxes(lhs_scales, -1, -2), -1, -2)
    results: list[Array] = _bind(lhs, rhs, rows, *operands, **params)
    return results


def _with_columns_first(
    lhs: Array,
    rhs: Array,
    lhs_scales: Array,
    rhs_scales: Array,
    *others: Array,
    rows_last: tuple[bool, bool],
    **params: Any,
) -> list[Array]:
    columns = with_columns_first(rhs_scales, rhs.shape[-2])
    results: list[Array] = _bind(
        lhs, rhs, lhs_scales, columns, *others, rows_last=(rows_last[0], True), **params
    )
    return results


SCALED = define_scaled(
    _Call,
    "tilekern_scaled_matmul",
    _reference,
    jvp=_jvp,
    transposes={i: functools.partial(_cotangent, i) for i in (2, 3)},
    refuse_tangent=_refuse_tangent,
    sharding_rule=_sharding_rule,
    planners={"cpu": Planner(no_refusal, _cpu), "cuda": Planner(no_refusal, _cuda)},
)
_bind = SCALED.bind
