"""The primitive behind ``cuda_kernel``: one call of a user's kernel, and its rules.

``vmap`` moves its axis to the front, and notes which inputs have it; what becomes of it is the
launch plan's. Linearity, where the user states it, gives tangents and cotangents.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_tilekern.compilation.compiler import NvrtcNotFound
from jax_tilekern.compilation.image import Image
from jax_tilekern.interop import compat, outcomes
from jax_tilekern.ops.cuda_kernel.settings import KernelSettings, Parameters, Use, several
from jax_tilekern.ops.cuda_kernel.sharding import explicit_shardings
from jax_tilekern.ops.cuda_kernel.tuning import TunableCall, chosen
from jax_tilekern.partitioning import xla
from jax_tilekern.partitioning.rule import ShardingRule
from jax_tilekern.partitioning.xla import Place
from jax_tilekern.plans.cuda_kernel import Array, Batch, KernelCall, plan_kernel
from jax_tilekern.plans.gpu import Gpu, NoGpu, current_gpu, known_gpu
from jax_tilekern.plans.policy import why_excluded
from jax_tilekern.primitives import deferral
from jax_tilekern.primitives.linearity import OperandGroup
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    Outcome,
    PlannedKernel,
    Rewrite,
    Transposes,
    define,
    lowering_platform,
)

# The GPU that kernels are checked for inside ``strict`` where none is at hand and none is named.
_CHECKED_FOR = "H100"

# For each ``vmap`` around a call, outermost first, which inputs have its axis.
Batches = tuple[tuple[bool, ...], ...]


def input_types(avals: Sequence[Any], batches: Batches = ()) -> tuple[Array, ...]:
    """Return the types of a kernel's inputs without the dimensions of batches."""
    for i, aval in enumerate(avals):
        if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            raise TypeError(f"input {i} of a kernel is {aval}; pass jax.random.key_data of it")
    depths = [sum(mapped[i] for mapped in batches) for i in range(len(avals))]
    return tuple(
        Array(tuple(aval.shape[depth:]), np.dtype(aval.dtype))
        for aval, depth in zip(avals, depths, strict=True)
    )


def _use(operands: Sequence[Any], *, parameters: Parameters, batches: Batches) -> Use:
    """Return what settings may depend on; batches have the sizes that the inputs have."""
    sized = []
    for depth, mapped in enumerate(batches):
        first = mapped.index(True)
        dimension = sum(outer[first] for outer in batches[:depth])
        sized.append(Batch(operands[first].shape[dimension], mapped))
    return Use(input_types(operands, batches), parameters, tuple(sized))


def _like_results(*operands: Any, settings: KernelSettings, **call: Any) -> list[Any]:
    use = _use(operands, **call)
    outputs, rule = settings.outputs(use), settings.rule(use)
    shardings: Sequence[Any] | None = None
    if rule is not None:
        avals = [jax.typeof(x) for x in operands]
        shardings = explicit_shardings(settings.label, settings.rule_text(use), rule, avals)
    leading = tuple(batch.size for batch in use.batches)
    empty = [
        lax.full((*leading, *output.shape), 0, output.dtype, sharding=sharding)
        for output, sharding in zip(outputs, shardings or [None] * len(outputs), strict=True)
    ]
    axes = tuple(sorted(compat.varying_axes(operands[0]))) if operands else ()
    return [lax.pcast(x, axes, to="varying") for x in empty] if axes else empty


def _batch(
    axis_data: Any,
    operands: Sequence[Any],
    dims: Sequence[int | None],
    *,
    settings: KernelSettings,
    batches: Batches,
    **call: Any,
) -> tuple[list[Any], list[int]]:
    moved = []
    for i, (operand, dim) in enumerate(zip(operands, dims, strict=True)):
        if dim is not None:
            moved.append(jnp.moveaxis(operand, dim, 0))
        elif i in settings.aliases:
            # Each output of the batch has its own buffer.
            moved.append(jnp.broadcast_to(operand, (axis_data.size, *operand.shape)))
        else:
            moved.append(operand)
    mapped = tuple(dim is not None or i in settings.aliases for i, dim in enumerate(dims))
    results = bind(*moved, settings=settings, batches=(mapped, *batches), **call)
    return results, [0] * len(results)


# Derivatives.


def _transposes(*, settings: KernelSettings, **_: Any) -> Transposes:
    return {group: functools.partial(_cotangents, group) for group in settings.linear}


def _refuse_tangent(operand: int, *, settings: KernelSettings, **_: Any) -> None:
    """Refuse a derivative that is neither attached nor the reference's."""
    if settings.reference is not None:
        return
    raise NotImplementedError(
        f"kernel {settings.label} has no derivative with respect to input {operand}; attach one "
        "to what cuda_kernel returned: .defjvp(rule), .defvjp(forward, backward), or, if "
        "the kernel is linear in the input, .deflinear(input, transpose); or give it a reference=, "
        "whose derivative it then has"
    )


def _cotangents(
    group: OperandGroup,
    cotangents: Sequence[Any],
    *operands: Any,
    settings: KernelSettings,
    **call: Any,
) -> Sequence[Any]:
    """Return the cotangents of a group by the user's rule, mapped over the batches."""
    use = _use(operands, **call)
    types, modes = use.inputs, use.parameters.modes
    parameters = settings.parameters_of_meaning(use.parameters)
    single = not settings.returns_tuple(use)

    def once(cotangents: Sequence[Any], known: Mapping[int, Any]) -> tuple[Any, ...]:
        inputs = [known.get(i, jax.ShapeDtypeStruct(t.shape, t.dtype)) for i, t in enumerate(types)]
        with modes.with_types_of(inputs, cotangents).entered():
            given = settings.linear[group](
                cotangents[0] if single else cotangents, *inputs, **parameters
            )
        results = several(given)
        wanted, got = _described(types[i] for i in group), _described(map(jax.typeof, results))
        if wanted != got:
            raise TypeError(
                f"the transpose rule of kernel {settings.label} for inputs {list(group)} returned "
                f"{got}, not {wanted}"
            )
        return results

    def mapped_over(mapped: Sequence[bool], inner: Callable[..., Any]) -> Callable[..., Any]:
        def rule(cotangents: Sequence[Any], known: Mapping[int, Any]) -> tuple[Any, ...]:
            axes = {i: 0 if mapped[i] else None for i in known}
            results = jax.vmap(inner, in_axes=(0, axes))(cotangents, known)
            # The cotangent of an input that the whole batch reads is the sum of the batch's.
            return tuple(
                x if mapped[i] else x.sum(axis=0) for i, x in zip(group, results, strict=True)
            )

        return rule

    rule: Callable[..., Any] = once
    for batch in reversed(use.batches):
        rule = mapped_over(batch.mapped, rule)
    known = {i: x for i, x in enumerate(operands) if not isinstance(x, jax.core.AbstractValue)}
    cotangents_of_group: Sequence[Any] = rule(tuple(cotangents), known)
    return cotangents_of_group


def _described(arrays: Iterable[Any]) -> str:
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)


# Lowering.


def _sharding_rule(*avals: Any, settings: KernelSettings, **call: Any) -> ShardingRule:
    rule = settings.rule(_use(avals, **call))
    assert rule is not None
    return rule


def _call(
    place: Place, operands: Sequence[Operand], *, settings: KernelSettings, **call: Any
) -> KernelCall | None:
    """Describe and check a call; ``None`` if XLA partitions it, so that each device has its own."""
    use = _use([operand.aval for operand in operands], **call)
    partitioned = place is Place.PARTITIONED and xla.uses_shardy()
    if partitioned and settings.rule(use) is not None:
        return None
    return settings.call(use)


def _plan_on_cuda(
    place: Place,
    operands: Sequence[Operand],
    results: Sequence[Any],
    *,
    settings: KernelSettings,
    **params: Any,
) -> Outcome | None:
    if _is_empty(results):
        return Rewrite(
            "its outputs have no elements",
            lambda *_: [lax.full(aval.shape, 0, aval.dtype) for aval in results],
        )
    call = _call(place, operands, settings=settings, **params)
    disabled = why_excluded()
    if disabled is not None:
        if settings.reference is None:
            raise NotImplementedError(
                f"kernel {settings.label} has no reference= to take its place: {disabled}"
            )
        return Fallback(f"its reference: {disabled}")
    if call is None:
        return None
    if place is Place.PARTLY_MANUAL and settings.reference is not None:
        return Fallback("its reference: XLA partitions that")
    if place is Place.PARTLY_MANUAL and not xla.uses_shardy():
        raise NotImplementedError(
            f"kernel {settings.label} is in a shard_map over some mesh axes, which GSPMD "
            "(jax_use_shardy_partitioner=False) does not compile; map over all of them, or give "
            "cuda_kernel a reference="
        )
    try:
        gpu = current_gpu()
        call, how = tuned_call([x.aval for x in operands], gpu, settings=settings, **params)
        plan = deferral.plan(plan_kernel, call, gpu)
    except (NoGpu, NvrtcNotFound) as error:
        if settings.reference is None:
            raise
        return Fallback(f"its reference, for there is {error}")
    reason = plan.resources + how
    if place is not Place.LOCAL:
        reason += "; every device computes the whole call, for it has no sharding_rule"
    values = [operand.value for operand in operands]
    return PlannedKernel(plan.name, reason, plan, values, settings.aliases, checked=settings.debug)


def tuned_call(
    avals: Sequence[Any],
    gpu: Gpu,
    *,
    settings: KernelSettings,
    parameters: Parameters,
    batches: Batches,
) -> tuple[KernelCall, str]:
    """Describe a call with its tuned parameters; return it, and words about the choice."""
    use = _use(avals, parameters=parameters, batches=batches)
    if settings.candidates(parameters) == [{}]:
        return settings.call(use), ""
    call = functools.partial(bind, settings=settings, batches=batches)
    reference = functools.partial(
        _reference, settings=settings, parameters=parameters, batches=batches
    )
    tunable = TunableCall(
        settings,
        use,
        tuple((tuple(aval.shape), np.dtype(aval.dtype)) for aval in avals),
        call,
        None if settings.reference is None else reference,
    )
    found, how = chosen(tunable, gpu)
    tuned = use._replace(parameters=found)
    if settings.outputs(tuned) != settings.outputs(use):
        raise ValueError(f"kernel {settings.label}: out depends on a parameter that is tuned")
    return settings.call(tuned), how


def _plan_elsewhere(
    place: Place, operands: Sequence[Operand], results: Sequence[Any], **params: Any
) -> Outcome:
    call = None if _is_empty(results) else _call(place, operands, **params)
    reason = "its reference: no CUDA here"
    if call is not None and outcomes.current() != "DEFAULT" and why_excluded() is None:
        reason += f"; {_checked_by_compiler(call)}"
    return Rewrite(reason, functools.partial(_reference, **params))


def _checked_by_compiler(call: KernelCall) -> str:
    """Compile a kernel that does not run here; return for which GPU."""
    try:
        gpu = current_gpu()
    except NoGpu:
        # A cubin and PTX may be for another one.
        if isinstance(call.source, Image):
            return "not checked: there is no GPU"
        gpu = known_gpu(_CHECKED_FOR)
    try:
        plan_kernel(call, gpu)
    except NvrtcNotFound as error:
        return f"not checked: {error}"
    return f"checked for {gpu.arch}"


def _is_empty(results: Sequence[Any]) -> bool:
    """Return whether no output has an element, so that nothing is launched."""
    return all(math.prod(aval.shape) == 0 for aval in results)


def _reference(*operands: Any, settings: KernelSettings, **call: Any) -> Sequence[Any]:
    if settings.reference is None:
        raise NotImplementedError(
            f"kernel {settings.label} is CUDA, and this program is lowered for "
            f"{lowering_platform.value or 'another platform'}; give cuda_kernel a reference=, the "
            "same function in JAX, to run elsewhere"
        )
    use = _use(operands, **call)
    declared, modes = settings.outputs(use), use.parameters.modes
    parameters = settings.parameters_of_meaning(use.parameters)

    def checked(*inputs: Any) -> tuple[Any, ...]:
        assert settings.reference is not None
        outputs = several(settings.reference(*inputs, **parameters))
        wanted, got = _described(declared), _described(map(jax.typeof, outputs))
        if wanted != got:
            raise TypeError(
                f"the reference of kernel {settings.label} returned {got}, but its out says "
                f"{wanted}"
            )
        return outputs

    function: Callable[..., Any] = checked
    for batch in reversed(use.batches):
        function = jax.vmap(function, in_axes=tuple(0 if has else None for has in batch.mapped))
    with modes.with_types_of(operands, declared).entered():
        results: Sequence[Any] = function(*operands)
    return results


def _describe(*, settings: KernelSettings, parameters: Parameters, **_: Any) -> str:
    return f"cuda_kernel {settings.label}" + (f" {parameters}" if parameters else "")


bind = define(
    Operation(
        "tilekern_cuda_kernel",
        reference=_reference,
        like_results=_like_results,
        batch=_batch,
        sharding_rule=_sharding_rule,
        planners={
            "cuda": _plan_on_cuda,
            **dict.fromkeys(("cpu", "rocm", "tpu"), _plan_elsewhere),
        },
        describe=_describe,
        several_results=True,
        transposes=_transposes,
        refuse_tangent=_refuse_tangent,
    )
)
