"""The choice of a kernel for a product with an epilogue, dense or grouped."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax_tilekern.plans.candidate import CostedCandidate
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel

# Where every kernel spills, so few bytes a thread cost less than a pass over memory.
_FEW_SPILLED_BYTES = 256
# Serialized MMAs took 1.8 times as long in the gradient of a cross-entropy on an H100.
_SERIALIZED = 1.8


def fused_plan(candidates: Sequence[CostedCandidate], gpu: Gpu) -> LaunchPlan | NoKernel:
    """Return the plan of the best candidate whose registers hold its epilogue.

    Candidates come best first. XLA's product is not considered, even where it is the faster one: an
    epilogue after it is a pass over memory.
    """
    spilled: dict[str, int] = {}
    plans: list[tuple[float, LaunchPlan]] = []
    few_spilled: list[tuple[int, LaunchPlan]] = []
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
            few_spilled.append((bytes_, plan))
            continue
        slower = _SERIALIZED if any(entry.serialized for entry in entries) else 1
        plans.append((slower * candidate.cycles, plan))
    if plans:
        return min(plans, key=lambda found: found[0])[1]
    fewest, best = min(few_spilled, key=lambda found: found[0])
    if fewest <= _FEW_SPILLED_BYTES:
        return best
    return NoKernel("the epilogue takes more registers than there are beside the accumulators")
