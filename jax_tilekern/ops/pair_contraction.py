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

from jax_tilekern.epilogue.scalar_function import ScalarFunction, trace_scalars
from jax_tilekern.ops.contraction import contract
from jax_tilekern.ops.fused_contraction import contract_with_scalar_function
from jax_tilekern.ops.fused_lowering import fused_kernel, planners
from jax_tilekern.ops.labelled_operands import product_by_lax
from jax_tilekern.plans.contraction import Contraction
from jax_tilekern.plans.gemm.arithmetic import accumulator_dtype
from jax_tilekern.primitives.linearity import jvp_of
from jax_tilekern.primitives.operation import Operand, Operation, PlannedKernel, define


def contract_pair(
    lhs: Array,
    first: Array,
    second: Array,
    *,
    contraction: Contraction,
    precision: Any,
    product: np.dtype[Any],
    function: Callable[[Any, Any], Any],
) -> Any:
    """Contract an array with each of two, and apply a function to each pair of elements.

    Parameters
    ----------
    lhs, first, second
        Arrays of one type; the shapes of ``first`` and ``second`` are equal.
    contraction
        Labels of ``lhs``, of both other arrays, and of the result.
    precision, product
        Of each contraction, as in
        :func:`~jax_tilekern.ops.fused_contraction.contract_with_epilogue`.
    function
        ``function(accumulator, second_accumulator)`` on scalars.

    Raises
    ------
    TypeError
        If it is not a function of scalars.
    """
    accumulator = accumulator_dtype(lhs.dtype, product)
    traced = trace_scalars(function, accumulator, product, [accumulator])
    results = _bind(
        lhs,
        first,
        second,
        *map(jnp.asarray, traced.closed_over),
        contraction=contraction,
        function=traced.function,
        precision=precision,
        product=product,
    )
    return traced.nested(results)


def _reference(
    lhs: Array,
    first: Array,
    second: Array,
    *scalars: Array,
    contraction: Contraction,
    function: ScalarFunction,
    precision: Any,
    product: np.dtype[Any],
) -> list[Array]:
    accumulators = (
        product_by_lax(
            lhs, rhs, contraction, precision=precision,
            out_dtype=accumulator_dtype(lhs.dtype, product),
        )
        for rhs in (first, second)
    )  # fmt: skip
    labels = (contraction.out, *(() for _ in scalars))
    return function.over_labels(contraction.out, labels)(*accumulators, *scalars)


def _two_contractions(
    lhs: Array,
    first: Array,
    second: Array,
    *scalars: Array,
    contraction: Contraction,
    function: ScalarFunction,
    precision: Any,
    product: np.dtype[Any],
) -> list[Array]:
    """Compute the second product, and the first one with an epilogue that reads it."""
    read = contract(lhs, second, contraction=contraction, precision=precision, out_dtype=product)
    return contract_with_scalar_function(
        lhs,
        first,
        contraction=contraction,
        precision=precision,
        product=product,
        function=_of_rounded(function, product),
        operands=[(read, contraction.out), *((x, ()) for x in scalars)],
        in_place=((0, 0),),
    )


def _of_rounded(function: ScalarFunction, product: np.dtype[Any]) -> ScalarFunction:
    """Return the function of a second product that is rounded to its type."""
    accumulator, _, *scalars = (np.dtype(x.dtype) for x in function.jaxpr.in_avals)

    def of_rounded(x: Any, rounded: Any, *scalars: Any) -> list[Any]:
        return function.python(x, rounded.astype(accumulator), *scalars)

    of_rounded.__name__ = function.name
    traced = trace_scalars(of_rounded, accumulator, product, [product, *scalars]).function
    return dataclasses.replace(traced, names=function.names)


def _batch(
    axis_data: Any,
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    contraction: Contraction,
    **params: Any,
) -> tuple[list[Array], list[int]]:
    """Label the mapped axis in place, if both products have it in the same way."""
    lhs, first, second, *scalars = dims
    if first == second and all(x is None for x in scalars):
        mapped = contraction.mapped(lhs, first)
        results = _bind(*operands, contraction=mapped, **params)
    else:
        function = functools.partial(_two_contractions, contraction=contraction, **params)
        results = jax.vmap(function, in_axes=tuple(dims), axis_size=axis_data.size)(*operands)
    return results, [0] * len(results)


def _described(*, contraction: Contraction, function: ScalarFunction, **_: Any) -> str:
    names = contraction.names
    lhs, rhs, out = (
        "".join(names[x] for x in xs) for xs in (contraction.lhs, contraction.rhs, contraction.out)
    )
    return f"contract {lhs},{rhs},{rhs}->{out}, {function.name}(accumulator, accumulator)"


def _kernel(
    operands: Sequence[Operand], *, product: np.dtype[Any], **params: Any
) -> PlannedKernel | str:
    lhs, first, second, *scalars = operands
    return fused_kernel(
        (lhs, first),
        second,
        scalars,
        operand_labels=[() for _ in scalars],
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
