"""Epilogues as functions of arrays, and what rules of every product with one have in common.

The derivative is that of the function, by JAX and with the user's custom rules, at the
*pre-activation*: where a call is differentiated, its kernel also stores the accumulators in the
product's type. Nothing else is saved, and a call that is not differentiated saves nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from jax_tilekern.epilogue.scalar_function import ScalarFunction
from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad
from jax_tilekern.ops.products.groups import local_bounds, over_groups, part_of
from jax_tilekern.ops.quantisation.quantize import quantize
from jax_tilekern.partitioning.local_program import FunctionOfSum, Shard
from jax_tilekern.partitioning.rule import Dims, ShardingRule
from jax_tilekern.plans.contraction import Contraction, Labels
from jax_tilekern.plans.gemm.epilogue import RowQuantization
from jax_tilekern.plans.quantize import BLOCK
from jax_tilekern.primitives.linearity import OperandGroup, jvp_of, tangents_out
from jax_tilekern.primitives.operation import Operation, Params, Transposes, define
from jax_tilekern.primitives.remat import Saved


def elementwise_function(
    function: ScalarFunction, contraction: Contraction, operand_labels: Sequence[Labels]
) -> Callable[..., list[Array]]:
    """Return a function of the accumulators, of the bounds if there are groups, and operands."""
    if contraction.group is not None:
        return over_groups(function, contraction, operand_labels)
    if not function.quantizes:
        return function.over_labels(contraction.out, operand_labels)

    def elements(function: ScalarFunction, *arrays: Array) -> list[Array]:
        return function.over_labels(contraction.out, operand_labels)(*arrays)

    return lambda *arrays: quantized_after(elements, function, *arrays)


def quantized_after(
    call: Callable[..., list[Array]], function: ScalarFunction, *operands: Array
) -> list[Array]:
    """Quantise rows of the results of ``call(function, *operands)``, which does not."""
    plain, order = function.without_quantization()
    found = dict(zip(order, call(plain, *operands), strict=True))
    quantized: dict[Any, tuple[Array, Array]] = {}
    results = []
    for i, kind in zip(function.sources, function.reductions, strict=True):
        if not isinstance(kind, RowQuantization):
            results.append(found[i])
            continue
        how = kind.dtype, kind.power_of_two
        if (i, how) not in quantized:
            quantized[i, how] = quantize(found[i], dtype=how[0], power_of_two=how[1])
        values, scales = quantized[i, how]
        results.append(jnp.moveaxis(scales, -1, 0) if kind.scales else values)
    return results


def with_blocks_last(results: Sequence[Array], function: ScalarFunction) -> list[Array]:
    """Return results as the user has them: in scales of quantised rows, blocks come last."""
    return [
        jnp.moveaxis(x, 0, -1) if isinstance(kind, RowQuantization) and kind.scales else x
        for x, kind in zip(results, function.reductions, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class ProductCall:
    """The parameters of a call of a product, and what follows from its epilogue if it has one.

    The operands are those that are multiplied, the bounds if there are groups, and what the
    function reads.
    """

    contraction: Contraction
    out_dtype: np.dtype[Any]
    function: ScalarFunction | None = None
    operand_labels: tuple[Labels, ...] = ()
    accumulator: np.dtype[Any] | None = None
    pair: bool = False  # whether the function has the accumulators of two products

    # Operands in which a product is linear.
    linear_in: ClassVar[Sequence[OperandGroup]]

    @property
    def factors(self) -> int:
        """The number of operands that are multiplied."""
        raise NotImplementedError

    @property
    def is_grouped(self) -> bool:
        return self.contraction.group is not None

    @property
    def first_read(self) -> int:
        """The first operand that the function reads."""
        return self.factors + self.is_grouped

    def multiply(self, *factors: Array, **others: Any) -> Array:
        """Return one product without the function, by default the accumulators."""
        raise NotImplementedError

    def elementwise(self, function: ScalarFunction | None = None) -> Callable[..., list[Array]]:
        """Return its function, or another, of the accumulators, the bounds and what it reads."""
        function = function or self.function
        assert function is not None
        labels = (self.contraction.out,) * self.pair + self.operand_labels
        return elementwise_function(function, self.contraction, labels)

    @property
    def product_in_words(self) -> str:
        """The product for ``explain``."""
        return str(self.contraction)

    def described(self) -> str:
        """Return the call for ``explain``."""
        if self.function is None:
            return self.product_in_words
        names = self.contraction.names
        arrays = ("".join(names[x] for x in labels) or "1" for labels in self.operand_labels)
        read = ", ".join((*["accumulator"] * (1 + self.pair), *arrays))
        return f"{self.product_in_words}, {self.function.name}({read})"

    def unfused(
        self,
        bind: Callable[..., list[Array]],
        operands: Sequence[Array],
        out_sharding: NamedSharding | None = None,
    ) -> list[Array]:
        """Compute the product by a kernel, and the epilogue in XLA.

        ``bind(*operands, function=...)`` computes the call with another function.
        """
        function = self.function
        assert function is not None
        if function.quantizes and out_sharding is None:

            def fused(function: ScalarFunction, *operands: Array) -> list[Array]:
                if function.is_closure:
                    return dataclasses.replace(self, function=function).unfused(bind, operands)
                return bind(*operands, function=function)

            return quantized_after(fused, function, *operands)
        rounded = function.rounded_product(*(x.dtype for x in operands[:2]))
        given = {"out_sharding": out_sharding, "out_dtype": rounded}
        stated = {name: value for name, value in given.items() if value is not None}
        product = self.multiply(*operands[: self.first_read], **stated)
        if function.is_identity:
            return [product.astype(function.out_dtypes[0])]
        product = product.astype(self.accumulator)
        elementwise = self.elementwise()
        if self.is_grouped:
            elementwise = compat.with_automatic_axes(elementwise, out_sharding)
        return elementwise(product, *operands[self.factors :])

    def batched_epilogue(
        self, operands: Sequence[Array], dims: Sequence[int | None]
    ) -> tuple[list[Array], list[int]]:
        """Batch a call whose product has no mapped axis: it has an epilogue for each element."""
        assert self.function is not None
        out_dims, n = self.function.mapped_dims, self.first_read
        accumulators = self.multiply(*operands[:n], out_dtype=self.accumulator)
        over = jax.vmap(self.elementwise(), (None, *dims[self.factors :]), out_dims)
        return over(accumulators, *operands[self.factors :]), out_dims

    def localised(self, shard: Shard, operands: Sequence[Array]) -> list[Array]:
        """Return a device's operands, with the bounds of its own rows and groups."""
        local, c, at = [*operands], self.contraction, self.factors
        if self.is_grouped:
            for dim, label in enumerate(c.bounds[:-1] if self.function else ()):
                if shard.is_split(label):
                    local[at] = part_of(shard, local[at], dim, label)
            local[at] = local_bounds(shard, local[at], c)
        return local

    def jvp(
        self, bind: Callable[..., list[Array]], primals: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Differentiate the call, which ``bind(*operands, function=...)`` computes."""
        function, n = self.function, self.first_read
        assert function is not None
        saved = function.accumulator_result
        added = saved is None
        if saved is None:
            saved, function = function.elements, function.with_accumulator(self.out_dtype)
        results = bind(*primals, function=function)
        pre_activation = results[saved].astype(self.accumulator)

        def product(*factors: Array) -> list[Array]:
            return [self.multiply(*factors, out_dtype=self.out_dtype)]

        (changed,) = self.tangents_of_product(product, primals[:n], tangents[:n], [pre_activation])
        if type(changed) is not ad.Zero:
            changed = changed.astype(self.accumulator)
        read, moved = primals[self.factors :], tangents[self.factors :]
        elementwise = self.elementwise(function)
        _, derived = jvp_of(elementwise, (pre_activation, *read), (changed, *moved))
        out = [
            x if jnp.issubdtype(result.dtype, jnp.inexact) else compat.zero_tangent(result)
            for result, x in zip(results, derived, strict=True)
        ]
        kept = [i for i in range(len(out)) if not (added and i == saved)]
        return [results[i] for i in kept], [out[i] for i in kept]

    def tangents_of_product(
        self, product: Callable[..., Any], primals: Any, tangents: Any, results: Any
    ) -> list[Any]:
        """Return the tangents of one product without the function, whose results are given."""
        return tangents_out(product, self.linear_in, primals, tangents, results)

    def saved(self) -> Saved | None:
        """Save the pre-activation, which a call that is differentiated stores."""
        function = self.function
        if function is None or self.pair or self.is_grouped:
            return None
        position = function.accumulator_result
        if position is None:
            return None

        def others(pre_activation: Array, *operands: Array) -> list[Array]:
            read = operands[self.factors - 2 :]
            results = self.elementwise()(pre_activation.astype(self.accumulator), *read)
            return [x for i, x in enumerate(results) if i != position]

        return Saved(position, others, function.names)

    def function_of_sum(self) -> FunctionOfSum:
        """Return the product as a term of the sum over devices, and the function of the sum."""

        def epilogue(total: Array, *operands: Array) -> list[Array]:
            return self.elementwise()(total.astype(self.accumulator), *operands[self.factors :])

        term = functools.partial(self.multiply, out_dtype=self.out_dtype)
        return FunctionOfSum(term, self.out_dtype, epilogue)

    def with_epilogue(
        self, rule: ShardingRule, labels: Sequence[Dims] | None = None
    ) -> ShardingRule:
        """Return the sharding rule of the call, given that of the product.

        ``labels`` are those of what the function reads, by default ``operand_labels``.
        """
        function = self.function
        if function is None:
            return rule
        if function.quantizes:
            rule = rule.in_blocks(rule.results[0][-1:], BLOCK)
        own = self.operand_labels if labels is None else labels
        read = [tuple(x if x in rule.sizes else None for x in dims) for dims in own]
        (out,) = rule.results
        places = function.result_labels(tuple(range(len(out))))
        results = tuple(tuple(out[i] for i in dims) for dims in places)
        shared = frozenset.intersection(*map(frozenset, results))
        kinds = (kind if isinstance(kind, str) else "sum" for kind in function.reductions)
        return dataclasses.replace(
            rule,
            operands=(*rule.operands, *read),
            results=results,
            epilogue_from=len(rule.operands),
            reduced=frozenset(x for x in out if x is not None and x not in shared),
            combined_by=tuple(kinds),
        )


def define_product(
    kind: type[ProductCall],
    name: str,
    reference: Callable[..., Any],
    *,
    transposes: Transposes | Callable[..., Transposes],
    **rules: Any,
) -> Callable[..., list[Array]]:
    """Define the primitive of a product whose calls are of a kind.

    ``transposes`` are those of calls without a function, which are linear. ``rules`` are those of
    :class:`~jax_tilekern.primitives.operation.Operation` that do not follow from ``kind``.
    """

    def linear(*, function: ScalarFunction | None = None, **params: Any) -> Transposes:
        if function is not None:
            return {}
        return transposes(**params) if callable(transposes) else transposes

    given = {"is_linear": lambda function=None, **_: function is None, **rules}
    return define(
        Operation(
            name,
            reference,
            several_results=True,
            transposes=linear,
            describe=lambda **params: kind(**params).described(),
            localised=lambda shard, *operands, **params: kind(**params).localised(shard, operands),
            in_float32=in_float32,
            function_of_sum=lambda **params: kind(**params).function_of_sum(),
            stands_for=as_dot_general,
            saved=lambda **params: kind(**params).saved(),
            **given,
        )
    )


def in_float32(*, function: ScalarFunction | None = None, **params: Any) -> Params:
    """Return the parameters of the same call whose products are float32, and so are reductions."""
    params["out_dtype"] = np.dtype(np.float32)
    if function is None:
        return params
    return {**params, "function": function.with_reductions_in_float32()}


def as_dot_general(
    contraction: Contraction,
    out_dtype: np.dtype[Any],
    precision: Any = None,
    pair: bool = False,
    **_: Any,
) -> tuple[compat.Primitive, dict[str, Any]] | None:
    """Return the primitive of JAX's, and its parameters, as which policies see a product.

    There is none for one with groups, or for a pair.
    """
    if contraction.group is not None or pair:
        return None
    return compat.dot_general_p, {
        "dimension_numbers": contraction.dimension_numbers,
        "precision": precision,
        "preferred_element_type": out_dtype,
        "out_sharding": None,
    }
