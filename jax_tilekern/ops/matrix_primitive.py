"""How the rules of an operation on batches of matrices are declared, once.

Unlike those of :mod:`jax_tilekern.primitive` these operations are not multilinear, so that each
states its own tangents, and some have several results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_tilekern import compat
from jax_tilekern.choices import record_choice
from jax_tilekern.compat import ad, batching, mlir
from jax_tilekern.primitive import Fallback, Kernel

# Binds a primitive to operands and parameters; results come as a list.
Bind = Callable[..., list[Any]]


@dataclass(frozen=True)
class MatrixOperation:
    """The rules of one operation. All functions take its parameters as keywords.

    Attributes
    ----------
    name
        The primitive's name, as it appears in a jaxpr.
    like_results
        ``like_results(*operands)`` gives arrays of the results' types, shapes and shardings.
    reference
        ``reference(*operands)`` gives the results by JAX's own functions: the meaning, and what
        runs where no kernel does.
    jvp
        ``jvp(primals, tangents)`` gives results and tangents. A tangent may be symbolically zero.
    batch
        ``batch(operands, dims)`` gives the results and their batch dimensions.
    planners
        For each platform, ``planner(ctx, *values)`` on MLIR values.
    describe
        ``describe()`` names the call for ``explain``.
    transpose
        ``transpose(cotangent, *operands)`` gives the cotangent of the last operand, in which an
        operation of one result is linear; ``None`` if it is not.
    """

    name: str
    like_results: Callable[..., Sequence[Any]]
    reference: Callable[..., Sequence[Any]]
    jvp: Callable[..., tuple[Sequence[Any], Sequence[Any]]]
    batch: Callable[..., tuple[Sequence[Any], Sequence[int]]]
    planners: Mapping[str, Callable[..., Kernel | Fallback]]
    describe: Callable[..., str]
    transpose: Callable[..., Any] | None = None


def define(operation: MatrixOperation) -> Bind:
    """Make the primitive of ``operation``; return the function that binds it."""
    primitive = compat.Primitive(operation.name)
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(compat.apply_primitive, primitive))

    def evaluate(*avals: Any, **params: Any) -> list[Any]:
        return compat.abstract_results(functools.partial(operation.like_results, **params), *avals)

    def bind(*operands: Any, **params: Any) -> list[Any]:
        results: list[Any] = primitive.bind(*compat.unify_varying(*operands), **params)
        return results

    def lower(platform: str, ctx: Any, *values: Any, **params: Any) -> Sequence[Any]:
        outcome = operation.planners[platform](ctx, *values, **params)
        kernel = outcome.name if isinstance(outcome, Kernel) else None
        record_choice(operation.describe(**params), ctx, platform, kernel, outcome.reason)
        if isinstance(outcome, Kernel):
            return outcome.emit()
        lowered: Sequence[Any] = lower_reference(ctx, *values, **params)
        return lowered

    def transpose(cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
        *known, unknown = operands
        if any(map(ad.is_undefined_primal, known)):
            raise TypeError(f"{operation.name} is not linear in its first operand")
        assert operation.transpose is not None
        (cotangent,) = cotangents
        if type(cotangent) is ad.Zero:
            return [*(None for _ in known), ad.Zero(unknown.aval.to_ct_aval())]
        result = operation.transpose(cotangent, *known, unknown.aval, **params)
        return [*(None for _ in known), result]

    primitive.def_abstract_eval(evaluate)
    lower_reference = mlir.lower_fun(operation.reference, multiple_results=True)
    ad.primitive_jvps[primitive] = operation.jvp
    if operation.transpose is not None:
        ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = operation.batch
    mlir.register_lowering(primitive, lower_reference)
    for platform in operation.planners:
        mlir.register_lowering(primitive, functools.partial(lower, platform), platform=platform)
    return bind
