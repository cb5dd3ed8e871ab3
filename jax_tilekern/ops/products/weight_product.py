"""The primitive of products with quantised weights: small integers or 8-bit floats, with scales.

It contracts ``x`` of 16 bits or float32 with weights, whose last dimension is contracted. Scales
and zero points follow the weights. With groups it is a grouped GEMM, and the bounds of the groups
come next. With a function it has an epilogue, whose operands come last.

A kernel of Hopper multiplies by weights as they are where it is predicted faster, and applies
functions of the elements. Otherwise
weights are dequantised in float32, rounded to bfloat16 if that is the type of ``x``, and multiplied
with float32 accumulators. Those for an ``x`` of float16 stay float32, because their range is that
of their scales.
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

from jax_tilekern.interop.compat import ad
from jax_tilekern.ops.products import weight_kernel
from jax_tilekern.ops.products.contraction import (
    contract,
    contract_with_scalar_function,
    masked_product,
    sharding_rule,
)
from jax_tilekern.ops.products.groups import used
from jax_tilekern.ops.products.scaled_call import ScaledCall, define_scaled, scaled_call
from jax_tilekern.ops.products.scaled_operands import block_of_scales, dequantized, of_elements
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.plans.contraction import Contraction
from jax_tilekern.plans.gemm.arithmetic import BF16, F32
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.plans.quantize import BLOCK
from jax_tilekern.primitives.linearity import OperandGroup, tangents_out
from jax_tilekern.primitives.operation import (
    Operand,
    Params,
    Planner,
    Rewrite,
    Transposes,
    no_refusal,
)


@dataclass(frozen=True, kw_only=True)
class _Call(ScaledCall):
    """The parameters of a call.

    Attributes
    ----------
    has_zeros
        Whether zero points follow the scales.
    precision
        That of the product of float32 arrays, canonical.
    """

    has_zeros: bool = False
    precision: Any = None
    accumulator: np.dtype[Any] = F32

    linear_in = ((0,), (2,))

    @property
    def factors(self) -> int:
        return 4 if self.has_zeros else 3

    @property
    def together(self) -> Sequence[OperandGroup]:
        return [tuple(range(1, self.factors))]

    @property
    def product_in_words(self) -> str:
        zeros = " with zero points" if self.has_zeros else ""
        return f"{super().product_in_words} by weights{zeros}"

    def multiply(self, *factors: Array, **others: Any) -> Array:
        own = {name: getattr(self, name) for name in ("contraction", "has_zeros", "precision")}
        (result,) = _bind(*factors, **{**own, "out_dtype": F32, **others})
        return result

    def tangents_of_product(
        self, product: Callable[..., Any], primals: Any, tangents: Any, results: Any
    ) -> list[Any]:
        """Add the term of the zero points, in which the product is affine."""
        found = tangents_out(product, self.linear_in, primals, tangents, results)
        if not self.has_zeros or type(tangents[3]) is ad.Zero:
            return found
        x, w, scales, _, *bounds = primals
        moved = product(x, jnp.zeros_like(w), scales, ad.instantiate_zeros(tangents[3]), *bounds)
        return [ad.add_tangents(*pair) for pair in zip(found, moved, strict=True)]


def weights_call(
    x: Array,
    weights: Sequence[Array | None],
    bounds: Sequence[Array] = (),
    *,
    contraction: Contraction,
    precision: Any = (lax.Precision.HIGHEST, lax.Precision.HIGHEST),
    **call: Any,
) -> Any:
    """Multiply by values, scales and perhaps zero points; ``call`` is that of ``scaled_call``."""
    given = [each for each in weights if each is not None]
    layout = {
        "contraction": contraction,
        "has_zeros": len(given) == 3,
        "precision": precision,
    }
    return scaled_call(_WEIGHTS, (x, *given), bounds, layout=layout, **call)


def _multiplied_type(x: Any) -> np.dtype[Any]:
    """Return the type of the weights that are multiplied with ``x``."""
    return BF16 if x.dtype == BF16 else F32


# Meaning.


def _by(multiply: Callable[..., Array], *operands: Array, **params: Any) -> list[Array]:
    """Multiply by the dequantised weights."""
    call = _Call(**params)
    x, rest = operands[0], operands[call.factors :]
    dtype = _multiplied_type(x)
    result = multiply(
        x.astype(dtype),
        dequantized(*operands[1 : call.factors]).astype(dtype),
        *rest[: call.is_grouped],
        contraction=call.contraction,
        precision=call.precision if x.dtype == F32 else None,
        out_dtype=F32,
    )
    if call.function is None:
        return [result.astype(call.out_dtype)]
    return call.elementwise()(result, *rest)


_reference = functools.partial(_by, masked_product)


def _by_contraction(*operands: Array, **params: Any) -> list[Array]:
    """Multiply by the dequantised weights, with the epilogue in the kernel of the product."""
    call = _Call(**params)
    dtype, out_dtype = _multiplied_type(operands[0]), call.out_dtype
    if call.function is None or dtype == F32 != out_dtype:
        return _by(contract, *operands, **params)
    bounds, read = operands[call.factors : call.first_read], operands[call.first_read :]
    return contract_with_scalar_function(
        operands[0].astype(dtype),
        dequantized(*operands[1 : call.factors]).astype(dtype),
        *bounds,
        contraction=call.contraction,
        precision=call.precision if operands[0].dtype == F32 else None,
        product=out_dtype,
        function=call.function,
        operands=[*zip(read, call.operand_labels, strict=True)],
    )


# Rules.


def _refuse_tangent(_: int, **__: Any) -> None:
    raise TypeError(
        "quantised weights have no derivative: take those of their scales and zero points, or "
        "jax.lax.stop_gradient"
    )


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Any], **params: Any
) -> tuple[list[Array], list[Any]]:
    """Differentiate a call with an epilogue or with zero points."""
    call, bind = _Call(**params), functools.partial(_bind, **params)
    if type(tangents[1]) is not ad.Zero:
        _refuse_tangent(1)
    if call.function is not None:
        return call.jvp(bind, primals, tangents)
    results = bind(*primals)
    return results, call.tangents_of_product(bind, primals, tangents, results)


def _cotangent(operand: int, cotangents: Sequence[Array], *operands: Any, **params: Any) -> Array:
    """Return the cotangent of ``x``, or of scales or zero points by that of the weights."""
    call, read = _Call(**params), [*operands]
    x, *_ = operands
    bounds, dtype = operands[call.factors :], _multiplied_type(x)
    if bounds and operand:
        # Cotangents of groups without rows are zeros, and their weights may be NaN.
        for i in {*range(1, call.factors)} - {operand}:
            _, read[i] = used(x, read[i], *bounds, contraction=call.contraction)

    def product(x: Array, w: Array) -> list[Array]:
        layout: Params = {
            "contraction": call.contraction,
            "precision": call.precision if dtype == F32 else None,
            "out_dtype": F32,
        }
        return [contract(x, w, *bounds, **layout).astype(call.out_dtype)]

    def linear(y: Array) -> list[Array]:
        w, scales, *zeros = (
            y if i == operand else each for i, each in enumerate(read[1 : call.factors], 1)
        )
        if operand == 0:
            return product(y.astype(dtype), dequantized(w, scales, *zeros).astype(dtype))
        if operand == 2:
            return product(x.astype(F32), dequantized(w, scales, *zeros))
        # The weights are 0 in the term that is linear in the zero points.
        slopes = of_elements(scales, w) * -jnp.ones_like(w, F32)
        return product(x.astype(F32), of_elements(y, w) * slopes)

    (result,) = jax.linear_transpose(linear, operands[operand])(list(cotangents))
    return result  # type: ignore[no-any-return]


def _transposes(*, has_zeros: bool = False, **_: Any) -> Transposes:
    """Return the rules of what a product alone is linear in.

    Zero points are an unknown of the term that ``tangents_of_product`` adds, whose weights are 0.
    """
    operands = (0, 2, 3) if has_zeros else (0, 2)
    return {i: functools.partial(_cotangent, i) for i in operands}


def _sharding_rule(x: Any, w: Any, scales: Any, *others: Any, **params: Any) -> ShardingRule:
    """Let devices share whole blocks, along dimensions that consist of those."""
    call = _Call(**params)
    c, bounds = call.contraction, others[call.has_zeros : call.has_zeros + call.is_grouped]
    rule = sharding_rule(x, w, *bounds, contraction=c)
    of_scales = tuple(
        label if count > 1 else None for label, count in zip(c.rhs, scales.shape, strict=True)
    )
    factors, of_bounds = rule.operands[:2], rule.operands[2:]
    rule = dataclasses.replace(
        rule, operands=(*factors, *[of_scales] * (call.factors - 2), *of_bounds)
    )
    (n, k), (rows, groups) = w.shape[-2:], scales.shape[-2:]
    if rows not in (1, n):
        rule = rule.in_blocks(c.rhs[-2:-1], BLOCK)
    if groups not in (1, k):
        rule = rule.in_blocks(c.rhs[-1:], block_of_scales(groups, k))
    return call.with_epilogue(rule)


# Lowering.


def _dequantised_first(reason: str, **params: Any) -> Rewrite:
    function = functools.partial(_by_contraction, **params)
    return Rewrite(f"the weights are dequantised first: {reason}", function)


def _on_cpu(_operands: Any, _results: Any, **params: Any) -> Rewrite:
    return _dequantised_first("no kernel of CPUs reads them as they are", **params)


def _on_gpu(operands: Sequence[Operand], _: Any, **params: Any) -> Rewrite:
    """Multiply by a kernel that reads the weights as they are, or dequantise them first."""
    call, gpu = _Call(**params), current_gpu()
    factors = [x.aval for x in operands[: call.factors]]
    if why := weight_kernel.why_not(call.contraction, gpu, *factors):
        return _dequantised_first(why, **params)
    function = call.function
    read = [*zip(operands[call.first_read :], call.operand_labels, strict=True)]
    fused = function is not None and weight_kernel.applies(
        function, call.contraction, factors[0], [(x.aval, labels) for x, labels in read]
    )
    apart = function is not None and not fused
    choice = weight_kernel.choice(call.contraction, gpu, *factors, has_function=apart)
    if choice.candidate is None:
        return _dequantised_first(choice.reason, **params)

    def product(*operands: Array) -> list[Array]:
        rest = operands[call.factors :]
        bounds, read = rest[: call.is_grouped], rest[call.is_grouped :]
        multiply = functools.partial(
            weight_kernel.multiply, call.contraction, *operands[: call.factors], bounds=bounds
        )
        if function is None:
            (found,) = multiply(out_dtype=call.out_dtype)
            return [found.astype(call.out_dtype)]
        if fused:
            labelled = [*zip(read, call.operand_labels, strict=True)]
            return multiply(out_dtype=function.out_dtypes[0], function=function, read=labelled)
        return call.elementwise()(*multiply(out_dtype=F32), *rest)

    how = "reads the weights as they are" + ", and applies the function" * fused
    return Rewrite(f"a kernel {how}; {choice.reason}", product)


_WEIGHTS = define_scaled(
    _Call,
    "tilekern_weight_matmul",
    _reference,
    jvp=_jvp,
    is_linear=lambda function=None, has_zeros=False, **_: function is None and not has_zeros,
    transposes=_transposes,
    refuse_tangent=_refuse_tangent,
    sharding_rule=_sharding_rule,
    planners={"cpu": Planner(no_refusal, _on_cpu), "cuda": Planner(no_refusal, _on_gpu)},
)
_bind = _WEIGHTS.bind
