"""The kernel of products with weights of 4 and 8 bits, as they lie in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array, lax

from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.planned_kernel import planned_kernel
from jax_tilekern.ops.products.scaled_operands import block_of_scales, dequantized
from jax_tilekern.plans.contraction import Contraction
from jax_tilekern.plans.gemm.arithmetic import F32
from jax_tilekern.plans.gemm.sm90.weight_only import (
    WeightOnlyCandidate,
    WeightOnlyProduct,
    choose_weight_only,
    plan_weight_only,
    refusal,
)
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.policy.choice import PolicyChoice
from jax_tilekern.plans.quantize import BLOCK, INTEGERS
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    PlannedKernel,
    Planner,
    define,
    no_refusal,
)

_INT4, _INT8 = INTEGERS


def why_not(
    contraction: Contraction, gpu: Gpu, x: Any, w: Any, scales: Any, zeros: Any = None
) -> str:
    """Return why no kernel multiplies by weights as they are, or nothing."""
    if w.dtype not in INTEGERS:
        return f"kernels multiply by int4 and int8, not {w.dtype}, as they are"
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


def multiply(
    contraction: Contraction,
    x: Array,
    w: Array,
    scales: Array,
    zeros: Array | None = None,
    *,
    out_dtype: np.dtype[Any],
) -> Array:
    """Multiply by the weights, if nothing is why not."""
    problem = _problem(contraction, x, w, scales, zeros, out_dtype)
    if w.dtype == _INT4:
        pairs = w.reshape(*w.shape[:-1], w.shape[-1] // 2, 2)
        w = lax.bitcast_convert_type(pairs, np.uint8)
    (found,) = _bind(w, x, scales, *([] if zeros is None else [zeros]), problem=problem)
    sizes = dict(zip((*contraction.lhs, *contraction.rhs), (*x.shape, *w.shape), strict=True))
    result: Array = found.reshape([sizes[label] for label in contraction.out])
    return result


def _is_of_rows(c: Contraction) -> bool:
    """Whether the operands are ``(batch, m, k)`` and ``(batch, n, k)``, and the result agrees."""
    *batch, n, k = c.rhs
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
        group=k if groups == 1 else block_of_scales(groups, k),
        dtype=x.dtype,
        out_dtype=out_dtype if out_dtype in (x.dtype, F32) else F32,
        scale_dtype=scales.dtype,
        zero_dtype=None if zeros is None else zeros.dtype,
        row_block={n: 1, 1: max(n, 1)}.get(rows, BLOCK),
        batch=math.prod(batch),
        x_batched=x_batched,
    )


# The primitive. Its operands are the bytes of the weights, x, scales, and zero points.


def _reference(w: Array, x: Array, *scales: Array, problem: WeightOnlyProduct) -> list[Array]:
    if problem.bits == 4:
        w = lax.bitcast_convert_type(w, _INT4)
        w = w.reshape(*w.shape[:-2], problem.k)
    weights = dequantized(w, *scales)
    weights = weights.reshape(problem.batch, problem.n, problem.k)
    x = x.reshape(problem.batch if problem.x_batched else 1, problem.m, problem.k)
    found = jnp.einsum("bmk,bnk->bmn", x.astype(F32), weights, precision="highest")
    return [found.astype(problem.out_dtype)]


def _like_results(*_: Array, problem: WeightOnlyProduct) -> list[Array]:
    return [jnp.zeros((problem.batch, problem.m, problem.n), problem.out_dtype)]


def _planned(
    operands: Sequence[Operand], _: Any, *, problem: WeightOnlyProduct
) -> PlannedKernel | Fallback:
    return planned_kernel([x.value for x in operands], plan_weight_only, problem)


def _batch(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("a product with weights is mapped before it becomes one of a kernel")


_bind = define(
    Operation(
        "tilekern_weight_kernel",
        _reference,
        batch=_batch,
        sharding_rule=None,
        # CPUs have no call of it, but for GPUs that tests emulate.
        planners=dict.fromkeys(("cpu", "cuda"), Planner(no_refusal, _planned)),
        describe=lambda *, problem: f"matmul by int{problem.bits}",
        several_results=True,
        like_results=_like_results,
    )
)
