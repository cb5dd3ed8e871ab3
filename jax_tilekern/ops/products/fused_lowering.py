"""How contractions with an epilogue are lowered: a kernel on a GPU, or other calls."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from jax import Array

from jax_tilekern.epilogue.cuda_text import CudaText, computed_type, cuda_text, rounded
from jax_tilekern.epilogue.scalar_function import ScalarFunction
from jax_tilekern.epilogue.understood import Untranslatable
from jax_tilekern.ops.products.contraction_lowering import (
    NOT_CONTRACTED,
    LoweredProduct,
    contracts_nothing,
    cuda_kernel,
)
from jax_tilekern.plans.contraction import Contraction, Labels
from jax_tilekern.plans.gemm.arithmetic import F32, accumulator_dtype
from jax_tilekern.plans.gemm.epilogue import (
    QUANTIZING_INSTRUCTIONS,
    Epilogue,
    EpilogueArray,
    QuantizedText,
    RowQuantization,
    RowReductionText,
)
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Outcome,
    PlannedKernel,
    Planner,
    Rewrite,
    no_refusal,
)

# Operands of an epilogue, and the results that take their memory.
InPlace = tuple[tuple[int, int], ...]


def planners(
    kernel: Callable[..., PlannedKernel | Fallback | str],
    otherwise: Callable[..., Array | list[Array]],
    in_words: Callable[..., tuple[str, str]],
) -> dict[str, Planner]:
    """Return the planners of a call that a kernel computes on a GPU alone.

    Parameters
    ----------
    kernel
        ``kernel(operands, **params)`` returns the kernel, or why there is none. A ``Fallback``
        leaves all of the call to XLA.
    otherwise
        ``otherwise(*operands, **params)`` computes the call in another way.
    in_words
        ``in_words(**params)`` names this way for ``explain``, and says why it is that on CPUs.
    """

    def rewrite(reason: str, params: dict[str, Any]) -> Rewrite:
        how, _ = in_words(**params)
        return Rewrite(f"{how}: {reason}", functools.partial(otherwise, **params))

    def plan_on_cpu(_: Sequence[Operand], __: Any, **params: Any) -> Rewrite:
        return rewrite(in_words(**params)[1], params)

    def plan_on_cuda(operands: Sequence[Operand], _: Any, **params: Any) -> Outcome:
        found = kernel(operands, **params)
        return rewrite(found, params) if isinstance(found, str) else found

    return {"cpu": Planner(no_refusal, plan_on_cpu), "cuda": Planner(no_refusal, plan_on_cuda)}


# ``state(factors, out_dtype=..., extra=...)`` states a product, or how it is computed otherwise.
State = Callable[..., LoweredProduct | Rewrite | Fallback]


def fused_kernel(
    factors: Sequence[Operand],
    second: Operand | None,
    arrays: Sequence[Operand],
    *,
    contraction: Contraction,
    operand_labels: Sequence[Labels],
    function: ScalarFunction,
    accumulator: np.dtype[Any],
    state: State,
    in_place: InPlace = (),
    symmetric: bool = False,
) -> PlannedKernel | str:
    """Return a kernel that computes products and a function of their elements, or why none does.

    Parameters
    ----------
    factors
        The operands of a product.
    second
        What takes the place of ``rhs`` in a second product, if there is one.
    arrays
        The operands of the function, which follow the accumulators.
    contraction, operand_labels, function, accumulator, in_place, symmetric
        As the parameters of a contraction with an epilogue.
    state
        States the product.
    """
    dtypes = [x.aval.dtype for x in arrays]
    is_outer = len(factors) == 2 and contracts_nothing(factors[0].aval, contraction)
    if is_outer and not function.quantizes:
        # XLA's fusions then read vectors alone.
        return NOT_CONTRACTED
    reason = _cannot_quantize(function)
    if reason is not None:
        return reason
    try:
        text = cuda_text(function)
        for dtype in (*dtypes, *function.out_dtypes):
            computed_type(dtype)
    except Untranslatable as error:
        return str(error)
    if accumulator != accumulator_dtype(factors[0].aval.dtype):
        return f"no kernel accumulates in {accumulator}"
    results = function.result_labels(contraction.out)
    # Strides of scales are those of single blocks.
    stored = [
        own[1:] if _are_scales(kind) else own
        for own, kind in zip(results, function.reductions, strict=True)
    ]
    state = functools.partial(
        state,
        # A kernel whose results are reductions alone stores no element of this type.
        out_dtype=function.out_dtypes[0] if function.elements else accumulator,
        extra=(*operand_labels, *stored[min(1, function.elements) :]),
    )
    problem = state(factors)
    if not isinstance(problem, LoweredProduct):
        return problem.reason
    product, read = problem.product, problem.operands
    if second is not None:
        other = state((factors[0], second, *factors[2:]))
        if not isinstance(other, LoweredProduct) or other.product != product:
            return "the two operands lie differently in memory"
        if other.operands[0] != read[0]:
            return "the result is contiguous along the rows"
        product = dataclasses.replace(product, pair=True, symmetric=False)
        read = (*read, other.operands[1])
    geometry, grouped = product.geometry, product.is_grouped
    # A mapped dimension of one operand may have become a part of its rows.
    if symmetric and geometry.m == geometry.n:
        product = dataclasses.replace(product, symmetric=True)
    if min(geometry.m, geometry.n) == 1 and not grouped:
        return "products with a vector write little"
    epilogue = epilogue_of(
        text,
        function,
        dtypes,
        problem.extra_strides,
        batch=geometry.batch,
        m=geometry.m,
        products=1 if second is None else 2,
        ragged="rows" if grouped else None,
    )
    rounded = function.rounded_product(*(x.aval.dtype for x in factors[:2]))
    epilogue = dataclasses.replace(epilogue, rounded=rounded)
    if epilogue.quantized and geometry.n != _size_of(contraction.out[-1], factors, contraction):
        return "several dimensions are the columns of the product"
    # Without an epilogue the choice is that of a product, among which is XLA's.
    stated = product if function.is_identity else product.with_epilogue(epilogue)
    planned = cuda_kernel(stated, (*read, *(x.value for x in arrays)))
    if isinstance(planned, Fallback):
        return planned.reason
    values = [*read, *(x.value for x in (*factors, *arrays))]
    # Threads read the elements of their accumulators before they write them. A factor's elements
    # are read for other accumulators too.
    aliases = {
        len(read) + i: j
        for i, j in in_place
        if function.reductions[j] is None
        and operand_labels[i] == results[j]
        and arrays[i].aval.dtype == function.out_dtypes[j]
        and values.count(arrays[i].value) == 1
    }
    return dataclasses.replace(planned, aliases=aliases)


def _are_scales(kind: Any) -> bool:
    return isinstance(kind, RowQuantization) and kind.scales


def _cannot_quantize(function: ScalarFunction) -> str | None:
    """Return why no kernel quantises a function's rows, if it returns some."""
    if not function.quantizes:
        return None
    rows = function.reductions[function.elements :]
    scales = rows[-1]
    assert isinstance(scales, RowQuantization)
    values = dataclasses.replace(scales, scales=False)
    one_value = len(set(function.sources[function.elements :])) == 1
    if rows != (values, dataclasses.replace(scales, scales=True)) or not one_value:
        return "no kernel has other results of rows than values and their scales"
    return None


def _size_of(label: int, factors: Sequence[Operand], contraction: Contraction) -> int | None:
    """Return the size of a dimension of the result."""
    for labels, x in zip((contraction.lhs, contraction.rhs), factors, strict=False):
        if label in labels:
            size: int = x.aval.shape[labels.index(label)]
            return size
    return None


def epilogue_of(
    text: CudaText,
    function: ScalarFunction,
    operands: Sequence[np.dtype[Any]],
    strides: Sequence[tuple[int, ...]],
    *,
    batch: tuple[int, ...],
    m: int,
    products: int,
    ragged: Literal["rows"] | None,
) -> Epilogue:
    """Return the epilogue of a kernel.

    Parameters
    ----------
    text, function
        The function in CUDA, and in JAX.
    operands
        Types of its operands.
    strides
        Strides of its operands, and of its results but the first element.
    m
        Rows of each matrix.
    batch, products, ragged
        As in :class:`~jax_tilekern.plans.gemm.epilogue.Epilogue`.
    """
    stored = function.elements
    dtypes = (*operands, *function.out_dtypes[1:stored])
    arrays = tuple(
        EpilogueArray(np.dtype(dtype), computed_type(dtype), own)
        for dtype, own in zip(dtypes, strides, strict=False)
    )
    reductions = tuple(
        RowReductionText(kind, value, np.dtype(dtype), own)
        for kind, value, dtype, own in zip(
            function.reductions[stored:],
            text.results[stored:],
            function.out_dtypes[stored:],
            strides[len(arrays) :],
            strict=True,
        )
        if isinstance(kind, str)
    )
    quantized = None
    kind = function.reductions[-1]
    if isinstance(kind, RowQuantization):
        value_strides, (*outer, row, _) = strides[-2:]
        rows = math.prod(batch) * m
        quantized = QuantizedText(
            rounded(text.results[-1], function.out_dtypes[-1]),
            kind.power_of_two,
            EpilogueArray(kind.dtype, "float", value_strides),
            EpilogueArray(F32, "float", (*outer, row, rows)),
        )
    return Epilogue(
        statements=text.statements,
        results=text.results[:stored],
        operands=arrays[: len(operands)],
        outputs=arrays[len(operands) :],
        batch=batch,
        instructions=text.instructions
        + sum(x.instructions for x in reductions)
        + (QUANTIZING_INSTRUCTIONS if quantized else 0),
        ragged=ragged,
        reductions=reductions,
        products=products,
        quantized=quantized,
    )
