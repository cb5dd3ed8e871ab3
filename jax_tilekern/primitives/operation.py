"""How an operation's rules are declared, once.

An operation is a value of :class:`Operation`: what it means in terms of ``jax.lax``, which
operands it is linear in, how it batches, which of its dimensions devices may share, and which
kernels compute it on each platform. :func:`define` makes the JAX primitive from it:

- *abstract evaluation* is that of the reference, so shapes, dtypes, weak types, shardings,
  varying axes and the errors about them are JAX's own;
- *jvp* follows from linearity in each operand; the *transpose* and *batching* rules are the
  operation's, and bind the operation itself again;
- *lowering* asks the platform's planner, and what no kernel covers lowers to the reference. In a
  ``jit`` over several devices the call is partitioned first, by its sharding rule, and the planner
  is asked for the call on each device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax_tilekern.inspection.choices import record_choice
from jax_tilekern.partitioning import xla
from jax_tilekern.partitioning.call import PartitionedOperation, lower_partitioned, register
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.partitioning.xla import Place
from jax_tilekern.patching.interception import by_xla
from jax_tilekern.primitives import compat, modes, remat
from jax_tilekern.primitives.compat import ad, mlir
from jax_tilekern.primitives.linearity import cotangents_in, tangents_out

Params = dict[str, Any]


@dataclass(frozen=True)
class Kernel:
    """A planner's answer: this kernel computes the call.

    Attributes
    ----------
    name
        The kernel, as ``explain`` shows it.
    reason
        Why it was chosen.
    emit
        Makes the custom call's results.
    """

    name: str
    reason: str
    emit: Callable[[], Sequence[Any]]


@dataclass(frozen=True)
class Rewrite:
    """A planner's answer: ``function`` computes the call through another call of a kernel."""

    reason: str
    function: Callable[..., Any]


@dataclass(frozen=True)
class Fallback:
    """A planner's answer: no kernel covers the call, so XLA's own operation does."""

    reason: str


class Planner(NamedTuple):
    """How a platform computes an operation.

    Attributes
    ----------
    refusal
        ``refusal(*avals, **params)`` says why no kernel covers a call, whatever its sizes are; it
        returns ``None`` if one may. Where a call is partitioned, it is all that is asked of the
        whole call.
    plan
        ``plan(ctx, *values, **params)`` on MLIR values, for calls that are not refused.
    """

    refusal: Callable[..., Fallback | None]
    plan: Callable[..., Kernel | Rewrite | Fallback]


class Source(NamedTuple):
    """Operands where they lie: MLIR values and types, and the parameters of the call on them."""

    values: Sequence[Any]
    avals: Sequence[Any]
    params: Params


@dataclass(frozen=True)
class Operation:
    """The rules of one operation.

    Attributes
    ----------
    name
        The primitive's name, as it appears in a jaxpr.
    reference
        ``reference(*operands, **params)`` in terms of ``jax.lax``: the meaning and the fallback.
    transposes
        For each operand in which the operation is linear, the rule
        ``rule(cotangent, *operands, **params)`` that gives that operand's cotangent; the linear
        operand itself is passed as its abstract value. A tuple of operands in which it is
        *jointly* linear has a rule that gives as many cotangents.
    batch
        ``batch(axis_data, operands, dims, **params)`` gives the batched result and its batch
        dimension.
    sharding_rule
        ``sharding_rule(*avals, **params)`` labels the dimensions that devices may share.
    planners
        For each platform.
    describe
        The call in a few words from its parameters, for ``explain``.
    localised
        Rewrites operands that hold positions along a dimension that is shared out; see
        :class:`~jax_tilekern.partitioning.call.PartitionedOperation`.
    source
        ``source(ctx, *values, **params)`` looks through what transposes operands. What a call is
        lowered to on each device sees no further than its own operands.
    in_float32
        ``in_float32(**params)`` returns the parameters of a call that gives its result in float32,
        for partial results that are added up over devices.
    stands_for
        ``stands_for(**params)`` gives the primitive of JAX's, and its parameters, as which
        checkpoint policies see the operation. Without it they see the operation itself.
    """

    name: str
    reference: Callable[..., Any]
    transposes: Mapping[int | tuple[int, ...], Callable[..., Any]]
    batch: Callable[..., tuple[Any, int]]
    sharding_rule: Callable[..., ShardingRule]
    planners: Mapping[str, Planner]
    describe: Callable[..., str]
    localised: Callable[..., Sequence[Any]] | None = None
    source: Callable[..., Source] | None = None
    in_float32: Callable[..., Params] | None = None
    stands_for: remat.StandsFor | None = None


def define(operation: Operation) -> Callable[..., Any]:
    """Make the primitive of ``operation``; return the function that binds it."""
    operation = dataclasses.replace(operation, reference=by_xla(operation.reference))
    primitive = compat.Primitive(operation.name)
    primitive.def_impl(functools.partial(compat.apply_primitive, primitive))
    primitive.def_abstract_eval(_abstract_evaluation(operation))

    def bind(*operands: Any, **params: Any) -> Any:
        return primitive.bind(*compat.unify_varying(*operands), **params)

    groups = dict(_as_group(*item) for item in operation.transposes.items())

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        def bind_one(*operands: Any) -> list[Any]:
            return [bind(*operands, **params)]

        result = bind(*primals, **params)
        (tangent,) = tangents_out(bind_one, tuple(groups), primals, tangents, [result])
        return result, tangent

    def transpose(cotangent: Any, *operands: Any, **params: Any) -> list[Any]:
        if type(cotangent) is ad.Zero:
            return [
                ad.Zero(x.aval.to_ct_aval()) if ad.is_undefined_primal(x) else None
                for x in operands
            ]
        return cotangents_in(groups, cotangent, operands, params)

    def batch(
        axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], **params: Any
    ) -> tuple[Any, int | None]:
        if all(dim is None for dim in dims):
            return bind(*operands, **params), None
        return operation.batch(axis_data, operands, dims, **params)

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    compat.register_batching(primitive, batch)
    compat.register_nan_check(primitive)

    partitioned = PartitionedOperation(
        operation.name,
        operation.sharding_rule,
        lambda *operands, **params: [bind(*operands, **params)],
        operation.localised,
        operation.in_float32,
    )
    register(partitioned)
    rules = {
        platform: functools.partial(_lower, operation, partitioned, platform)
        for platform in operation.planners
    }
    elsewhere = mlir.lower_fun(operation.reference, multiple_results=False)
    # Not cacheable: a planner looks at where its operands come from.
    mlir.register_lowering(
        primitive,
        functools.partial(compat.lower_per_platform, operation.name, rules, elsewhere),
        cacheable=False,
    )
    if operation.stands_for is not None:
        remat.register(primitive, operation.stands_for)
    return bind


def _as_group(
    operands: int | tuple[int, ...], rule: Callable[..., Any]
) -> tuple[tuple[int, ...], Callable[..., Sequence[Any]]]:
    if isinstance(operands, tuple):
        return operands, rule
    return (operands,), lambda *args, **params: (rule(*args, **params),)


def _abstract_evaluation(operation: Operation) -> Callable[..., Any]:
    @functools.lru_cache(maxsize=4096)
    def evaluate(avals: tuple[Any, ...], params: tuple[tuple[str, Any], ...]) -> Any:
        reference = functools.partial(operation.reference, **dict(params))
        (result,) = compat.abstract_results(reference, *avals)
        return result

    return lambda *avals, **params: evaluate(avals, tuple(sorted(params.items())))


def _lower(
    operation: Operation,
    partitioned: PartitionedOperation,
    platform: str,
    ctx: Any,
    *values: Any,
    **params: Any,
) -> Sequence[Any]:
    planner = operation.planners[platform]
    disabled = modes.why_disabled()
    refused = Fallback(disabled) if disabled else planner.refusal(*ctx.avals_in, **params)
    if refused is not None:
        return _lowered(operation, platform, refused, ctx, *values, **params)
    place = xla.place(ctx)
    if place is Place.LOCAL:
        outcome = planner.plan(ctx, *values, **params)
        return _lowered(operation, platform, outcome, ctx, *values, **params)
    why = obstacle(place, (*ctx.avals_in, *ctx.avals_out))
    if why is not None:
        return _lowered(operation, platform, Fallback(why), ctx, *values, **params)
    source = Source(values, ctx.avals_in, params)
    if operation.source is not None:
        source = operation.source(ctx, *values, **params)
    if "out_sharding" in params:
        source.params["out_sharding"] = None
    ctx = ctx.replace(avals_in=list(source.avals))
    described = operation.describe(**source.params)
    return lower_partitioned(ctx, partitioned, platform, described, *source.values, **source.params)


def obstacle(place: Place, avals: Sequence[Any]) -> str | None:
    """Return why a call on several devices is XLA's to partition, if it is."""
    if place is Place.PARTLY_MANUAL:
        return (
            "XLA partitions its own operation in a shard_map over some mesh axes; one over all of "
            "them has a kernel"
        )
    if xla.has_partial_sums(avals):
        return "XLA keeps account of unreduced and reduced axes in its own operations"
    if not xla.uses_shardy():
        return "GSPMD (jax_use_shardy_partitioner=False) partitions XLA's own operation"
    return None


def _lowered(
    operation: Operation,
    platform: str,
    outcome: Kernel | Rewrite | Fallback,
    ctx: Any,
    *values: Any,
    **params: Any,
) -> Sequence[Any]:
    call = operation.describe(**params)
    record_choice(
        call,
        ctx,
        platform,
        outcome.name if isinstance(outcome, Kernel) else None,
        outcome.reason,
    )
    if isinstance(outcome, Kernel):
        return outcome.emit()
    if isinstance(outcome, Fallback):
        modes.note_fallback(call, platform, outcome.reason)
    function: Callable[..., Any] = functools.partial(operation.reference, **params)
    if isinstance(outcome, Rewrite):
        function = compat.with_automatic_axes(outcome.function, params.get("out_sharding"))
    lowered: Sequence[Any] = mlir.lower_fun(function, multiple_results=False)(ctx, *values)
    return lowered
