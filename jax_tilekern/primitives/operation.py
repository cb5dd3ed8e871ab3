"""How an operation's rules are declared, once.

An operation is a value of :class:`Operation`: what it means in terms of ``jax.lax``, how it is
differentiated and batched, which of its dimensions devices may share, and which kernels compute it
on each platform. :func:`define` makes the JAX primitive from it:

- *abstract evaluation* is that of the reference, so shapes, dtypes, weak types, shardings,
  varying axes and the errors about them are JAX's own;
- *jvp* follows from linearity in groups of operands, or is the operation's own; the *transpose* and
  *batching* rules are the operation's, and bind the operation itself again;
- *lowering* asks the platform's planner, and what no kernel covers lowers to the reference. In a
  ``jit`` over several devices the call is partitioned first, by its sharding rule, and the planner
  is asked for the call on each device.

An equation has the settings that it was traced under (:mod:`jax_tilekern.scope`); no rule of an
operation sees them, and every rule runs under them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_tilekern.interop import compat, ffi, outcomes
from jax_tilekern.interop.compat import ad, mlir, partial_eval
from jax_tilekern.interop.global_modes import (
    Modes,
    by_types,
    by_xla,
    mode_independent,
    with_current_modes,
)
from jax_tilekern.interop.outcomes import listed_below, record_choice, record_elsewhere
from jax_tilekern.interop.primitive import Primitive
from jax_tilekern.interop.result_types import evaluated_at_any_size
from jax_tilekern.partitioning import params_text, xla
from jax_tilekern.partitioning.agreement import require_agreement
from jax_tilekern.partitioning.call import PartitionedOperation, lower_partitioned, register
from jax_tilekern.partitioning.local_program import FunctionOfSum
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.partitioning.xla import Place
from jax_tilekern.plans.gpu import planning_beside_collectives
from jax_tilekern.plans.launch import NOT_PREDICTED, LaunchPlan, PredictedUs
from jax_tilekern.plans.policy import policy, why_excluded
from jax_tilekern.primitives import deferral, remat, taylor
from jax_tilekern.primitives.linearity import OperandGroup, cotangents_in, jvp_of, tangents_out
from jax_tilekern.scope import Setting, under_traced_settings

Params = dict[str, Any]


class Operand(NamedTuple):
    """An operand of a call that is being lowered: its MLIR value and its abstract value."""

    value: Any
    aval: Any


@dataclass(frozen=True)
class PlannedKernel:
    """A planner's answer: this kernel computes the call."""

    name: str  # as explain shows it
    reason: str
    call: LaunchPlan | ffi.CpuCall  # a launch plan on a GPU, or a call of a CPU handler
    # MLIR values of the arrays that it reads, row-major in memory; not always the call's operands.
    operands: Sequence[Any]
    # Positions in ``operands`` whose memory results take, and of these results.
    aliases: Mapping[int, int] = field(default_factory=dict)
    # Types of results after the call's own, which nothing reads. One that takes an operand's memory
    # is a copy of it that the kernel works on.
    scratch: Sequence[Any] = ()
    checked: bool = False  # Whether the launch is checked, as by ``debug`` of ``cuda_kernel``.
    predicted_us: PredictedUs = NOT_PREDICTED


@dataclass(frozen=True)
class Rewrite:
    """A planner's answer: ``function`` computes the call through another call of a kernel."""

    reason: str
    function: Callable[..., Any]
    predicted_us: PredictedUs = NOT_PREDICTED
    operands: Sequence[Operand] | None = None  # of the function, if not those of the call


@dataclass(frozen=True)
class Fallback:
    """A planner's answer: XLA's own operation computes the call, for a reason in words."""

    reason: str
    predicted_us: PredictedUs = NOT_PREDICTED
    # False where no kernel is wanted, because nothing is left to compute.
    is_loss: bool = True


Outcome = PlannedKernel | Rewrite | Fallback

# The platform for which a reference is traced, where it is known; a reference may depend on it.
lowering_platform = Setting("lowering platform", "")


class Planner(NamedTuple):
    """How a platform computes an operation.

    Attributes
    ----------
    refusal
        ``refusal(*avals, **params)`` says why no kernel covers a call, whatever its sizes are, or
        what it is rewritten to, wherever it is; it returns ``None`` if a kernel may cover it. Where
        a call is partitioned, it is all that is asked of the whole call. It is not asked about
        symbolic or empty shapes, which have no kernel.
    plan
        ``plan(operands, results, **params)`` for calls that are not refused: an :class:`Operand`
        for each operand, and the abstract values of the results.
    """

    refusal: Callable[..., Rewrite | Fallback | None]
    plan: Callable[..., Outcome]


def no_refusal(*_: Any, **__: Any) -> None:
    """Refuse no call, as the ``refusal`` of a :class:`Planner`."""


# By operand, or by tuple of operands.
Transposes = Mapping[Any, Callable[..., Any]]


@dataclass(frozen=True)
class Operation:
    """The rules of one operation. Every rule takes the operation's parameters as keywords.

    Attributes
    ----------
    name
        The primitive's name, as it appears in a jaxpr.
    reference
        ``reference(*operands, **params)`` in terms of JAX's own functions: the meaning and the
        fallback.
    batch
        ``batch(axis_data, operands, dims, **params)`` gives the batched result and its batch
        dimension.
    sharding_rule
        ``sharding_rule(*avals, **params)`` labels the dimensions that devices may share. ``None``
        for an operation that is ``composed``.
    planners
        For each platform. A function ``plan(place, operands, results, **params)`` answers for
        itself what the policy, the sizes and the place of a call allow, and returns ``None`` for a
        call that XLA partitions.
    describe
        ``describe(**params)`` names the call in a few words, for ``explain``.
    several_results
        Whether the operation has a sequence of results. Then ``reference`` and ``batch`` return
        sequences, and so does the function that binds it; rules of ``transposes`` take a sequence
        of cotangents.
    transposes
        For each operand in which the operation is linear, the rule
        ``rule(cotangent, *operands, **params)`` that gives that operand's cotangent; the linear
        operand itself is passed as its abstract value. A tuple of operands in which it is
        *jointly* linear has a rule that gives as many cotangents. Where the operands depend on the
        call, ``transposes(**params)`` gives them and their rules.
    jvp
        ``jvp(primals, tangents, **params)`` gives the results and their tangents, for an operation
        that is not linear in each of its operands. A tangent may be symbolically zero, but not all
        of them are. By default the tangents follow from ``transposes``.
    is_linear
        ``is_linear(**params)`` says for which calls they do though there is a ``jvp`` for others.
    refuse_tangent
        ``refuse_tangent(operand, **params)`` raises the error about a tangent of an operand in none
        of the groups of ``transposes``, or returns, and then the tangents are those of the
        reference. Without it the results do not depend on such a tangent.
    composed
        ``composed(*operands, **params)`` computes the call by other operations, each of which is
        partitioned by its own rule. In a ``jit`` over several devices the call is lowered to it.
    is_composed
        ``is_composed(**params)`` says for which calls ``composed`` holds, all of them by default.
    any_size
        ``any_size(**params)`` says whether every size of the results is one of the operands',
        whatever these are, so that abstract evaluation need not know them.
    like_results
        ``like_results(*operands, **params)`` gives arrays of the results' types, shapes and
        shardings, where the reference is not what abstract evaluation should trace.
    localised
        Rewrites operands that hold positions along a dimension that is shared out; see
        :class:`~jax_tilekern.partitioning.call.PartitionedOperation`.
    source
        ``source(operands, **params)`` looks through what transposes operands: it returns the
        operands where they lie and the parameters of the call on them. The lowering of a call
        on each device sees its own operands only.
    in_float32
        ``in_float32(**params)`` returns the parameters of a call that gives in float32 the results
        that are combined over devices.
    terms_in_float32
        Whether the results that are combined are those of ``in_float32`` on every platform. Those
        of a call with an epilogue are.
    function_of_sum
        ``function_of_sum(**params)`` takes a call with an epilogue apart; see
        :class:`~jax_tilekern.partitioning.local_program.FunctionOfSum`.
    stands_for
        ``stands_for(**params)`` gives the primitive of JAX's, and its parameters, as which
        checkpoint policies see the operation. Without it they see the operation itself.
    saved
        ``saved(**params)`` says what is saved of several results where a policy saves the primitive
        of ``stands_for``.
    register
        ``register(primitive)`` registers rules of JAX's that the others do not give, for an
        operation that has a jaxpr among its parameters.
    """

    name: str
    reference: Callable[..., Any]
    batch: Callable[..., tuple[Any, Any]]
    sharding_rule: Callable[..., ShardingRule] | None
    planners: Mapping[str, Planner | Callable[..., Outcome | None]]
    describe: Callable[..., str]
    several_results: bool = False
    transposes: Transposes | Callable[..., Transposes] = field(default_factory=dict)
    jvp: Callable[..., tuple[Any, Any]] | None = None
    is_linear: Callable[..., bool] = lambda **_: False
    refuse_tangent: Callable[..., None] | None = None
    composed: Callable[..., Any] | None = None
    is_composed: Callable[..., bool] = lambda **_: True
    any_size: Callable[..., bool] = lambda **_: False
    like_results: Callable[..., Any] | None = None
    localised: Callable[..., Sequence[Any]] | None = None
    source: Callable[..., tuple[Sequence[Operand], Params]] | None = None
    in_float32: Callable[..., Params] | None = None
    terms_in_float32: bool = False
    function_of_sum: Callable[..., FunctionOfSum] | None = None
    stands_for: remat.StandsFor | None = None
    saved: Callable[..., remat.Saved | None] | None = None
    register: Callable[[Any], None] | None = None


# The function of a list of operands that each operation of this library means, by its primitive.
references: dict[str, Callable[..., list[Any]]] = {}


def define(operation: Operation) -> Callable[..., Any]:
    """Make the primitive of ``operation``; return the function that binds it."""
    operation = _mode_independent(operation)
    references[operation.name] = under_traced_settings(_as_list(operation))
    primitive: Any = Primitive(operation.name)

    def evaluate(*operands: Any, **params: Any) -> Any:
        # Equal functions of two calls have one program. Their derivatives have been taken.
        params = {name: params_text.shared(x) for name, x in params.items()}
        return compat.apply_primitive(primitive, *operands, **params)

    primitive.multiple_results = operation.several_results
    primitive.def_impl(evaluate)
    primitive.def_abstract_eval(under_traced_settings(_abstract_evaluation(operation)))

    def bind(*operands: Any, **params: Any) -> Any:
        return primitive.bind(*compat.unify_varying(*operands), **params)

    def bind_to_list(*operands: Any, **params: Any) -> list[Any]:
        result = bind(*operands, **params)
        return result if operation.several_results else [result]

    def batch(
        axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], **params: Any
    ) -> tuple[Any, Any]:
        if all(dim is None for dim in dims):
            result = bind(*operands, **params)
            return result, [None] * len(result) if operation.several_results else None
        if axis_data.size == 0:
            return batch_no_element(axis_data, operands, dims, params)
        return operation.batch(axis_data, operands, dims, **params)

    @mode_independent
    def batch_no_element(
        axis_data: Any, operands: Sequence[Any], dims: Sequence[int | None], params: Params
    ) -> tuple[Any, Any]:
        """Return empty results where the rule gives batches, and its results where it does not.

        The rule is traced for one element, because it may divide by the number of elements.
        """
        # A sum over no element has the type of one, with its sharding.
        one = [
            x if d is None else jnp.expand_dims(x.sum(d, dtype=x.dtype), d)
            for x, d in zip(operands, dims, strict=True)
        ]
        found: list[int | None] = []

        def batch_one(*operands: Any) -> list[Any]:
            axis = compat.one_element_axis(axis_data)
            results, out = operation.batch(axis, operands, dims, **params)
            found.extend(out if operation.several_results else [out])
            return list(results) if operation.several_results else [results]

        traced = jax.make_jaxpr(batch_one)(*one)
        jaxpr, used = partial_eval.dce_jaxpr(traced.jaxpr, [d is None for d in found])
        read = (x for x, is_used in zip(one, used, strict=True) if is_used)
        unbatched = iter(compat.eval_jaxpr(jaxpr, traced.consts, *read))
        results = [
            next(unbatched)
            if d is None
            else jax.lax.slice_in_dim(ad.zeros_like_aval(x), 0, 0, axis=d)
            for x, d in zip(traced.out_avals, found, strict=True)
        ]
        return (results, found) if operation.several_results else (results[0], found[0])

    compat.register_batching(primitive, under_traced_settings(batch))
    compat.register_nan_check(primitive)
    _register_derivatives(operation, primitive, bind_to_list)
    _register_lowering(operation, primitive, bind_to_list)
    if operation.stands_for is not None:
        remat.register(primitive, operation.stands_for, operation.saved)
    if operation.register is not None:
        operation.register(primitive)
    return bind


def _as_list(operation: Operation) -> Callable[..., list[Any]]:
    def reference(*operands: Any, **params: Any) -> list[Any]:
        result = operation.reference(*operands, **params)
        return list(result) if operation.several_results else [result]

    return reference


def _mode_independent(operation: Operation) -> Operation:
    """Return the operation with rules that neither ``patch`` nor JAX's global modes change."""
    rules: dict[str, Any] = {
        name: mode_independent(rule)
        for name in ("batch", "jvp", "like_results", "sharding_rule")
        if (rule := getattr(operation, name)) is not None
    }
    return dataclasses.replace(
        operation,
        reference=by_xla(mode_independent(operation.reference)),
        **rules,
    )


def _register_derivatives(
    operation: Operation, primitive: Any, bind: Callable[..., list[Any]]
) -> None:
    def rules(params: Params) -> dict[OperandGroup, Callable[..., Sequence[Any]]]:
        given = operation.transposes
        own = given(**params) if callable(given) else given
        return dict(_as_group(*item) for item in own.items())

    def groups(moving: Iterable[int], params: Params) -> tuple[OperandGroup, ...] | None:
        """Return the groups by which a call is differentiated, or ``None`` for the reference."""
        found = tuple(rules(params))
        if operation.refuse_tangent is None:
            return found
        others = sorted(set(moving).difference(*found))
        for i in others:
            operation.refuse_tangent(i, **params)
        return None if others else found

    def jvp_by_linearity(
        primals: Sequence[Any], tangents: Sequence[Any], **params: Any
    ) -> tuple[Any, Any]:
        moving = (i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero)
        linear = groups(moving, params)
        bound = functools.partial(bind, **params)
        results = bound(*primals)
        if linear is None:
            _, derivative = jvp_of(operation.reference, primals, tangents, **params)
            derived = list(derivative) if operation.several_results else [derivative]
        else:
            derived = tangents_out(bound, linear, primals, tangents, results)
        if operation.several_results:
            return results, derived
        return results[0], derived[0]

    def rule_of_jvp(params: Params) -> Callable[..., tuple[Any, Any]]:
        own = None if operation.is_linear(**params) else operation.jvp
        return own or jvp_by_linearity

    def jvp_of_call(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
        return rule_of_jvp(params)(primals, tangents, **params)

    def taylor_polynomials(
        primals: Sequence[Any], series: taylor.Coefficients, **params: Any
    ) -> taylor.Polynomials:
        jvp, bound = rule_of_jvp(params), functools.partial(bind, **params)
        moving = [i for i, x in enumerate(primals) if jnp.issubdtype(x.dtype, jnp.inexact)]
        if not moving:
            results = bound(*primals)
            return list(results), [[jnp.zeros_like(y)] * len(series[0]) for y in results]
        if jvp is jvp_by_linearity:
            linear = groups(moving, params)
            if linear is not None:
                return taylor.multilinear_polynomials(bound, linear, primals, series)

        def jvp_of_lists(*args: Any) -> tuple[Sequence[Any], Sequence[Any]]:
            results, tangents = jvp(*args, **params)
            return (results, tangents) if operation.several_results else ([results], [tangents])

        return taylor.differentiable_polynomials(jvp_of_lists, primals, series)

    def transpose(cotangent: Any, *operands: Any, **params: Any) -> list[Any]:
        cotangents = cotangent if operation.several_results else [cotangent]
        if all(type(x) is ad.Zero for x in cotangents):
            return [
                ad.Zero(x.aval.to_ct_aval()) if ad.is_undefined_primal(x) else None
                for x in operands
            ]
        if operation.several_results:
            cotangent = [ad.instantiate_zeros(x) for x in cotangents]
        return cotangents_in(rules(params), cotangent, operands, params)

    if operation.jvp or operation.transposes:
        ad.primitive_jvps[primitive] = under_traced_settings(jvp_of_call)
        taylor.register(primitive, under_traced_settings(mode_independent(taylor_polynomials)))
    if operation.transposes:
        ad.primitive_transposes[primitive] = under_traced_settings(transpose)


def _register_lowering(
    operation: Operation, primitive: Any, bind: Callable[..., list[Any]]
) -> None:
    partitioned = None
    if operation.sharding_rule is not None:
        partitioned = PartitionedOperation(
            operation.name,
            operation.sharding_rule,
            bind,
            operation.localised,
            operation.in_float32,
            operation.terms_in_float32,
            operation.function_of_sum,
        )
        register(partitioned)
    rules = {
        platform: under_traced_settings(functools.partial(_lower, operation, partitioned, platform))
        for platform in operation.planners
    }
    by_reference = mlir.lower_fun(
        by_xla(operation.reference), multiple_results=operation.several_results
    )

    @under_traced_settings
    def elsewhere(ctx: Any, *values: Any, **params: Any) -> Sequence[Any]:
        if operation.planners:
            record_elsewhere(operation.describe(**params), ctx)
        lowered: Sequence[Any] = by_reference(ctx, *values, **params)
        return lowered

    # The lowering is not cacheable, because a planner inspects the producers of its operands.
    mlir.register_lowering(
        primitive,
        functools.partial(compat.lower_per_platform, operation.name, rules, elsewhere),
        cacheable=False,
    )


def _as_group(
    operands: int | tuple[int, ...], rule: Callable[..., Any]
) -> tuple[tuple[int, ...], Callable[..., Sequence[Any]]]:
    rule = mode_independent(rule)
    if isinstance(operands, tuple):
        return operands, rule
    return (operands,), lambda *args, **params: (rule(*args, **params),)


def _abstract_evaluation(operation: Operation) -> Callable[..., Any]:
    @compat.cached(max_size=4096)
    def evaluate(avals: tuple[Any, ...], params: tuple[tuple[str, Any], ...]) -> list[Any]:
        traced = operation.like_results or operation.reference
        results = compat.abstract_results(functools.partial(traced, **dict(params)), *avals)
        return list(results)

    def abstract(*avals: Any, **params: Any) -> Any:
        key = tuple(sorted(params.items()))
        results = None
        if operation.any_size(**params):
            results = evaluated_at_any_size(lambda x: evaluate(x, key), avals)
        results = evaluate(avals, key) if results is None else results
        return results if operation.several_results else results[0]

    return abstract


def _lower(
    operation: Operation,
    partitioned: PartitionedOperation | None,
    platform: str,
    ctx: Any,
    *values: Any,
    **params: Any,
) -> Sequence[Any]:
    def lower(ctx: Any, *values: Any) -> Sequence[Any]:
        return _lower_now(operation, partitioned, platform, ctx, *values, **params)

    if xla.has_other_devices(ctx):
        require_agreement(platform)
        return lower(ctx, *values)
    return deferral.lower_or_defer(lower, ctx, *values)


def _lower_now(
    operation: Operation,
    partitioned: PartitionedOperation | None,
    platform: str,
    ctx: Any,
    *values: Any,
    **params: Any,
) -> Sequence[Any]:
    modes = Modes.current()
    with by_types(ctx.avals_in, ctx.avals_out, params):
        outcome = _outcome(operation, platform, ctx, *values, **params)
        if outcome is not None:
            return _lowered(operation, platform, outcome, modes, ctx, *values, **params)
        return _partitioned(operation, partitioned, platform, ctx, *values, **params)


def _partitioned(
    operation: Operation,
    partitioned: PartitionedOperation | None,
    platform: str,
    ctx: Any,
    *values: Any,
    **params: Any,
) -> Sequence[Any]:
    assert partitioned is not None
    operands: Sequence[Operand] = tuple(map(Operand, values, ctx.avals_in))
    if operation.source is not None:
        operands, params = operation.source(operands, **params)
    if "out_sharding" in params:
        params = {**params, "out_sharding": None}
    ctx = ctx.replace(avals_in=[operand.aval for operand in operands])
    described = operation.describe(**params)
    read = [operand.value for operand in operands]
    return lower_partitioned(ctx, partitioned, platform, described, *read, **params)


def _outcome(
    operation: Operation, platform: str, ctx: Any, *values: Any, **params: Any
) -> Outcome | None:
    """Return the planned computation of a call, or ``None`` if XLA partitions it first."""
    planner, place = operation.planners[platform], xla.place(ctx)
    operands = tuple(map(Operand, values, ctx.avals_in))
    if not isinstance(planner, Planner):
        return planner(place, operands, ctx.avals_out, **params)
    excluded = why_excluded()
    if excluded is not None:
        return Fallback(excluded)
    without_plan = _without_plan(ctx.avals_in, ctx.avals_out)
    if without_plan is not None:
        return without_plan
    refused = planner.refusal(*ctx.avals_in, **params)
    if refused is not None:
        return refused
    if place is Place.LOCAL:
        with planning_beside_collectives() if xla.has_other_devices(ctx) else nullcontext():
            return planner.plan(operands, ctx.avals_out, **params)
    if operation.composed is not None and operation.is_composed(**params):
        composed = functools.partial(operation.composed, **params)
        return Rewrite("its operations are partitioned by their own rules", composed)
    why = obstacle(place, (*ctx.avals_in, *ctx.avals_out))
    return None if why is None else Fallback(why)


def _without_plan(operands: Sequence[Any], results: Sequence[Any]) -> Fallback | None:
    """Return why sizes allow no plan, if they do not."""
    if not all(isinstance(size, int) for x in (*operands, *results) for size in x.shape):
        return Fallback("a plan needs every size, and this shape is symbolic")
    if any(0 in x.shape for x in operands):
        return Fallback("an operand is empty, so there is nothing to compute", is_loss=False)
    return None


def obstacle(place: Place, avals: Sequence[Any]) -> str | None:
    """Return why XLA computes a call on several devices, if it does."""
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
    outcome: Outcome,
    modes: Modes,
    ctx: Any,
    *values: Any,
    **params: Any,
) -> Sequence[Any]:
    call = operation.describe(**params)
    record_choice(
        call,
        ctx,
        platform,
        outcome.name if isinstance(outcome, PlannedKernel) else None,
        outcome.reason,
        outcome.predicted_us,
        isinstance(outcome, Rewrite),
    )
    if isinstance(outcome, PlannedKernel):
        return ffi.emit(
            ctx,
            outcome.operands,
            outcome.call,
            outcome.aliases,
            scratch=outcome.scratch,
            checked=outcome.checked,
        )
    if isinstance(outcome, Fallback):
        if outcomes.forbids_losses():
            with policy("kernels"):
                forced = _outcome(operation, platform, ctx, *values, **params)
            if isinstance(forced, Fallback) and forced.is_loss:
                outcomes.note_loss(call, forced.reason, platform)
        reason = outcome.reason + outcome.predicted_us.in_parentheses()
        outcomes.note_fallback(call, reason, platform)
    function: Callable[..., Any] = functools.partial(operation.reference, **params)
    if isinstance(outcome, Rewrite):
        function = compat.with_automatic_axes(outcome.function, params.get("out_sharding"))
        if outcome.operands is not None:
            values = tuple(x.value for x in outcome.operands)
            ctx = ctx.replace(avals_in=[x.aval for x in outcome.operands])
    if not compat.passes_numbers(ctx):
        modes = Modes.current()
    # Integers of sizes and of platforms, which functions of the module pass on, have the type of
    # the program's modes.
    function = by_xla(with_current_modes(function))
    lower = mlir.lower_fun(function, multiple_results=operation.several_results)
    if not params.keys().isdisjoint(("jaxpr", "scores")):
        # Its functions were traced outside of every shard_map.
        ctx = ctx.replace(avals_in=[compat.without_varying_axes(aval) for aval in ctx.avals_in])
    with listed_below(), lowering_platform(platform), modes.entered():
        lowered: Sequence[Any] = lower(ctx, *values)
    return lowered
