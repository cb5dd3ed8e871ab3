"""Which kernel reduces to segments."""

from __future__ import annotations

from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel
from jax_tilekern.plans.segments.few_segments import few_segments
from jax_tilekern.plans.segments.problem import SegmentReduction
from jax_tilekern.plans.segments.sorted_segments import SortedSegments


def reads_keys(reduction: SegmentReduction, gpu: Gpu) -> bool:
    """Return whether the kernel reads the keys of the edges as they lie, and no order."""
    return reduction.ordered and few_segments(reduction, gpu) is not None


def plan_segments(reduction: SegmentReduction, gpu: Gpu) -> LaunchPlan | NoKernel:
    """Plan a reduction; its operands end with the keys, or with the order and the bounds.

    Raises
    ------
    NvrtcNotFound
        If there is no NVRTC to compile the kernels with.
    """
    few = few_segments(reduction, gpu) if reduction.ordered else None
    return SortedSegments(reduction, gpu.sm_count).plan(gpu) if few is None else few.plan(gpu)
