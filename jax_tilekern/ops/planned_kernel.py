"""From a planner's answer to what a primitive lowers to on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax_tilekern import ffi
from jax_tilekern.compiler import NvrtcNotFound
from jax_tilekern.plans.gpu import Gpu, NoGpu, current_gpu
from jax_tilekern.plans.launch import LaunchPlan, NoKernel
from jax_tilekern.primitive import Fallback, Kernel


def planned_kernel(
    ctx: Any, operands: Sequence[Any], plan: Callable[[Gpu], LaunchPlan | NoKernel]
) -> Kernel | Fallback:
    """Return the kernel that ``plan`` finds for the GPU at hand, or why there is none."""
    try:
        found = plan(current_gpu())
    except (NoGpu, NvrtcNotFound) as error:
        return Fallback(str(error))
    if isinstance(found, NoKernel):
        return Fallback(found.reason)
    return Kernel(found.name, found.reason, lambda: ffi.cuda_launch(ctx, operands, found))
