"""Contractions with an epilogue: any JAX function of each element of a product, and its rules.

The function is one of scalars, ``f(accumulator, *operands)``. Operands have some of the result's
labels and are broadcast over the others, so a bias, a scale of rows and a residual are one thing,
and ``vmap`` adds a label to whatever has the mapped axis. With groups an operand may have the
group's label: then each row reads the element of its own group. Rows of no group stay zeros in
every result.

The derivative is that of the function, by JAX and with the user's custom rules, at the
*pre-activation*: where a call is differentiated, its kernel also stores the accumulators in the
product's type. Nothing else is saved, and a call that is not differentiated saves nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding

from jax_tilekern.epilogue.plain_data import from_data, to_data
from jax_tilekern.epilogue.scalar_function import OWN, Role, ScalarFunction, trace_scalars
from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad
from jax_tilekern.ops.contraction import (
    as_dot_general,
    contract,
    mapped,
    masked_product,
    sharding_rule,
)
from jax_tilekern.ops.contraction_lowering import source
from jax_tilekern.ops.fused_lowering import InPlace, fused_kernel, planners
from jax_tilekern.ops.groups import local_bounds, over_groups, part_of
from jax_tilekern.ops.labelled_operands import common_type
from jax_tilekern.ops.quantize import quantize
from jax_tilekern.partitioning import params_text
from jax_tilekern.partitioning.local_program import FunctionOfSum, Shard
from jax_tilekern.partitioning.rule import Dims, ShardingRule
from jax_tilekern.plans.contraction import Contraction, Labels, labelled
from jax_tilekern.plans.gemm.arithmetic import accumulator_dtype
from jax_tilekern.plans.gemm.epilogue import RowQuantization
from jax_tilekern.plans.quantize import BLOCK
from jax_tilekern.primitives.linearity import jvp_of, tangents_out
from jax_tilekern.primitives.operation import Operand, Operation, Params, PlannedKernel, define
from jax_tilekern.primitives.remat import Saved


def contract_with_epilogue(
    lhs: Array,
    rhs: Array,
    *bounds: Array,
    contraction: Contraction,
    precision: Any,
    product: np.dtype[Any],
    shape: Sequence[int],
    epilogue: Callable[..., Any],
    operands: Sequence[Any],
    group_operands: Sequence[Any] = (),
    in_place: InPlace = (),
    symmetric: bool = False,
    out_sharding: NamedSharding | None = None,
    role: Role = OWN,
) -> Any:
    """Contract two arrays and apply a function to every element of the result.

    Parameters
    ----------
    lhs, rhs, bounds, contraction, precision
        As for :func:`~jax_tilekern.ops.contraction.contract`. The result has the ragged label.
    product
        Type of the product without an epilogue.
    shape
        Shape of the result; ``contraction.out`` has its labels.
    epilogue
        ``epilogue(accumulator, *operands, *group_operands)`` on scalars.
    operands
        Arrays that broadcast to ``shape``.
    group_operands
        Arrays that broadcast to ``shape`` with the groups in place of the rows.
    in_place
        Pairs of an operand of the epilogue and a result. A kernel writes the result over the
        operand where both have one type and shape, unless the call is differentiated. XLA copies
        the operand first if something else still reads it.
    symmetric
        Whether the caller knows that the product is symmetric in its last two dimensions, and so
        are the operands. A kernel may then compute half of each result.
    out_sharding
        Sharding of the result on a mesh with explicit axes.
    role
        What errors call the function.

    Raises
    ------
    ValueError
        If an operand does not broadcast, or rows of a vector are quantised.
    TypeError
        If the epilogue is not a function of scalars.
    """
    lhs, rhs = common_type(lhs, rhs, product, precision)
    accumulator = accumulator_dtype(lhs.dtype, product)
    arrays = [jnp.asarray(x) for x in (*operands, *group_operands)]
    function, closed_over, nested = trace_scalars(
        epilogue, accumulator, product, [x.dtype for x in arrays], role
    )
    if function.is_identity and not symmetric:
        plain = contract(
            lhs,
            rhs,
            *bounds,
            contraction=contraction,
            precision=precision,
            out_dtype=product,
            out_sharding=out_sharding,
        )
        return nested([plain])
    if bounds and function.elements < len(function.reductions):
        raise TypeError(
            f"{role.of(epilogue)} returns a result of rows, which {role.call} does not have; it is "
            "a result of epilogues of matmul and dot_general"
        )
    if function.quantizes and len(shape) < 2:
        raise ValueError(
            f"{role.of(epilogue)} quantises rows, which takes a product of at least 2 dimensions; "
            f"its shape is {tuple(shape)}"
        )
    read = labelled_operands(
        operands, group_operands, *bounds, contraction=contraction, shape=shape, role=role
    ) + [(jnp.asarray(x), ()) for x in closed_over]
    results = contract_with_scalar_function(
        lhs,
        rhs,
        *bounds,
        contraction=contraction,
        precision=precision,
        product=product,
        function=function,
        operands=read,
        in_place=in_place,
        symmetric=symmetric,
        out_sharding=out_sharding,
    )
    return nested(with_blocks_last(results, function))


def contract_with_scalar_function(
    lhs: Array,
    rhs: Array,
    *bounds: Array,
    contraction: Contraction,
    precision: Any,
    product: np.dtype[Any],
    function: ScalarFunction,
    operands: Sequence[tuple[Array, Labels]],
    in_place: InPlace = (),
    symmetric: bool = False,
    out_sharding: NamedSharding | None = None,
) -> list[Array]:
    """Contract two arrays and apply a traced function to every element of the result.

    Parameters
    ----------
    lhs, rhs
        Operands of a type that :func:`~jax_tilekern.ops.labelled_operands.common_type` returns.
    bounds, contraction, precision, product, in_place, symmetric, out_sharding
        As in :func:`contract_with_epilogue`.
    function
        The epilogue, for the accumulators' type.
    operands
        Its operands, and the result's dimension that each of their dimensions is.

    Returns
    -------
    list of Array
        The function's results.
    """
    call: Params = {
        "contraction": contraction,
        "operand_labels": tuple(labels for _, labels in operands),
        "function": function,
        "precision": precision,
        "accumulator": accumulator_dtype(lhs.dtype, product),
        "product": product,
        "in_place": in_place,
        "symmetric": symmetric,
    }
    read = (lhs, rhs, *bounds, *(x for x, _ in operands))
    if out_sharding is not None or function.is_closure:
        return _unfused(*read, **call, out_sharding=out_sharding)
    results: list[Array] = _bind(*read, **call)
    return results


def labelled_operands(
    operands: Sequence[Any],
    group_operands: Sequence[Any],
    *bounds: Array,
    contraction: Contraction,
    shape: Sequence[int],
    role: Role = OWN,
) -> list[tuple[Array, Labels]]:
    """Label the operands of an epilogue, which are those of :func:`contract_with_epilogue`."""
    names = (f"{role.call}: {role.operand.format(i)}" for i in itertools.count())
    return [
        _with_labels(name, jnp.asarray(x), contraction.out, shape)
        for x, name in zip(operands, names, strict=False)
    ] + [
        _with_labels(name, jnp.asarray(x), *_of_groups(contraction, shape, *bounds), "the groups'")
        for x, name in zip(group_operands, names, strict=False)
    ]


def _with_labels(
    name: str, x: Array, out: Labels, shape: Sequence[int], whose: str = "the product's"
) -> tuple[Array, Labels]:
    """Label an operand's dimensions as NumPy broadcasts them, without those of size 1."""
    aligned = tuple(shape[len(shape) - x.ndim :])
    if x.ndim > len(shape) or any(
        own not in (1, size) for own, size in zip(x.shape, aligned, strict=True)
    ):
        raise ValueError(
            f"{name} has shape {x.shape}, which does not broadcast to {whose}, {tuple(shape)}"
        )
    labels = out[len(out) - x.ndim :]
    dropped = [i for i, size in enumerate(x.shape) if size == 1]
    return lax.squeeze(x, dropped), tuple(
        label for i, label in enumerate(labels) if i not in dropped
    )


def _of_groups(
    contraction: Contraction, shape: Sequence[int], bounds: Array
) -> tuple[Labels, list[int]]:
    """Return the result's labels and shape with the groups in place of the rows."""
    assert contraction.group is not None
    place = contraction.out.index(contraction.ragged)
    labels, sizes = list(contraction.out), list(shape)
    labels[place], sizes[place] = contraction.group, bounds.shape[-1] - 1
    return tuple(labels), sizes


# Meaning.


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


def _reference(
    *operands: Array,
    contraction: Contraction,
    operand_labels: tuple[Labels, ...],
    function: ScalarFunction,
    precision: Any,
    accumulator: np.dtype[Any],
    **_: Any,
) -> list[Array]:
    product = masked_product(
        *operands[: len(contraction.operands)],
        contraction=contraction,
        precision=precision,
        out_dtype=function.out_dtypes[0] if function.is_identity else accumulator,
    )
    if function.is_identity:
        return [product]
    return elementwise_function(function, contraction, operand_labels)(product, *operands[2:])


def _unfused(
    *operands: Array,
    contraction: Contraction,
    operand_labels: tuple[Labels, ...],
    function: ScalarFunction,
    precision: Any,
    accumulator: np.dtype[Any],
    out_sharding: NamedSharding | None = None,
    **others: Any,
) -> list[Array]:
    """Compute the product by a kernel, and the epilogue in XLA."""
    if function.quantizes and out_sharding is None:

        def fused(function: ScalarFunction, *operands: Array) -> list[Array]:
            call = _unfused if function.is_closure else _bind
            return call(
                *operands, contraction=contraction, operand_labels=operand_labels,
                function=function, precision=precision, accumulator=accumulator, **others,
            )  # fmt: skip

        return quantized_after(fused, function, *operands)
    product = contract(
        *operands[: len(contraction.operands)],
        contraction=contraction,
        precision=precision,
        out_dtype=function.out_dtypes[0] if function.is_identity else accumulator,
        out_sharding=out_sharding,
    )
    if function.is_identity:
        return [product]
    elementwise = elementwise_function(function, contraction, operand_labels)
    if contraction.group is not None:
        elementwise = compat.with_automatic_axes(elementwise, out_sharding)
    return elementwise(product, *operands[2:])


# Differentiation and batching.


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    contraction: Contraction,
    operand_labels: tuple[Labels, ...],
    function: ScalarFunction,
    precision: Any,
    accumulator: np.dtype[Any],
    product: np.dtype[Any],
    in_place: InPlace = (),
    symmetric: bool = False,
) -> tuple[list[Any], list[Any]]:
    n = len(contraction.operands)

    def of_factors(*factors: Array) -> list[Array]:
        return [contract(*factors, contraction=contraction, precision=precision, out_dtype=product)]

    def change(pre_activation: Array) -> Any:
        groups = [(0,), (1,)]
        return tangents_out(of_factors, groups, primals[:n], tangents[:n], [pre_activation])[0]

    def elementwise(function: ScalarFunction) -> Callable[..., list[Array]]:
        return elementwise_function(function, contraction, operand_labels)

    # The derivative reads the operands again, so none is overwritten.
    bind = functools.partial(
        _bind, contraction=contraction, operand_labels=operand_labels, precision=precision,
        accumulator=accumulator, product=product, in_place=(), symmetric=symmetric,
    )  # fmt: skip
    return jvp_at_pre_activation(
        bind, change, elementwise, function, accumulator, product, 2, primals, tangents
    )


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


def _batch(
    _: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    contraction: Contraction,
    operand_labels: tuple[Labels, ...],
    **params: Any,
) -> tuple[list[Array], list[int]]:
    """Label the mapped axis in place; an operand without it is unchanged."""
    n = len(contraction.operands)
    out_dims = params["function"].mapped_dims
    if all(dim is None for dim in dims[:n]):
        # One product has an epilogue for each element of the batch.
        accumulators = contract(
            *operands[:n],
            contraction=contraction,
            precision=params["precision"],
            out_dtype=params["accumulator"],
        )
        elementwise = elementwise_function(params["function"], contraction, operand_labels)
        results = jax.vmap(elementwise, (None, *dims[2:]), out_dims)(accumulators, *operands[2:])
    else:
        factors, product = mapped(contraction, operands[:n], dims[:n])
        labels = tuple(
            labelled(own, product.out[0], dim)
            for own, dim in zip(operand_labels, dims[n:], strict=True)
        )
        results = _bind(
            *factors, *operands[n:], contraction=product, operand_labels=labels, **params
        )
    return results, out_dims


# Checkpoint policies.


def _as_dot_general(
    *, product: np.dtype[Any], **params: Any
) -> tuple[compat.Primitive, dict[str, Any]] | None:
    return as_dot_general(out_dtype=product, **params)


def _saved(
    *,
    contraction: Contraction,
    operand_labels: tuple[Labels, ...],
    function: ScalarFunction,
    accumulator: np.dtype[Any],
    **_: Any,
) -> Saved | None:
    if contraction.group is not None:
        return None
    elementwise = elementwise_function(function, contraction, operand_labels)
    return saved_pre_activation(function, elementwise, accumulator)


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


# Partitioning: where devices have parts of the contracted dimensions, or share the groups, the sum
# over devices is completed before the epilogue, which is not linear.

params_text.register(ScalarFunction, to_data, from_data)


def _sharding_rule(
    *operands: Any,
    contraction: Contraction,
    operand_labels: tuple[Labels, ...],
    function: ScalarFunction,
    **_: Any,
) -> ShardingRule:
    c, n = contraction, len(contraction.operands)
    # Rows of any group may be in a device's part of the results. So every device has whole bounds,
    # and whole operands of groups, which are small.
    bounds = [(None,) * x.ndim for x in operands[2:n]]
    read = [tuple(None if label == c.group else label for label in own) for own in operand_labels]
    rule = sharding_rule(*operands[:n], contraction=c)
    return with_epilogue(
        dataclasses.replace(rule, operands=(c.lhs, c.rhs, *bounds)), read, function
    )


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


def _source(operands: Sequence[Operand], **params: Any) -> tuple[Sequence[Operand], Params]:
    """Return the operands where they lie, of a call that is partitioned.

    A device's part of a symmetric product may be a square of it that is not symmetric.
    """
    return source(operands, **params | {"symmetric": False})


def _localised(
    shard: Shard, lhs: Array, rhs: Array, *others: Array, contraction: Contraction, **_: Any
) -> list[Array]:
    if contraction.group is None:
        return [lhs, rhs, *others]
    bounds, *read = others
    for dim, label in enumerate(contraction.bounds[:-1]):
        if shard.is_split(label):
            bounds = part_of(shard, bounds, dim, label)
    return [lhs, rhs, local_bounds(shard, bounds, contraction), *read]


def _in_float32(*, function: ScalarFunction, **params: Any) -> Params:
    function = function.with_reductions_in_float32()
    return {**params, "function": function, "product": np.dtype(np.float32)}


def _function_of_sum(
    *,
    contraction: Contraction,
    operand_labels: tuple[Labels, ...],
    function: ScalarFunction,
    precision: Any,
    accumulator: np.dtype[Any],
    product: np.dtype[Any],
    **_: Any,
) -> FunctionOfSum:
    def epilogue(total: Array, _: Array, __: Array, *others: Array) -> list[Array]:
        elementwise = elementwise_function(function, contraction, operand_labels)
        return elementwise(total.astype(accumulator), *others)

    term = functools.partial(
        contract, contraction=contraction, precision=precision, out_dtype=product
    )
    return FunctionOfSum(term, product, epilogue)


# Lowering.


def _kernel(
    operands: Sequence[Operand], *, contraction: Contraction, **params: Any
) -> PlannedKernel | str:
    n = len(contraction.operands)
    return fused_kernel(operands[:n], None, operands[n:], contraction=contraction, **params)


def _described(
    *,
    contraction: Contraction,
    operand_labels: tuple[Labels, ...],
    function: ScalarFunction,
    **_: Any,
) -> str:
    return f"contract {contraction}, {described_function(function, contraction, operand_labels)}"


def described_function(
    function: ScalarFunction, contraction: Contraction, operand_labels: Sequence[Labels]
) -> str:
    """Return the call of an epilogue, for ``explain``."""
    names = contraction.names
    arrays = ("".join(names[x] for x in labels) or "1" for labels in operand_labels)
    return f"{function.name}({', '.join(('accumulator', *arrays))})"


_bind = define(
    Operation(
        name="tilekern_contract_with_epilogue",
        reference=_reference,
        several_results=True,
        jvp=_jvp,
        batch=_batch,
        sharding_rule=_sharding_rule,
        planners=planners(
            _kernel,
            _unfused,
            "the epilogue runs in XLA, after the product",
            on_cpu="XLA fuses it into one pass",
        ),
        describe=_described,
        localised=_localised,
        source=_source,
        in_float32=_in_float32,
        function_of_sum=_function_of_sum,
        stands_for=_as_dot_general,
        saved=_saved,
    )
)
