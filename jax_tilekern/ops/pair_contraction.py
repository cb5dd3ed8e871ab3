"""Two contractions of one ``lhs``, and a function of each pair of their elements.

On a Hopper GPU one kernel may compute both: it reads ``lhs`` once, and the function has the
accumulators of both in registers. Elsewhere the second contraction comes first, and the first one's
epilogue reads its result (``fused_contraction.py``). The derivatives, the partition and most
batches are those of these two calls, too, so a call that is differentiated computes two products.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_tilekern.epilogue.scalar_function import OWN, Role, ScalarFunction, trace_scalars
from jax_tilekern.ops.contraction import contract, mapped, masked_product
from jax_tilekern.ops.fused_contraction import (
    contract_with_scalar_function,
    elementwise_function,
    with_blocks_last,
)
from jax_tilekern.ops.fused_lowering import fused_kernel, planners
from jax_tilekern.plans.contraction import Contraction, Labels, labelled
from jax_tilekern.plans.gemm.arithmetic import accumulator_dtype
from jax_tilekern.primitives.linearity import jvp_of
from jax_tilekern.primitives.operation import Operand, Operation, PlannedKernel, define


def contract_pair(
    lhs: Array,
    first: Array,
    second: Array,
    *bounds: Array,
    contraction: Contraction,
    precision: Any,
    product: np.dtype[Any],
    function: Callable[..., Any],
    operands: Sequence[tuple[Array, Labels]] = (),
    role: Role = OWN,
) -> Any:
    """Contract an array with each of two, and apply a function to each pair of elements.

    Parameters
    ----------
    lhs, first, second
        Arrays of one type; the shapes of ``first`` and ``second`` are equal.
    bounds
        Those of the groups, if there are any; both products have the same.
    contraction
        Labels of ``lhs``, of both other arrays, and of the result.
    precision, product
        Of each contraction, as in
        :func:`~jax_tilekern.ops.fused_contraction.contract_with_epilogue`.
    function
        ``function(accumulator, second_accumulator, *operands)`` on scalars.
    operands
        Its operands, and the result's dimension that each of their dimensions is.
    role
        What errors call it.

    Raises
    ------
    TypeError
        If it is not a function of scalars.
    """
    accumulator = accumulator_dtype(lhs.dtype, product)
    dtypes = [accumulator, *(x.dtype for x, _ in operands)]
    traced = trace_scalars(function, accumulator, product, dtypes, role)
    read = [*operands, *((jnp.asarray(x), ()) for x in traced.closed_over)]
    compute = _two_contractions if traced.function.is_closure else _bind
    results = compute(
        lhs,
        first,
        second,
        *bounds,
        *(x for x, _ in read),
        contraction=contraction,
        operand_labels=tuple(labels for _, labels in read),
        function=traced.function,
        precision=precision,
        product=product,
    )
    return traced.nested(with_blocks_last(results, traced.function))


def _split(
    operands: Sequence[Any], contraction: Contraction
) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Return the operands of both products, the bounds, and the operands of the function."""
    n = 1 + len(contraction.operands)
    return operands[:3], operands[3:n], operands[n:]


def _reference(
    *operands: Array,
    contraction: Contraction,
    operand_labels: tuple[Labels, ...],
    function: ScalarFunction,
    precision: Any,
    product: np.dtype[Any],
) -> list[Array]:
    (lhs, *factors), bounds, read = _split(operands, contraction)
    one, two = (
        masked_product(
            lhs, rhs, *bounds, contraction=contraction, precision=precision,
            out_dtype=accumulator_dtype(lhs.dtype, product),
        )
        for rhs in factors
    )  # fmt: skip
    labels = (contraction.out, *operand_labels)
    return elementwise_function(function, contraction, labels)(one, *bounds, two, *read)


def _two_contractions(
    *operands: Array,
    contraction: Contraction,
    operand_labels: tuple[Labels, ...],
    function: ScalarFunction,
    precision: Any,
    product: np.dtype[Any],
) -> list[Array]:
    """Compute the second product, and the first one with an epilogue that reads it."""
    (lhs, first, second), bounds, arrays = _split(operands, contraction)
    read = contract(
        lhs, second, *bounds, contraction=contraction, precision=precision, out_dtype=product
    )
    return contract_with_scalar_function(
        lhs,
        first,
        *bounds,
        contraction=contraction,
        precision=precision,
        product=product,
        function=_of_rounded(function, product),
        operands=[(read, contraction.out), *zip(arrays, operand_labels, strict=True)],
        in_place=((0, 0),),
    )


def _of_rounded(function: ScalarFunction, product: np.dtype[Any]) -> ScalarFunction:
    """Return the function of a second product that is rounded to its type."""
    accumulator, _, *scalars = (np.dtype(x.dtype) for x in function.jaxpr.in_avals)

    def of_rounded(x: Any, rounded: Any, *scalars: Any) -> list[Any]:
        return function.python(x, rounded.astype(accumulator), *scalars)

    of_rounded.__name__ = function.name
    traced = trace_scalars(of_rounded, accumulator, product, [product, *scalars]).function
    return dataclasses.replace(traced, names=function.names, reductions=function.reductions)


def _batch(
    axis_data: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    contraction: Contraction,
    operand_labels: tuple[Labels, ...],
    **params: Any,
) -> tuple[list[Array], list[int]]:
    """Label the mapped axis in place, if both products have it in the same way."""
    (lhs, first, second), bounds, arrays = _split(dims, contraction)
    out_dims = params["function"].mapped_dims
    if first == second and (lhs, first) != (None, None):
        (x, one, two), of_groups, read = _split(operands, contraction)
        factors, labels = mapped(contraction, [x, one, *of_groups], [lhs, first, *bounds])
        own = zip(operand_labels, arrays, strict=True)
        results = _bind(
            *factors[:2], two, *factors[2:], *read, contraction=labels,
            operand_labels=tuple(labelled(x, labels.out[0], dim) for x, dim in own), **params,
        )  # fmt: skip
    else:
        function = functools.partial(
            _two_contractions, contraction=contraction, operand_labels=operand_labels, **params
        )
        mapped_function = jax.vmap(function, tuple(dims), out_dims, axis_size=axis_data.size)
        results = mapped_function(*operands)
    return results, out_dims


def _described(
    *,
    contraction: Contraction,
    operand_labels: tuple[Labels, ...],
    function: ScalarFunction,
    **_: Any,
) -> str:
    names = contraction.names
    lhs, rhs, out, *arrays = (
        "".join(names[x] for x in xs) or "1"
        for xs in (contraction.lhs, contraction.rhs, contraction.out, *operand_labels)
    )
    read = ", ".join(("accumulator", "accumulator", *arrays))
    return f"contract {lhs},{rhs},{rhs}->{out}, {function.name}({read})"


def _kernel(
    operands: Sequence[Operand], *, contraction: Contraction, product: np.dtype[Any], **params: Any
) -> PlannedKernel | str:
    (lhs, first, second), bounds, arrays = _split(operands, contraction)
    return fused_kernel(
        (lhs, first, *bounds),
        second,
        arrays,
        contraction=contraction,
        accumulator=accumulator_dtype(lhs.aval.dtype, product),
        **params,
    )


_bind = define(
    Operation(
        name="tilekern_contract_pair",
        reference=_reference,
        several_results=True,
        jvp=functools.partial(jvp_of, _two_contractions),
        batch=_batch,
        # XLA partitions each of the two calls.
        sharding_rule=None,
        composed=_two_contractions,
        planners=planners(
            _kernel,
            _two_contractions,
            "a kernel for each",
            on_cpu="kernels of both are for Hopper GPUs",
        ),
        describe=_described,
    )
)
