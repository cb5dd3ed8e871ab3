"""Which kernel reduces to segments."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel, PredictedUs
from jax_tilekern.plans.policy import current_policy
from jax_tilekern.plans.segments.cost import (
    few_rows_microseconds,
    fill_microseconds,
    kernel_microseconds,
    scatter_microseconds,
    totals_microseconds,
    xla_microseconds,
)
from jax_tilekern.plans.segments.few_segments import FewSegments, few_segments
from jax_tilekern.plans.segments.problem import SegmentReduction
from jax_tilekern.plans.segments.scanned_segments import ScannedSegments
from jax_tilekern.plans.segments.sorted_segments import SortedSegments

SegmentKernel = ScannedSegments | FewSegments | SortedSegments


def reads_keys(reduction: SegmentReduction, gpu: Gpu) -> bool:
    """Return whether the kernel reads the keys of the edges as they lie, and no order."""
    return not isinstance(_kernel(reduction, gpu), SortedSegments)


def sorts(reduction: SegmentReduction, gpu: Gpu) -> bool:
    """Return whether a reduction reads the order and bounds of the edges."""
    ours, xla = predicted_microseconds(reduction, gpu)
    is_xlas = current_policy() != "kernels" and xla < ours
    return not is_xlas and not reads_keys(reduction, gpu)


def plan_segments(reduction: SegmentReduction, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan a reduction.

    Its operands end with the keys for a kernel that :func:`reads_keys`, otherwise with the order
    and bounds.
    """
    if current_policy() != "kernels":
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


def updates_few_rows(updates: SegmentReduction, gpu: Gpu, *, has_table: bool) -> PredictedUs | None:
    """Return the times of updates of few rows and of a reduction, if the first is shorter.

    The updates are floats of 16 bits, whose sums are rounded, and are added up in no fixed order.
    """
    r = updates
    if current_policy() == "kernels" or r.reduction != "sum" or r.out_dtype == r.value:
        return None
    few = few_rows_microseconds(r, gpu, has_table=has_table)
    if has_table:
        wide = dataclasses.replace(r, out_dtype=r.value)
        others = totals_microseconds(r, min(predicted_microseconds(wide, gpu)), gpu)
    else:
        others = min(predicted_microseconds(r, gpu))
    return PredictedUs(few, others) if few < others else None


def scatters_into_table(updates: SegmentReduction, gpu: Gpu) -> PredictedUs | None:
    """Return the times of a reduction and of XLA's scatter into a table, if the last is shorter."""
    r = updates
    if current_policy() == "kernels" or r.out_dtype != r.value:
        return None
    totals = totals_microseconds(r, min(predicted_microseconds(r, gpu)), gpu)
    scatter = scatter_microseconds(r, gpu)
    return PredictedUs(totals, scatter) if scatter < totals else None


def is_filled_by_kernel(elements: int, dtype: np.dtype[Any], gpu: Gpu) -> bool:
    """Return whether a kernel stores the equal elements that XLA reduces into."""
    kernel, xla = fill_microseconds(elements, dtype.itemsize, gpu)
    return kernel < xla


def _kernel(reduction: SegmentReduction, gpu: Gpu) -> SegmentKernel:
    """Return the kernel that is predicted to be the fastest."""
    scanned = ScannedSegments(reduction)
    few = few_segments(reduction, gpu) if reduction.ordered else None
    kernels: list[SegmentKernel] = [
        *([scanned] if scanned.is_possible else []),
        *([few] if few else []),
        SortedSegments(reduction, gpu.sm_count),
    ]
    return min(kernels, key=lambda kernel: kernel_microseconds(kernel, gpu))
