"""Contractions with an epilogue: any JAX function of each element of a product, and its rules.

The function is one of scalars, ``f(accumulator, *operands)``. Operands have some of the result's
labels and are broadcast over the others, so a bias, a scale of rows and a residual are one thing,
and ``vmap`` adds a label to whatever has the mapped axis.

The derivative is that of the function, by JAX and with the user's custom rules, at the
*pre-activation*: where a call is differentiated, its kernel also stores the accumulators in the
product's type. Nothing else is saved, and a call that is not differentiated saves nothing.
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
from jax import Array
from jax.sharding import NamedSharding

from jax_tilekern.epilogue.cuda_text import CudaText
from jax_tilekern.epilogue.plain_data import from_data, to_data
from jax_tilekern.epilogue.scalar_function import ScalarFunction, trace_scalars
from jax_tilekern.interop import compat
from jax_tilekern.ops.contraction import (
    CUDA,
    Problem,
    as_dot_general,
    contract,
    source,
    state_problem,
)
from jax_tilekern.ops.epilogue_rules import (
    described,
    generated_epilogue,
    jvp_at_pre_activation,
    planners,
    with_labels,
)
from jax_tilekern.ops.labelled_operands import common_type, product_by_lax
from jax_tilekern.ops.planned_kernel import planned_kernel
from jax_tilekern.partitioning import params_text
from jax_tilekern.partitioning.local_program import FunctionOfSum
from jax_tilekern.partitioning.rule import ShardingRule, sizes_of
from jax_tilekern.plans.gemm.arithmetic import accumulator_dtype
from jax_tilekern.plans.gemm.contraction import Contraction, Labels, labelled
from jax_tilekern.plans.gemm.select import plan_matmul
from jax_tilekern.primitives.operation import (
    Fallback,
    Kernel,
    Operand,
    Operation,
    Params,
    define,
)
from jax_tilekern.primitives.remat import Saved

# Operands of an epilogue, and the results that take their memory.
InPlace = tuple[tuple[int, int], ...]


def contract_with_epilogue(
    lhs: Array,
    rhs: Array,
    contraction: Contraction,
    *,
    precision: Any,
    product: np.dtype[Any],
    shape: Sequence[int],
    epilogue: Callable[..., Any],
    operands: Sequence[Any],
    in_place: InPlace = (),
    out_sharding: NamedSharding | None = None,
) -> Any:
    """Contract two arrays and apply a function to every element of the result.

    Parameters
    ----------
    lhs, rhs, contraction, precision
        As for :func:`~jax_tilekern.ops.contraction.contract`.
    product
        Type of the product without an epilogue.
    shape
        Shape of the result; ``contraction.out`` has its labels.
    epilogue
        ``epilogue(accumulator, *operands)`` on scalars.
    operands
        Arrays that broadcast to ``shape``.
    in_place
        Pairs of an operand of the epilogue and a result. A kernel writes the result over the
        operand where both have one type and shape, unless the call is differentiated. XLA copies
        the operand first if something else still reads it.
    out_sharding
        Sharding of the result on a mesh with explicit axes.

    Raises
    ------
    ValueError
        If an operand does not broadcast.
    TypeError
        If the epilogue is not a function of scalars.
    """
    lhs, rhs = common_type(lhs, rhs, product, precision)
    accumulator = accumulator_dtype(lhs.dtype, product)
    arrays = [jnp.asarray(x) for x in operands]
    function, closed_over, nested = trace_scalars(
        epilogue, accumulator, product, [x.dtype for x in arrays]
    )
    if function.is_identity:
        plain = contract(
            lhs, rhs, contraction, precision=precision, out_dtype=product, out_sharding=out_sharding
        )
        return nested([plain])
    labelled_arrays = [with_labels(i, x, contraction.out, shape) for i, x in enumerate(arrays)] + [
        (jnp.asarray(x), ()) for x in closed_over
    ]
    call: dict[str, Any] = {
        "contraction": contraction,
        "operand_labels": tuple(labels for _, labels in labelled_arrays),
        "function": function,
        "precision": precision,
        "accumulator": accumulator,
        "product": product,
        "in_place": in_place,
    }
    read = (lhs, rhs, *(x for x, _ in labelled_arrays))
    if out_sharding is None:
        results = _bind(*read, **call)
    else:
        results = _unfused(*read, **call, out_sharding=out_sharding)
    return nested(results)


def contract_with_scalar_function(
    lhs: Array,
    rhs: Array,
    contraction: Contraction,
    *,
    precision: Any,
    product: np.dtype[Any],
    function: ScalarFunction,
    operands: Sequence[tuple[Array, Labels]],
    in_place: InPlace = (),
) -> list[Array]:
    """Contract two arrays and apply a traced function to every element of the result.

    Parameters
    ----------
    lhs, rhs
        Operands of a type that :func:`~jax_tilekern.ops.labelled_operands.common_type` returns.
    contraction, precision, product, in_place
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
    results: list[Array] = _bind(
        lhs,
        rhs,
        *(x for x, _ in operands),
        contraction=contraction,
        operand_labels=tuple(labels for _, labels in operands),
        function=function,
        precision=precision,
        accumulator=accumulator_dtype(lhs.dtype, product),
        product=product,
        in_place=in_place,
    )
    return results


# Meaning.


def _reference(
    lhs: Array,
    rhs: Array,
    *operands: Array,
    contraction: Contraction,
    operand_labels: tuple[Labels, ...],
    function: ScalarFunction,
    precision: Any,
    accumulator: np.dtype[Any],
    **_: Any,
) -> list[Array]:
    accumulators = product_by_lax(lhs, rhs, contraction, precision=precision, out_dtype=accumulator)
    return function.over_labels(contraction.out, operand_labels)(accumulators, *operands)


def _unfused(
    lhs: Array,
    rhs: Array,
    *operands: Array,
    contraction: Contraction,
    operand_labels: tuple[Labels, ...],
    function: ScalarFunction,
    precision: Any,
    accumulator: np.dtype[Any],
    out_sharding: NamedSharding | None = None,
    **_: Any,
) -> list[Array]:
    """Compute the product by a kernel, and the epilogue in XLA."""
    accumulators = contract(
        lhs, rhs, contraction, precision=precision, out_dtype=accumulator, out_sharding=out_sharding
    )
    return function.over_labels(contraction.out, operand_labels)(accumulators, *operands)


# Differentiation and batching.


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, function: ScalarFunction, **params: Any
) -> tuple[list[Any], list[Any]]:
    contraction, product = params["contraction"], params["product"]
    # The derivative reads the operands again.
    params["in_place"] = ()

    def change(left: Array, right: Array) -> Array:
        precision = params["precision"]
        return contract(left, right, contraction, precision=precision, out_dtype=product)

    def elementwise(function: ScalarFunction) -> Callable[..., list[Any]]:
        return function.over_labels(contraction.out, params["operand_labels"])

    return jvp_at_pre_activation(
        functools.partial(_bind, *primals, **params),
        function,
        elementwise,
        change,
        primals,
        tangents,
        product,
        params["accumulator"],
    )


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
    factors = contraction.mapped(dims[0], dims[1])
    labels = tuple(
        labelled(own, factors.out[0], dim)
        for own, dim in zip(operand_labels, dims[2:], strict=True)
    )
    if dims[0] is dims[1] is None:
        # One product has an epilogue for each element of the batch.
        function = params["function"]
        accumulators = contract(
            operands[0],
            operands[1],
            contraction,
            precision=params["precision"],
            out_dtype=params["accumulator"],
        )
        mapped_function = jax.vmap(
            function.over_labels(contraction.out, operand_labels), in_axes=(None, *dims[2:])
        )
        results = mapped_function(accumulators, *operands[2:])
    else:
        results = _bind(*operands, contraction=factors, operand_labels=labels, **params)
    return results, [0] * len(results)


# Checkpoint policies.


def _as_dot_general(
    *, product: np.dtype[Any], **params: Any
) -> tuple[compat.Primitive, dict[str, Any]]:
    return as_dot_general(out_dtype=product, **params)


def _saved(
    *,
    contraction: Contraction,
    operand_labels: tuple[Labels, ...],
    function: ScalarFunction,
    accumulator: np.dtype[Any],
    **_: Any,
) -> Saved | None:
    """Save the pre-activation, which a call that is differentiated stores."""
    position = function.accumulator_result
    if position is None:
        return None

    def others(pre_activation: Array, *operands: Array) -> list[Array]:
        elementwise = function.over_labels(contraction.out, operand_labels)
        results = elementwise(pre_activation.astype(accumulator), *operands)
        return [x for i, x in enumerate(results) if i != position]

    return Saved(position, others, function.names)


# Partitioning: where devices have parts of the contracted dimensions, the sum over devices is
# completed before the epilogue, which is not linear.

params_text.register(ScalarFunction, to_data, from_data)


def _sharding_rule(
    lhs: Any,
    rhs: Any,
    *_: Any,
    contraction: Contraction,
    operand_labels: tuple[Labels, ...],
    function: ScalarFunction,
    **__: Any,
) -> ShardingRule:
    c = contraction
    sizes = sizes_of((c.lhs, lhs.shape), (c.rhs, rhs.shape))
    results = tuple(function.result_labels(c.out))
    return ShardingRule(
        (c.lhs, c.rhs, *operand_labels),
        results,
        sizes,
        flops=2 * math.prod(sizes.values()),
        names=c.names,
        epilogue_from=2,
        reduced=frozenset(c.out) - frozenset.intersection(*map(frozenset, results)),
        combined_by=tuple(kind or "sum" for kind in function.reductions),
    )


def _source(operands: Sequence[Operand], **params: Any) -> tuple[Sequence[Operand], Params]:
    factors, params = source(operands[:2], **params)
    return [*factors, *operands[2:]], params


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
    def epilogue(total: Array, _: Array, __: Array, *operands: Array) -> list[Array]:
        elementwise = function.over_labels(contraction.out, operand_labels)
        return elementwise(total.astype(accumulator), *operands)

    term = functools.partial(
        contract, contraction=contraction, precision=precision, out_dtype=product
    )
    return FunctionOfSum(term, product, epilogue)


# Lowering.


def _kernel(
    factors: Sequence[Operand],
    arrays: Sequence[Operand],
    text: CudaText,
    *,
    contraction: Contraction,
    operand_labels: tuple[Labels, ...],
    function: ScalarFunction,
    precision: Any,
    accumulator: np.dtype[Any],
    in_place: InPlace,
    **_: Any,
) -> Kernel | str:
    results = function.result_labels(contraction.out)
    problem = state_problem(
        CUDA,
        factors,
        contraction=contraction,
        precision=precision,
        # A kernel whose results are reductions alone stores no element of this type.
        out_dtype=function.out_dtypes[0] if function.elements else accumulator,
        further=(*operand_labels, *results[min(1, function.elements) :]),
    )
    if not isinstance(problem, Problem):
        return problem.reason
    geometry = problem.product.geometry
    if min(geometry.m, geometry.n) == 1:
        return "products with a vector write little"
    epilogue = generated_epilogue(
        text, function, [x.aval.dtype for x in arrays], problem.further_strides, geometry.batch
    )
    planned = planned_kernel(
        (*problem.operands, *(x.value for x in arrays)),
        plan_matmul,
        problem.product.with_epilogue(epilogue),
    )
    if isinstance(planned, Fallback):
        return planned.reason
    values = [*problem.operands, *(x.value for x in (*factors, *arrays))]
    # Threads read the elements of their accumulators before they write them. A factor's elements
    # are read for other accumulators too.
    aliases = {
        len(problem.operands) + i: j
        for i, j in in_place
        if operand_labels[i] == results[j]
        and arrays[i].aval.dtype == function.out_dtypes[j]
        and values.count(arrays[i].value) == 1
    }
    return dataclasses.replace(planned, aliases=aliases)


_bind = define(
    Operation(
        name="tilekern_contract_with_epilogue",
        reference=_reference,
        several_results=True,
        jvp=_jvp,
        batch=_batch,
        sharding_rule=_sharding_rule,
        planners=planners(2, _unfused, _kernel),
        describe=described,
        stands_for=_as_dot_general,
        saved=_saved,
        source=_source,
        in_float32=_in_float32,
        function_of_sum=_function_of_sum,
    )
)
