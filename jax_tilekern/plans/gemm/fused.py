"""The choice of a kernel for a product with an epilogue, dense or grouped."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax_tilekern.plans.candidate import CostedCandidate
from jax_tilekern.plans.gpu import Gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel

# Where every kernel spills, so few bytes a thread cost less than a pass over memory.
_FEW_SPILLED_BYTES = 256


def fused_plan(candidates: Sequence[CostedCandidate], gpu: Gpu) -> LaunchPlan | NoKernel:
    """Return the plan of the best candidate whose registers hold its epilogue.

    XLA's product is not considered, even where it is the faster one: an epilogue after it is a pass
    over memory.
    """
    spilled: dict[str, int] = {}
    plans: list[tuple[int, LaunchPlan]] = []
    for candidate in candidates:
        # Where a kernel spills, so do others of its kind with as many accumulators, and a
        # compilation takes seconds.
        if candidate.accumulators >= spilled.get(candidate.kind, math.inf):
            continue
        plan = candidate.plan(gpu)
        bytes_ = max(launch.entry.spill_bytes for launch in plan.launches)
        if bytes_ == 0:
            return plan
        spilled[candidate.kind] = candidate.accumulators
        plans.append((bytes_, plan))
    fewest, best = min(plans, key=lambda pair: pair[0])
    if fewest <= _FEW_SPILLED_BYTES:
        return best
    return NoKernel("the epilogue takes more registers than there are beside the accumulators")
