"""The plan of one call: a kernel, or the reason why there is none; and primitives of kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from jax import Array

from jax_tilekern.compilation.nvrtc import CompileError, NvrtcNotFound
from jax_tilekern.interop import compat, outcomes
from jax_tilekern.plans.cpu import current_cpu
from jax_tilekern.plans.gpu import MIN_COMPUTE_CAPABILITY, Gpu, NoGpu, current_gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel, PlanError
from jax_tilekern.plans.policy import choose, current_policy
from jax_tilekern.plans.policy.workload import Workload
from jax_tilekern.plans.tuned import planning_state
from jax_tilekern.primitives import deferral
from jax_tilekern.primitives.operation import (
    Fallback,
    Operand,
    Operation,
    PlannedKernel,
    Planner,
    define,
    no_refusal,
)


def planned_kernel(
    operands: Sequence[Any],
    planner: Callable[..., LaunchPlan | NoKernel],
    *problem: Hashable,
) -> PlannedKernel | Fallback:
    """Return the kernel of MLIR operands that ``planner(*problem, gpu)`` finds, or why it does not.

    A kernel that cannot be compiled or launched is a warning and XLA's operation, unless
    :func:`jax_tilekern.strict` makes it an error.
    """
    try:
        gpu = current_gpu()
        if gpu.compute_capability < MIN_COMPUTE_CAPABILITY:
            oldest = "sm_{}{}".format(*MIN_COMPUTE_CAPABILITY)
            return Fallback(f"{gpu.arch} is older than {oldest}")
        found = deferral.plan(_planned, planner, problem, gpu)
    except (NoGpu, NvrtcNotFound) as error:
        return Fallback(str(error))
    if isinstance(found, Exception):
        return Fallback(outcomes.note_failure(found))
    if isinstance(found, NoKernel):
        return Fallback(found.reason, found.predicted_us)
    return PlannedKernel(found.name, found.reason, found, operands, predicted_us=found.predicted_us)


def transposed_sizes(operands: Sequence[Operand]) -> tuple[int, ...]:
    """Return the sizes in bytes of the operands that a transpose makes."""
    avals = (x.aval for x in operands if compat.transposed_from(x.value) is not None)
    return tuple(x.size * x.dtype.itemsize for x in avals)


def define_kernel(
    name: str,
    reference: Callable[..., Sequence[Array]],
    plan: Callable[..., PlannedKernel | Fallback],
    *,
    describe: Callable[..., str],
    like_results: Callable[..., Sequence[Array]],
) -> Callable[..., Any]:
    """Make the primitive of a kernel that calls of other primitives are lowered to.

    These have been mapped and divided among devices, so it has no rules for either. See
    :class:`~jax_tilekern.primitives.operation.Operation` for the arguments.
    """

    def batch(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{name}: calls are mapped before they become those of a kernel")

    return define(
        Operation(
            name,
            reference,
            batch=batch,
            sharding_rule=None,
            # CPUs have no call of it, but for GPUs that tests emulate.
            planners=dict.fromkeys(("cpu", "cuda"), Planner(no_refusal, plan)),
            describe=describe,
            several_results=True,
            like_results=like_results,
        )
    )


def chosen_cpu_kernel(workload: Workload, kernel: PlannedKernel) -> PlannedKernel | Fallback:
    """Return a kernel for this CPU, or why XLA computes the call."""
    choice = choose(workload, [kernel], current_cpu())
    if choice.candidate is None:
        return Fallback(choice.reason, choice.predicted_us)
    reason = f"{kernel.reason}; {choice.reason}"
    return dataclasses.replace(kernel, reason=reason, predicted_us=choice.predicted_us)


Planned = LaunchPlan | NoKernel | CompileError | PlanError


def _planned(
    planner: Callable[..., LaunchPlan | NoKernel], arguments: tuple[Hashable, ...], gpu: Gpu
) -> Planned:
    state = planning_state(), current_policy()
    planned: Planned = _plan_once(planner, arguments, gpu, state=state)
    return planned


@compat.cached(max_size=1024, trace_context_in_key=False)
def _plan_once(
    planner: Callable[..., LaunchPlan | NoKernel],
    arguments: tuple[Hashable, ...],
    gpu: Gpu,
    *,
    state: Hashable,
) -> Planned:
    """Plan a call once; equal layers of a model reuse the plan."""
    try:
        return planner(*arguments, gpu)
    except (CompileError, PlanError) as error:
        # The traceback is dropped, because it would keep frames alive.
        return error.with_traceback(None)
