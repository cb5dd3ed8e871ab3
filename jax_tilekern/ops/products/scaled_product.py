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

from jax_tilekern.epilogue.scalar_function import ScalarFunction
from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad
from jax_tilekern.ops.products.contraction import (
    as_dot_general,
    contract,
    in_float32,
    masked_product,
    sharding_rule,
)
from jax_tilekern.ops.products.contraction_lowering import LoweredProduct, cuda_kernel
from jax_tilekern.ops.products.epilogues import (
    ProductCall,
    described_function,
    with_epilogue,
)
from jax_tilekern.ops.products.fused_lowering import fused_kernel
from jax_tilekern.ops.products.groups import used
from jax_tilekern.ops.products.scaled_call import ScaledPrimitive
from jax_tilekern.ops.products.scaled_layout import (
    scaled_geometry,
    scales_in_memory,
    stored_scales,
    with_columns_first,
)
from jax_tilekern.ops.products.scaled_operands import dequantized, refuse_tangent
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.plans.contraction import Labels, labelled
from jax_tilekern.plans.gemm.problem import Product, Scales
from jax_tilekern.plans.gemm.select import copies_rows_first
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.plans.quantize import BLOCK
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    Outcome,
    Params,
    Planner,
    Rewrite,
    Transposes,
    define,
    no_refusal,
)

_F32: np.dtype[Any] = np.dtype(np.float32)


@dataclass(frozen=True, kw_only=True)
class _Call(ProductCall):
    """The parameters of a call."""

    rows_last: tuple[bool, bool] = (False, False)
    accumulator: np.dtype[Any] = _F32

    factors = 4
    linear_in = ((2,), (3,))

    @property
    def name(self) -> str:
        """The public function that it is."""
        return "scaled_ragged_dot" if self.is_grouped else "scaled_matmul"

    def multiply(self, *factors: Array, **others: Any) -> Array:
        own = {"contraction": self.contraction, "rows_last": self.rows_last, "out_dtype": _F32}
        (result,) = _bind(*factors, **own | others)
        return result  # type: ignore[no-any-return]


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


_reference = functools.partial(_by, masked_product)
_by_contraction = functools.partial(_by, contract)


def unfused(*operands: Array, **params: Any) -> list[Array]:
    """Compute the product by a kernel, and the epilogue in XLA."""
    return _Call(**params).unfused(functools.partial(_bind, **params), operands)


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


def _transposes(*, function: ScalarFunction | None = None, **_: Any) -> Transposes:
    """Return the rules of both arrays of scales, in which a product alone is linear."""
    if function is not None:
        return {}
    return {i: functools.partial(_cotangent, i) for i in (2, 3)}


def _batch(
    axis_data: Any, operands: Sequence[Array], dims: Sequence[int | None], **params: Any
) -> tuple[list[Array], list[int]]:
    """Put the mapped axis first. An operand and its scales have it together."""
    call, n = _Call(**params), _Call(**params).first_read
    out_dims = [0] if call.function is None else call.function.mapped_dims
    if all(dim is None for dim in dims[:n]):
        return call.batched_epilogue(operands, dims)
    mapped = [dims[i] is not None or dims[i + 2] is not None for i in (0, 1)] * 2
    mapped += [dim is not None for dim in dims[4:n]]

    labels = call.contraction.mapped(*(0 if x else None for x in (*mapped[:2], *mapped[4:])))
    params["contraction"], new = labels, labels.out[0]
    if call.function is not None:
        own = zip(call.operand_labels, dims[n:], strict=True)
        params["operand_labels"] = tuple(labelled(x, new, dim) for x, dim in own)
    factors = batched_factors(axis_data.size, operands[:n], dims[:n], mapped)
    return _bind(*factors, *operands[n:], **params), out_dims


def batched_factors(
    size: int, operands: Sequence[Array], dims: Sequence[int | None], mapped: Sequence[bool]
) -> list[Array]:
    """Return operands with the mapped axis first, in those that are to have it."""

    def moved(x: Array, dim: int | None, is_mapped: bool) -> Array:
        if not is_mapped:
            return x
        if dim is None:
            return jnp.broadcast_to(x, (size, *x.shape))
        return jnp.moveaxis(x, dim, 0)

    return [*map(moved, operands, dims, mapped)]


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
    if call.function is None:
        return rule
    return with_epilogue(rule, call.operand_labels, call.function)


# Lowering.


def _described(**params: Any) -> str:
    call = _Call(**params)
    text = f"{call.name} {call.contraction}"
    if call.function is None:
        return text
    return f"{text}, {described_function(call.function, call.contraction, call.operand_labels)}"


def _dequantised(why: str, params: Params) -> Rewrite:
    text = "the operands are dequantised, and multiplied in float32"
    function = functools.partial(_by_contraction, **params)
    return Rewrite(f"{text}: {why}" if why else text, function)


def _cpu(operands: Sequence[Operand], _: Any, **params: Any) -> Rewrite:
    why = "kernels are for Hopper GPUs" if _Call(**params).is_grouped else ""
    transposed = tuple(_is_transposed(x) for x in operands[:2])
    return _dequantised(why, {**params, "transposed": transposed})


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
    return Rewrite(text, functools.partial(unfused, **params))


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


_bind = define(
    Operation(
        name="tilekern_scaled_matmul",
        reference=_reference,
        several_results=True,
        jvp=_jvp,
        is_linear=lambda function=None, **_: function is None,
        transposes=_transposes,
        refuse_tangent=_refuse_tangent,
        batch=_batch,
        sharding_rule=_sharding_rule,
        localised=lambda shard, *operands, **params: _Call(**params).localised(shard, operands),
        planners={"cpu": Planner(no_refusal, _cpu), "cuda": Planner(no_refusal, _cuda)},
        describe=_described,
        in_float32=in_float32,
        function_of_sum=lambda **params: _Call(**params).function_of_sum(),
        stands_for=as_dot_general,
        saved=lambda **params: _Call(**params).saved(),
    )
)

SCALED = ScaledPrimitive(_bind, unfused)
