"""What products and grouped GEMMs with an epilogue share: operands, derivatives, generated text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_tilekern.epilogue.cuda_text import CudaText, Untranslatable, computed_type, cuda_text
from jax_tilekern.epilogue.scalar_function import ScalarFunction
from jax_tilekern.interop import compat
from jax_tilekern.interop.compat import ad
from jax_tilekern.plans.gemm.arithmetic import accumulator_dtype
from jax_tilekern.plans.gemm.contraction import Labels
from jax_tilekern.plans.gemm.epilogue import Epilogue, EpilogueArray, RowReduction
from jax_tilekern.primitives.operation import Fallback, Kernel, Operand, Planner, Rewrite


def check_operands(epilogue: Callable[..., Any] | None, **operands: Any) -> None:
    """Raise a ``TypeError`` if operands of an epilogue are no sequence, or nothing reads them."""
    for name, arrays in operands.items():
        if not isinstance(arrays, Sequence):
            raise TypeError(
                f"{name} of an epilogue are a sequence of arrays, got one of shape "
                f"{np.shape(arrays)}: pass {name}=(x,)"
            )
        if arrays and epilogue is None:
            raise TypeError(
                f"{len(arrays)} {name} of an epilogue, but no epilogue= that reads them"
            )


def with_labels(
    number: int, x: Array, out: Labels, shape: Sequence[int], whose: str = "the product's"
) -> tuple[Array, Labels]:
    """Label an operand's dimensions as NumPy broadcasts them, without those of size 1."""
    aligned = tuple(shape[len(shape) - x.ndim :])
    if x.ndim > len(shape) or any(
        own not in (1, size) for own, size in zip(x.shape, aligned, strict=True)
    ):
        raise ValueError(
            f"operand {number} of the epilogue has shape {x.shape}, which does not broadcast to "
            f"{whose}, {tuple(shape)}"
        )
    labels = out[len(out) - x.ndim :]
    dropped = [i for i, size in enumerate(x.shape) if size == 1]
    return lax.squeeze(x, dropped), tuple(
        label for i, label in enumerate(labels) if i not in dropped
    )


def jvp_at_pre_activation(
    bind: Callable[..., Sequence[Array]],
    function: ScalarFunction,
    elementwise: Callable[[ScalarFunction], Callable[..., list[Array]]],
    change: Callable[[Any, Any], Array],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    product: np.dtype[Any],
    accumulator: np.dtype[Any],
) -> tuple[list[Any], list[Any]]:
    """Return the results of a call with an epilogue, and their tangents.

    Parameters
    ----------
    bind
        ``bind(function=function)`` makes the call.
    function
        The epilogue.
    elementwise
        Returns the function of accumulators and operands that a function of scalars is.
    change
        ``change(lhs, rhs)`` contracts two arrays, of which one is a tangent.
    primals, tangents
        Of ``lhs``, ``rhs`` and the operands of the epilogue.
    product, accumulator
        Types of the product and of the accumulators.
    """
    saved = function.accumulator_result
    added = saved is None
    if saved is None:
        saved, function = function.elements, function.with_accumulator(product)
    results = bind(function=function)
    pre_activation = results[saved].astype(accumulator)

    lhs, rhs, *operands = primals
    changes = [
        change(left, right)
        for left, right, tangent in (
            (tangents[0], rhs, tangents[0]),
            (lhs, tangents[1], tangents[1]),
        )
        if type(tangent) is not ad.Zero
    ]
    points = [pre_activation, *operands]
    directions = [
        functools.reduce(jnp.add, changes).astype(accumulator) if changes else None,
        *(None if type(x) is ad.Zero else x for x in tangents[2:]),
    ]
    active = [i for i, x in enumerate(directions) if x is not None]
    of_arrays = elementwise(function)

    def of_active(*values: Any) -> list[Any]:
        filled = list(points)
        for i, value in zip(active, values, strict=True):
            filled[i] = value
        return of_arrays(*filled)

    _, derived = jax.jvp(of_active, [points[i] for i in active], [directions[i] for i in active])
    out = [
        x if jnp.issubdtype(result.dtype, jnp.inexact) else compat.zero_tangent(result)
        for result, x in zip(results, derived, strict=True)
    ]
    kept = [i for i in range(len(out)) if not (added and i == saved)]
    return [results[i] for i in kept], [out[i] for i in kept]


def generated_epilogue(
    text: CudaText,
    function: ScalarFunction,
    operands: Sequence[np.dtype[Any]],
    strides: Sequence[tuple[int, ...]],
    batch: tuple[int, ...],
    products: int = 1,
    ragged: Literal["rows"] | None = None,
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
    batch
        Sizes of the product's batch dimensions.
    products, ragged
        As in :class:`~jax_tilekern.plans.gemm.epilogue.Epilogue`.
    """
    stored = function.elements
    dtypes = (*operands, *function.out_dtypes[1:stored])
    arrays = tuple(
        EpilogueArray(np.dtype(dtype), computed_type(dtype), own)
        for dtype, own in zip(dtypes, strides, strict=False)
    )
    reductions = tuple(
        RowReduction(kind, value, np.dtype(dtype), own)
        for kind, value, dtype, own in zip(
            function.reductions[stored:],
            text.results[stored:],
            function.out_dtypes[stored:],
            strides[len(arrays) :],
            strict=True,
        )
        if kind is not None
    )
    return Epilogue(
        statements=text.statements,
        results=text.results[:stored],
        operands=arrays[: len(operands)],
        outputs=arrays[len(operands) :],
        batch=batch,
        instructions=text.instructions + sum(x.instructions for x in reductions),
        ragged=ragged,
        reductions=reductions,
        products=products,
    )


def planners(
    factors: int, unfused: Callable[..., list[Array]], kernel: Callable[..., Kernel | str]
) -> dict[str, Planner]:
    """Return the planners of a product with an epilogue.

    Parameters
    ----------
    factors
        Number of the product's own operands, which precede those of the epilogue.
    unfused
        Computes the product by a kernel, and the epilogue in XLA.
    kernel
        ``kernel(factors, operands, text, **params)`` returns a kernel that computes both on a GPU,
        or why there is none.
    """

    def after_the_product(reason: str, params: dict[str, Any]) -> Rewrite:
        return Rewrite(
            f"the epilogue runs in XLA, after the product: {reason}",
            functools.partial(unfused, **params),
        )

    def refusal(*_: Any, **__: Any) -> Fallback | None:
        return None

    def plan_on_cpu(_: Sequence[Operand], __: Any, **params: Any) -> Rewrite:
        return after_the_product("XLA fuses it into one pass", params)

    def plan_on_cuda(operands: Sequence[Operand], _: Any, **params: Any) -> Kernel | Rewrite:
        function, arrays = params["function"], operands[factors:]
        try:
            text = cuda_text(function)
            for dtype in (*(x.aval.dtype for x in arrays), *function.out_dtypes):
                computed_type(dtype)
        except Untranslatable as error:
            return after_the_product(str(error), params)
        if params["accumulator"] != accumulator_dtype(operands[0].aval.dtype):
            return after_the_product(f"no kernel accumulates in {params['accumulator']}", params)
        found = kernel(operands[:factors], arrays, text, **params)
        return after_the_product(found, params) if isinstance(found, str) else found

    return {"cpu": Planner(refusal, plan_on_cpu), "cuda": Planner(refusal, plan_on_cuda)}


def described(
    contraction: Any, operand_labels: tuple[Labels, ...], function: ScalarFunction, **_: Any
) -> str:
    """Return what ``explain`` calls a product with an epilogue."""
    names = contraction.names
    arrays = ("".join(names[x] for x in labels) or "1" for labels in operand_labels)
    return f"contract {contraction}, {function.name}({', '.join(('accumulator', *arrays))})"
