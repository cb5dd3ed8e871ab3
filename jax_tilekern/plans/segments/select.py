"""Which kernel reduces to segments."""

from __future__ import annotations

from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel, PredictedUs
from jax_tilekern.plans.policy import current_policy
from jax_tilekern.plans.segments.cost import kernel_microseconds, xla_microseconds
from jax_tilekern.plans.segments.few_segments import FewSegments, few_segments
from jax_tilekern.plans.segments.problem import SegmentReduction
from jax_tilekern.plans.segments.scanned_segments import ScannedSegments
from jax_tilekern.plans.segments.sorted_segments import SortedSegments


def unsorted_kernel(reduction: SegmentReduction, gpu: Gpu) -> ScannedSegments | FewSegments | None:
    """Return what reads the keys of the edges as they lie, and no order, if that is faster."""
    scanned = ScannedSegments(reduction)
    if scanned.is_fast:
        return scanned
    return few_segments(reduction, gpu) if reduction.ordered else None


def plan_segments(reduction: SegmentReduction, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan a reduction.

    Its operands end with the keys for an :func:`unsorted_kernel`, otherwise with the order and
    bounds.
    """
    # No time of XLA's products of floats is known.
    is_known = reduction.text is None and (reduction.reduction, reduction.value.kind) != (
        "prod",
        "f",
    )
    if is_known and current_policy() != "kernels":
        ours, xla = predicted_microseconds(reduction, gpu)
        if xla < ours:
            why = "XLA's scatter is predicted to be faster"
            if (reduction.reduction, reduction.value.kind) == ("sum", "f"):
                why += "; its order of additions is not fixed"
            return NoKernel(why, PredictedUs(ours, xla))
    return _kernel(reduction, gpu).plan(gpu)


def predicted_microseconds(reduction: SegmentReduction, gpu: Gpu) -> tuple[float, float]:
    """Predict how long a kernel takes, with the sort that it needs, and XLA's scatter."""
    return kernel_microseconds(_kernel(reduction, gpu), gpu), xla_microseconds(reduction, gpu)


def _kernel(
    reduction: SegmentReduction, gpu: Gpu
) -> ScannedSegments | FewSegments | SortedSegments:
    return unsorted_kernel(reduction, gpu) or SortedSegments(reduction, gpu.sm_count)
