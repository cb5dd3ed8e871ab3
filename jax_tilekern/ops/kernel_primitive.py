"""The primitive behind ``cuda_kernel``: one call of a user's kernel, and its rules.

``vmap`` notes a :class:`Batch` and moves its axis to the front; what becomes of it is the launch
plan's. Linearity, where the user states it, gives tangents and cotangents.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tilekern.compilation.compiler import NvrtcNotFound
from jax_tilekern.inspection.choices import record_choice
from jax_tilekern.interop import compat, ffi, modes
from jax_tilekern.interop.compat import ad, batching, mlir
from jax_tilekern.interop.global_modes import by_types, mode_independent
from jax_tilekern.ops.kernel_settings import KernelSettings, Parameters
from jax_tilekern.ops.kernel_sharding import explicit_shardings
from jax_tilekern.partitioning import xla
from jax_tilekern.partitioning.call import PartitionedOperation, lower_partitioned, register
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.partitioning.xla import Place
from jax_tilekern.plans.cuda_kernel import Array, Batch, KernelCall, plan_kernel
from jax_tilekern.plans.gpu import NoGpu, current_gpu
from jax_tilekern.plans.policy import why_excluded
from jax_tilekern.primitives import taylor
from jax_tilekern.primitives.linearity import Group, cotangents_in, tangents_out

Batches = tuple[Batch, ...]

_primitive = compat.Primitive("tilekern_cuda_kernel")
_primitive.multiple_results = True
_primitive.def_impl(functools.partial(compat.apply_primitive, _primitive))


def bind(
    *operands: Any, settings: KernelSettings, parameters: Parameters, batches: Batches = ()
) -> list[Any]:
    """Call a kernel; outputs come as a list."""
    outputs: list[Any] = _primitive.bind(
        *compat.unify_varying(*operands), settings=settings, parameters=parameters, batches=batches
    )
    return outputs


def input_types(avals: Sequence[Any], batches: Batches = ()) -> tuple[Array, ...]:
    """Return the types of a kernel's inputs without the dimensions of batches.

    Raises
    ------
    TypeError
        If one has no memory of its own kind, as a typed key of ``jax.random`` has none.
    """
    for i, aval in enumerate(avals):
        if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            raise TypeError(f"input {i} of a kernel is {aval}; pass jax.random.key_data of it")
    depths = [sum(batch.mapped[i] for batch in batches) for i in range(len(avals))]
    return tuple(
        Array(tuple(aval.shape[depth:]), np.dtype(aval.dtype))
        for aval, depth in zip(avals, depths, strict=True)
    )


def _abstract_evaluation(
    *avals: Any, settings: KernelSettings, parameters: Parameters, batches: Batches
) -> list[Any]:
    types = input_types(avals, batches)
    outputs = settings.outputs(types, parameters)
    leading = tuple(batch.size for batch in batches)
    rule = settings.rule(types, parameters, batches)
    shardings: Sequence[Any] | None = None
    if rule is not None:
        text = settings.rule_text(types, parameters)
        shardings = explicit_shardings(settings.label, text, rule, avals)

    def like_outputs(*operands: Any) -> list[Any]:
        axes = tuple(sorted(compat.varying_axes(operands[0]))) if operands else ()
        empty = [
            lax.full((*leading, *output.shape), 0, output.dtype, sharding=sharding)
            for output, sharding in zip(outputs, shardings or [None] * len(outputs), strict=True)
        ]
        return [lax.pcast(x, axes, to="varying") for x in empty] if axes else empty

    with by_types(avals, outputs):
        return compat.abstract_results(like_outputs, *avals)


def _batch(
    operands: Sequence[Any],
    dims: Sequence[int | None],
    *,
    settings: KernelSettings,
    parameters: Parameters,
    batches: Batches,
) -> tuple[list[Any], list[int]]:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    moved = []
    for i, (operand, dim) in enumerate(zip(operands, dims, strict=True)):
        if dim is not None:
            moved.append(jnp.moveaxis(operand, dim, 0))
        elif i in settings.aliases:
            # Each output of the batch has its own buffer.
            moved.append(jnp.broadcast_to(operand, (size, *operand.shape)))
        else:
            moved.append(operand)
    mapped = tuple(dim is not None or i in settings.aliases for i, dim in enumerate(dims))
    results = bind(
        *moved,
        settings=settings,
        parameters=parameters,
        batches=(Batch(size, mapped), *batches),
    )
    return results, [0] * len(results)


def _jvp(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    settings: KernelSettings,
    parameters: Parameters,
    batches: Batches,
) -> tuple[list[Any], list[Any]]:
    groups = tuple(settings.linear)
    linear = {i for group in groups for i in group}
    for i, tangent in enumerate(tangents):
        if type(tangent) is not ad.Zero and i not in linear:
            raise NotImplementedError(
                f"kernel {settings.label} has no derivative with respect to input {i}; attach one "
                "to what cuda_kernel returned: .defjvp(rule), .defvjp(forward, backward), or, if "
                "the kernel is linear in the input, .deflinear(input, transpose)"
            )
    call = functools.partial(bind, settings=settings, parameters=parameters, batches=batches)
    results = call(*primals)
    return results, tangents_out(call, groups, primals, tangents, results)


def _taylor_polynomials(
    primals: Sequence[Any], series: taylor.Coefficients, **params: Any
) -> taylor.Polynomials:
    groups = tuple(params["settings"].linear)
    linear = {i for group in groups for i in group}
    if all(i in linear for i, x in enumerate(primals) if jnp.issubdtype(x.dtype, jnp.inexact)):
        return taylor.of_multilinear(functools.partial(bind, **params), groups, primals, series)
    return taylor.of_differentiable(functools.partial(_jvp, **params), primals, series)


def _transpose(
    cotangents: Sequence[Any],
    *operands: Any,
    settings: KernelSettings,
    parameters: Parameters,
    batches: Batches,
) -> list[Any]:
    filled = tuple(ad.instantiate_zeros(cotangent) for cotangent in cotangents)
    avals = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in operands]
    types = input_types(avals, batches)

    def rule(group: Group, cotangents: Sequence[Any], *known: Any) -> Sequence[Any]:
        arrays = {i: x for i, x in enumerate(known) if not isinstance(x, jax.core.AbstractValue)}
        return _linear_rule(settings, parameters, batches, types, group)(cotangents, arrays)

    rules = {group: functools.partial(rule, group) for group in settings.linear}
    return cotangents_in(rules, filled, operands, {})


def _linear_rule(
    settings: KernelSettings,
    parameters: Parameters,
    batches: Batches,
    types: Sequence[Array],
    group: Group,
) -> Callable[[Sequence[Any], Mapping[int, Any]], Sequence[Any]]:
    """Return the user's rule for a group, mapped over the batches."""
    single = not settings.returns_tuple(types, parameters)

    def once(cotangents: Sequence[Any], known: Mapping[int, Any]) -> tuple[Any, ...]:
        inputs = [known.get(i, jax.ShapeDtypeStruct(t.shape, t.dtype)) for i, t in enumerate(types)]
        with parameters.modes.with_types_of(inputs, cotangents).entered():
            given = settings.linear[group](
                cotangents[0] if single else cotangents, *inputs, **parameters
            )
        results = tuple(given) if isinstance(given, tuple | list) else (given,)
        _check_cotangents(settings, group, types, results)
        return results

    def mapped_over(batch: Batch, inner: Callable[..., Any]) -> Callable[..., Any]:
        def rule(cotangents: Sequence[Any], known: Mapping[int, Any]) -> tuple[Any, ...]:
            axes = {i: 0 if batch.mapped[i] else None for i in known}
            results = jax.vmap(inner, in_axes=(0, axes))(cotangents, known)
            # The cotangent of an input that the whole batch reads is the sum of the batch's.
            return tuple(
                x if batch.mapped[i] else _sum_of_batch(x)
                for i, x in zip(group, results, strict=True)
            )

        return rule

    rule: Callable[..., Any] = once
    for batch in reversed(batches):
        rule = mapped_over(batch, rule)
    return rule


@mode_independent
def _sum_of_batch(x: Any) -> Any:
    return x.sum(axis=0)


def _check_cotangents(
    settings: KernelSettings, group: Group, types: Sequence[Array], results: Sequence[Any]
) -> None:
    wanted = [f"{types[i].dtype}{list(types[i].shape)}" for i in group]
    given = [f"{x.dtype}{list(x.shape)}" for x in map(jax.typeof, results)]
    if wanted != given:
        raise TypeError(
            f"the transpose rule of kernel {settings.label} for inputs {list(group)} returned "
            f"{', '.join(given)}, not {', '.join(wanted)}"
        )


def _lower_for_cuda(
    ctx: Any,
    *values: Any,
    settings: KernelSettings,
    parameters: Parameters,
    batches: Batches,
) -> Sequence[Any]:
    if _is_empty(ctx):
        return _lower_to_zeros(ctx, *values)
    params: dict[str, Any] = {"settings": settings, "parameters": parameters, "batches": batches}
    place = xla.place(ctx)
    call = _call(ctx, **params)
    disabled = why_excluded()
    if disabled is not None:
        if settings.reference is None:
            raise NotImplementedError(
                f"kernel {settings.label} has no reference= to take its place: {disabled}"
            )
        return _fall_back(ctx, f"its reference: {disabled}", *values, **params)
    if call is None:
        return lower_partitioned(
            ctx, _partitioned, "cuda", _described(settings, parameters), *values, **params
        )
    if place is Place.PARTLY_MANUAL and settings.reference is not None:
        return _fall_back(ctx, "its reference: XLA partitions that", *values, **params)
    if place is Place.PARTLY_MANUAL and not xla.uses_shardy():
        raise NotImplementedError(
            f"kernel {settings.label} is in a shard_map over some mesh axes, which GSPMD "
            "(jax_use_shardy_partitioner=False) does not compile; map over all of them, or give "
            "cuda_kernel a reference="
        )
    try:
        plan = plan_kernel(call, current_gpu())
    except (NoGpu, NvrtcNotFound) as error:
        if settings.reference is None:
            raise
        return _fall_back(ctx, f"its reference, for there is {error}", *values, **params)
    reason = plan.resources
    if place is not Place.LOCAL:
        reason += "; every device computes the whole call, for it has no sharding_rule"
    _record(settings, parameters, ctx, "cuda", plan.name, reason)
    return ffi.cuda_launch(ctx, values, plan, aliases=settings.aliases, checked=settings.debug)


def _is_empty(ctx: Any) -> bool:
    """Return whether no output has an element, so that nothing is launched."""
    return all(math.prod(aval.shape) == 0 for aval in ctx.avals_out)


def _call(
    ctx: Any, *, settings: KernelSettings, parameters: Parameters, batches: Batches
) -> KernelCall | None:
    """Describe and check a call; ``None`` if XLA partitions it, so that each device has its own."""
    types = input_types(ctx.avals_in, batches)
    partitioned = xla.place(ctx) is Place.PARTITIONED and xla.uses_shardy()
    if partitioned and settings.rule(types, parameters, batches) is not None:
        return None
    return settings.call(types, parameters, batches)


def _fall_back(ctx: Any, reason: str, *values: Any, **params: Any) -> Sequence[Any]:
    """Lower to the reference where a user would expect a kernel."""
    settings, parameters = params["settings"], params["parameters"]
    _record(settings, parameters, ctx, "cuda", None, reason)
    modes.note_fallback(_described(settings, parameters), "cuda", reason)
    return _lower_reference(ctx, *values, **params)


def _lower_elsewhere(
    ctx: Any,
    *values: Any,
    settings: KernelSettings,
    parameters: Parameters,
    batches: Batches,
) -> Sequence[Any]:
    if settings.reference is None:
        raise NotImplementedError(
            f"kernel {settings.label} is CUDA, and this program is lowered for "
            f"{', '.join(_platforms(ctx))}; give cuda_kernel a reference=, the same function in "
            "JAX, to run elsewhere"
        )
    params: dict[str, Any] = {"settings": settings, "parameters": parameters, "batches": batches}
    if not _is_empty(ctx):
        _call(ctx, **params)
    _record(settings, parameters, ctx, _platforms(ctx)[0], None, "its reference: no CUDA here")
    return _lower_reference(ctx, *values, **params)


def _platforms(ctx: Any) -> Sequence[str]:
    return tuple(ctx.platforms or ctx.module_context.platforms)


def _record(
    settings: KernelSettings,
    parameters: Parameters,
    ctx: Any,
    platform: str,
    kernel: str | None,
    reason: str,
) -> None:
    record_choice(_described(settings, parameters), ctx, platform, kernel, reason)


def _described(settings: KernelSettings, parameters: Parameters) -> str:
    return f"cuda_kernel {settings.label}" + (f" {parameters}" if parameters else "")


def _sharding_rule(
    *avals: Any, settings: KernelSettings, parameters: Parameters, batches: Batches
) -> ShardingRule:
    rule = settings.rule(input_types(avals, batches), parameters, batches)
    assert rule is not None
    return rule


def _bind_part(
    *operands: Any, settings: KernelSettings, parameters: Parameters, batches: Batches
) -> list[Any]:
    """Call the kernel on one device's part, in which batches have the operands' sizes."""
    own = []
    depths = [0] * len(operands)
    for batch in batches:
        mapped = [i for i, has in enumerate(batch.mapped) if has]
        own.append(Batch(operands[mapped[0]].shape[depths[mapped[0]]], batch.mapped))
        for i in mapped:
            depths[i] += 1
    return bind(*operands, settings=settings, parameters=parameters, batches=tuple(own))


def _lower_to_zeros(ctx: Any, *values: Any) -> Sequence[Any]:
    def zeros(*operands: Any) -> list[Any]:
        return [lax.full(aval.shape, 0, aval.dtype) for aval in ctx.avals_out]

    with by_types(ctx.avals_out):
        lowered: Sequence[Any] = mlir.lower_fun(zeros, multiple_results=True)(ctx, *values)
    return lowered


def _lower_reference(
    ctx: Any,
    *values: Any,
    settings: KernelSettings,
    parameters: Parameters,
    batches: Batches,
) -> Sequence[Any]:
    assert settings.reference is not None

    def call(*inputs: Any) -> tuple[Any, ...]:
        assert settings.reference is not None
        given = settings.reference(*inputs, **parameters)
        outputs = tuple(given) if isinstance(given, tuple | list) else (given,)
        wanted = [f"{x.dtype}{list(x.shape)}" for x in declared]
        got = [f"{x.dtype}{list(x.shape)}" for x in map(jax.typeof, outputs)]
        if wanted != got:
            raise TypeError(
                f"the reference of kernel {settings.label} returned {', '.join(got)}, but its out "
                f"says {', '.join(wanted)}"
            )
        return outputs

    declared = settings.outputs(input_types(ctx.avals_in, batches), parameters)
    function: Callable[..., Any] = call
    for batch in reversed(batches):
        function = jax.vmap(
            function, in_axes=tuple(0 if mapped else None for mapped in batch.mapped)
        )
    with parameters.modes.with_types_of(ctx.avals_in, ctx.avals_out).entered():
        lowered: Sequence[Any] = mlir.lower_fun(function, multiple_results=True)(ctx, *values)
    return lowered


_partitioned = PartitionedOperation("tilekern_cuda_kernel", _sharding_rule, _bind_part)
register(_partitioned)
_primitive.def_abstract_eval(_abstract_evaluation)
batching.primitive_batchers[_primitive] = _batch
ad.primitive_jvps[_primitive] = _jvp
ad.primitive_transposes[_primitive] = _transpose
taylor.register(_primitive, _taylor_polynomials)
mlir.register_lowering(_primitive, _lower_elsewhere)
mlir.register_lowering(_primitive, _lower_for_cuda, platform="cuda")
