"""How the rules of an operation on batches of matrices are declared, once.

Unlike those of :mod:`jax_tilekern.primitives.operation` these operations are not multilinear, so
that each states its own tangents, and some have several results. Devices share the leading
dimensions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jax_tilekern.inspection.choices import record_choice
from jax_tilekern.partitioning import xla
from jax_tilekern.partitioning.call import PartitionedOperation, lower_partitioned, register
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.partitioning.xla import Place
from jax_tilekern.primitives import compat, modes
from jax_tilekern.primitives.compat import ad, batching, mlir
from jax_tilekern.primitives.operation import Fallback, Kernel, obstacle

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
    refusal
        ``refusal(*avals)`` says why no kernel covers a call, whatever its leading dimensions are;
        it returns ``None`` if one may.
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
    refusal: Callable[..., Fallback | None]
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

    def sharding_rule(*avals: Any, **params: Any) -> ShardingRule:
        evaluated = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in avals]
        leading = tuple(range(avals[0].ndim - 2))
        operands, results = (
            tuple((*leading, *(None,) * (aval.ndim - len(leading))) for aval in arrays)
            for arrays in (avals, evaluate(*evaluated, **params))
        )
        size = avals[0].shape[-1]
        return ShardingRule(
            operands,
            results,
            dict(zip(leading, avals[0].shape, strict=False)),
            flops=2.0 * math.prod(avals[0].shape) * size,
            names={axis: f"axis {axis}" for axis in leading},
        )

    partitioned = PartitionedOperation(operation.name, sharding_rule, bind)
    register(partitioned)

    def outcome_on_device(
        platform: str, ctx: Any, *values: Any, **params: Any
    ) -> Kernel | Fallback | None:
        """Return what computes a call, or ``None`` if XLA is to partition it first."""
        off = modes.why_disabled()
        refused = operation.refusal(*ctx.avals_in, **params) if off is None else Fallback(off)
        if refused is not None:
            return refused
        place = xla.place(ctx)
        if place is Place.LOCAL:
            return operation.planners[platform](ctx, *values, **params)
        why = obstacle(place, (*ctx.avals_in, *ctx.avals_out))
        return None if why is None else Fallback(why)

    def lower(platform: str, ctx: Any, *values: Any, **params: Any) -> Sequence[Any]:
        outcome = outcome_on_device(platform, ctx, *values, **params)
        if outcome is None:
            described = operation.describe(**params)
            return lower_partitioned(ctx, partitioned, platform, described, *values, **params)
        call = operation.describe(**params)
        kernel = outcome.name if isinstance(outcome, Kernel) else None
        record_choice(call, ctx, platform, kernel, outcome.reason)
        if isinstance(outcome, Kernel):
            return outcome.emit()
        modes.note_fallback(call, platform, outcome.reason)
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
    rules = {platform: functools.partial(lower, platform) for platform in operation.planners}
    # Not cacheable: what a call lowers to depends on where in a program it stands.
    mlir.register_lowering(
        primitive,
        functools.partial(compat.lower_per_platform, operation.name, rules, lower_reference),
        cacheable=False,
    )
    return bind
