"""Products of the same ragged rows by two arrays of quantised weights, in one kernel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from jax_tilekern.epilogue.scalar_function import Role
from jax_tilekern.interop.custom_rules import custom_jvp
from jax_tilekern.interop.global_modes import mode_independent
from jax_tilekern.ops.products import weight_kernel
from jax_tilekern.ops.products.scaled_call import ROWS_BY_MATRICES
from jax_tilekern.ops.products.weight_product import weights_call
from jax_tilekern.plans.gpu import current_gpu
from jax_tilekern.primitives.operation import (
    Operand,
    Operation,
    Planner,
    Rewrite,
    define,
    no_refusal,
)

Factors = tuple[Array, ...]


def is_pair(first: Factors, second: Factors) -> bool:
    """Whether one kernel may multiply by both: integers, scales and zero points are alike."""
    kinds = [[(x.shape, x.dtype) for x in each] for each in (first, second)]
    return kinds[0] == kinds[1]


def multiply_by_pair(
    x: Array, first: Factors, second: Factors, bounds: Array, *, precision: Any, out_dtype: Any
) -> list[Array]:
    """Multiply rows by a matrix of their group of each of two arrays, for which ``is_pair`` holds.

    Arrays are integers, scales, and zero points if there are any.
    """
    params = {"precision": precision, "out_dtype": np.dtype(out_dtype)}

    @custom_jvp
    def pair(bounds: Array, x: Array, first: Factors, second: Factors) -> list[Array]:
        return list(_bind(x, *first, *second, bounds, **params))

    @pair.defjvp
    @mode_independent
    def _jvp(primals: Any, tangents: Any) -> Any:
        bounds, *moving = primals

        def separately(x: Array, first: Factors, second: Factors) -> list[Array]:
            return _separately(x, *first, *second, bounds, **params)

        return jax.jvp(separately, moving, [*tangents[1:]])

    results: list[Array] = pair(bounds, x, first, second)
    return results


def _separately(x: Array, *operands: Array, precision: Any, out_dtype: Any) -> list[Array]:
    *weights, bounds = operands
    half = len(weights) // 2
    call: dict[str, Any] = {"contraction": ROWS_BY_MATRICES, "role": Role("moe")}
    call |= {"precision": precision, "out_dtype": out_dtype}
    return [
        weights_call(x, factors, [bounds], shape=(x.shape[0], factors[0].shape[1]), **call)
        for factors in (weights[:half], weights[half:])
    ]


def _batch(
    _: Any, operands: Sequence[Array], dims: Sequence[int | None], **params: Any
) -> tuple[list[Array], list[int]]:
    results = jax.vmap(functools.partial(_separately, **params), dims)(*operands)
    return results, [0] * len(results)


def _two(reason: str, **params: Any) -> Rewrite:
    return Rewrite(f"two products: {reason}", functools.partial(_separately, **params))


def _on_cpu(_operands: Any, _results: Any, **params: Any) -> Rewrite:
    return _two("CPUs have no kernel of both", **params)


def _on_gpu(operands: Sequence[Operand], _: Any, **params: Any) -> Rewrite:
    x, *weights = (each.aval for each in operands[:-1])
    half, gpu = len(weights) // 2, current_gpu()
    first = x, *weights[:half]
    if why := weight_kernel.why_not(ROWS_BY_MATRICES, gpu, *first):
        return _two(why, **params)
    choice = weight_kernel.choice(ROWS_BY_MATRICES, gpu, *first, has_function=False)
    if choice.candidate is None:
        return _two(choice.reason, **params)
    out_dtype = params["out_dtype"]

    def both(x: Array, *operands: Array) -> list[Array]:
        *weights, bounds = operands
        found = weight_kernel.multiply(
            ROWS_BY_MATRICES, x, *weights[:half], second=weights[half:], bounds=[bounds],
            out_dtype=out_dtype,
        )  # fmt: skip
        return [y.astype(out_dtype) for y in found]

    return Rewrite(f"a kernel reads both weights as they are; {choice.reason}", both)


_bind = define(
    Operation(
        "tilekern_weight_pair",
        _separately,
        batch=_batch,
        sharding_rule=None,
        planners={"cpu": Planner(no_refusal, _on_cpu), "cuda": Planner(no_refusal, _on_gpu)},
        describe=lambda **_: "scaled_ragged_dot by two arrays of weights",
        several_results=True,
    )
)
