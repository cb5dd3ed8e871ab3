"""The kernel of products with weights of 4 and 8 bits, as they lie in memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array, lax

from jax_tilekern.epilogue.cuda_text import computed_type, cuda_text
from jax_tilekern.epilogue.scalar_function import ScalarFunction
from jax_tilekern.epilogue.understood import Untranslatable
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.planned_kernel import define_kernel, planned_kernel
from jax_tilekern.ops.products.contraction import masked_product
from jax_tilekern.ops.products.fused_lowering import epilogue_of
from jax_tilekern.ops.products.scaled_operands import block_of_scales, dequantized
from jax_tilekern.plans.contraction import Contraction, Labels
from jax_tilekern.plans.gemm.arithmetic import F32, FP8
from jax_tilekern.plans.gemm.sm90.weight_only import WeightOnlyProduct, refusal
from jax_tilekern.plans.gemm.sm90.weight_only_choice import (
    WeightOnlyCandidate,
    choose_weight_only,
)
from jax_tilekern.plans.gemm.sm90.weight_only_launches import plan_weight_only
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.policy.choice import PolicyChoice
from jax_tilekern.plans.quantize import BLOCK, INTEGERS
from jax_tilekern.primitives.operation import Fallback, Operand, PlannedKernel

_INT4, _ = INTEGERS


def why_not(
    contraction: Contraction, gpu: Gpu, x: Any, w: Any, scales: Any, zeros: Any = None
) -> str:
    """Return why no kernel multiplies by weights as they are, or nothing."""
    if not _is_of_rows(contraction):
        return f"kernels multiply rows of both operands, not {contraction}"
    return refusal(_problem(contraction, x, w, scales, zeros, F32), gpu)


def choice(
    contraction: Contraction,
    gpu: Gpu,
    x: Any,
    w: Any,
    scales: Any,
    zeros: Any = None,
    *,
    has_function: bool,
) -> PolicyChoice[WeightOnlyCandidate]:
    """Choose the kernel or the dequantised product, if nothing is why not."""
    problem = _problem(contraction, x, w, scales, zeros, F32)
    return choose_weight_only(problem, gpu, has_function=has_function)


def applies(
    function: ScalarFunction, contraction: Contraction, x: Any, read: Sequence[tuple[Any, Labels]]
) -> bool:
    """Whether the kernel applies a function of the elements, which reads labelled arrays."""
    if contraction.bounds:
        return False
    by_element = not any(function.reductions) and not function.is_closure
    if not by_element or function.out_dtypes[0] not in (x.dtype, F32):
        return False
    if any(_dims_of(contraction, labels) is None for _, labels in read):
        return False
    try:
        cuda_text(function)
        for dtype in (*(x.dtype for x, _ in read), *function.out_dtypes):
            computed_type(dtype)
    except Untranslatable:
        return False
    return True


def multiply(
    contraction: Contraction,
    x: Array,
    w: Array,
    scales: Array,
    zeros: Array | None = None,
    *,
    bounds: Sequence[Array] = (),
    second: Sequence[Array] = (),
    out_dtype: np.dtype[Any],
    function: ScalarFunction | None = None,
    read: Sequence[tuple[Array, Labels]] = (),
) -> list[Array]:
    """Multiply by the weights, if nothing is why not, and apply a function, if ``applies``.

    Those of ragged rows have their bounds. By a ``second`` array of weights, with scales and zero
    points of the same kind, there is a result more.
    """
    problem = _problem(contraction, x, w, scales, zeros, out_dtype)
    problem = dataclasses.replace(problem, pair=bool(second))
    shape = dict(zip((*contraction.lhs, *contraction.rhs), (*x.shape, *w.shape), strict=True))
    sizes = problem.batch, problem.m, problem.n
    dims = [_dims_of(contraction, labels) or () for _, labels in read]
    found = _bind(
        *(_as_bytes(w), x, scales),
        *([] if zeros is None else [zeros]),
        *((_as_bytes(second[0]), *second[1:]) if second else ()),
        *bounds,
        *(y.reshape([sizes[i] for i in own]) for (y, _), own in zip(read, dims, strict=True)),
        problem=problem,
        function=function,
        read=tuple(dims),
    )
    if second:
        return [found[0][:, : problem.n], found[0][:, problem.n :]]
    return [y.reshape([shape[label] for label in contraction.out]) for y in found]


def _as_bytes(w: Array) -> Array:
    if w.dtype in FP8:
        return lax.bitcast_convert_type(w, np.uint8)
    if w.dtype != _INT4:
        return w
    pairs = w.reshape(*w.shape[:-1], w.shape[-1] // 2, 2)
    return lax.bitcast_convert_type(pairs, np.uint8)


def _dims_of(c: Contraction, labels: Labels) -> tuple[int, ...] | None:
    """Return which of batch, rows and columns an array has whole and in order, if that is all."""
    *batch, n, _ = c.rhs
    rest, dims = labels, []
    for i, own in enumerate((batch, [x for x in c.lhs[:-1] if x not in batch], [n])):
        if own and rest[: len(own)] == tuple(own):
            rest = rest[len(own) :]
            dims.append(i)
    return None if rest else tuple(dims)


def _is_of_rows(c: Contraction) -> bool:
    """Whether the operands are ``(batch, m, k)`` and ``(batch, n, k)``, and the result agrees.

    Those of ragged rows are ``(m, k)`` and ``(groups, n, k)``.
    """
    *batch, n, k = c.rhs
    if c.bounds:
        return (c.lhs, c.rhs, c.out) == ((c.ragged, k), (*c.bounds, n, k), (c.ragged, n))
    if c.lhs[-1] != k or c.out[-1] != n:
        return False
    shared = [label for label in batch if label in c.lhs]
    of_x = [label for label in c.lhs[:-1] if label not in batch]
    return shared in ([], batch) and (*shared, *of_x, k) == c.lhs and (*batch, *of_x, n) == c.out


def _problem(
    c: Contraction, x: Any, w: Any, scales: Any, zeros: Any, out_dtype: np.dtype[Any]
) -> WeightOnlyProduct:
    *batch, n, k = w.shape
    *_, rows, groups = scales.shape
    x_batched = bool(batch) and c.rhs[0] in c.lhs
    m = math.prod(x.shape[len(batch) * x_batched : -1])
    return WeightOnlyProduct(
        m=m,
        n=n,
        k=k,
        bits=4 if w.dtype == _INT4 else 8,
        float8=w.dtype if w.dtype in FP8 else None,
        group=k if groups == 1 else block_of_scales(groups, k),
        dtype=x.dtype,
        out_dtype=out_dtype if out_dtype in (x.dtype, F32) else F32,
        scale_dtype=scales.dtype,
        zero_dtype=None if zeros is None else zeros.dtype,
        row_block={n: 1, 1: max(n, 1)}.get(rows, BLOCK),
        batch=math.prod(batch),
        x_batched=x_batched,
        ragged=bool(c.bounds),
    )


# The primitive. Its operands are the bytes of the weights, x, scales, zero points, a second array
# of weights, bounds of ragged rows, and what a function of the elements reads. Arrays of these have
# some of batch, rows of x and rows of weights.

_ELEMENTS = (0, 1, 2)
_RAGGED = Contraction((0, 1), (2, 3, 1), (0, 3), (2,), 0, 2)
_Read = tuple[tuple[int, ...], ...]


def _reference(
    w: Array,
    x: Array,
    *others: Array,
    problem: WeightOnlyProduct,
    function: ScalarFunction | None,
    read: _Read,
) -> list[Array]:
    of_weights = 1 + (problem.zero_dtype is not None)

    def dequantised(w: Array, *scales: Array) -> Array:
        if problem.bits == 4:
            w = lax.bitcast_convert_type(w, _INT4)
            w = w.reshape(*w.shape[:-2], problem.k)
        elif problem.float8:
            w = lax.bitcast_convert_type(w, problem.float8)
        return dequantized(w, *scales).reshape(problem.batch, problem.n, problem.k)

    weights = dequantised(w, *others[:of_weights])
    if problem.pair:
        weights = jnp.concatenate([weights, dequantised(*others[of_weights:-1])], 1)
    if problem.ragged:
        layout: dict[str, Any] = {"contraction": _RAGGED, "precision": lax.Precision.HIGHEST}
        rows = x.reshape(problem.m, problem.k).astype(F32)
        product = masked_product(rows, weights, others[-1], **layout, out_dtype=F32)
        return [product.astype(problem.out_dtype)]
    x = x.reshape(problem.batch if problem.x_batched else 1, problem.m, problem.k)
    found = jnp.einsum("bmk,bnk->bmn", x.astype(F32), weights, precision="highest")
    if function is None:
        return [found.astype(problem.out_dtype)]
    return function.over_labels(_ELEMENTS, read)(found, *others[of_weights:])


def _like_results(
    *_: Array, problem: WeightOnlyProduct, function: ScalarFunction | None, read: _Read
) -> list[Array]:
    dtypes = (problem.out_dtype,) if function is None else function.out_dtypes
    batch = () if problem.ragged else (problem.batch,)
    return [jnp.zeros((*batch, problem.m, problem.columns), dtype) for dtype in dtypes]


def _planned(
    operands: Sequence[Operand],
    _: Any,
    *,
    problem: WeightOnlyProduct,
    function: ScalarFunction | None,
    read: _Read,
) -> PlannedKernel | Fallback:
    if function is not None:
        arrays = [x.aval for x in operands[len(operands) - len(read) :]]
        outputs = [_ELEMENTS] * (function.elements - 1)
        epilogue = epilogue_of(
            cuda_text(function),
            function,
            [x.dtype for x in arrays],
            [_strides(problem, dims) for dims in (*read, *outputs)],
            batch=(problem.batch,),
            m=problem.m,
            products=1,
            ragged=None,
        )
        problem = dataclasses.replace(problem, epilogue=epilogue)
    return planned_kernel([x.value for x in operands], plan_weight_only, problem)


def _strides(problem: WeightOnlyProduct, dims: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of an array that is broadcast over all but some dimensions."""
    sizes = problem.batch, problem.m, problem.n
    return tuple(math.prod(sizes[j] for j in dims if j > i) if i in dims else 0 for i in _ELEMENTS)


_bind = define_kernel(
    "tilekern_weight_kernel",
    _reference,
    _planned,
    describe=lambda *, problem, **_: f"matmul by {problem.weights_name}",
    like_results=_like_results,
)
