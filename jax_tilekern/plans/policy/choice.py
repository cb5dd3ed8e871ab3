"""The choice between candidates and XLA's own operation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from jax_tilekern.plans.candidate import (
    Candidate,
    Costed,
    CostedCandidate,
    fused_plan,
    with_cycles,
)
from jax_tilekern.plans.cpu import Cpu
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import NOT_PREDICTED, LaunchPlan, NoKernel, PredictedUs
from jax_tilekern.plans.policy.model import DeviceModel, NearestCalls, model_of
from jax_tilekern.plans.policy.setting import current_policy
from jax_tilekern.plans.policy.workload import Workload, candidate_numbers

_C = TypeVar("_C")
Device = Gpu | Cpu
_Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class PolicyChoice(Generic[_C]):
    """The candidate that computes a call, or XLA."""

    candidate: _C | None  # None for XLA's own operation
    reason: str
    predicted_us: PredictedUs = NOT_PREDICTED  # of the best candidate and of XLA


def choose(workload: Workload, candidates: Sequence[_C], device: Device) -> PolicyChoice[_C]:
    """Choose what computes a call: one of the candidates, best first by their estimates, or XLA."""
    asked = current_policy() == "kernels"
    must = _is_wrong_in_xla(workload, device)
    why = "XLA's int8 products are not exact" if must else 'jax_tilekern.policy("kernels")'
    if not (asked or must) and _in_matrix_units(workload, device):
        return PolicyChoice(
            None, f"XLA multiplies {workload.arithmetic} in this CPU's matrix units (AMX)"
        )
    found = predicted_times(workload, candidates, device)
    if found is None:
        if asked or must:
            return PolicyChoice(candidates[0], why)
        without = f"no times on {device.name} are recorded"
        if not workload.is_xlas:
            return PolicyChoice(candidates[0], f"the first by its estimate, because {without}")
        return PolicyChoice(
            None,
            f'{without}, so XLA computes it (jax_tilekern.policy("kernels") takes a kernel)',
        )
    best = int(np.argmin(found.ours))
    kernel, before = float(found.ours[best]), late_us(workload, device)
    ours = kernel + before
    times, data = PredictedUs(ours, found.xla), f"(data of {found.device})"
    if asked or must:
        return PolicyChoice(candidates[best], why, times)
    if kernel * found.margin + before <= found.xla:
        return PolicyChoice(candidates[best], f"predicted faster than XLA {data}", times)
    text = f"XLA is predicted as fast {data}"
    if ours <= found.xla:
        text += f"; a kernel is taken where it is predicted {found.margin - 1:.0%} faster"
    return PolicyChoice(None, text, times)


def late_us(workload: Workload, device: Device) -> float:
    """Return how much later than XLA's operation a kernel begins in a program."""
    if workload.by_library or not isinstance(device, Gpu):
        return 0.0
    return device.rates.custom_call_us


class PredictedTimes(NamedTuple):
    """Predicted microseconds of a call alone.

    Attributes
    ----------
    ours
        Of each candidate.
    xla
        Of XLA's operation.
    margin
        How many times the time of a kernel XLA's has to be.
    device
        Whose data predict them.
    """

    ours: _Array
    xla: float
    margin: float
    device: str


def predicted_times(
    workload: Workload, candidates: Sequence[Any], device: Device
) -> PredictedTimes | None:
    """Return the predicted times of candidates and of XLA, or ``None`` without data."""
    known = model_of(device.name)
    if known is None or not known.predicts(workload):
        return None
    model, xla = known.models.get(workload.operation), known.roofline(workload)
    if isinstance(model, NearestCalls):
        kernel, library = model(workload.features)
        return PredictedTimes(np.array([kernel]), library, 1.0, model.device or known.device)
    if model is None:
        bases = np.array([base_microseconds(x, device, xla) for x in candidates])
        return PredictedTimes(bases, xla, 1.0, known.device)
    numbers = known.numbers(workload)
    xla *= math.exp(model.xla([numbers])[0])
    least, error_factor = model.margin
    margin = math.exp(max(least, error_factor * model.error([numbers])[0]))
    ours = predicted(known, workload, candidates, device, xla)
    return PredictedTimes(ours, xla, margin, model.device or known.device)


def _is_wrong_in_xla(workload: Workload, device: Device) -> bool:
    """Return whether XLA's operation may be wrong, so that users get none of it.

    On GPUs, products of int8 matrices are wrong at a k of 8, 256, 320 and others, which depend on
    the kernel that the autotuner takes. Products with a vector are loops.
    """
    product = workload.product
    if product is None or not isinstance(device, Gpu):
        return False
    return workload.arithmetic == "int8" and min(product.geometry.m, product.geometry.n) > 1


# The fewest rows and columns for which XLA uses AMX.
_LEAST_OF_MATRIX_UNITS = 8


def _in_matrix_units(workload: Workload, device: Device) -> bool:
    """Return whether XLA's product uses Intel AMX, which no kernel does."""
    if not (isinstance(device, Cpu) and device.has_amx and workload.product is not None):
        return False
    geometry = workload.product.geometry
    is_wide = min(geometry.m, geometry.n) >= _LEAST_OF_MATRIX_UNITS
    # Other batches are stated in float32: see ``product_by_lax``.
    leading = not geometry.batch or all(
        strides[0] == max(strides)
        for strides in (geometry.lhs_strides, geometry.rhs_strides, geometry.out_strides)
    )
    is_stated = workload.arithmetic == "int8" or (workload.arithmetic == "bf16" and leading)
    return is_stated and is_wide and geometry.lhs_k_major


def plan_choice(
    workload: Workload, candidates: Sequence[Candidate], gpu: Gpu
) -> LaunchPlan | NoKernel:
    """Choose what computes a call on a GPU, and compile it."""
    choice = choose(workload, candidates, gpu)
    if choice.candidate is None:
        return NoKernel(choice.reason, choice.predicted_us)
    plan = choice.candidate.plan(gpu)
    reason = f"{plan.reason}; {choice.reason}"
    return dataclasses.replace(plan, reason=reason, predicted_us=choice.predicted_us)


def plan_fused(
    workload: Workload, candidates: Sequence[CostedCandidate], gpu: Gpu
) -> LaunchPlan | NoKernel:
    """Choose what computes a product with an epilogue, and compile it.

    XLA's product is one of the accumulators, and a pass over them. It is taken where it is
    predicted to be faster than the best candidate whose registers hold the epilogue.
    """
    choice = choose(workload, candidates, gpu)
    times = predicted_times(workload, candidates, gpu)
    ours, xla = choice.predicted_us
    if choice.candidate is None or times is None:
        told = f": a kernel {ours:.3g} us, XLA's product and a pass {xla:.3g} us" if ours else ""
        return NoKernel(f"{choice.reason}{told}", choice.predicted_us)
    cycles = times.ours * gpu.rates.cycles_per_microsecond
    ranked = sorted(map(with_cycles, candidates, cycles.tolist()), key=lambda x: x.cycles)
    asked = current_policy() == "kernels"
    least = times.xla - late_us(workload, gpu)
    limit = math.inf if asked else least * gpu.rates.cycles_per_microsecond
    plan = fused_plan(ranked, gpu, limit)
    if isinstance(plan, NoKernel):
        return dataclasses.replace(plan, predicted_us=choice.predicted_us)
    reason = f"{plan.reason}; {choice.reason}"
    return dataclasses.replace(plan, reason=reason, predicted_us=choice.predicted_us)


def predicted(
    known: DeviceModel, workload: Workload, candidates: Sequence[Any], device: Device, xla: float
) -> _Array:
    """Return the predicted microseconds of each candidate, where XLA takes ``xla``."""
    numbers, model = known.numbers(workload), known.models[workload.operation]
    assert not isinstance(model, NearestCalls)
    rows = [
        (*numbers, *candidate_numbers(candidate, candidates[0], workload, device))
        for candidate in candidates
    ]
    bases = [base_microseconds(candidate, device, xla) for candidate in candidates]
    result: _Array = np.asarray(bases) * np.exp(model.ours(rows))
    return result


def base_microseconds(candidate: Any, device: Device, xla: float) -> float:
    """Return a candidate's own estimate, or XLA's time where it has none."""
    if isinstance(candidate, Costed) and isinstance(device, Gpu):
        return candidate.cycles / device.rates.cycles_per_microsecond
    return xla
