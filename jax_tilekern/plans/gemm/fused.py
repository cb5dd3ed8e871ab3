"""The choice of a kernel for a product with an epilogue, dense or grouped."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax_tilekern.plans.candidate import CostedCandidate
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel

# A kernel that spills more bytes a thread is not chosen on Hopper. On other GPUs, where no speed of
# spilled registers was measured, none that spills is.
_FEW_SPILLED_BYTES = 256
# The part of a kernel's time that a spilled byte takes on Hopper, an estimate: exponentials of a
# cross-entropy took 1.6 ms with 148 bytes in tiles of 128x256, and 1.8 ms with none in 128x128.
_SPILLED_BYTE = 1 / 5000
# Serialized MMAs took 1.8 times as long in the gradient of a cross-entropy on an H100.
_SERIALIZED = 1.8


def fused_plan(candidates: Sequence[CostedCandidate], gpu: Gpu) -> LaunchPlan | NoKernel:
    """Return the plan of the best candidate whose registers hold its epilogue.

    Candidates come best first. XLA's product is not considered, even where it is the faster one: an
    epilogue after it is a pass over memory.
    """
    allowed = _FEW_SPILLED_BYTES if gpu.compute_capability == (9, 0) else 0
    spilled: dict[str, int] = {}
    plans: list[tuple[float, LaunchPlan]] = []
    for candidate in candidates:
        if plans and candidate.cycles >= min(cycles for cycles, _ in plans):
            break
        # Where a kernel spills, so do others of its kind with as many accumulators, and a
        # compilation takes seconds.
        if candidate.accumulators >= spilled.get(candidate.kind, math.inf):
            continue
        plan = candidate.plan(gpu)
        entries = [launch.entry for launch in plan.launches]
        bytes_ = max(entry.spill_bytes for entry in entries)
        if bytes_ > 0:
            spilled[candidate.kind] = candidate.accumulators
        if bytes_ > allowed:
            continue
        slower = 1 + bytes_ * _SPILLED_BYTE
        if any(entry.serialized for entry in entries):
            slower *= _SERIALIZED
        plans.append((slower * candidate.cycles, plan))
    if not plans:
        return NoKernel("the epilogue takes more registers than there are beside the accumulators")
    return min(plans, key=lambda found: found[0])[1]
