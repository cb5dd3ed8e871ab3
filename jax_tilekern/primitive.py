"""How an operation's rules are declared, once.

An operation is a value of :class:`Operation`: what it means in terms of ``jax.lax``, which
operands it is linear in, how it batches, and which kernels compute it on each platform.
:func:`define` makes the JAX primitive from it:

- *abstract evaluation* is that of the reference, so shapes, dtypes, weak types, shardings,
  varying axes and the errors about them are JAX's own;
- *jvp* follows from linearity in each operand; the *transpose* and *batching* rules are the
  operation's, and bind the operation itself again;
- *lowering* asks the platform's planner, and what no kernel covers lowers to the reference.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_tilekern import compat, remat
from jax_tilekern.compat import ad, batching, mlir
from jax_tilekern.interception import by_xla
from jax_tilekern.linearity import cotangents_in, tangents_out

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


Planner = Callable[..., Kernel | Rewrite | Fallback]


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
        ``batch(operands, dims, **params)`` gives the batched result and its batch dimension.
    planners
        For each platform, ``planner(ctx, *values, **params)`` on MLIR values.
    describe
        The call in a few words from its parameters, for ``explain``.
    stands_for
        ``stands_for(**params)`` gives the primitive of JAX's, and its parameters, as which
        checkpoint policies see the operation. Without it they see the operation itself.
    """

    name: str
    reference: Callable[..., Any]
    transposes: Mapping[int | tuple[int, ...], Callable[..., Any]]
    batch: Callable[..., tuple[Any, int]]
    planners: Mapping[str, Planner]
    describe: Callable[..., str]
    stands_for: remat.StandsFor | None = None


@dataclass(frozen=True)
class Choice:
    """What one call of the library lowered to.

    Attributes
    ----------
    call
        The operation with its dimensions, for example ``contract mk,kn->mn``.
    operands, result
        Types with shapes, for example ``f32[64,128]``; a comma between several results.
    platform
        ``cpu``, ``cuda`` or another platform of JAX's.
    kernel
        The kernel, or ``None`` where XLA's own operation or another call of the library takes it.
    reason
        Why.
    """

    call: str
    operands: tuple[str, ...]
    result: str
    platform: str
    kernel: str | None
    reason: str


_recorded: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar(
    "jax_tilekern_choices", default=None
)


@contextlib.contextmanager
def recorded_choices() -> Iterator[list[Choice]]:
    """Collect the choice of every call that is lowered inside the context."""
    choices: list[Choice] = []
    token = _recorded.set(choices)
    try:
        yield choices
    finally:
        _recorded.reset(token)


def record_choice(call: str, ctx: Any, platform: str, kernel: str | None, reason: str) -> None:
    """Tell whoever is collecting choices what a call lowers to."""
    recorded = _recorded.get()
    if recorded is not None:
        operands, results = (
            tuple(aval.str_short(short_dtypes=True) for aval in avals)
            for avals in (ctx.avals_in, ctx.avals_out)
        )
        recorded.append(Choice(call, operands, ", ".join(results), platform, kernel, reason))


def define(operation: Operation) -> Callable[..., Any]:
    """Make the primitive of ``operation``; return the function that binds it."""
    operation = dataclasses.replace(operation, reference=by_xla(operation.reference))
    primitive = compat.Primitive(operation.name)
    primitive.def_impl(functools.partial(compat.apply_primitive, primitive))
    primitive.def_abstract_eval(_abstract_evaluation(operation))

    def bind(*operands: Any, **params: Any) -> Any:
        return primitive.bind(*compat.unify_varying(*operands), **params)

    rules = dict(_as_group(*item) for item in operation.transposes.items())

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        def bind_one(*operands: Any) -> list[Any]:
            return [bind(*operands, **params)]

        result = bind(*primals, **params)
        (tangent,) = tangents_out(bind_one, tuple(rules), primals, tangents, [result])
        return result, tangent

    def transpose(cotangent: Any, *operands: Any, **params: Any) -> list[Any]:
        if type(cotangent) is ad.Zero:
            return [
                ad.Zero(x.aval.to_ct_aval()) if ad.is_undefined_primal(x) else None
                for x in operands
            ]
        return cotangents_in(rules, cotangent, operands, params)

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = lambda operands, dims, **params: operation.batch(
        operands, dims, **params
    )
    if operation.stands_for is not None:
        remat.register(primitive, operation.stands_for)
    reference = mlir.lower_fun(operation.reference, multiple_results=False)
    mlir.register_lowering(primitive, reference)
    for platform in operation.planners:
        # Not cacheable: a planner looks at where its operands come from.
        rule = functools.partial(_lower, operation, platform)
        mlir.register_lowering(primitive, rule, platform=platform, cacheable=False)
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
    operation: Operation, platform: str, ctx: Any, *values: Any, **params: Any
) -> Sequence[Any]:
    outcome = operation.planners[platform](ctx, *values, **params)
    record_choice(
        operation.describe(**params),
        ctx,
        platform,
        outcome.name if isinstance(outcome, Kernel) else None,
        outcome.reason,
    )
    if isinstance(outcome, Kernel):
        return outcome.emit()
    function = (
        outcome.function
        if isinstance(outcome, Rewrite)
        else functools.partial(operation.reference, **params)
    )
    lowered: Sequence[Any] = mlir.lower_fun(function, multiple_results=False)(ctx, *values)
    return lowered
