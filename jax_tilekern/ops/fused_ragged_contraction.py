"""Grouped GEMMs with an epilogue: any JAX function of each element, and its rules.

An operand of the function has some of the result's labels, or the group's: then each row reads the
element of its own group. Rows of no group stay zeros in every result.

Derivatives are those of the function at the *pre-activation*, as in ``fused_contraction.py``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding

from jax_tilekern.epilogue.cuda_text import CudaText
from jax_tilekern.epilogue.scalar_function import ScalarFunction, trace_scalars
from jax_tilekern.interop import compat
from jax_tilekern.ops.epilogue_rules import (
    described,
    generated_epilogue,
    jvp_at_pre_activation,
    planners,
    with_labels,
)
from jax_tilekern.ops.labelled_operands import broadcasted, common_type
from jax_tilekern.ops.planned_kernel import planned_kernel
from jax_tilekern.ops.ragged_contraction import (
    CUDA,
    RaggedProblem,
    contract_groups,
    localised,
    masked_product,
    part_of,
    sharding_rule,
    state_problem,
)
from jax_tilekern.partitioning.local_program import FunctionOfSum, Shard
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.plans.gemm.arithmetic import accumulator_dtype
from jax_tilekern.plans.gemm.contraction import Labels, labelled
from jax_tilekern.plans.grouped_gemm.contraction import RaggedContraction
from jax_tilekern.plans.grouped_gemm.select import plan_grouped_gemm
from jax_tilekern.primitives.operation import (
    Fallback,
    Kernel,
    Operand,
    Operation,
    define,
)


def contract_groups_with_epilogue(
    lhs: Array,
    rhs: Array,
    bounds: Array,
    contraction: RaggedContraction,
    *,
    precision: Any,
    product: np.dtype[Any],
    shape: Sequence[int],
    epilogue: Callable[..., Any],
    operands: Sequence[Any],
    group_operands: Sequence[Any],
    out_sharding: NamedSharding | None = None,
) -> Any:
    """Multiply each group's rows by its matrix, and apply a function to every element.

    Parameters
    ----------
    lhs, rhs, bounds, contraction, precision
        As for :func:`~jax_tilekern.ops.ragged_contraction.contract_groups`; the result has the
        ragged label.
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
    arrays = [jnp.asarray(x) for x in (*operands, *group_operands)]
    function, closed_over, nested = trace_scalars(
        epilogue, accumulator, product, [x.dtype for x in arrays]
    )
    if function.is_identity:
        plain = contract_groups(
            lhs,
            rhs,
            bounds,
            contraction,
            precision=precision,
            out_dtype=product,
            out_sharding=out_sharding,
        )
        return nested([plain])
    if function.elements < len(function.reductions):
        raise TypeError(
            f"the epilogue {function.name} returns a reduction of rows, which ragged_dot does not "
            "have; it is a result of epilogues of matmul and dot_general"
        )
    of_groups = _of_groups(contraction)
    group_shape = [
        bounds.shape[-1] - 1 if label == contraction.group else size
        for label, size in zip(of_groups, shape, strict=True)
    ]
    read = [
        with_labels(i, x, contraction.out, shape)
        if i < len(operands)
        else with_labels(i, x, of_groups, group_shape, "the groups'")
        for i, x in enumerate(arrays)
    ] + [(jnp.asarray(x), ()) for x in closed_over]
    call: dict[str, Any] = {
        "contraction": contraction,
        "operand_labels": tuple(own for _, own in read),
        "function": function,
        "precision": precision,
        "accumulator": accumulator,
        "product": product,
    }
    operands = (lhs, rhs, bounds, *(x for x, _ in read))
    if out_sharding is None:
        results = _bind(*operands, **call)
    else:
        results = _unfused(*operands, **call, out_sharding=out_sharding)
    return nested(results)


def _of_groups(contraction: RaggedContraction) -> Labels:
    """Return the result's labels with the group in place of the rows."""
    return tuple(contraction.group if x == contraction.ragged else x for x in contraction.out)


# Meaning.


def _elementwise(
    function: ScalarFunction,
    contraction: RaggedContraction,
    operand_labels: Sequence[Labels],
    bounds: Array,
) -> Callable[..., list[Array]]:
    """Return the function of arrays, whose rows of no group are zeros."""
    c = contraction
    prefix = c.bounds[:-1]

    def call(accumulators: Array, *operands: Array) -> list[Array]:
        rows = accumulators.shape[c.out.index(c.ragged)]
        position = lax.broadcasted_iota(np.int32, (*bounds.shape[:-1], rows), bounds.ndim - 1)
        group = (bounds[..., 1:-1, None] <= position[..., None, :]).sum(-2, dtype=np.int32)
        inside = (bounds[..., :1] <= position) & (position < bounds[..., -1:])
        sizes = dict(zip(c.out, accumulators.shape, strict=True))
        inside = broadcasted(inside, (*prefix, c.ragged), c.out, sizes)
        read = [_at_rows(x, own, group, c) for x, own in zip(operands, operand_labels, strict=True)]
        # Rows of no group have no derivatives, though those of the function there may be NaN.
        within = [_constant_outside(inside, broadcasted(x, own, c.out, sizes)) for x, own in read]
        results = function.over_labels(c.out, [c.out] * len(within))(accumulators, *within)
        return [jnp.where(inside, x, jnp.zeros((), x.dtype)) for x in results]

    return call


def _constant_outside(inside: Array, x: Array) -> Array:
    return jnp.where(inside, x, lax.stop_gradient(x))


def _at_rows(
    x: Array, labels: Labels, group: Array, contraction: RaggedContraction
) -> tuple[Array, Labels]:
    """Give an operand of groups the elements that each row reads."""
    c = contraction
    if c.group not in labels:
        return x, labels
    prefix = c.bounds[:-1]
    if x.shape[labels.index(c.group)] == 0:
        # All rows are of no group, but a gather needs an element.
        sizes = [1 if label == c.group else n for n, label in zip(x.shape, labels, strict=True)]
        x = jnp.zeros(sizes, x.dtype)
    inner = [label for label in labels if label not in prefix]
    take: Callable[..., Array] = functools.partial(jnp.take, axis=inner.index(c.group), mode="clip")
    for i in reversed(range(len(prefix))):
        left = [label for label in labels if label not in prefix[:i]]
        take = jax.vmap(take, (left.index(prefix[i]) if prefix[i] in left else None, 0))
    return take(x, group), (*prefix, *(c.ragged if label == c.group else label for label in inner))


def _reference(
    lhs: Array,
    rhs: Array,
    bounds: Array,
    *operands: Array,
    contraction: RaggedContraction,
    operand_labels: tuple[Labels, ...],
    function: ScalarFunction,
    precision: Any,
    accumulator: np.dtype[Any],
    **_: Any,
) -> list[Array]:
    accumulators = masked_product(
        lhs, rhs, bounds, contraction=contraction, precision=precision, out_dtype=accumulator
    )
    return _elementwise(function, contraction, operand_labels, bounds)(accumulators, *operands)


def _unfused(
    lhs: Array,
    rhs: Array,
    bounds: Array,
    *operands: Array,
    contraction: RaggedContraction,
    operand_labels: tuple[Labels, ...],
    function: ScalarFunction,
    precision: Any,
    accumulator: np.dtype[Any],
    out_sharding: NamedSharding | None = None,
    **_: Any,
) -> list[Array]:
    """Compute the products by a kernel, and the epilogue in XLA."""
    accumulators = contract_groups(
        lhs,
        rhs,
        bounds,
        contraction,
        precision=precision,
        out_dtype=accumulator,
        out_sharding=out_sharding,
    )

    def elementwise(accumulators: Array, bounds: Array, *operands: Array) -> list[Array]:
        return _elementwise(function, contraction, operand_labels, bounds)(accumulators, *operands)

    results: list[Array] = compat.with_automatic_axes(elementwise, out_sharding)(
        accumulators, bounds, *operands
    )
    return results


# Differentiation and batching.


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, function: ScalarFunction, **params: Any
) -> tuple[list[Any], list[Any]]:
    lhs, rhs, bounds, *operands = primals
    contraction = params["contraction"]

    def change(left: Array, right: Array) -> Array:
        return contract_groups(
            left,
            right,
            bounds,
            contraction,
            precision=params["precision"],
            out_dtype=params["product"],
        )

    def elementwise(function: ScalarFunction) -> Callable[..., list[Array]]:
        return _elementwise(function, contraction, params["operand_labels"], bounds)

    return jvp_at_pre_activation(
        functools.partial(_bind, lhs, rhs, bounds, *operands, **params),
        function,
        elementwise,
        change,
        (lhs, rhs, *operands),
        (*tangents[:2], *tangents[3:]),
        params["product"],
        params["accumulator"],
    )


def _batch(
    _: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    contraction: RaggedContraction,
    operand_labels: tuple[Labels, ...],
    **params: Any,
) -> tuple[list[Array], list[int]]:
    """Label the mapped axis in place; an operand without it is unchanged."""
    c = contraction
    lhs, rhs, bounds, *read = operands
    if dims[2] is not None:
        bounds = jnp.moveaxis(bounds, dims[2], 0)
    if dims[0] is dims[1] is dims[2] is None:
        # The products have an epilogue for each element of the batch.
        accumulators = contract_groups(
            lhs, rhs, bounds, c, precision=params["precision"], out_dtype=params["accumulator"]
        )
        elementwise = _elementwise(params["function"], c, operand_labels, bounds)
        results = jax.vmap(elementwise, in_axes=(None, *dims[3:]))(accumulators, *read)
        return results, [0] * len(results)
    mapped = 1 + max(*c.lhs, *c.rhs, *c.out)
    batched = RaggedContraction(
        labelled(c.lhs, mapped, dims[0]),
        labelled(c.rhs, mapped, dims[1]),
        labelled(c.bounds, mapped, None if dims[2] is None else 0),
        (mapped, *c.out),
        c.ragged,
        c.group,
    )
    labels = tuple(
        labelled(own, mapped, dim) for own, dim in zip(operand_labels, dims[3:], strict=True)
    )
    results = _bind(lhs, rhs, bounds, *read, contraction=batched, operand_labels=labels, **params)
    return results, [0] * len(results)


# Partitioning: where devices share the groups or the contracted dimensions, the sum over devices is
# completed before the epilogue.


def _sharding_rule(
    lhs: Any,
    rhs: Any,
    bounds: Any,
    *_: Any,
    contraction: RaggedContraction,
    operand_labels: tuple[Labels, ...],
    function: ScalarFunction,
    **__: Any,
) -> ShardingRule:
    """Share out the grouped GEMM; every device has the bounds, and whole operands of groups.

    Rows of any group may be in a device's part of the results, and these operands are small.
    """
    rule = sharding_rule(lhs, rhs, bounds, contraction=contraction)
    read = (
        tuple(None if label == contraction.group else label for label in own)
        for own in operand_labels
    )
    return dataclasses.replace(
        rule,
        operands=(*rule.operands[:2], (None,) * bounds.ndim, *read),
        results=rule.results * len(function.out_dtypes),
        epilogue_from=3,
    )


def _localised(
    shard: Shard,
    lhs: Array,
    rhs: Array,
    bounds: Array,
    *operands: Array,
    contraction: RaggedContraction,
    **_: Any,
) -> list[Array]:
    for dim, label in enumerate(contraction.bounds[:-1]):
        if shard.is_split(label):
            bounds = part_of(shard, bounds, dim, label)
    return [*localised(shard, lhs, rhs, bounds, contraction=contraction), *operands]


def _function_of_sum(
    *,
    contraction: RaggedContraction,
    operand_labels: tuple[Labels, ...],
    function: ScalarFunction,
    precision: Any,
    accumulator: np.dtype[Any],
    product: np.dtype[Any],
) -> FunctionOfSum:
    def term(lhs: Array, rhs: Array, bounds: Array) -> Array:
        return contract_groups(
            lhs, rhs, bounds, contraction, precision=precision, out_dtype=product
        )

    def epilogue(total: Array, _: Array, __: Array, bounds: Array, *operands: Array) -> list[Array]:
        elementwise = _elementwise(function, contraction, operand_labels, bounds)
        return elementwise(total.astype(accumulator), *operands)

    return FunctionOfSum(term, product, epilogue)


# Lowering.


def _kernel(
    factors: Sequence[Operand],
    arrays: Sequence[Operand],
    text: CudaText,
    *,
    contraction: RaggedContraction,
    operand_labels: tuple[Labels, ...],
    function: ScalarFunction,
    precision: Any,
    **_: Any,
) -> Kernel | str:
    problem = state_problem(
        CUDA,
        factors,
        contraction=contraction,
        precision=precision,
        out_dtype=function.out_dtypes[0],
        further=(*operand_labels, *(contraction.out,) * (len(text.results) - 1)),
    )
    if not isinstance(problem, RaggedProblem):
        return problem.reason
    epilogue = generated_epilogue(
        text,
        function,
        [x.aval.dtype for x in arrays],
        problem.further_strides,
        problem.product.strided.batch,
        ragged="rows",
    )
    planned = planned_kernel(
        (*problem.operands, *(x.value for x in arrays)),
        plan_grouped_gemm,
        problem.product.with_epilogue(epilogue),
    )
    return planned.reason if isinstance(planned, Fallback) else planned


_bind = define(
    Operation(
        name="tilekern_contract_groups_with_epilogue",
        reference=_reference,
        several_results=True,
        jvp=_jvp,
        batch=_batch,
        sharding_rule=_sharding_rule,
        planners=planners(3, _unfused, _kernel),
        describe=described,
        localised=_localised,
        in_float32=lambda **params: {**params, "product": np.dtype(np.float32)},
        function_of_sum=_function_of_sum,
    )
)
