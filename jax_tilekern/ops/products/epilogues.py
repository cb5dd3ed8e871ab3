"""Epilogues as functions of arrays, and what rules of every product with one have in common.

The derivative is that of the function, by JAX and with the user's custom rules, at the
*pre-activation*: where a call is differentiated, its kernel also stores the accumulators in the
product's type. Nothing else is saved, and a call that is not differentiated saves nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_tilekern.epilogue.scalar_function import ScalarFunction
from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad
from jax_tilekern.ops.products.groups import over_groups
from jax_tilekern.ops.quantisation.quantize import quantize
from jax_tilekern.partitioning.rule import Dims, ShardingRule
from jax_tilekern.plans.contraction import Contraction, Labels
from jax_tilekern.plans.gemm.epilogue import RowQuantization
from jax_tilekern.plans.quantize import BLOCK
from jax_tilekern.primitives.linearity import jvp_of
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


def jvp_at_pre_activation(
    bind: Callable[..., list[Array]],
    change: Callable[[Array], Any],
    elementwise: Callable[[ScalarFunction], Callable[..., list[Array]]],
    function: ScalarFunction,
    accumulator: np.dtype[Any],
    product: np.dtype[Any],
    factors: int,
    primals: Sequence[Any],
    tangents: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """Differentiate a product with an epilogue.

    Parameters
    ----------
    bind
        ``bind(*primals, function=...)`` computes it.
    change
        ``change(pre_activation)`` gives the tangent of the product, symbolically zero if it is.
    elementwise
        Makes a function of scalars one of the accumulators and of the operands after the factors.
    function, accumulator, product
        As the parameters of a contraction with an epilogue.
    factors
        The number of operands that are multiplied.
    primals, tangents
        All operands, and their tangents.
    """
    saved = function.accumulator_result
    added = saved is None
    if saved is None:
        saved, function = function.elements, function.with_accumulator(product)
    results = bind(*primals, function=function)
    pre_activation = results[saved].astype(accumulator)
    changed = change(pre_activation)
    if type(changed) is not ad.Zero:
        changed = changed.astype(accumulator)
    read, moved = primals[factors:], tangents[factors:]
    _, derived = jvp_of(elementwise(function), (pre_activation, *read), (changed, *moved))
    out = [
        x if jnp.issubdtype(result.dtype, jnp.inexact) else compat.zero_tangent(result)
        for result, x in zip(results, derived, strict=True)
    ]
    kept = [i for i in range(len(out)) if not (added and i == saved)]
    return [results[i] for i in kept], [out[i] for i in kept]


def saved_pre_activation(
    function: ScalarFunction,
    elementwise: Callable[..., list[Array]],
    accumulator: np.dtype[Any],
    between: int = 0,
) -> Saved | None:
    """Save the pre-activation, which a call that is differentiated stores.

    ``elementwise`` is the function of arrays. So many operands are ``between`` the two that are
    multiplied and its own.
    """
    position = function.accumulator_result
    if position is None:
        return None

    def others(pre_activation: Array, *operands: Array) -> list[Array]:
        results = elementwise(pre_activation.astype(accumulator), *operands[between:])
        return [x for i, x in enumerate(results) if i != position]

    return Saved(position, others, function.names)


def with_epilogue(
    rule: ShardingRule, operands: Sequence[Dims], function: ScalarFunction
) -> ShardingRule:
    """Return the rule of a product with an epilogue of some operands, given the product's."""
    if function.quantizes:
        rule, operands = _with_blocks(rule, operands)
    (out,) = rule.results
    places = function.result_labels(tuple(range(len(out))))
    results = tuple(tuple(out[i] for i in dims) for dims in places)
    shared = frozenset.intersection(*map(frozenset, results))
    return dataclasses.replace(
        rule,
        operands=(*rule.operands, *operands),
        results=results,
        epilogue_from=len(rule.operands),
        reduced=frozenset(x for x in out if x is not None and x not in shared),
        combined_by=tuple(kind if isinstance(kind, str) else "sum" for kind in function.reductions),
    )


def _with_blocks(
    rule: ShardingRule, operands: Sequence[Dims]
) -> tuple[ShardingRule, Sequence[Dims]]:
    """Let devices share whole blocks of the rows of a product."""
    ((*_, column),) = rule.results
    if column is None or column in rule.blocked:
        return rule, operands
    blocks, rest = divmod(rule.sizes[column], BLOCK)
    if blocks > 1 and not rest:
        sizes, blocked = {**rule.sizes, column: blocks}, rule.blocked | {column}
        return dataclasses.replace(rule, sizes=sizes, blocked=blocked), operands

    def whole(dims: Dims) -> Dims:
        return tuple(None if label == column else label for label in dims)

    rule = dataclasses.replace(
        rule,
        operands=tuple(map(whole, rule.operands)),
        results=tuple(map(whole, rule.results)),
        sizes={label: size for label, size in rule.sizes.items() if label != column},
    )
    return rule, [*map(whole, operands)]


def described_function(
    function: ScalarFunction,
    contraction: Contraction,
    operand_labels: Sequence[Labels],
    products: int = 1,
) -> str:
    """Return the call of an epilogue of so many products, for ``explain``."""
    names = contraction.names
    arrays = ("".join(names[x] for x in labels) or "1" for labels in operand_labels)
    return f"{function.name}({', '.join((*['accumulator'] * products, *arrays))})"
